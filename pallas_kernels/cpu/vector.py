"""Register-tiled inner loops as vector instructions, written once for every vector width.

Each intrinsic emits LLVM code for literal tile sizes. A sum runs in one fixed order that depends on its
length and the vector width only, so that the bits of a result do not depend on the tile it was part of.
16-bit operands are widened in registers: `F32`, `BF16` and `F16` say what the bytes in memory mean.
"""

from typing import Any

import llvmlite.binding as llvm
import numba
from llvmlite import ir
from numba import types

from .memory import gives_nothing

F32, BF16, F16 = 0, 1, 2
KINDS = {"float32": F32, "bfloat16": BF16, "float16": F16}

_F32, _I16, _I32, _I64 = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)


def host_width() -> int:
    """Floats in a vector register of the processor that numba compiles for."""
    chosen = numba.config.CPU_FEATURES
    features = llvm.get_host_cpu_features().flatten() if chosen is None else chosen
    return 16 if "+avx512f" in features.split(",") else 8


def _vector(width: int) -> Any:
    return ir.VectorType(_F32, width)


def _splat(value: float, width: int) -> Any:
    return ir.Constant(_vector(width), [value] * width)


def _at(builder: Any, address: Any, to: Any) -> Any:
    return builder.inttoptr(address, to.as_pointer())


def _load(builder: Any, address: Any, kind: int, width: int) -> Any:
    """A vector of `kind` from memory, widened to float32."""
    if kind == F32:
        return builder.load(_at(builder, address, _vector(width)), align=4)
    bits = builder.load(_at(builder, address, ir.VectorType(_I16, width)), align=2)
    if kind == F16:
        return builder.fpext(
            builder.bitcast(bits, ir.VectorType(ir.HalfType(), width)), _vector(width)
        )
    wide = ir.VectorType(_I32, width)
    shifted = builder.shl(builder.zext(bits, wide), ir.Constant(wide, [16] * width))
    return builder.bitcast(shifted, _vector(width))


def _store(builder: Any, value: Any, address: Any) -> None:
    builder.store(value, _at(builder, address, value.type), align=4)


def _broadcast(builder: Any, scalar: Any, width: int) -> Any:
    undefined = ir.Constant(_vector(width), ir.Undefined)
    one = builder.insert_element(undefined, scalar, ir.Constant(_I32, 0))
    zeros = ir.Constant(ir.VectorType(_I32, width), [0] * width)
    return builder.shuffle_vector(one, undefined, zeros)


def _call(builder: Any, name: str, *args: Any) -> Any:
    """An LLVM intrinsic that maps vectors of one type to a vector of it."""
    vector = args[0].type
    function = builder.module.declare_intrinsic(
        f"llvm.{name}.v{vector.count}f32", (), ir.FunctionType(vector, [vector] * len(args))
    )
    return builder.call(function, args)


def _prefetch(builder: Any, address: Any) -> None:
    byte, flag = ir.IntType(8).as_pointer(), ir.Constant(_I32, 1)
    function = builder.module.declare_intrinsic(
        "llvm.prefetch.p0", (), ir.FunctionType(ir.VoidType(), [byte, _I32, _I32, _I32])
    )
    read, soon = ir.Constant(_I32, 0), ir.Constant(_I32, 2)
    builder.call(function, [builder.inttoptr(address, byte), read, soon, flag])


def _multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return _call(builder, "fmuladd", a, b, c)


def _offset(builder: Any, address: Any, index: int, stride: Any) -> Any:
    return builder.add(address, builder.mul(stride, ir.Constant(_I64, index)))


def _pick(builder: Any, a: Any, b: Any, indices: list[int]) -> Any:
    """The lanes of `a` and `b` laid end to end that `indices` name."""
    mask = ir.Constant(ir.VectorType(_I32, len(indices)), indices)
    return builder.shuffle_vector(a, b, mask)


def _fold_lanes(builder: Any, value: Any, width: int) -> Any:
    """The sum of a vector's groups of four lanes, halves first."""
    while width > 4:
        width //= 2
        low, high = (
            _pick(builder, value, value, list(range(start, start + width))) for start in (0, width)
        )
        value = builder.fadd(low, high)
    return value


