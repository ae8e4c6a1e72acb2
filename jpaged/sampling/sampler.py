"""The sampler: logits of the chosen positions to tokens and log-probabilities, on device.

Every row is computed by itself. Features that no row of the batch uses are skipped by `lax.cond`,
not by another program. top_k and top_p are exact, ties broken by lower token id: where the few most
likely tokens hold all that a row keeps, as they nearly always do, only those are looked at; else
the filter of filters.py runs over the vocabulary. A row's noise at a token id is the same either
way.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from jpaged.sampling.filters import filter_mask
from jpaged.sampling.noise import gumbel, noise_keys
from jpaged.sampling.params import MAX_LOGPROBS
from jpaged.sampling.row_params import RowParams

_Rows = TypeVar("_Rows")

# So many of the most likely tokens are looked at before the whole vocabulary is.
NUM_LIKELY = 256
# Tokens of a tile, of which the largest is found first.
_TILE = 128


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["tokens", "logprobs", "ranks", "top_ids", "top_logprobs"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Sampled:
    """What one step yields for each row; log-softmax of the model's own logits, in nats.

    `ranks`, `top_ids` and `top_logprobs` are zero unless a row of the batch asked for
    log-probabilities.
    """

    tokens: Int[Array, " rows"]
    logprobs: Float[Array, " rows"]
    ranks: Int[Array, " rows"]
    top_ids: Int[Array, "rows max_logprobs"]
    top_logprobs: Float[Array, "rows max_logprobs"]


def sample(
    logits: Float[Array, "rows vocab"],
    params: RowParams,
    positions: Int[Array, " rows"],
    *,
    rows_at_once: int | None = None,
) -> Sampled:
    """One token a row. `positions[r]` is where the new token will stand; it seeds the row's noise.

    What only some requests ask for is computed for `rows_at_once` rows at a time, None for all: it
    takes several times the memory of the logits.
    """
    greedy = _argmax(logits)
    random = params.temperature > 0
    tokens = _for_some(
        rows_at_once,
        random,
        _tokens,
        (logits, params, positions, greedy),
        otherwise=greedy,
    )
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)
    log_total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    wanted = params.top_logprobs >= 0
    ranks, top_ids, top_logits = _for_some(
        rows_at_once,
        wanted,
        _most_likely,
        (logits, chosen),
        otherwise=jax.tree.map(jnp.zeros_like, jax.eval_shape(_most_likely, logits, chosen)),
    )
    return Sampled(
        tokens=tokens,
        logprobs=(chosen - log_total)[:, 0],
        ranks=ranks,
        top_ids=top_ids,
        top_logprobs=top_logits - log_total,
    )


def _for_some(
    at_once: int | None,
    asked: Bool[Array, " rows"],
    function: Callable[..., _Rows],
    arguments: tuple[object, ...],
    otherwise: _Rows,
) -> _Rows:
    """`function` of all arguments by blocks of rows, where a row of the block asks; else `otherwise`.

    All leaves have the rows as their first axis.
    """
    rows = asked.shape[0]
    size = math.gcd(rows, at_once or rows)

    def block(xs: tuple[Array, tuple[object, ...], _Rows]) -> _Rows:
        asked, arguments, otherwise = xs
        return jax.lax.cond(jnp.any(asked), lambda: function(*arguments), lambda: otherwise)

    def all_blocks() -> _Rows:
        blocks = jax.tree.map(
            lambda x: x.reshape(-1, size, *x.shape[1:]), (asked, arguments, otherwise)
        )
        mapped = jax.lax.map(block, blocks)
        return jax.tree.map(lambda x: x.reshape(rows, *x.shape[2:]), mapped)

    xs = (asked, arguments, otherwise)
    if size == rows:
        return block(xs)
    return jax.lax.cond(jnp.any(asked), all_blocks, lambda: otherwise)


def _tokens(
    logits: Float[Array, "rows vocab"],
    params: RowParams,
    positions: Int[Array, " rows"],
    greedy: Int[Array, " rows"],
) -> Int[Array, " rows"]:
    """A draw for each row with a temperature, `greedy` for the others."""
    return jnp.where(params.temperature > 0, _draw(logits, params, positions), greedy)


def _argmax(x: Float[Array, "rows vocab"]) -> Int[Array, " rows"]:
    """The first of the largest, in two levels: a plain maximum is vectorised, an argmax is not."""
    rows, vocab = x.shape
    pad = -vocab % _TILE
    tiles = jnp.pad(x, ((0, 0), (0, pad)), constant_values=-jnp.inf) if pad else x
    tiles = tiles.reshape(rows, -1, _TILE)
    first = jnp.argmax(jnp.max(tiles, axis=-1), axis=-1)
    tile = jnp.take_along_axis(tiles, first[:, None, None], axis=1)[:, 0]
    best = first * _TILE + jnp.argmax(tile, axis=-1)
    # A row of nothing but -inf or NaN: the host is told by its log-probability, the id stays in range.
    return jnp.minimum(best, vocab - 1).astype(jnp.int32)


def _draw(
    logits: Float[Array, "rows vocab"], params: RowParams, positions: Int[Array, " rows"]
) -> Int[Array, " rows"]:
    """Gumbel-max over the filtered, tempered logits: a draw from their softmax.

    The largest logit is taken off first, so that a temperature near 0 cannot overflow.
    """
    vocab = logits.shape[-1]
    random = params.temperature > 0
    temperature = jnp.where(random, params.temperature, 1.0)[:, None]
    scaled = (logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature
    keys = noise_keys(params.seed_low, params.seed_high, params.sample, positions)
    filtered = ((params.top_k > 0) & (params.top_k < vocab)) | (params.top_p < 1)
    filtered &= random

    few, covered = jax.lax.cond(
        jnp.any(filtered),
        lambda: _draw_among_likely(scaled, params, keys),
        lambda: (jnp.zeros_like(params.top_k), jnp.zeros_like(filtered)),
    )
    covered &= filtered

    def over_vocabulary() -> Int[Array, " rows"]:
        kept = jax.lax.cond(
            jnp.any(filtered & ~covered),
            lambda: jnp.where(filter_mask(scaled, params.top_k, params.top_p), scaled, -jnp.inf),
            lambda: scaled,
        )
        ids = jax.lax.broadcasted_iota(jnp.int32, scaled.shape, 1)
        # Without the barrier the noise is computed once for each reduction of the argmax.
        return _argmax(jax.lax.optimization_barrier(kept + gumbel(keys, ids)))

    return jax.lax.cond(
        jnp.any(random & ~covered),
        lambda: jnp.where(covered, few, over_vocabulary()),
        lambda: few,
    )


def _draw_among_likely(
    scaled: Float[Array, "rows vocab"], params: RowParams, keys: UInt32[Array, "rows 2"]
) -> tuple[Int[Array, " rows"], Bool[Array, " rows"]]:
    """A draw from the NUM_LIKELY most likely tokens, and whether these hold all that the row keeps."""
    count = min(NUM_LIKELY, scaled.shape[-1])
    likely, ids = jax.lax.top_k(scaled, count)
    rank = jnp.arange(count)[None]
    has_k = (params.top_k > 0) & (params.top_k <= count)
    in_top_k = (rank < params.top_k[:, None]) | ~has_k[:, None]
    weights = jnp.where(in_top_k, jnp.exp(likely), 0.0)
    total = jnp.where(has_k, jnp.sum(weights, axis=-1), jnp.sum(jnp.exp(scaled), axis=-1))
    target = (params.top_p * total)[:, None]
    # The sum of all better ones, as a product: a cumsum costs XLA:CPU more to compile and to run.
    better = jnp.triu(jnp.ones((count, count), weights.dtype), k=1)
    before = jnp.matmul(weights, better, precision=jax.lax.Precision.HIGHEST)
    in_top_p = (before < target) | (params.top_p >= 1)[:, None]
    # The nucleus ends among these where the last one begins beyond the target. A top_k larger than
    # `count` filters before top_p does, so such a row is never covered.
    ends = (params.top_p < 1) & (before[:, -1] >= target[:, 0])
    wide_k = (params.top_k > count) & (params.top_k < scaled.shape[-1])
    covered = has_k | (ends & ~wide_k) | (count == scaled.shape[-1])
    kept = jnp.where(in_top_k & in_top_p, likely, -jnp.inf)
    best = jnp.argmax(kept + gumbel(keys, ids), axis=-1)
    return jnp.take_along_axis(ids, best[:, None], axis=-1)[:, 0], covered


def _most_likely(
    logits: Float[Array, "rows vocab"], chosen: Float[Array, "rows 1"]
) -> tuple[Int[Array, " rows"], Int[Array, "rows max_logprobs"], Float[Array, "rows max_logprobs"]]:
    """Rank of the chosen token (1 is best), and the most likely tokens with their logits."""
    ranks = 1 + jnp.sum(logits > chosen, axis=-1, dtype=jnp.int32)
    count = min(MAX_LOGPROBS, logits.shape[-1])
    top_logits, top_ids = jax.lax.top_k(logits, count)
    pad = ((0, 0), (0, MAX_LOGPROBS - count))
    return ranks, jnp.pad(top_ids, pad), jnp.pad(top_logits, pad, constant_values=-jnp.inf)
