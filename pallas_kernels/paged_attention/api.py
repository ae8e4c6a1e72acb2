"""The functions people call: checks, then dispatch to an implementation by name or platform."""

import math

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..dispatch import choose, resolve_platform
from ..kv import KVGroup, interleave_kv, scatter_slots
from . import reference, xla
from .metadata import AttentionMetadata

IMPLEMENTATIONS = ("reference", "xla", "numba")

_NUMBA_DTYPES = ("float32", "bfloat16", "float16")
_NUMBA_HEAD_DIM = 16

_TILES_AT_ONCE = {"cpu": 1, "gpu": 128, "tpu": 128}


def write_kv(
    kv: KVGroup,
    layer: Int[Array, ""] | int,
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    slots: Int[Array, " tokens"],
    *,
    implementation: str | None = None,
    platform: str | None = None,
) -> KVGroup:
    """Writes each token's K and V into its slot; in place where the pool is donated.

    Args:
        kv: the pool; values are divided by its scales, if any, and rounded to its dtype.
        layer: which layer of the group, may be traced.
        k, v: one vector per token and kv head.
        slots: page * page_size + offset per token; tokens of one real slot must not repeat, padding
            tokens share slot 0.
        implementation: "reference" | "xla" | "numba"; None picks by platform.
        platform: "cpu" | "gpu" | "tpu", where the program will run; None is the default backend.

    Raises:
        ValueError: an argument's shape or name is not allowed; the message names it.
    """
    expected = (slots.shape[0], kv.kv_heads, kv.head_dim)
    for name, x in (("k", k), ("v", v)):
        if x.shape != expected:
            raise ValueError(
                f"{name} has shape {x.shape}; slots and pages ask for [tokens, kv_heads, head_dim] = "
                f"{expected}"
            )
    if slots.dtype != jnp.int32:
        raise ValueError(f"slots has dtype {slots.dtype}; allowed: int32")
    implementation = choose(
        implementation, resolve_platform(platform), IMPLEMENTATIONS, numba_obstacle=lambda: None
    )
    layer, values = jnp.asarray(layer, jnp.int32), interleave_kv(k, v)
    if implementation == "numba":
        from . import numba_write

        return numba_write.write(kv, layer, values, slots)
    return scatter_slots(kv, layer, values, slots)


def paged_attention(
    q: Float[Array, "tokens heads head_dim"],
    kv: KVGroup,
    layer: Int[Array, ""] | int,
    metadata: AttentionMetadata,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " heads"] | None = None,
    implementation: str | None = None,
    platform: str | None = None,
) -> Float[Array, "tokens heads head_dim"]:
    """Causal attention of each token over the positions of its own row up to itself.

    A position p attends to positions j with j <= p and, with a window, p - j < window. Scores are
    `scale * q.k`, then `soft_cap * tanh(score / soft_cap)` if given; `sinks[h]` is one more logit per head
    that takes part in the softmax and contributes no value. Query head h reads kv head
    h // (heads // kv_heads). Accumulates in float32 and returns q's dtype. The pool's scales, if any,
    multiply what is read from it.

    Args:
        q: all query tokens of the step, row after row, then padding.
        kv: the pool, with this step's K and V already written.
        layer: which layer of the group, may be traced.
        metadata: where the rows' tokens lie.
        scale: factor of the scores, usually head_dim ** -0.5.
        window: positions a token sees, itself included; None sees all.
        soft_cap: bound of the scores; None has none.
        sinks: one logit per query head; None has none.
        implementation: "reference" | "xla" | "numba"; None picks by platform.
        platform: "cpu" | "gpu" | "tpu", where the program will run; None is the default backend.

    Raises:
        ValueError: an argument's shape, value or name is not allowed; the message names it.
    """
    platform = resolve_platform(platform)
    _check(q, kv, metadata, scale=scale, window=window, soft_cap=soft_cap, sinks=sinks)
    implementation = choose(
        implementation, platform, IMPLEMENTATIONS, numba_obstacle=lambda: _numba_obstacle(kv)
    )
    layer = jnp.asarray(layer, jnp.int32)
    if implementation == "numba":
        from . import numba_cpu

        return numba_cpu.attend(
            q, kv, layer, metadata, scale=scale, window=window, soft_cap=soft_cap, sinks=sinks
        )
    if implementation == "reference":
        return reference.attend(
            q, kv, layer, metadata, scale=scale, window=window, soft_cap=soft_cap, sinks=sinks
        )
    return xla.attend(
        q,
        kv,
        layer,
        metadata,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        sinks=sinks,
        tiles_at_once=_TILES_AT_ONCE[platform],
    )


