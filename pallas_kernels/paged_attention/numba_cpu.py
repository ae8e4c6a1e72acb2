"""Ragged paged attention and the write into the pool as numba kernels that XLA:CPU calls.

An item is one kv head of a tile: one new token of a row (decode), or up to a hundred query vectors of a
row (a chunk). It walks its row's live pages in blocks of keys with a streaming softmax. Decode multiplies
queries with keys where they lie in the pages; a chunk widens each block of K and V once for all its query
vectors. Scores are kept with one row per key and one column per query vector, so that the softmax needs
no sum across a register.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..cpu.memory import (
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
    inlined,
    new_state,
    release_memory,
    result,
    run_shared,
    source_digest,
    take,
)
from ..cpu.runtime import fetch_add as _count
from ..cpu.vector import (
    F32,
    KINDS,
    accumulate,
    cap_scores,
    dots,
    host_width,
    scale_rows,
    soften,
    widen,
)
from ..kv import KVGroup
from .metadata import AttentionMetadata

HEAD_DIM_MULTIPLE = 16

_BLOCK = 64  # keys whose scores are held at once
_CHUNK_COLUMNS = 96  # query vectors that share a block of widened keys
_FEWEST_COLUMNS = 8  # with fewer query vectors a token's keys are read where they lie
_LOWEST, _MASKED = -1e30, -3e38  # exp(_MASKED - _LOWEST) is 0 also before any key was seen
_SMALL = 1 << 15  # multiply-adds below which help costs more than it brings

# Words of a call's state.
_Q, _PAGES, _TABLE, _LENS, _STARTS, _SCALES, _SINKS, _OUT, _TILES = (OP + 8 * i for i in range(9))
_KV_HEADS, _TABLE_WIDTH, _PAGE_SIZE, _WINDOW = (OP + 72 + 8 * i for i in range(4))
_SCALE, _CAP = OP + 104, OP + 108
_STATE_SIZE = 112


@inlined
def _page(state: int, row: int, position: int, head: int, dim: int, size: int) -> int:
    """The address of K of one head at a position of a row; V follows it."""
    page_size = load_i64(state + _PAGE_SIZE)
    width, heads = load_i64(state + _TABLE_WIDTH), load_i64(state + _KV_HEADS)
    entry = row * width + position // page_size
    page = load_i32(load_i64(state + _TABLE) + 4 * entry)
    slot = page * page_size + position % page_size
    return load_i64(state + _PAGES) + (slot * heads + head) * 2 * dim * size


@inlined
def _start(top: int, total: int, state: int, head: int, group: int, columns: int) -> None:
    """A softmax that has seen only the sinks; column c is a query vector of head c % group."""
    sinks = load_i64(state + _SINKS)
    for c in range(columns):
        sink = load_f32(sinks + 4 * (head * group + c % group))
        store_f32(top + 4 * c, max(sink, _LOWEST))
        store_f32(total + 4 * c, 1.0 if sink > _LOWEST else 0.0)


@inlined
def _finish(
    state: int,
    sums: int,
    total: int,
    token: int,
    head: int,
    columns: int,
    group: int,
    dim: int,
) -> None:
    """Divides the sums by the weights' total and writes them to the result."""
    heads = load_i64(state + _KV_HEADS)
    v_scale = load_f32(load_i64(state + _SCALES) + 4 * (2 * head + 1))
    for c in range(columns):
        weight = load_f32(total + 4 * c)
        factor = v_scale / weight if weight > 0 else 0.0
        place = (token + c // group) * heads * group + head * group + c % group
        out = load_i64(state + _OUT) + 4 * dim * place
        for d in range(dim):
            store_f32(out + 4 * d, load_f32(sums + 4 * (c * dim + d)) * factor)


@inlined
def _decode(
    state: int,
    scratch: int,
    row: int,
    token: int,
    head: int,
    kind: int,
    group: int,
    dim: int,
    width: int,
    keys: int,
    values: int,
) -> None:
    """Attention of one token at its row's last position, one kv head."""
    size = 4 if kind == F32 else 2
    heads, page_size = load_i64(state + _KV_HEADS), load_i64(state + _PAGE_SIZE)
    stride = 2 * heads * dim * size
    end = load_i32(load_i64(state + _LENS) + 4 * row)
    window, cap = load_i64(state + _WINDOW), load_f32(state + _CAP)
    top, total, kept = scratch, scratch + 4 * width, scratch + 8 * width
    scores = scratch + 12 * width
    query = scores + 4 * width * _BLOCK
    sums = query + 4 * group * dim

    factor = load_f32(state + _SCALE) * load_f32(load_i64(state + _SCALES) + 8 * head)
    source = load_i64(state + _Q) + 4 * dim * (token * heads + head) * group
    for d in range(group * dim):
        store_f32(query + 4 * d, load_f32(source + 4 * d) * factor)
    zero_bytes(top, 4 * width * (3 + _BLOCK))
    zero_bytes(sums, 4 * group * dim)
    _start(top, total, state, head, group, group)

    position = max(0, end - window) if window > 0 else 0
    while position < end:
        count = min(_BLOCK, end - position)
        done = 0
        while done < count:
            run = min(page_size - (position + done) % page_size, count - done)
            k = _page(state, row, position + done, head, dim, size)
            place = scores + 4 * width * done
            i = 0
            while i + keys <= run:
                dots(
                    place + 4 * width * i,
                    4,
                    4 * width,
                    query,
                    4 * dim,
                    k + stride * i,
                    stride,
                    dim,
                    group,
                    keys,
                    kind,
                    width,
                )
                i += keys
            while i < run:
                dots(
                    place + 4 * width * i,
                    4,
                    4 * width,
                    query,
                    4 * dim,
                    k + stride * i,
                    stride,
                    dim,
                    group,
                    1,
                    kind,
                    width,
                )
                i += 1
            done += run
        if cap > 0:
            cap_scores(scores, count * width, cap, width)
        soften(scores, 4 * width, count, top, total, kept, width)
        for g in range(group):
            factor = load_f32(kept + 4 * g)
            if factor != 1.0:
                scale_rows(sums + 4 * dim * g, dim, factor, width)
        done = 0
        while done < count:
            run = min(page_size - (position + done) % page_size, count - done)
            v = _page(state, row, position + done, head, dim, size) + dim * size
            weights = scores + 4 * width * done
            for d in range(0, dim, values * width):
                accumulate(
                    sums + 4 * d,
                    4 * dim,
                    weights,
                    4,
                    4 * width,
                    v + size * d,
                    stride,
                    run,
                    group,
                    values,
                    kind,
                    width,
                )
            done += run
        position += count
    _finish(state, sums, total, token, head, group, group, dim)


@inlined
def _chunk(
    state: int,
    scratch: int,
    row: int,
    token: int,
    tokens: int,
    head: int,
    kind: int,
    group: int,
    dim: int,
    width: int,
    keys: int,
    columns: int,
    queries: int,
    values: int,
    most: int,
) -> None:
    """Attention of `tokens` consecutive tokens of a row, one kv head.

    `keys` x `columns` vectors and `queries` x `values` vectors are the register tiles of the two
    products, `most` the most query vectors of a tile, padded to whole registers.
    """
    size = 4 if kind == F32 else 2
    heads, page_size = load_i64(state + _KV_HEADS), load_i64(state + _PAGE_SIZE)
    stride = 2 * heads * dim * size
    window, cap = load_i64(state + _WINDOW), load_f32(state + _CAP)
    used = tokens * group
    padded = (used + width - 1) // width * width
    top, total, kept = scratch, scratch + 4 * most, scratch + 8 * most
    scores = scratch + 12 * most
    query = scores + 4 * most * _BLOCK
    sums = query + 4 * most * dim
    k_block = sums + 4 * most * dim
    v_block = k_block + 4 * _BLOCK * dim

    factor = load_f32(state + _SCALE) * load_f32(load_i64(state + _SCALES) + 8 * head)
    zero_bytes(top, 12 * most)
    zero_bytes(query, 4 * padded * dim)
    zero_bytes(sums, 4 * used * dim)
    for c in range(used):
        place = ((token + c // group) * heads + head) * group + c % group
        source = load_i64(state + _Q) + 4 * dim * place
        for d in range(dim):
            store_f32(query + 4 * (d * padded + c), load_f32(source + 4 * d) * factor)
    _start(top, total, state, head, group, used)

    last = load_i32(load_i64(state + _STARTS) + 4 * row + 4)
    first = load_i32(load_i64(state + _LENS) + 4 * row) - last + token  # position of `token`
    end = first + tokens
    position = max(0, first - window + 1) if window > 0 else 0
    while position < end:
        count = min(_BLOCK, end - position)
        done = 0
        while done < count:
            run = min(page_size - (position + done) % page_size, count - done)
            k = _page(state, row, position + done, head, dim, size)
            for i in range(run):
                widen(k_block + 4 * dim * (done + i), k + stride * i, dim, kind, width)
                v = k + stride * i + dim * size
                widen(v_block + 4 * dim * (done + i), v, dim, kind, width)
            done += run

        zero_bytes(scores, 4 * padded * _BLOCK)
        for t in range(0, count, keys):
            place, k = scores + 4 * padded * t, k_block + 4 * dim * t
            c = 0
            while c + columns * width <= padded:
                accumulate(
                    place + 4 * c,
                    4 * padded,
                    k,
                    4 * dim,
                    4,
                    query + 4 * c,
                    4 * padded,
                    dim,
                    keys,
                    columns,
                    F32,
                    width,
                )
                c += columns * width
            while c < padded:
                accumulate(
                    place + 4 * c,
                    4 * padded,
                    k,
                    4 * dim,
                    4,
                    query + 4 * c,
                    4 * padded,
                    dim,
                    keys,
                    1,
                    F32,
                    width,
                )
                c += width
        if cap > 0:
            cap_scores(scores, count * padded, cap, width)
        # Columns run from the first token to the last: those before a key are a prefix, those whose
        # window has left it behind a suffix.
        for t in range(count):
            place = scores + 4 * padded * t
            for c in range(min(used, max(0, (position + t - first) * group))):
                store_f32(place + 4 * c, _MASKED)
            if window > 0:
                for c in range(max(0, (position + t + window - first) * group), used):
                    store_f32(place + 4 * c, _MASKED)
        for c in range(0, padded, width):
            soften(
                scores + 4 * c,
                4 * padded,
                count,
                top + 4 * c,
                total + 4 * c,
                kept + 4 * c,
                width,
            )
        for c in range(used):
            factor = load_f32(kept + 4 * c)
            if factor != 1.0:
                scale_rows(sums + 4 * dim * c, dim, factor, width)
        for d in range(0, dim, values * width):
            c = 0
            while c + queries <= used:
                accumulate(
                    sums + 4 * (dim * c + d),
                    4 * dim,
                    scores + 4 * c,
                    4,
                    4 * padded,
                    v_block + 4 * d,
                    4 * dim,
                    count,
                    queries,
                    values,
                    F32,
                    width,
                )
                c += queries
            while c < used:
                accumulate(
                    sums + 4 * (dim * c + d),
                    4 * dim,
                    scores + 4 * c,
                    4,
                    4 * padded,
                    v_block + 4 * d,
                    4 * dim,
                    count,
                    1,
                    values,
                    F32,
                    width,
                )
                c += 1
        position += count
    _finish(state, sums, total, token, head, used, group, dim)


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
    store_i64(state + _Q, data(q))
    store_i64(state + _PAGES, data(pages) + layer * layer_bytes)
    store_i64(state + _TABLE, data(table))
    store_i64(state + _LENS, data(argument(frame, 4)))
    store_i64(state + _STARTS, data(argument(frame, 5)))
    store_i64(state + _SCALES, data(argument(frame, 6)))
    store_i64(state + _SINKS, data(argument(frame, 7)))
    store_i64(state + _OUT, data(result(frame, 0)))
    store_i64(state + _KV_HEADS, dimension(pages, 3) // 2)
    store_i64(state + _TABLE_WIDTH, dimension(table, 1))
    store_i64(state + _PAGE_SIZE, dimension(pages, 2))
    store_i64(state + _WINDOW, load_i32(data(argument(frame, 9))))
    store_f32(state + _SCALE, load_f32(data(argument(frame, 8))))
    store_f32(state + _CAP, load_f32(data(argument(frame, 8)) + 4))

    starts, rows = data(argument(frame, 5)), dimension(table, 0)
    token_bytes = 4 * dimension(q, 1) * dimension(q, 2)
    tokens = load_i32(starts + 4 * rows)
    zero_bytes(
        data(result(frame, 0)) + tokens * token_bytes, (dimension(q, 0) - tokens) * token_bytes
    )
    tiles = state + OP + _STATE_SIZE
    store_i64(state + _TILES, tiles)
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
    needed = 4 * (
        most * (3 + _BLOCK + 2 * dim) + 2 * _BLOCK * dim + width * (3 + _BLOCK) + 2 * group * dim
    )

    def make() -> Callable[[int], int]:
        def task(state: int) -> int:
            scratch = allocate(needed) if digest > 0 else 0
            if scratch == 0:
                store_i64(state + FAILED, 1)
            item = take(state)
            while item >= 0:
                if scratch != 0:
                    heads = load_i64(state + _KV_HEADS)
                    tile = load_i64(state + _TILES) + 8 * (item // heads)
                    row, token, head = load_i32(tile), load_i32(tile + 4), item % heads
                    starts = load_i64(state + _STARTS) + 4 * row
                    tokens = min(tile_tokens, load_i32(starts + 4) - token)
                    if near and load_i32(starts + 4) - load_i32(starts) == 1:
                        _decode(
                            state,
                            scratch,
                            row,
                            token,
                            head,
                            kind,
                            group,
                            dim,
                            width,
                            near_keys,
                            near_values,
                        )
                    else:
                        _chunk(
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
                _count(state + DONE, 1)
                item = take(state)
            if scratch != 0:
                release_memory(scratch)
            drop(state)
            return 0

        return task

    return make


def _make_handler(
    kind: int, group: int, digest: int
) -> Callable[[str], Callable[[int], int]]:
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
            state = new_state(_STATE_SIZE + 8 * dimension(argument(frame, 0), 0))
            if state != 0:
                tiles = _prepare(frame, state, tile_tokens, chunk_tile, size)
                items = tiles * load_i64(state + _KV_HEADS)
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
    group, width, digest = heads // kv_heads, host_width(), source_digest(__file__)
    kind = KINDS[dtype]
    name = f"jpaged_attention_{dtype}_{group}_{head_dim}"
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
