"""Rotary position embeddings: their parameters, frequencies and application.

Knows every kind of scaling that is supported and the two dialects in which checkpoints write them. Does not
know which layers use which parameters: `config.py` decides that.
"""

import dataclasses
import math
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jpaged.errors import ModelLoadError

# The keys that each kind may have beside its name and `rope_theta`; those in the second set must be there.
_KEYS: dict[str, tuple[frozenset[str], frozenset[str]]] = {
    "default": (frozenset(), frozenset()),
    "linear": (frozenset({"factor"}), frozenset({"factor"})),
    "llama3": (
        frozenset(
            {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
        ),
        frozenset({"factor", "low_freq_factor", "high_freq_factor"}),
    ),
    "yarn": (
        frozenset(
            {
                "factor",
                "original_max_position_embeddings",
                "attention_factor",
                "beta_fast",
                "beta_slow",
                "mscale",
                "mscale_all_dim",
                "truncate",
            }
        ),
        frozenset({"factor"}),
    ),
}
# Written by some exporters, without a meaning for the numbers.
_IGNORED = frozenset({"finetuned"})


@dataclasses.dataclass(frozen=True)
class Rope:
    """Parameters of one rotary embedding; fields that `kind` does not use keep their defaults."""

    kind: str = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0


def _number(value: object, field: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ModelLoadError(f"config field {field} is {value!r}; it must be a positive number")
    return float(value)


def rope_from_hf(
    parameters: Mapping[str, object], *, field: str, theta: float, max_position_embeddings: int
) -> Rope:
    """Reads one dictionary of rope parameters, in either dialect.

    `field` is its name in the config, for errors; `theta` applies where the dictionary has none.
    """
    given = {k: v for k, v in parameters.items() if v is not None and k not in _IGNORED}
    kinds = {given.pop(key) for key in ("rope_type", "type") if key in given} or {"default"}
    kind = kinds.pop()
    if kinds or kind not in _KEYS:
        shown = " and ".join(repr(k) for k in sorted(map(str, {kind, *kinds})))
        raise ModelLoadError(
            f"config field {field} has rope_type {shown}; supported are {', '.join(sorted(_KEYS))}"
        )
    if _number(given.pop("partial_rotary_factor", 1.0), f"{field}.partial_rotary_factor") != 1.0:
        raise ModelLoadError(
            f"config field {field}.partial_rotary_factor is not 1; partial rotation is not supported"
        )
    theta = _number(given.pop("rope_theta", theta), f"{field}.rope_theta")
    allowed, required = _KEYS[str(kind)]
    if missing := sorted(required - given.keys()):
        raise ModelLoadError(f"config field {field} of kind {kind!r} lacks {', '.join(missing)}")
    if unknown := sorted(given.keys() - allowed):
        raise ModelLoadError(
            f"config field {field} of kind {kind!r} has {', '.join(unknown)}; "
            f"allowed are {', '.join(sorted(allowed)) or 'no further keys'}"
        )
    truncate = given.pop("truncate", True)
    if not isinstance(truncate, bool):
        raise ModelLoadError(f"config field {field}.truncate is {truncate!r}; it must be a bool")
    numbers = {key: _number(value, f"{field}.{key}") for key, value in given.items()}
    original = numbers.pop("original_max_position_embeddings", float(max_position_embeddings))
    mscale, mscale_all_dim = numbers.pop("mscale", 0.0), numbers.pop("mscale_all_dim", 0.0)
    if kind == "yarn":
        numbers.setdefault(
            "attention_factor", _yarn_attention_factor(numbers["factor"], mscale, mscale_all_dim)
        )
    return Rope(
        kind=str(kind),
        theta=theta,
        original_max_position_embeddings=int(original) if kind in ("llama3", "yarn") else 0,
        truncate=truncate,
        **numbers,
    )


def _yarn_attention_factor(factor: float, mscale: float, mscale_all_dim: float) -> float:
    """The factor on cos and sin (YaRN, arXiv 2309.00071, eq. 22)."""

    def scaled(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    return scaled(mscale) / scaled(mscale_all_dim) if mscale and mscale_all_dim else scaled(1.0)


def inverse_frequencies(rope: Rope, head_dim: int) -> np.ndarray:
    """Radians per position for each of the `head_dim / 2` planes, float32 of a float64 computation."""
    inverse = 1.0 / rope.theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.kind == "linear":
        inverse = inverse / rope.factor
    elif rope.kind == "llama3":
        # Turns of each plane within the original context: many turns stay, few are slowed by the
        # whole factor, between the two bounds the mixture is linear in the number of turns.
        turns = rope.original_max_position_embeddings * inverse / (2 * math.pi)
        span = rope.high_freq_factor - rope.low_freq_factor
        keep = np.clip((turns - rope.low_freq_factor) / span, 0.0, 1.0)
        inverse = keep * inverse + (1.0 - keep) * inverse / rope.factor
    elif rope.kind == "yarn":
        keep = 1.0 - _yarn_ramp(rope, head_dim)
        inverse = keep * inverse + (1.0 - keep) * inverse / rope.factor
    return inverse.astype(np.float32)


def _yarn_ramp(rope: Rope, head_dim: int) -> np.ndarray:
    """0 for planes that turn at least `beta_fast` times in the original context, 1 below `beta_slow`."""

    def plane(turns: float) -> float:
        span = rope.original_max_position_embeddings / (turns * 2 * math.pi)
        return head_dim * math.log(span) / (2 * math.log(rope.theta))

    low, high = plane(rope.beta_fast), plane(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    return np.clip((np.arange(head_dim // 2) - low) / (high - low), 0.0, 1.0)


def rope_angles(
    positions: Int[Array, " tokens"], rope: Rope, head_dim: int
) -> tuple[Float[Array, "tokens planes"], Float[Array, "tokens planes"]]:
    """Cosine and sine of each token's angles, float32 whatever the model's dtype."""
    inverse = jnp.asarray(inverse_frequencies(rope, head_dim))
    angles = positions[:, None].astype(jnp.float32) * inverse
    return jnp.cos(angles) * rope.attention_factor, jnp.sin(angles) * rope.attention_factor


def rotate(
    x: Float[Array, "*batch tokens heads head_dim"],
    angles: tuple[Float[Array, "tokens planes"], Float[Array, "tokens planes"]],
) -> Float[Array, "*batch tokens heads head_dim"]:
    """Turns each pair (x[i], x[i + head_dim / 2]) by its angle; computed in float32."""
    cos, sin = angles[0][:, None, :], angles[1][:, None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)
