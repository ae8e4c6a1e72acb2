"""The two layouts of weights: strict checks, and a transform that inverts, copies and lets go."""

import random
import weakref
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jpaged.errors import ModelLoadError
from jpaged.models.config import ModelConfig
from jpaged.models.registry import build_model
from jpaged.models.weights import (
    RunLayout,
    check_public,
    flatten_public,
    public_names,
    public_shapes,
)
from tests.models import families

CASES = tuple(families.CASES)


def layout_of(case: str) -> RunLayout:
    config = ModelConfig.from_hf(families.CASES[case])
    return RunLayout.create(config, dtype=jnp.float32, platform=jax.default_backend())


def arrays_of(layout: RunLayout) -> dict[str, np.ndarray]:
    return {
        name: families.weight(name, spec.shape, one_plus_norm=False)
        for name, spec in layout.public.items()
    }


def test_public_names_and_shapes_are_those_of_the_checkpoint() -> None:
    shapes = public_shapes(ModelConfig.from_hf(families.CASES["llama3"]), jnp.bfloat16)
    layer = {
        "input_layernorm.weight": (40,),
        "post_attention_layernorm.weight": (40,),
        "self_attn.q_proj.weight": (96, 40),
        "self_attn.q_proj.bias": (96,),
        "self_attn.k_proj.weight": (48, 40),
        "self_attn.k_proj.bias": (48,),
        "self_attn.v_proj.weight": (48, 40),
        "self_attn.v_proj.bias": (48,),
        "self_attn.o_proj.weight": (40, 96),
        "self_attn.o_proj.bias": (40,),
        "mlp.gate_proj.weight": (56, 40),
        "mlp.gate_proj.bias": (56,),
        "mlp.up_proj.weight": (56, 40),
        "mlp.up_proj.bias": (56,),
        "mlp.down_proj.weight": (40, 56),
        "mlp.down_proj.bias": (40,),
    }
    expected = {f"model.layers.{i}.{k}": v for i in range(2) for k, v in layer.items()}
    expected |= {"model.embed_tokens.weight": (97, 40), "model.norm.weight": (40,)}
    expected["lm_head.weight"] = (97, 40)
    assert {name: spec.shape for name, spec in shapes.items()} == expected
    assert {spec.dtype for spec in shapes.values()} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.parametrize("case", CASES)
def test_the_run_layout_inverts_in_any_order(case: str) -> None:
    layout = layout_of(case)
    given = arrays_of(layout)
    shuffled = list(given.items())
    random.Random(3).shuffle(shuffled)
    run = layout.to_run(iter(shuffled))
    assert [(a.shape, a.dtype) for a in run] == [(s.shape, s.dtype) for s in layout.specs]
    back = layout.to_public(run)
    assert back.keys() == given.keys()
    for name, array in given.items():
        assert np.array_equal(back[name], array), name


def test_layers_keep_their_order_beyond_ten() -> None:
    config = ModelConfig.from_hf({**families.CASES["llama_linear_tied"], "num_hidden_layers": 12})
    layout = RunLayout.create(config, dtype=jnp.float32, platform=jax.default_backend())
    merged = flatten_public(layout.merge(layout.to_run(arrays_of(layout))))
    for index in range(12):
        name = f"model.layers.{index}.self_attn.o_proj.weight"
        want = families.weight(name, merged[name].shape, one_plus_norm=False)
        assert np.array_equal(merged[name], want)


def test_fused_products_are_few() -> None:
    layout = layout_of("llama3")
    weights = [n for n in layout.names if n.startswith("model.layers.0") and "proj.weight" in n]
    assert [n.split(".")[-2] for n in weights] == [
        "down_proj",
        "gate_up_proj",
        "o_proj",
        "qkv_proj",
    ]


@pytest.mark.parametrize("kind", [np.asarray, jnp.array])
def test_run_arrays_share_no_memory_with_what_was_given(kind: type) -> None:
    layout = layout_of("llama_linear_tied")
    want = layout.to_run(arrays_of(layout))
    given = {name: kind(array) for name, array in arrays_of(layout).items()}
    run = layout.to_run(given)
    for array in given.values():
        # A trainer donates its params, or writes to them.
        if isinstance(array, jax.Array):
            array.delete()
        else:
            array.fill(np.nan)
    for got, expected in zip(run, want, strict=True):
        assert np.array_equal(got, expected)


def test_public_tensors_are_let_go_one_by_one() -> None:
    layout = layout_of("llama3")
    alive: list[weakref.ref[np.ndarray]] = []

    def stream() -> Iterator[tuple[str, np.ndarray]]:
        for name, spec in layout.public.items():
            array = np.zeros(spec.shape, np.float32)
            alive.append(weakref.ref(array))
            # At most the parts of two fused arrays wait (weights and biases of q, k and v).
            assert sum(ref() is not None for ref in alive) <= 6
            yield name, array
            del array

    layout.to_run(stream())
    assert not any(ref() is not None for ref in alive)


def test_weights_are_cast_to_the_dtype_of_the_layout() -> None:
    config = ModelConfig.from_hf(families.CASES["llama_linear_tied"])
    layout = RunLayout.create(config, dtype=jnp.bfloat16, platform=jax.default_backend())
    given = arrays_of(layout)
    for kind in (np.asarray, jnp.asarray):
        back = layout.to_public(layout.to_run({k: kind(v) for k, v in given.items()}))
        for name, array in given.items():
            assert np.array_equal(back[name], array.astype(jnp.bfloat16)), name