def _add_lanes(builder: Any, values: list[Any], width: int) -> Any:
    """The sum of the lanes of one vector, in the order of `_add_lanes_of_four`."""
    value = values[0]
    for distance in (2, 1):
        swapped = [lane ^ distance for lane in range(width)]
        value = builder.fadd(value, _pick(builder, value, value, swapped))
    return builder.extract_element(_fold_lanes(builder, value, width), ir.Constant(_I32, 0))


def _add_lanes_of_four(builder: Any, values: list[Any], width: int) -> Any:
    """The sums of four vectors' lanes as one vector: a transposition in between saves half the work."""

    def interleave(a: Any, b: Any, size: int) -> Any:
        """Adds the halves of each group of four lanes, those of a and b side by side."""
        low: list[int] = []
        high: list[int] = []
        for group in range(0, width, 4):
            for start in range(0, 2, size):
                for offset in (0, width):
                    lanes = [offset + group + start + i for i in range(size)]
                    low += lanes
                    high += [lane + 2 for lane in lanes]
        return builder.fadd(_pick(builder, a, b, low), _pick(builder, a, b, high))

    pairs = [interleave(values[0], values[1], 1), interleave(values[2], values[3], 1)]
    return _fold_lanes(builder, interleave(pairs[0], pairs[1], 2), width)


class _Loop:
    """`for index in range(0, count, step)` in LLVM, carrying values."""

    def __init__(self, builder: Any, count: Any, step: int, carried: list[Any]) -> None:
        self._builder, self._step = builder, step
        before = builder.block
        self._head = builder.append_basic_block("loop")
        self._body = builder.append_basic_block("body")
        self._after = builder.append_basic_block("after")
        builder.branch(self._head)
        builder.position_at_end(self._head)
        self.index = builder.phi(_I64)
        self.index.add_incoming(ir.Constant(_I64, 0), before)
        self.values = [builder.phi(value.type) for value in carried]
        for phi, value in zip(self.values, carried, strict=True):
            phi.add_incoming(value, before)
        more = builder.icmp_signed("<", self.index, count)
        builder.cbranch(more, self._body, self._after)
        builder.position_at_end(self._body)

    def close(self, values: list[Any]) -> list[Any]:
        """Ends the body with the values for the next turn; returns those after the last."""
        builder = self._builder
        following = builder.add(self.index, ir.Constant(_I64, self._step))
        self.index.add_incoming(following, builder.block)
        for phi, value in zip(self.values, values, strict=True):
            phi.add_incoming(value, builder.block)
        builder.branch(self._head)
        builder.position_at_end(self._after)
        return self.values


def _exp(builder: Any, x: Any, width: int) -> Any:
    """exp(x) for x <= 0 to about 2 units in the last place, 0 below -87 (Cephes' polynomial)."""
    vector = _vector(width)
    low = _splat(-87.0, width)
    live = builder.fcmp_ordered(">=", x, low)
    x = builder.select(live, x, low)
    n = _call(builder, "rint", builder.fmul(x, _splat(1.4426950408889634, width)))
    r = _multiply_add(builder, n, _splat(-0.693359375, width), x)
    r = _multiply_add(builder, n, _splat(2.12194440e-4, width), r)
    y = _splat(1.9875691500e-4, width)
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        y = _multiply_add(builder, y, r, _splat(c, width))
    y = _multiply_add(builder, y, builder.fmul(r, r), builder.fadd(r, _splat(1.0, width)))
    wide = ir.VectorType(_I32, width)
    exponent = builder.add(builder.fptosi(n, wide), ir.Constant(wide, [127] * width))
    power = builder.bitcast(builder.shl(exponent, ir.Constant(wide, [23] * width)), vector)
    return builder.select(live, builder.fmul(y, power), _splat(0.0, width))


