"""Ragged paged attention as a numba kernel that XLA:CPU calls: checks, the list of tiles, who takes which.

An item of work is one kv head of one tile; what is computed for it is known to `numba_tiles`.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..cpu.memory import (
    fetch_add,
    load_f32,
    load_i32,
    load_i64,
    store_f32,
    store_i32,
    store_i64,
    symbol_address,
    text_address,
    zero_bytes,
)
from ..cpu.runtime import (
    DONE,
    FAILED,
    INVALID_ARGUMENT,
    OP,
    RESOURCE_EXHAUSTED,
    allocate,
    argument,
    compiled,
    data,
    dimension,
    drop,
    ensure_registered,
    executes,
    failure,
    new_state,
    release_memory,
    result,
    run_shared,
    source_digest,
    take,
)
from ..cpu.vector import F32, KINDS, host_width
from ..kv import KVGroup
from . import numba_tiles
from .metadata import AttentionMetadata
from .numba_tiles import (
    CAP,
    HEADS_AT_ONCE,
    KEYS_PER_BLOCK,
    KV_HEADS,
    LENS,
    OUT,
    PAGE_SIZE,
    PAGES,
    SCALE,
    SCALES,
    SINKS,
    STARTS,
    STATE_SIZE,
    TABLE,
    TABLE_WIDTH,
    TILES,
    WINDOW,
    Q,
    attend_chunk,
    attend_token,
)

_CHUNK_COLUMNS = 96  # query vectors that share a block of widened keys
_FEWEST_COLUMNS = 8  # with fewer query vectors a token's keys are read where they lie
_MANY_TILES = 8
_SMALL = 1 << 15  # multiply-adds below which help costs more than it brings


@compiled
def _check_rows(frame: int, layers: int) -> bool:
    """Whether lengths, pages and the layer stay within the arrays: a kernel must not read beside them."""
    q, pages, table = argument(frame, 0), argument(frame, 1), argument(frame, 3)
    lens, starts = data(argument(frame, 4)), data(argument(frame, 5))
    num_pages, page_size = dimension(pages, 1), dimension(pages, 2)
    rows, width = dimension(table, 0), dimension(table, 1)
    layer = load_i32(data(argument(frame, 2)))
    window = load_i32(data(argument(frame, 9)))
    if layer < 0 or layer >= layers or load_i32(starts) != 0:
        return False
    if load_i32(starts + 4 * rows) > dimension(q, 0):
        return False
    for row in range(rows):
        count = load_i32(starts + 4 * row + 4) - load_i32(starts + 4 * row)
        length = load_i32(lens + 4 * row)
        if count < 0 or (count > 0 and (count > length or length > width * page_size)):
            return False
        if count == 0:
            continue
        first = max(0, length - count - window + 1) if window > 0 else 0
        for i in range(first // page_size, (length + page_size - 1) // page_size):
            page = load_i32(data(table) + 4 * (row * width + i))
            if page < 0 or page >= num_pages:
                return False
    return True


@compiled
def _prepare(frame: int, state: int, tile_tokens: int, chunk_tile: int, size: int) -> int:
    """Fills a call's state, zeroes the padding's result, and returns the number of tiles.

    Tiles are (row, first token) pairs: those of chunks first, the longest walks leading, so that no
    thread is left with one at the end.
    """
    q, pages, table = argument(frame, 0), argument(frame, 1), argument(frame, 3)
    layer = load_i32(data(argument(frame, 2)))
    layer_bytes = size
    for axis in range(1, 5):
        layer_bytes *= dimension(pages, axis)
    store_i64(state + Q, data(q))
    store_i64(state + PAGES, data(pages) + layer * layer_bytes)
    store_i64(state + TABLE, data(table))
    store_i64(state + LENS, data(argument(frame, 4)))
    store_i64(state + STARTS, data(argument(frame, 5)))
    store_i64(state + SCALES, data(argument(frame, 6)))
    store_i64(state + SINKS, data(argument(frame, 7)))
    store_i64(state + OUT, data(result(frame, 0)))
    store_i64(state + KV_HEADS, dimension(pages, 3) // 2)
    store_i64(state + TABLE_WIDTH, dimension(table, 1))
    store_i64(state + PAGE_SIZE, dimension(pages, 2))
    store_i64(state + WINDOW, load_i32(data(argument(frame, 9))))
    store_f32(state + SCALE, load_f32(data(argument(frame, 8))))
    store_f32(state + CAP, load_f32(data(argument(frame, 8)) + 4))

    starts, rows = data(argument(frame, 5)), dimension(table, 0)
    token_bytes = 4 * dimension(q, 1) * dimension(q, 2)
    tokens = load_i32(starts + 4 * rows)
    zero_bytes(
        data(result(frame, 0)) + tokens * token_bytes, (dimension(q, 0) - tokens) * token_bytes
    )
    tiles = state + OP + STATE_SIZE
    store_i64(state + TILES, tiles)
    count = 0
    for row in range(rows):
        first, last = load_i32(starts + 4 * row), load_i32(starts + 4 * row + 4)
        if last - first < chunk_tile:
            continue
        token = first + (last - first - 1) // tile_tokens * tile_tokens
        while token >= first:
            store_i32(tiles + 8 * count, row)
            store_i32(tiles + 8 * count + 4, token)
            count += 1
            token -= tile_tokens
    for row in range(rows):
        first, last = load_i32(starts + 4 * row), load_i32(starts + 4 * row + 4)
        if last > first and last - first < chunk_tile:
            store_i32(tiles + 8 * count, row)
            store_i32(tiles + 8 * count + 4, first)
            count += 1
    # With rows enough for every thread the heads of a row stay together.
    store_i64(state + HEADS_AT_ONCE, dimension(pages, 3) // 2 if count >= _MANY_TILES else 1)
    return count


@compiled
def _work(frame: int) -> int:
    """Multiply-adds of a call, roughly."""
    lens, starts = data(argument(frame, 4)), data(argument(frame, 5))
    total = 0
    for row in range(dimension(argument(frame, 3), 0)):
        count = load_i32(starts + 4 * row + 4) - load_i32(starts + 4 * row)
        total += count * load_i32(lens + 4 * row)
    q = argument(frame, 0)
    return total * dimension(q, 1) * dimension(q, 2)


def _make_task(
    kind: int, group: int, dim: int, width: int, digest: int
) -> Callable[[], Callable[[int], int]]:
    tile_tokens = max(1, _CHUNK_COLUMNS // group)
    most = -(-tile_tokens * group // width) * width
    registers = 32 if width == 16 else 16
    vectors = dim // width
    keys, columns = (8, 3) if registers == 32 else (4, 3)
    queries, values = 6, max(n for n in (4, 3, 2, 1) if vectors % n == 0 and 6 * n < registers - 2)
    near_keys = 4 if group <= 4 else 2
    near_values = max(
        n for n in (4, 3, 2, 1) if vectors % n == 0 and (n == 1 or group * n < registers - 2)
    )
    near = group < _FEWEST_COLUMNS
    chunk_scratch = 4 * (most * (3 + KEYS_PER_BLOCK + 2 * dim) + 2 * KEYS_PER_BLOCK * dim)
    token_scratch, head_scratch = 4 * group * KEYS_PER_BLOCK, 4 * group * (3 + 2 * dim)

    def make() -> Callable[[int], int]:
        def task(state: int) -> int:
            item, scratch, heads = take(state), 0, load_i64(state + KV_HEADS)
            if item >= 0 and digest > 0:
                scratch = allocate(max(chunk_scratch, token_scratch + heads * head_scratch))
                if scratch == 0:
                    store_i64(state + FAILED, 1)
            while item >= 0:
                if scratch != 0:
                    tile = load_i64(state + TILES) + 8 * (item // heads)
                    row, token, head = load_i32(tile), load_i32(tile + 4), item % heads
                    starts = load_i64(state + STARTS) + 4 * row
                    tokens = min(tile_tokens, load_i32(starts + 4) - token)
                    at_once = load_i64(state + HEADS_AT_ONCE)
                    if near and load_i32(starts + 4) - load_i32(starts) == 1:
                        if head % at_once == 0:
                            attend_token(
                                state,
                                scratch,
                                row,
                                token,
                                head,
                                min(at_once, heads - head),
                                kind,
                                group,
                                dim,
                                width,
                                near_keys,
                                near_values,
                            )
                    else:
                        attend_chunk(
                            state,
                            scratch,
                            row,
                            token,
                            tokens,
                            head,
                            kind,
                            group,
                            dim,
                            width,
                            keys,
                            columns,
                            queries,
                            values,
                            most,
                        )
                fetch_add(state + DONE, 1)
                item = take(state)
            if scratch != 0:
                release_memory(scratch)
            drop(state)
            return 0

        return task

    return make


def _make_handler(kind: int, group: int, digest: int) -> Callable[[str], Callable[[int], int]]:
    tile_tokens = max(1, _CHUNK_COLUMNS // group)
    chunk_tile = 2 if group < _FEWEST_COLUMNS else 1
    size = 4 if kind == F32 else 2

    def make(symbol: str) -> Callable[[int], int]:
        def handler(frame: int) -> int:
            if not executes(frame):
                return 0
            if digest <= 0 or not _check_rows(frame, dimension(argument(frame, 1), 0)):
                return failure(
                    frame,
                    INVALID_ARGUMENT,
                    text_address(
                        "paged_attention: layer, page_table, kv_lens or cu_q_lens point outside of the "
                        "pool, the table or the tokens"
                    ),
                )
            state = new_state(STATE_SIZE + 8 * dimension(argument(frame, 0), 0))
            if state != 0:
                tiles = _prepare(frame, state, tile_tokens, chunk_tile, size)
                items = tiles * load_i64(state + KV_HEADS)
                small = _work(frame) < _SMALL
                if run_shared(frame, state, symbol_address(symbol), items, small):
                    return 0
            return failure(
                frame, RESOURCE_EXHAUSTED, text_address("paged_attention: out of memory")
            )

        return handler

    return make


def prepare(dtype: str, heads: int, kv_heads: int, head_dim: int) -> str:
    """Compiles and registers the kernel for a pool's dtype and head shapes; returns its FFI name."""
    group, width, digest = (
        heads // kv_heads,
        host_width(),
        source_digest(__file__, numba_tiles.__file__),
    )
    kind = KINDS[dtype]
    name = f"jpaged_attention_{dtype}_{group}_{head_dim}_{width}"
    ensure_registered(
        name,
        _make_task(kind, group, head_dim, width, digest),
        _make_handler(kind, group, digest),
    )
    return name


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
    heads = q.shape[1]
    name = prepare(kv.dtype, heads, kv.kv_heads, kv.head_dim)
    scales = jnp.ones(2 * kv.kv_heads) if kv.scales is None else kv.scales[layer]
    logits = jnp.full(heads, -jnp.inf) if sinks is None else sinks
    call = jax.ffi.ffi_call(name, jax.ShapeDtypeStruct(q.shape, jnp.float32))
    out: Array = call(
        q.astype(jnp.float32),
        kv.pages,
        layer,
        metadata.page_table,
        metadata.kv_lens,
        metadata.cu_q_lens,
        scales.astype(jnp.float32),
        logits.astype(jnp.float32),
        jnp.array([scale, soft_cap or 0.0], jnp.float32),
        jnp.array(window or 0, jnp.int32),
    )
    return out.astype(q.dtype)
