"""The arithmetic of ragged paged attention on the CPU: one kv head of one tile of query vectors.

A tile is one new token of a row (decode), or up to a hundred query vectors of a row (a chunk). It walks its
row's live pages in blocks of keys with a streaming softmax. Decode multiplies queries with keys where they
lie in the pages; a chunk widens each block of K and V once for all its query vectors, and keeps scores
with one row per key and one column per query vector, so that its softmax needs no sum across a register.

All numbers it needs lie in the state of a call; who fills it and who takes which tile is not known here.
"""

from ..cpu.memory import load_f32, load_i32, load_i64, store_f32, zero_bytes
from ..cpu.runtime import OP, compiled
from ..cpu.vector import (
    F32,
    accumulate,
    cap_scores,
    dots_with_all,
    scale_rows,
    soften,
    soften_row,
    widen,
)

KEYS_PER_BLOCK = 64  # keys whose scores are held at once
_KEYS_AHEAD = 32  # K is fetched into the cache so many keys before its use
_LOWEST, _MASKED = -1e30, -3e38  # exp(_MASKED - _LOWEST) is 0 also before any key was seen

# Where the words of a call's state lie: addresses, then numbers.
Q, PAGES, TABLE, LENS, STARTS, SCALES, SINKS, OUT, TILES = (OP + 8 * i for i in range(9))
KV_HEADS, TABLE_WIDTH, PAGE_SIZE, WINDOW = (OP + 72 + 8 * i for i in range(4))
SCALE, CAP, HEADS_AT_ONCE = OP + 104, OP + 108, OP + 112
STATE_SIZE = 120


@compiled
def _page(state: int, row: int, entry: int) -> int:
    """The page that holds an entry of a row's table."""
    return load_i32(load_i64(state + TABLE) + 4 * (row * load_i64(state + TABLE_WIDTH) + entry))


@compiled
def _start(top: int, total: int, state: int, head: int, group: int, columns: int) -> None:
    """A softmax that has seen only the sinks; column c is a query vector of head c % group."""
    sinks = load_i64(state + SINKS)
    for c in range(columns):
        sink = load_f32(sinks + 4 * (head * group + c % group))
        store_f32(top + 4 * c, max(sink, _LOWEST))
        store_f32(total + 4 * c, 1.0 if sink > _LOWEST else 0.0)