def _emit_dots(
    builder: Any,
    out: Any,
    out_stride: Any,
    a: Any,
    a_stride: Any,
    b: Any,
    b_stride: Any,
    count: Any,
    ahead: Any,
    *,
    tile: tuple[int, int, int, int],
) -> None:
    """out[i, j] = sum over k < count of a[i, k] * b[j, k] for a tile (rows of a, of b, b's kind, width).

    With `ahead`, what lies so many bytes after each vector of `b` is fetched into the cache.
    """
    m, n, kind, w = tile
    rows_a = [_offset(builder, a, i, a_stride) for i in range(m)]
    rows_b = [_offset(builder, b, j, b_stride) for j in range(n)]
    loop = _Loop(builder, count, w, [_splat(0.0, w)] * (m * n))
    step_a = builder.mul(loop.index, ir.Constant(_I64, 4))
    step_b = builder.mul(loop.index, ir.Constant(_I64, 4 if kind == F32 else 2))
    places_b = [builder.add(row, step_b) for row in rows_b]
    vectors_b = [_load(builder, place, kind, w) for place in places_b]
    if ahead is not None:
        for place in places_b:
            _prefetch(builder, builder.add(place, ahead))
    sums = list(loop.values)
    for i in range(m):
        vector_a = _load(builder, builder.add(rows_a[i], step_a), F32, w)
        for j in range(n):
            sums[i * n + j] = _multiply_add(builder, vector_a, vectors_b[j], sums[i * n + j])
    sums = loop.close(sums)
    together = 1 if n % 4 else 4
    for i in range(m):
        for j in range(0, n, together):
            here = sums[i * n + j : i * n + j + together]
            add = _add_lanes_of_four if together == 4 else _add_lanes
            place = builder.add(_offset(builder, out, i, out_stride), ir.Constant(_I64, 4 * j))
            _store(builder, add(builder, here, w), place)


@gives_nothing
def dots(
    typingctx: Any,
    out: Any,
    out_stride: Any,
    a: Any,
    a_stride: Any,
    b: Any,
    b_stride: Any,
    count: Any,
    ahead: Any,
    a_rows: Any,
    b_rows: Any,
    b_kind: Any,
    width: Any,
) -> Any:
    """out[i, j] = sum over k < count of a[i, k] * b[j, k], for a few rows i of `a` and j of `b`.

    `count` is a multiple of the width. Strides are in bytes; `out` and `a` are float32, the numbers of a
    row of `out` lie side by side. What lies `ahead` bytes after each vector of `b` is fetched into the
    cache. The last four are literal.
    """
    m, n, kind, w = (x.literal_value for x in (a_rows, b_rows, b_kind, width))

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _emit_dots(builder, *args[:8], tile=(m, n, kind, w))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 8, a_rows, b_rows, b_kind, width), generate


@gives_nothing
def dots_with_all(
    typingctx: Any,
    out: Any,
    out_stride: Any,
    a: Any,
    a_stride: Any,
    b: Any,
    b_stride: Any,
    b_count: Any,
    count: Any,
    ahead: Any,
    beside: Any,
    a_rows: Any,
    b_rows: Any,
    b_kind: Any,
    width: Any,
) -> Any:
    """As `dots`, for any number `b_count` of short rows of `b`, taken `b_rows` at once while they last.

    What lies `ahead` and `beside` bytes after each row of `b` is fetched into the cache.
    """
    m, n, kind, w = (x.literal_value for x in (a_rows, b_rows, b_kind, width))

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        out, out_stride, a, a_stride, b, b_stride, b_count, count, ahead, beside = args[:10]
        size = builder.mul(count, ir.Constant(_I64, 4 if kind == F32 else 2))

        def take(first: Any, number: Any, at_once: int) -> None:
            loop = _Loop(builder, number, at_once, [])
            index = builder.add(first, loop.index)
            here = builder.add(b, builder.mul(index, b_stride))
            for j in range(at_once):
                row = _offset(builder, here, j, b_stride)
                lines = _Loop(builder, size, 64, [])
                for offset in (ahead, beside):
                    _prefetch(builder, builder.add(builder.add(row, offset), lines.index))
                lines.close([])
            place = builder.add(out, builder.mul(index, ir.Constant(_I64, 4)))
            _emit_dots(
                builder,
                place,
                out_stride,
                a,
                a_stride,
                here,
                b_stride,
                count,
                None,
                tile=(m, at_once, kind, w),
            )
            loop.close([])

        rest = builder.srem(b_count, ir.Constant(_I64, n))
        whole = builder.sub(b_count, rest)
        take(ir.Constant(_I64, 0), whole, n)
        take(whole, rest, 1)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 10, a_rows, b_rows, b_kind, width), generate


