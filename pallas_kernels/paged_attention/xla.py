"""Ragged paged attention in XLA's own operations, for any platform.

The queries of a row are cut into tiles, and each tile walks the live pages of its row in fixed-size
blocks with a streaming softmax. The loops' trip counts come from the lengths: a row without tokens has no
tile, table width costs nothing, and a tile's arithmetic has one shape whatever lies beside it, so that its
bits do not depend on its neighbours.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..kv import KVGroup, from_storage
from .metadata import AttentionMetadata

_KEYS_PER_BLOCK = 128
_CHUNK_TILE = 32  # queries of one row that walk its pages together
_LOWEST = -1e30  # stands for -inf where a difference of two of them must not be NaN


@dataclasses.dataclass(frozen=True)
class _Tiles:
    """The work list: tile i holds `tile_size` tokens of row `rows[i]` from token `firsts[i]` on."""

    rows: Int[Array, " tiles"]
    firsts: Int[Array, " tiles"]
    count: Int[Array, ""]


def _cut(
    metadata: AttentionMetadata, wanted: Bool[Array, " rows"], tile_size: int, max_tiles: int
) -> _Tiles:
    """Cuts the tokens of the rows in `wanted` into tiles, row after row."""
    starts, q_lens = metadata.cu_q_lens[:-1], jnp.diff(metadata.cu_q_lens)
    per_row = jnp.where(wanted, -(-q_lens // tile_size), 0)
    ends = jnp.cumsum(per_row)
    tile = jnp.arange(max_tiles, dtype=jnp.int32)
    rows = jnp.searchsorted(ends, tile, side="right", method="compare_all").astype(jnp.int32)
    rows = jnp.minimum(rows, ends.shape[0] - 1)
    firsts = starts[rows] + (tile - (ends - per_row)[rows]) * tile_size
    return _Tiles(rows=rows, firsts=firsts, count=ends[-1])


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
    tiles_at_once: int,
) -> Float[Array, "tokens heads head_dim"]:
    """Causal attention of each token over its own row; see `paged_attention`.

    `tiles_at_once` tiles are one batched product: 1 suits two cores, many an accelerator.
    """
    num_tokens, heads, head_dim = q.shape
    kv_heads, page_size = kv.kv_heads, kv.page_size
    num_rows, table_width = metadata.page_table.shape
    pages_per_block = max(1, _KEYS_PER_BLOCK // page_size)
    block = pages_per_block * page_size
    q_lens = jnp.diff(metadata.cu_q_lens)
    # One operand type for both products, so that XLA keeps to its matrix units.
    compute = jnp.promote_types(q.dtype, kv.dtype) if kv.scales is None else jnp.float32
    if compute == jnp.float16:
        compute = jnp.dtype(jnp.float32)
    # Accelerators would multiply float32 in fewer bits by default.
    precision = jax.lax.Precision.HIGHEST if compute == jnp.float32 else None
    sink_logits = None if sinks is None else sinks.astype(jnp.float32).reshape(kv_heads, -1)

    def load(rows: Array, index: Array, lo: Array, hi: Array) -> Array:
        """K and V of one block of keys per tile `[tiles, block, 2 * kv_heads, head_dim]`, zero outside
        [lo, hi): what nobody wrote may be NaN, and 0 * NaN is NaN."""
        entries = index[:, None] * pages_per_block + jnp.arange(pages_per_block)
        entries = jnp.minimum(entries, table_width - 1)
        ids = metadata.page_table.at[rows[:, None], entries].get(mode="promise_in_bounds")
        bits = kv.pages.at[layer, ids].get(mode="promise_in_bounds")
        values = from_storage(bits, kv.dtype).reshape(-1, block, 2 * kv_heads, head_dim)
        if kv.scales is not None:
            values = values.astype(jnp.float32) * kv.scales[layer][:, None]
        keys = index[:, None] * block + jnp.arange(block)
        live = (keys >= lo[:, None]) & (keys < hi[:, None])
        return jnp.where(live[:, :, None, None], values, 0).astype(compute)

    def attend_tiles(
        out: Array, wanted: Bool[Array, " rows"], tile_size: int, max_tiles: int
    ) -> Array:
        at_once = min(tiles_at_once, max_tiles)
        tiles = _cut(metadata, wanted, tile_size, -(-max_tiles // at_once) * at_once)

        def step(group: Array, out: Array) -> Array:
            here = group * at_once + jnp.arange(at_once)
            rows, firsts = tiles.rows[here], tiles.firsts[here]
            used = here < tiles.count
            tokens = firsts[:, None] + jnp.arange(tile_size)
            ends = metadata.cu_q_lens[rows + 1]
            is_token = (tokens < ends[:, None]) & used[:, None]
            positions = (metadata.kv_lens[rows] - ends)[:, None] + tokens
            # Keys [lo, hi) are all that any token of the tile sees.
            hi = jnp.where(used, jnp.max(jnp.where(is_token, positions, -1), axis=1) + 1, 0)
            lo = jnp.zeros_like(hi)
            if window is not None:
                lo = jnp.maximum(positions[:, 0] - window + 1, 0)
            first, last = lo // block, -(-hi // block)

            grouped = q.at[jnp.minimum(tokens, num_tokens - 1)].get(mode="promise_in_bounds")
            grouped = grouped.astype(compute).reshape(
                at_once, tile_size, kv_heads, heads // kv_heads, head_dim
            )

            def walk(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
                top, total, acc = carry
                index = first + i
                values = load(rows, index, lo, hi)
                k, v = values[:, :, 0::2], values[:, :, 1::2]
                scores = scale * jnp.einsum(
                    "nqkgd,nskd->nkqgs",
                    grouped,
                    k,
                    precision=precision,
                    preferred_element_type=jnp.float32,
                )
                if soft_cap is not None:
                    scores = soft_cap * jnp.tanh(scores / soft_cap)
                keys = (index[:, None] * block + jnp.arange(block))[:, None, :]
                seen = (keys <= positions[:, :, None]) & is_token[:, :, None]
                if window is not None:
                    seen &= positions[:, :, None] - keys < window
                seen = seen[:, None, :, None, :]
                new_top = jnp.maximum(top, jnp.max(jnp.where(seen, scores, _LOWEST), axis=-1))
                weights = jnp.where(seen, jnp.exp(scores - new_top[..., None]), 0)
                kept = jnp.exp(top - new_top)
                total = total * kept + jnp.sum(weights, axis=-1)
                added = jnp.einsum(
                    "nkqgs,nskd->nkqgd",
                    weights.astype(compute),
                    v,
                    precision=precision,
                    preferred_element_type=jnp.float32,
                )
                return new_top, total, acc * kept[..., None] + added

            shape = (at_once, kv_heads, tile_size, heads // kv_heads)
            top, total = jnp.full(shape, _LOWEST), jnp.zeros(shape)
            if sink_logits is not None:
                top = jnp.broadcast_to(sink_logits[None, :, None, :], shape)
                total = jnp.ones(shape)
            trips = jnp.max(jnp.where(used, last - first, 0))
            state = (top, total, jnp.zeros((*shape, head_dim)))
            top, total, acc = jax.lax.fori_loop(0, trips, walk, state)
            result = jnp.einsum("nkqgd->nqkgd", acc / jnp.where(total > 0, total, 1)[..., None])
            result = result.reshape(at_once, tile_size, heads, head_dim).astype(q.dtype)
            where = jnp.where(is_token, tokens, num_tokens)
            return out.at[where].set(result, mode="drop")

        return jax.lax.fori_loop(0, -(-tiles.count // at_once), step, out)

    out = jnp.zeros(q.shape, q.dtype)
    out = attend_tiles(out, q_lens == 1, 1, min(num_rows, num_tokens))
    if num_tokens > 1:
        # A row with several tokens fills tiles but for its last one.
        max_tiles = num_tokens // _CHUNK_TILE + min(num_rows, num_tokens // 2)
        out = attend_tiles(out, q_lens > 1, _CHUNK_TILE, max_tiles)
    return out
