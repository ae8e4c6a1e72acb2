"""The sampler's meaning in numpy, float64, by sorting."""

import jax.numpy as jnp
import numpy as np

from jpaged.sampling.params import SamplingParams
from jpaged.sampling.row_params import RowParams, SequenceSampling, row_params_from_words


def order(logits: np.ndarray) -> np.ndarray:
    """Ids from the most to the least likely, ties by lower id."""
    return np.argsort(-logits, kind="stable")


def keep(logits: np.ndarray, top_k: int, top_p: float) -> tuple[np.ndarray, float]:
    """Which ids top_k and then top_p keep, and how far the nearest partial sum is from top_p."""
    ranked = order(logits.astype(np.float64))
    if 0 < top_k < len(ranked):
        ranked = ranked[:top_k]
    margin = 1.0
    if top_p < 1:
        weights = np.exp(logits[ranked].astype(np.float64) - logits[ranked[0]])
        share = np.cumsum(weights) / weights.sum()
        margin = float(np.min(np.abs(share - top_p)))
        ranked = ranked[: 1 + int(np.sum(share < top_p))]
    kept = np.zeros(len(logits), bool)
    kept[ranked] = True
    return kept, margin


def log_softmax(logits: np.ndarray) -> np.ndarray:
    x = logits.astype(np.float64)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def rows(
    *params: SamplingParams, seeds: list[int] | None = None, samples: list[int] | None = None
) -> RowParams:
    """Row parameters as the worker makes them, through their words."""
    count = len(params)
    seeds, samples = seeds or [0] * count, samples or [0] * count
    words = [
        SequenceSampling(params=p, seed=seed, sample=sample).words()
        for p, seed, sample in zip(params, seeds, samples, strict=True)
    ]
    return row_params_from_words(jnp.asarray(np.stack(words)))