@gives_nothing
def accumulate(
    typingctx: Any,
    out: Any,
    out_stride: Any,
    a: Any,
    a_row: Any,
    a_column: Any,
    b: Any,
    b_stride: Any,
    count: Any,
    rows: Any,
    vectors: Any,
    b_kind: Any,
    width: Any,
) -> Any:
    """out[i, :] += sum over k < count of a[i, k] * b[k, :], for `vectors` vectors of columns.

    Strides are in bytes (those of `a`: per row, per column); `out` and `a` are float32. The last four
    are literal.
    """
    m, n, kind, w = (x.literal_value for x in (rows, vectors, b_kind, width))

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        out, out_stride, a, a_row, a_column, b, b_stride, count = args[:8]
        places = [
            builder.add(_offset(builder, out, i, out_stride), ir.Constant(_I64, 4 * w * j))
            for i in range(m)
            for j in range(n)
        ]
        rows_a = [_offset(builder, a, i, a_row) for i in range(m)]
        loop = _Loop(builder, count, 1, [_load(builder, place, F32, w) for place in places])
        step_a = builder.mul(loop.index, a_column)
        row_b = builder.add(b, builder.mul(loop.index, b_stride))
        size = w * (4 if kind == F32 else 2)
        vectors_b = [
            _load(builder, builder.add(row_b, ir.Constant(_I64, size * j)), kind, w)
            for j in range(n)
        ]
        sums = list(loop.values)
        for i in range(m):
            scalar = builder.load(_at(builder, builder.add(rows_a[i], step_a), _F32))
            wide = _broadcast(builder, scalar, w)
            for j in range(n):
                sums[i * n + j] = _multiply_add(builder, wide, vectors_b[j], sums[i * n + j])
        for place, value in zip(places, loop.close(sums), strict=True):
            _store(builder, value, place)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 8, rows, vectors, b_kind, width), generate


@gives_nothing
def widen(typingctx: Any, out: Any, source: Any, count: Any, kind: Any, width: Any) -> Any:
    """Copies `count` numbers of `kind`, a multiple of the width, as float32."""
    k, w = kind.literal_value, width.literal_value

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        out, source, count = args[:3]
        loop = _Loop(builder, count, w, [])
        size = ir.Constant(_I64, 4 if k == F32 else 2)
        value = _load(builder, builder.add(source, builder.mul(loop.index, size)), k, w)
        offset = builder.mul(loop.index, ir.Constant(_I64, 4))
        _store(builder, value, builder.add(out, offset))
        loop.close([])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3, kind, width), generate


@gives_nothing
def scale_rows(typingctx: Any, x: Any, count: Any, factor: Any, width: Any) -> Any:
    """x[i] *= factor for `count` numbers, a multiple of the width."""
    w = width.literal_value

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, count, factor = args[:3]
        wide = _broadcast(builder, factor, w)
        loop = _Loop(builder, count, w, [])
        place = builder.add(x, builder.mul(loop.index, ir.Constant(_I64, 4)))
        _store(builder, builder.fmul(_load(builder, place, F32, w), wide), place)
        loop.close([])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32, width), generate


