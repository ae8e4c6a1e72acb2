"""The sampler: logits of the chosen positions to tokens and log-probabilities, on device.

Every row is computed by itself. Features that no row of the batch uses are skipped by `lax.cond`, not by
another program. Filters find their threshold by bisection over the bits of the logits and break ties by lower
token id, so nothing sorts the vocabulary and the result is exact.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from jpaged.sampling.params import MAX_LOGPROBS
from jpaged.sampling.row_params import RowParams


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["tokens", "logprobs", "ranks", "top_ids", "top_logprobs"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Sampled:
    """What one step yields for each row; log-softmax of the model's own logits, in nats.

    `ranks`, `top_ids` and `top_logprobs` are zero unless a row of the batch asked for log-probabilities.
    """

    tokens: Int[Array, " rows"]
    logprobs: Float[Array, " rows"]
    ranks: Int[Array, " rows"]
    top_ids: Int[Array, "rows max_logprobs"]
    top_logprobs: Float[Array, "rows max_logprobs"]


def sample(
    logits: Float[Array, "rows vocab"], params: RowParams, positions: Int[Array, " rows"]
) -> Sampled:
    """One token a row. `positions[r]` is where the new token will stand; it seeds the row's noise."""
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    random = params.temperature > 0
    tokens = jax.lax.cond(
        jnp.any(random),
        lambda: jnp.where(random, _draw(logits, params, positions), greedy),
        lambda: greedy,
    )
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)
    log_total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    ranks, top_ids, top_logits = jax.lax.cond(
        jnp.any(params.top_logprobs >= 0),
        lambda: _most_likely(logits, chosen),
        lambda: jax.tree.map(jnp.zeros_like, jax.eval_shape(_most_likely, logits, chosen)),
    )
    return Sampled(
        tokens=tokens,
        logprobs=(chosen - log_total)[:, 0],
        ranks=ranks,
        top_ids=top_ids,
        top_logprobs=top_logits - log_total,
    )


def _draw(
    logits: Float[Array, "rows vocab"], params: RowParams, positions: Int[Array, " rows"]
) -> Int[Array, " rows"]:
    """Gumbel-max over the filtered, tempered logits: a draw from their softmax.

    The largest logit is taken off first, so that a temperature near 0 cannot overflow.
    """
    temperature = jnp.where(params.temperature > 0, params.temperature, 1.0)[:, None]
    scaled = (logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature
    vocab = logits.shape[-1]
    filtered = ((params.top_k > 0) & (params.top_k < vocab)) | (params.top_p < 1)
    filtered &= params.temperature > 0
    scaled = jax.lax.cond(
        jnp.any(filtered),
        lambda: jnp.where(filter_mask(scaled, params.top_k, params.top_p), scaled, -jnp.inf),
        lambda: scaled,
    )
    noise = jax.vmap(partial(_gumbel, vocab=vocab))(
        params.seed_low, params.seed_high, params.sample, positions
    )
    return jnp.argmax(scaled + noise, axis=-1).astype(jnp.int32)


def _gumbel(
    seed_low: UInt32[Array, ""],
    seed_high: UInt32[Array, ""],
    sample_index: Int[Array, ""],
    position: Int[Array, ""],
    *,
    vocab: int,
) -> Float[Array, " vocab"]:
    """Noise that is a function of (seed, sample, position) and the token id, and of nothing else."""
    key = jax.random.wrap_key_data(jnp.stack([seed_high, seed_low]), impl="threefry2x32")
    key = jax.random.fold_in(jax.random.fold_in(key, sample_index), position)
    return jax.random.gumbel(key, (vocab,), jnp.float32)


def filter_mask(
    logits: Float[Array, "rows vocab"],
    top_k: Int[Array, " rows"],
    top_p: Float[Array, " rows"],
) -> Bool[Array, "rows vocab"]:
    """Tokens that top_k and then top_p keep, of the distribution softmax(logits).

    top_k (0 keeps all) keeps exactly k, by (logit, lower id). top_p then keeps the smallest set, by the same
    order, whose share of what top_k kept is at least top_p; never none.
    """
    vocab = logits.shape[-1]
    order = _ordered_bits(logits)
    k = jnp.where((top_k > 0) & (top_k < vocab), top_k, vocab)
    ones = jnp.ones_like(logits)
    kept = _smallest_set(order, ones, k.astype(jnp.float32))
    probs = jnp.where(kept, jax.nn.softmax(jnp.where(kept, logits, -jnp.inf), axis=-1), 0.0)
    nucleus = _smallest_set(order, probs, top_p)
    return kept & (nucleus | (top_p >= 1)[:, None])


def _smallest_set(
    order: UInt32[Array, "rows vocab"],
    weights: Float[Array, "rows vocab"],
    target: Float[Array, " rows"],
) -> Bool[Array, "rows vocab"]:
    """The shortest prefix, in falling `order` and rising id, whose weights sum to at least `target`.

    Bisection over the 32 bits of `order` finds the value of the last member; among those equal to it,
    as many of the lowest ids are taken as are needed.
    """

    def above(threshold: UInt32[Array, " rows"]) -> Float[Array, " rows"]:
        return jnp.sum(jnp.where(order >= threshold[:, None], weights, 0.0), axis=-1)

    def set_bit(i: Int[Array, ""], threshold: UInt32[Array, " rows"]) -> UInt32[Array, " rows"]:
        trial = threshold | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        return jnp.where(above(trial) >= target, trial, threshold)

    # Largest threshold whose members still reach the target; 0 (everything) where rounding keeps even
    # the whole from reaching it.
    threshold = jax.lax.fori_loop(0, 32, set_bit, jnp.zeros(order.shape[0], jnp.uint32))[:, None]
    greater = order > threshold
    missing = target - jnp.sum(jnp.where(greater, weights, 0.0), axis=-1)
    equal = order == threshold
    tied = jnp.where(equal, weights, 0.0)
    before = jnp.cumsum(tied, axis=-1) - tied
    return greater | (equal & (before < missing[:, None]))


def _ordered_bits(x: Float[Array, "rows vocab"]) -> UInt32[Array, "rows vocab"]:
    """Unsigned integers in the order of the floats (-0 is taken for 0)."""
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32) + 0.0, jnp.uint32)
    sign = bits >> 31
    return jnp.where(sign == 1, ~bits, bits | jnp.uint32(0x80000000))


def _most_likely(
    logits: Float[Array, "rows vocab"], chosen: Float[Array, "rows 1"]
) -> tuple[Int[Array, " rows"], Int[Array, "rows max_logprobs"], Float[Array, "rows max_logprobs"]]:
    """Rank of the chosen token (1 is best), and the most likely tokens with their logits."""
    ranks = 1 + jnp.sum(logits > chosen, axis=-1, dtype=jnp.int32)
    count = min(MAX_LOGPROBS, logits.shape[-1])
    top_logits, top_ids = jax.lax.top_k(logits, count)
    pad = ((0, 0), (0, MAX_LOGPROBS - count))
    return ranks, jnp.pad(top_ids, pad), jnp.pad(top_logits, pad, constant_values=-jnp.inf)