def test_a_live_update_on_the_cpu_compiles_nothing() -> None:
    layout = layout_of("llama3")
    given = {name: jax.device_put(array) for name, array in arrays_of(layout).items()}
    compiled: list[str] = []

    def listen(event: str, duration: float, **_: object) -> None:
        compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        jax.jit(lambda x: x + 17)(jnp.zeros(3))
        assert any("compile" in event for event in compiled)
        compiled.clear()
        layout.to_run(given)
        assert not [event for event in compiled if "compile" in event]
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def test_to_run_refuses_what_does_not_fit() -> None:
    layout = layout_of("llama3")
    given = arrays_of(layout)
    name = "model.layers.1.self_attn.k_proj.weight"
    with pytest.raises(ModelLoadError, match=f"missing {name}"):
        layout.to_run({k: v for k, v in given.items() if k != name})
    with pytest.raises(ModelLoadError, match="model.extra is not part"):
        layout.to_run({**given, "model.extra": np.zeros(2)})
    with pytest.raises(ModelLoadError, match=f"{name} has shape"):
        layout.to_run({**given, name: given[name].T})
    for twice in (name, "model.norm.weight"):
        with pytest.raises(ModelLoadError, match=f"{twice} occurs twice"):
            layout.to_run([(twice, given[twice]), *given.items()])


def test_check_lists_all_problems_at_once() -> None:
    shapes = layout_of("llama3").public
    given = dict(shapes)
    del given["model.norm.weight"], given["lm_head.weight"]
    given["model.layers.0.self_attn.q_norm.weight"] = jax.ShapeDtypeStruct((24,), jnp.float32)
    given["model.layers.0.mlp.up_proj.bias"] = jax.ShapeDtypeStruct((55,), jnp.float32)
    given["model.embed_tokens.weight"] = jax.ShapeDtypeStruct((97, 40), jnp.bfloat16)
    with pytest.raises(ModelLoadError) as caught:
        check_public(shapes, given)
    text = str(caught.value)
    assert "5 places" in text
    assert "missing: model.norm.weight" in text
    assert "missing: lm_head.weight" in text
    assert "not part of this model: model.layers.0.self_attn.q_norm.weight (24,)" in text
    assert "model.layers.0.mlp.up_proj.bias has shape (55,), not (56,)" in text
    assert "model.embed_tokens.weight has dtype bfloat16, not float32" in text


def test_a_tied_model_may_bring_its_head_and_any_model_its_frequencies() -> None:
    layout = layout_of("llama_linear_tied")
    head = jax.ShapeDtypeStruct((83, 36), jnp.float32)
    frequencies = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(6, np.float32)}
    check_public(layout.public, {**layout.public, **frequencies, "lm_head.weight": head})
    layout.to_run({**arrays_of(layout), **frequencies, "lm_head.weight": np.zeros((83, 36))})
    wrong = jax.ShapeDtypeStruct((84, 36), jnp.float32)
    with pytest.raises(ModelLoadError, match="lm_head"):
        check_public(layout.public, {**layout.public, "lm_head.weight": wrong})
    bias = jax.ShapeDtypeStruct((83,), jnp.float32)
    with pytest.raises(ModelLoadError, match="lm_head.bias"):
        check_public(layout.public, {**layout.public, "lm_head.bias": bias})


@pytest.mark.parametrize(
    ("language", "vision"),
    [
        ("model.language_model.", "model.vision_tower.encoder.weight"),
        ("language_model.model.", "vision_tower.vision_model.post_layernorm.bias"),
    ],
)
def test_the_text_model_of_a_multimodal_checkpoint(language: str, vision: str) -> None:
    layout = layout_of("gemma3")
    given = {name.replace("model.", language, 1): x for name, x in arrays_of(layout).items()}
    given[vision] = np.zeros(3, np.float32)
    check_public(layout.public, given)
    assert public_names(given).keys() == layout.public.keys()
    want = layout.to_run(arrays_of(layout))
    for got, expected in zip(layout.to_run(given), want, strict=True):
        assert np.array_equal(got, expected)


def test_without_a_language_model_a_tower_is_extra() -> None:
    shapes = layout_of("llama3").public
    tower = jax.ShapeDtypeStruct((3,), jnp.float32)
    with pytest.raises(ModelLoadError, match="vision_tower"):
        check_public(shapes, {**shapes, "vision_tower.x": tower})


def test_flatten_takes_modules_states_and_dicts_flat_or_nested() -> None:
    model = build_model(ModelConfig.from_hf(families.CASES["qwen3"]), rngs=nnx.Rngs(3))
    flat = flatten_public(model)
    check_public(public_shapes(model.config, jnp.float32), flat)
    state = nnx.state(model, nnx.Param)
    nested = {"model": nnx.to_pure_dict(state["model"]), "lm_head.weight": flat["lm_head.weight"]}
    for tree in (state, flat, nested, nnx.to_pure_dict(state)):
        got = flatten_public(tree)
        assert got.keys() == flat.keys()
        assert all(np.array_equal(got[name], flat[name]) for name in flat)


def test_flatten_refuses_repeats_and_what_is_no_array() -> None:
    x = np.zeros(2)
    with pytest.raises(ModelLoadError, match="a.b occurs twice"):
        flatten_public({"a": {"b": x}, "a.b": x})
    with pytest.raises(ModelLoadError, match="a.b is int"):
        flatten_public({"a": {"b": 3}})
    with pytest.raises(ModelLoadError, match="the tree is NoneType"):
        flatten_public(None)
