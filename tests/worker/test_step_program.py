"""The compiled programs: the pool is written in place, on every implementation and in every dtype."""

import jax
import numpy as np
import pytest

from jpaged.models.config import ModelConfig
from jpaged.models.weights import RunLayout
from jpaged.pallas_kernels import allocate_kv
from jpaged.worker.step_input import StepShape
from jpaged.worker.step_program import empty_rows, make_forward, make_sample
from tests.engine import tiny

ROWS = 4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("attention", ["xla", "numba"])
@pytest.mark.parametrize("tokens", [1, 16])
def test_no_step_copies_the_pool(attention: str, dtype: str, tokens: int) -> None:
    config = ModelConfig.from_hf(tiny.HF_CONFIG)
    layout = RunLayout.create(config, dtype=dtype, platform="cpu")
    kv = (allocate_kv(2, 4000, 4, 2, 16, dtype=dtype, platform="cpu"),)
    pool = sum(group.pages.nbytes for group in kv)
    shape = StepShape(tokens, min(tokens, ROWS), ROWS, (64,))
    forward = make_forward(layout, shape, attention=attention, platform="cpu")
    vector = jax.ShapeDtypeStruct((shape.size,), np.int32)
    compiled = (
        jax.jit(forward, donate_argnums=(1, 2))
        .lower(layout.specs, kv, empty_rows(ROWS), vector)
        .compile()
    )
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= pool
    assert memory.temp_size_in_bytes < pool / 8


def test_what_comes_out_has_the_form_of_what_went_in() -> None:
    """Else the next step would compile anew, or copy."""
    config = ModelConfig.from_hf(tiny.HF_CONFIG)
    layout = RunLayout.create(config, dtype="float32", platform="cpu")
    kv = (allocate_kv(2, 8, 4, 2, 16, dtype="float32", platform="cpu"),)
    rows = empty_rows(ROWS)
    shape = StepShape(8, ROWS, ROWS, (2,))
    forward = make_forward(layout, shape, attention="xla", platform="cpu")
    vector = jax.ShapeDtypeStruct((shape.size,), np.int32)
    result = jax.eval_shape(forward, layout.specs, kv, rows, vector)

    def form(tree: object) -> object:
        return jax.tree.map(lambda x: (x.shape, x.dtype), tree)

    assert form(result.kv) == form(kv) and form(result.rows) == form(rows)
    row_ids = jax.ShapeDtypeStruct((2,), np.int32)
    sample = make_sample(layout, platform="cpu")
    rows_after, sampled = jax.eval_shape(sample, layout.specs, rows, result.hidden, row_ids)
    assert form(rows_after) == form(rows)
    assert sampled.tokens.shape == (2,)