@gives_nothing
def cap_scores(typingctx: Any, x: Any, count: Any, cap: Any, width: Any) -> Any:
    """x[i] = cap * tanh(x[i] / cap) for `count` numbers, a multiple of the width."""
    w = width.literal_value

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, count, cap = args[:3]
        wide, one = _broadcast(builder, cap, w), _splat(1.0, w)
        loop = _Loop(builder, count, w, [])
        place = builder.add(x, builder.mul(loop.index, ir.Constant(_I64, 4)))
        y = builder.fdiv(_load(builder, place, F32, w), wide)
        # tanh|y| = (1 - e) / (1 + e) with e = exp(-2|y|)
        e = _exp(builder, builder.fmul(_call(builder, "fabs", y), _splat(-2.0, w)), w)
        tanh = builder.fdiv(builder.fsub(one, e), builder.fadd(one, e))
        _store(builder, builder.fmul(wide, _call(builder, "copysign", tanh, y)), place)
        loop.close([])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32, width), generate


@gives_nothing
def soften(
    typingctx: Any,
    scores: Any,
    stride: Any,
    count: Any,
    top: Any,
    total: Any,
    kept: Any,
    width: Any,
) -> Any:
    """One block's step of a streaming softmax, for one vector of columns.

    `top` (the greatest score so far) and `total` (the sum of the weights) are brought up to date, the
    `count` rows of scores become weights exp(score - top), and `kept` is the factor that what was
    summed before must be multiplied by.
    """
    w = width.literal_value

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        scores, stride, count, top, total, kept = args[:6]
        old = _load(builder, top, F32, w)
        loop = _Loop(builder, count, 1, [old])
        place = builder.add(scores, builder.mul(loop.index, stride))
        score = _load(builder, place, F32, w)
        greater = builder.fcmp_ordered(">", score, loop.values[0])
        new = loop.close([builder.select(greater, score, loop.values[0])])[0]
        factor = _exp(builder, builder.fsub(old, new), w)
        before = builder.fmul(_load(builder, total, F32, w), factor)
        loop = _Loop(builder, count, 1, [_splat(0.0, w)])
        place = builder.add(scores, builder.mul(loop.index, stride))
        weight = _exp(builder, builder.fsub(_load(builder, place, F32, w), new), w)
        _store(builder, weight, place)
        added = loop.close([builder.fadd(loop.values[0], weight)])[0]
        _store(builder, new, top)
        _store(builder, builder.fadd(before, added), total)
        _store(builder, factor, kept)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6, width), generate


@gives_nothing
def soften_row(
    typingctx: Any, scores: Any, count: Any, top: Any, total: Any, kept: Any, width: Any
) -> Any:
    """One block's step of a streaming softmax, for one row of scores, a multiple of the width.

    As `soften`, with the scores of one column side by side; `top`, `total` and `kept` are numbers.
    """
    w = width.literal_value

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        scores, count, top, total, kept = args[:5]

        def greater(a: Any, b: Any) -> Any:
            return builder.select(builder.fcmp_ordered(">", a, b), a, b)

        def number(address: Any) -> Any:
            return builder.load(_at(builder, address, _F32))

        def place(loop: _Loop) -> Any:
            return builder.add(scores, builder.mul(loop.index, ir.Constant(_I64, 4)))

        old = _broadcast(builder, number(top), w)
        loop = _Loop(builder, count, w, [old])
        new = loop.close([greater(_load(builder, place(loop), F32, w), loop.values[0])])[0]
        distance = w
        while distance > 1:
            distance //= 2
            new = greater(new, _pick(builder, new, new, [lane ^ distance for lane in range(w)]))
        factor = _exp(builder, builder.fsub(old, new), w)
        loop = _Loop(builder, count, w, [_splat(0.0, w)])
        score = _load(builder, place(loop), F32, w)
        weight = _exp(builder, builder.fsub(score, new), w)
        _store(builder, weight, place(loop))
        sums = loop.close([builder.fadd(loop.values[0], weight)])[0]
        first = ir.Constant(_I32, 0)
        factor = builder.extract_element(factor, first)
        before = builder.fmul(number(total), factor)
        _store(builder, builder.extract_element(new, first), top)
        _store(builder, builder.fadd(before, _add_lanes(builder, [sums], w)), total)
        _store(builder, factor, kept)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5, width), generate