def _numba_obstacle(kv: KVGroup) -> str | None:
    """Why the numba kernel cannot read this pool; None if it can."""
    if kv.dtype not in _NUMBA_DTYPES:
        return f"pages hold {kv.dtype}, it reads {', '.join(_NUMBA_DTYPES)}"
    if kv.head_dim % _NUMBA_HEAD_DIM:
        return f"head_dim={kv.head_dim} is not a multiple of {_NUMBA_HEAD_DIM}"
    return None


def _check(
    q: Array,
    kv: KVGroup,
    metadata: AttentionMetadata,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: Array | None,
) -> None:
    """Raises ValueError, naming the argument, if shapes or values do not fit together."""
    if kv.pages.ndim != 5 or kv.pages.shape[3] % 2:
        raise ValueError(
            f"pages has shape {kv.pages.shape}; allowed: [layers, pages, page_size, 2 * kv_heads, "
            "head_dim]"
        )
    if q.ndim != 3 or q.shape[0] == 0 or q.shape[2] != kv.head_dim:
        raise ValueError(
            f"q has shape {q.shape}; allowed: [tokens, heads, head_dim = {kv.head_dim}] with at least "
            "one token"
        )
    heads = q.shape[1]
    if heads == 0 or heads % kv.kv_heads:
        raise ValueError(f"q has {heads} heads; allowed: a multiple of kv_heads = {kv.kv_heads}")
    if not jnp.issubdtype(q.dtype, jnp.floating):
        raise ValueError(f"q has dtype {q.dtype}; allowed: a float dtype")
    if metadata.page_table.ndim != 2 or 0 in metadata.page_table.shape:
        raise ValueError(
            f"page_table has shape {metadata.page_table.shape}; allowed: [rows, table_width], neither 0"
        )
    rows = metadata.page_table.shape[0]
    if metadata.kv_lens.shape != (rows,):
        raise ValueError(
            f"kv_lens has shape {metadata.kv_lens.shape}; page_table asks for ({rows},)"
        )
    if metadata.cu_q_lens.shape != (rows + 1,):
        raise ValueError(
            f"cu_q_lens has shape {metadata.cu_q_lens.shape}; page_table asks for ({rows + 1},)"
        )
    for name in ("page_table", "kv_lens", "cu_q_lens"):
        if (dtype := getattr(metadata, name).dtype) != jnp.int32:
            raise ValueError(f"{name} has dtype {dtype}; allowed: int32")
    if not math.isfinite(scale):
        raise ValueError(f"scale={scale}; allowed: a finite number")
    if window is not None and window < 1:
        raise ValueError(f"window={window}; allowed: None or at least 1")
    if soft_cap is not None and not (math.isfinite(soft_cap) and soft_cap > 0):
        raise ValueError(f"soft_cap={soft_cap}; allowed: None or a positive number")
    if sinks is not None and sinks.shape != (heads,):
        raise ValueError(f"sinks has shape {sinks.shape}; q asks for ({heads},)")
    if kv.scales is not None and kv.scales.shape != (kv.pages.shape[0], kv.pages.shape[3]):
        raise ValueError(
            f"scales has shape {kv.scales.shape}; pages ask for [layers, 2 * kv_heads] = "
            f"{(kv.pages.shape[0], kv.pages.shape[3])}"
        )
