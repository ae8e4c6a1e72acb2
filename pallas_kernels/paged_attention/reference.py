"""What ragged paged attention means, in plain jnp: the oracle. Reads the whole table; slow on purpose."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..kv import KVGroup, from_storage
from .metadata import AttentionMetadata, token_rows


def attend(
    q: Float[Array, "tokens heads head_dim"],
    kv: KVGroup,
    layer: Int[Array, ""],
    metadata: AttentionMetadata,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: Float[Array, " heads"] | None,
) -> Float[Array, "tokens heads head_dim"]:
    """Causal attention of each token over its own row; see `paged_attention`."""
    tokens, heads, head_dim = q.shape
    rows, positions, is_token = token_rows(metadata, tokens)

    pages = from_storage(kv.pages[layer, metadata.page_table], kv.dtype).astype(jnp.float32)
    pages = pages.reshape(pages.shape[0], -1, 2 * kv.kv_heads, head_dim)
    if kv.scales is not None:
        pages = pages * kv.scales[layer][:, None]
    k, v = pages[rows, :, 0::2], pages[rows, :, 1::2]

    keys = jnp.arange(k.shape[1])
    seen = (keys <= positions[:, None]) & is_token[:, None]
    if window is not None:
        seen &= positions[:, None] - keys < window
    # where, not multiply: a slot nobody reads may hold NaN, and 0 * NaN is NaN.
    k = jnp.where(seen[:, :, None, None], k, 0)
    v = jnp.where(seen[:, :, None, None], v, 0)

    grouped = q.astype(jnp.float32).reshape(tokens, kv.kv_heads, -1, head_dim)
    highest = jax.lax.Precision.HIGHEST
    scores = scale * jnp.einsum("tkgd,tskd->tkgs", grouped, k, precision=highest)
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    seen_by_head = seen[:, None, None, :]
    scores = jnp.where(seen_by_head, scores, -jnp.inf)
    top = jnp.max(scores, axis=-1, keepdims=True)
    if sinks is not None:
        logits = sinks.astype(jnp.float32).reshape(1, kv.kv_heads, -1, 1)
        top = jnp.maximum(top, logits)
    top = jnp.where(jnp.isfinite(top), top, 0)
    weights = jnp.where(seen_by_head, jnp.exp(scores - top), 0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(logits - top)
    weights = weights / jnp.where(total > 0, total, 1)
    out = jnp.einsum("tkgs,tskd->tkgd", weights, v, precision=highest)
    return out.reshape(tokens, heads, head_dim).astype(q.dtype)
