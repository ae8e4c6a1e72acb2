"""top_k and top_p over a whole vocabulary, exactly and without sorting it.

Finds the value of the last token that is kept by bisection over the bits of the logits.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32


def filter_mask(
    logits: Float[Array, "rows vocab"],
    top_k: Int[Array, " rows"],
    top_p: Float[Array, " rows"],
) -> Bool[Array, "rows vocab"]:
    """Tokens that top_k and then top_p keep, of the distribution softmax(logits).

    top_k (0 keeps all) keeps exactly k, by (logit, lower id). top_p then keeps the smallest set, by
    the same order, whose share of what top_k kept is at least top_p; never none.
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

    Bisection over the 32 bits of `order` finds the value of the last member; among those equal to
    it, as many of the lowest ids are taken as are needed.
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
