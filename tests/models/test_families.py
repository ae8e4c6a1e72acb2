"""Each family gives transformers' logits: whole sequences, and prefill and decode through the page pool."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.typing import DTypeLike

from jpaged.models.config import ModelConfig
from jpaged.models.weights import RunLayout
from tests.models import families
from tests.models.paged import mixed_steps, run_paged

CASES = tuple(families.CASES)


def layout_of(config: ModelConfig, dtype: DTypeLike) -> RunLayout:
    return RunLayout.create(config, dtype=dtype, platform=jax.default_backend())


def weights_of(layout: RunLayout) -> dict[str, np.ndarray]:
    one_plus = layout.config.model_type == "gemma3_text"
    return {
        name: families.weight(name, spec.shape, one_plus_norm=one_plus)
        for name, spec in layout.public.items()
    }


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    """The largest error by the largest logit."""
    assert got.shape == want.shape
    assert np.isfinite(got).all()
    return float(np.abs(got - want).max() / np.abs(want).max())


@pytest.mark.parametrize("case", CASES)
def test_dense_logits_are_those_of_transformers(case: str) -> None:
    config = ModelConfig.from_hf(families.CASES[case])
    layout = layout_of(config, jnp.float32)
    tokens = jnp.asarray(families.tokens(case))[None]
    run = jax.jit(lambda params: layout.merge(params).dense_logits(tokens)[0])
    got = np.asarray(run(layout.to_run(weights_of(layout))))
    assert relative_error(got, families.golden_logits(case)) < 100 * np.finfo(np.float32).eps


@pytest.mark.parametrize("case", CASES)
def test_chunks_and_decodes_through_pages_give_the_same(case: str) -> None:
    config = ModelConfig.from_hf(families.CASES[case])
    layout = layout_of(config, jnp.float32)
    text, want = families.tokens(case), families.golden_logits(case)
    # A text among neighbours, one of them a beginning of it.
    texts = [text, text[::-1][:30], text[:21]]
    steps = mixed_steps([len(t) for t in texts])
    got = run_paged(layout, layout.to_run(weights_of(layout)), texts, steps)
    assert relative_error(got[0], want) < 100 * np.finfo(np.float32).eps
    assert relative_error(got[2], want[:21]) < 100 * np.finfo(np.float32).eps


@pytest.mark.parametrize("case", ["llama3", "qwen3", "gemma3"])
def test_bfloat16_stays_near(case: str) -> None:
    config = ModelConfig.from_hf(families.CASES[case])
    layout = layout_of(config, jnp.bfloat16)
    text, want = families.tokens(case), families.golden_logits(case)
    params = layout.to_run(weights_of(layout))
    got = run_paged(layout, params, [text], [[(0, 16)], [(0, 15)], *[[(0, 1)]] * 13])[0]
    # Roundings of random sign: about ten a layer, each half a unit of the last place.
    rms = float(np.sqrt(np.mean((got - want) ** 2)) / np.sqrt(np.mean(want**2)))
    assert rms < np.sqrt(10 * config.num_layers) * float(jnp.finfo(jnp.bfloat16).eps)