@compiled
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
    heads = load_i64(state + KV_HEADS)
    v_scale = load_f32(load_i64(state + SCALES) + 4 * (2 * head + 1))
    for c in range(columns):
        weight = load_f32(total + 4 * c)
        factor = v_scale / weight if weight > 0 else 0.0
        place = (token + c // group) * heads * group + head * group + c % group
        out = load_i64(state + OUT) + 4 * dim * place
        for d in range(dim):
            store_f32(out + 4 * d, load_f32(sums + 4 * (c * dim + d)) * factor)


@compiled
def attend_token(
    state: int,
    scratch: int,
    row: int,
    token: int,
    head: int,
    num_heads: int,
    kind: int,
    group: int,
    dim: int,
    width: int,
    keys: int,
    values: int,
) -> None:
    """Attention of one token at its row's last position, for `num_heads` kv heads from `head` on.

    `keys` keys are multiplied at once, with `values` registers of V. Heads take turns at each block of keys,
    so that a page is read in one go; what is computed for one does not depend on the others.
    """
    size = 4 if kind == F32 else 2
    heads, page_size = load_i64(state + KV_HEADS), load_i64(state + PAGE_SIZE)
    stride = 2 * heads * dim * size
    end = load_i32(load_i64(state + LENS) + 4 * row)
    window, cap = load_i64(state + WINDOW), load_f32(state + CAP)
    columns = num_heads * group
    top, total, kept = scratch, scratch + 4 * columns, scratch + 8 * columns
    scores = scratch + 12 * columns
    line = 4 * KEYS_PER_BLOCK
    query = scores + line * group
    sums = query + 4 * columns * dim

    source = load_i64(state + Q) + 4 * dim * (token * heads + head) * group
    for h in range(num_heads):
        factor = load_f32(state + SCALE) * load_f32(load_i64(state + SCALES) + 8 * (head + h))
        for d in range(h * group * dim, (h + 1) * group * dim):
            store_f32(query + 4 * d, load_f32(source + 4 * d) * factor)
        _start(top + 4 * h * group, total + 4 * h * group, state, head + h, group, group)
    zero_bytes(sums, 4 * columns * dim)

    position = max(0, end - window) if window > 0 else 0
    next_entry = position // page_size
    next_offset = position - next_entry * page_size
    last_entry, pages_ahead = (end - 1) // page_size, (_KEYS_AHEAD - 1 + page_size) // page_size
    while position < end:
        count = min(KEYS_PER_BLOCK, end - position)
        padded = (count + width - 1) // width * width
        first_entry, first_offset = next_entry, next_offset
        for h in range(num_heads):
            pages = load_i64(state + PAGES) + (head + h) * 2 * dim * size
            entry, offset, done = first_entry, first_offset, 0
            while done < count:
                run = min(page_size - offset, count - done)
                page = _page(state, row, entry)
                # K of a page to come, while this one's V is fetched for the sums after this block.
                following = _page(state, row, min(entry + pages_ahead, last_entry))
                dots_with_all(
                    scores + 4 * done,
                    line,
                    query + 4 * h * group * dim,
                    4 * dim,
                    pages + (page * page_size + offset) * stride,
                    stride,
                    run,
                    dim,
                    (following - page) * page_size * stride,
                    dim * size,
                    group,
                    keys,
                    kind,
                    width,
                )
                done += run
                offset += run
                if offset == page_size:
                    entry, offset = entry + 1, 0
            next_entry, next_offset = entry, offset
            for g in range(group):
                here, place = scores + line * g, 4 * (h * group + g)
                if cap > 0:
                    cap_scores(here, padded, cap, width)
                for t in range(count, padded):
                    store_f32(here + 4 * t, _MASKED)
                soften_row(here, padded, top + place, total + place, kept + place, width)
                factor = load_f32(kept + place)
                if factor != 1.0:
                    scale_rows(sums + dim * place, dim, factor, width)
            entry, offset, done = first_entry, first_offset, 0
            while done < count:
                run = min(page_size - offset, count - done)
                v = pages + (_page(state, row, entry) * page_size + offset) * stride + dim * size
                for d in range(0, dim, values * width):
                    accumulate(
                        sums + 4 * (h * group * dim + d),
                        4 * dim,
                        scores + 4 * done,
                        line,
                        4,
                        v + size * d,
                        stride,
                        run,
                        group,
                        values,
                        kind,
                        width,
                    )
                done += run
                offset += run
                if offset == page_size:
                    entry, offset = entry + 1, 0
        position += count
    for h in range(num_heads):
        place = 4 * h * group
        _finish(state, sums + dim * place, total + place, token, head + h, group, group, dim)


@compiled
def attend_chunk(
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
    heads, page_size = load_i64(state + KV_HEADS), load_i64(state + PAGE_SIZE)
    stride = 2 * heads * dim * size
    window, cap = load_i64(state + WINDOW), load_f32(state + CAP)
    used = tokens * group
    padded = (used + width - 1) // width * width
    top, total, kept = scratch, scratch + 4 * most, scratch + 8 * most
    scores = scratch + 12 * most
    query = scores + 4 * most * KEYS_PER_BLOCK
    sums = query + 4 * most * dim
    k_block = sums + 4 * most * dim
    v_block = k_block + 4 * KEYS_PER_BLOCK * dim

    factor = load_f32(state + SCALE) * load_f32(load_i64(state + SCALES) + 8 * head)
    zero_bytes(top, 12 * most)
    zero_bytes(query, 4 * padded * dim)
    zero_bytes(sums, 4 * used * dim)
    for c in range(used):
        place = ((token + c // group) * heads + head) * group + c % group
        source = load_i64(state + Q) + 4 * dim * place
        for d in range(dim):
            store_f32(query + 4 * (d * padded + c), load_f32(source + 4 * d) * factor)
    _start(top, total, state, head, group, used)

    last = load_i32(load_i64(state + STARTS) + 4 * row + 4)
    first = load_i32(load_i64(state + LENS) + 4 * row) - last + token  # position of `token`
    end = first + tokens
    position = max(0, first - window + 1) if window > 0 else 0
    entry = position // page_size
    offset = position - entry * page_size
    pages = load_i64(state + PAGES) + head * 2 * dim * size
    while position < end:
        count = min(KEYS_PER_BLOCK, end - position)
        done = 0
        while done < count:
            run = min(page_size - offset, count - done)
            k = pages + (_page(state, row, entry) * page_size + offset) * stride
            for i in range(run):
                widen(k_block + 4 * dim * (done + i), k + stride * i, dim, kind, width)
                v = k + stride * i + dim * size
                widen(v_block + 4 * dim * (done + i), v, dim, kind, width)
            done += run
            offset += run
            if offset == page_size:
                entry, offset = entry + 1, 0

        zero_bytes(scores, 4 * padded * KEYS_PER_BLOCK)
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
