"""Gumbel noise that is a function of (seed, sample, position, token id) and of nothing else.

A counter-based generator: a key for each row, and a hash of (key, token id), which costs a few
integer operations where threefry over a vocabulary costs more than a small model's step on a CPU.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32


def noise_keys(
    seed_low: UInt32[Array, " rows"],
    seed_high: UInt32[Array, " rows"],
    sample: Int[Array, " rows"],
    positions: Int[Array, " rows"],
) -> UInt32[Array, "rows 2"]:
    """The key of each row's noise: two words, each a hash that takes in the four arguments in turn."""
    words = [seed_low, seed_high, sample.astype(jnp.uint32), positions.astype(jnp.uint32)]

    def absorb(start: int) -> UInt32[Array, " rows"]:
        state = jnp.full_like(seed_low, start)
        for word in words:
            # Multiplying between words makes their order count.
            state = _mix((state ^ word) * jnp.uint32(0x9E3779B1) + jnp.uint32(start))
        return state

    return jnp.stack([absorb(0x243F6A88), absorb(0x85A308D3)], axis=-1)


def gumbel(
    keys: UInt32[Array, "rows 2"], ids: Int[Array, "rows tokens"]
) -> Float[Array, "rows tokens"]:
    """Standard Gumbel noise at token ids: -log(-log(u)), u uniform on 2^23 points in (0, 1).

    With one bit more, the float32 of the last point is 1 and its noise infinite.
    """
    bits = _mix(_mix(ids.astype(jnp.uint32) * jnp.uint32(0x9E3779B1) + keys[:, :1]) ^ keys[:, 1:])
    uniform = ((bits >> 9).astype(jnp.float32) + 0.5) * jnp.float32(2**-23)
    return -jnp.log(-jnp.log(uniform))


def _mix(x: UInt32[Array, "*shape"]) -> UInt32[Array, "*shape"]:
    """The finaliser of MurmurHash3: a bijection in which each bit of x moves half of the others."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
