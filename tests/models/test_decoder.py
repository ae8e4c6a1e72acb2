"""What holds for all decoders: one trace for equal layers, gradients, tied heads, and no copy of the pool."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jpaged.models.config import ModelConfig
from jpaged.models.decoder import CausalLM
from jpaged.models.gemma3 import Gemma3Block
from jpaged.models.llama import LlamaBlock
from jpaged.models.registry import abstract_model, build_model
from jpaged.models.weights import RunLayout, flatten_public
from jpaged.pallas_kernels import AttentionMetadata
from tests.models import families
from tests.models.paged import fresh_pool

_TOKENS = 5
# So many that the pool is larger than all a tiny step needs beside it; only shapes are made.
_PAGES = 8192


def step_arguments(layout: RunLayout) -> tuple[Any, ...]:
    """Params as shapes, an empty pool, tokens, positions and metadata of one row."""
    config = layout.config
    ints = jax.ShapeDtypeStruct((_TOKENS,), jnp.int32)
    row = AttentionMetadata(
        page_table=jax.ShapeDtypeStruct((1, 2), jnp.int32),
        kv_lens=jax.ShapeDtypeStruct((1,), jnp.int32),
        cu_q_lens=jax.ShapeDtypeStruct((2,), jnp.int32),
        slots=ints,
    )
    kv = jax.eval_shape(lambda: fresh_pool(config, _PAGES, layout.specs[0].dtype))
    return layout.specs, kv, ints, ints, (row,) * len(config.kv_groups)


def lower_step(layout: RunLayout) -> jax.stages.Lowered:
    def step(params, kv, tokens, positions, metadata):  # type: ignore[no-untyped-def]
        model = layout.merge(params)
        hidden, kv = model(tokens, positions, kv, metadata)
        return model.logits(hidden), kv

    return jax.jit(step, donate_argnums=1).lower(*step_arguments(layout))


@pytest.mark.parametrize(
    ("case", "block", "kinds"), [("llama3", LlamaBlock, 1), ("gemma3", Gemma3Block, 2)]
)
def test_layers_of_equal_structure_and_window_are_traced_once(
    case: str, block: type[nnx.Module], kinds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A number of features that no other test has: the traces of a process are shared.
    hf = {**families.CASES[case], "num_hidden_layers": 9, "intermediate_size": 22}
    config = ModelConfig.from_hf(hf)
    traces = []
    original = block.__call__

    def counting(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        traces.append(type(self))
        return original(self, *args, **kwargs)

    monkeypatch.setattr(block, "__call__", counting)
    layout = RunLayout.create(config, dtype=jnp.float32, platform=jax.default_backend())
    text = lower_step(layout).as_text()
    assert len(traces) == kinds
    assert text.count("func.func private @_paged_block") == kinds
    assert text.count("call @_paged_block") == 9
    lower_step(layout)
    assert len(traces) == kinds


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_writes_the_pool_in_place(dtype: str) -> None:
    config = ModelConfig.from_hf(families.CASES["gemma3"])
    layout = RunLayout.create(config, dtype=dtype, platform=jax.default_backend())
    _, kv, *_ = step_arguments(layout)
    pool_bytes = sum(group.pages.size * group.pages.dtype.itemsize for group in kv)
    memory = lower_step(layout).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= pool_bytes
    smallest = min(group.pages.size * group.pages.dtype.itemsize for group in kv)
    assert memory.temp_size_in_bytes < smallest


def loss(model: nnx.Module, tokens: jax.Array) -> jax.Array:
    logits = model.dense_logits(tokens)[:, :-1]
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def model_of(case: str, dtype: str = "float32") -> CausalLM:
    """A model of the case with its own weights, in the run layout."""
    config = ModelConfig.from_hf(families.CASES[case])
    layout = RunLayout.create(config, dtype=dtype, platform=jax.default_backend())
    one_plus = config.model_type == "gemma3_text"
    return layout.merge(
        layout.to_run(
            {
                name: families.weight(name, spec.shape, one_plus_norm=one_plus)
                for name, spec in layout.public.items()
            }
        )
    )


def norm(tree: Any) -> float:
    return float(np.sqrt(sum(np.sum(np.square(x)) for x in jax.tree.leaves(tree))))


@pytest.mark.parametrize("case", ["llama_linear_tied", "gemma3"])
def test_gradients_are_the_slopes_of_the_loss(case: str) -> None:
    model = model_of(case)
    tokens = jnp.asarray(families.tokens(case)[:20]).reshape(2, 10)
    graph, params = nnx.split(model)

    def of_params(params: Any) -> jax.Array:
        return loss(nnx.merge(graph, params), tokens)

    value, grads = jax.device_get(jax.jit(jax.value_and_grad(of_params))(params))
    size = norm(grads)
    assert np.isfinite(value) and size > 0
    for path, grad in jax.tree.leaves_with_path(grads):
        assert np.abs(grad).max() > 0, path
    run = jax.jit(of_params)

    def along(step: float) -> float:
        moved = jax.tree.map(
            lambda p, g: np.asarray(p) + np.float32(step / size) * g, params, grads
        )
        return float(run(moved))

    # Rounding errs by about 1e-3 of the slope, and the third derivative enters with the step's square.
    assert (along(1e-3) - along(-1e-3)) / 2e-3 == pytest.approx(size, rel=1e-2)


def test_a_module_from_build_model_trains() -> None:
    hf = {**families.CASES["qwen3"], "num_hidden_layers": 1, "layer_types": None}
    model = build_model(ModelConfig.from_hf(hf), rngs=nnx.Rngs(5))
    tokens = jnp.asarray(families.tokens("qwen3")[:20]).reshape(2, 10)
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def train(model: CausalLM, optimizer: nnx.Optimizer[CausalLM]) -> jax.Array:
        value, grads = nnx.value_and_grad(loss)(model, tokens)
        optimizer.update(model, grads)
        return value

    losses = [float(train(model, optimizer)) for _ in range(12)]
    # Fresh weights know nothing: the loss begins at that of a uniform guess.
    assert losses[0] == pytest.approx(np.log(91), rel=0.1)
    assert losses[-1] < 0.5 * losses[0]


def test_tied_models_have_no_second_matrix() -> None:
    model = model_of("llama_linear_tied")
    assert "lm_head.weight" not in flatten_public(model)
    hidden = np.random.default_rng(0).standard_normal((3, 36)).astype(np.float32)
    want = hidden @ np.asarray(model.model.embed_tokens.weight[...]).T
    np.testing.assert_allclose(model.logits(jnp.asarray(hidden)), want, rtol=1e-5, atol=1e-5)


def test_logits_are_float32_whatever_the_dtype() -> None:
    model = model_of("gemma3", "bfloat16")
    logits = model.logits(jnp.ones((2, 36), jnp.bfloat16))
    assert logits.dtype == jnp.float32
    # More digits than bfloat16 has: neither product nor soft cap was rounded to it.
    values = np.asarray(logits)
    assert not np.array_equal(values, values.astype(jnp.bfloat16).astype(np.float32))
    cap = model.config.final_logit_softcap
    assert cap is not None and np.abs(values).max() <= cap


def test_embeddings_are_scaled_by_the_root_rounded_to_the_dtype() -> None:
    model = model_of("gemma3", "bfloat16")
    # Not a square, so that rounding shows.
    model.config = dataclasses.replace(model.config, embedding_scale=40**0.5)
    rows = np.asarray(model.model.embed_tokens.weight[...])[:9].astype(np.float32)
    want = rows * np.float32(jnp.bfloat16(40**0.5))
    got = np.asarray(model.embed(jnp.arange(9)))
    assert np.array_equal(got, want.astype(jnp.bfloat16))


def test_an_abstract_model_has_shapes_and_no_data() -> None:
    config = ModelConfig.from_hf({"model_type": "llama"})
    leaves = jax.tree.leaves(nnx.state(abstract_model(config, jnp.bfloat16)))
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    assert sum(leaf.size for leaf in leaves) == 6_738_415_616
