"""The product of a few rows with a weight as a numba kernel that XLA:CPU calls.

With few rows the product is a single pass over the weight, so the kernel's one aim is to read it at the
memory's rate: an item is a run of the weight's rows, 16-bit weights are widened in registers. Each element
of the result is one sum in one order, whatever the number of rows.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..cpu.memory import fetch_add, load_i64, store_i64, symbol_address, text_address
from ..cpu.runtime import (
    DONE,
    OP,
    RESOURCE_EXHAUSTED,
    argument,
    compiled,
    data,
    dimension,
    drop,
    ensure_registered,
    executes,
    failure,
    new_state,
    result,
    run_shared,
    source_digest,
    take,
)
from ..cpu.vector import F32, KINDS, dots, host_width
from . import xla

_AHEAD = 8  # rows of the weight that are fetched before they are needed
_ITEM_BYTES = 1 << 16
_SMALL = 1 << 16  # weight bytes below which help costs more than it brings

# Words of a call's state.
_X, _W, _OUT, _ROWS, _INPUTS, _OUTPUTS, _PER_ITEM = (OP + 8 * i for i in range(7))
_STATE_SIZE = 56


@compiled
def _column(
    state: int, row: int, output: int, kind: int, width: int, rows: int, outputs: int
) -> None:
    """`rows` x `outputs` elements of the result."""
    inputs, size = load_i64(state + _INPUTS), 4 if kind == F32 else 2
    line = 4 * load_i64(state + _OUTPUTS)
    dots(
        load_i64(state + _OUT) + line * row + 4 * output,
        line,
        load_i64(state + _X) + 4 * inputs * row,
        4 * inputs,
        load_i64(state + _W) + size * inputs * output,
        size * inputs,
        inputs,
        _AHEAD * size * inputs,
        rows,
        outputs,
        kind,
        width,
    )


@compiled
def _item(state: int, item: int, kind: int, width: int) -> None:
    """All rows of the result for a run of the weight's rows, which stay in the cache meanwhile."""
    rows = load_i64(state + _ROWS)
    output = item * load_i64(state + _PER_ITEM)
    end = min(output + load_i64(state + _PER_ITEM), load_i64(state + _OUTPUTS))
    while output + 8 <= end:
        row = 0
        while row + 4 <= rows:
            if width == 16:
                _column(state, row, output, kind, width, 4, 4)
                _column(state, row, output + 4, kind, width, 4, 4)
            else:
                for o in range(0, 8, 2):
                    _column(state, row, output + o, kind, width, 4, 2)
            row += 4
        while row + 2 <= rows:
            _column(state, row, output, kind, width, 2, 4)
            _column(state, row, output + 4, kind, width, 2, 4)
            row += 2
        if row < rows:
            _column(state, row, output, kind, width, 1, 8)
        output += 8
    while output < end:
        for row in range(rows):
            _column(state, row, output, kind, width, 1, 1)
        output += 1


@compiled
def _prepare(frame: int, state: int, size: int) -> int:
    """Fills a call's state and returns the number of items."""
    x, w = argument(frame, 0), argument(frame, 1)
    inputs, outputs = dimension(w, 1), dimension(w, 0)
    per_item = max(1, _ITEM_BYTES // (inputs * size * 8)) * 8
    store_i64(state + _X, data(x))
    store_i64(state + _W, data(w))
    store_i64(state + _OUT, data(result(frame, 0)))
    store_i64(state + _ROWS, dimension(x, 0))
    store_i64(state + _INPUTS, inputs)
    store_i64(state + _OUTPUTS, outputs)
    store_i64(state + _PER_ITEM, per_item)
    return (outputs + per_item - 1) // per_item


def _make_task(kind: int, width: int, digest: int) -> Callable[[], Callable[[int], int]]:
    def make() -> Callable[[int], int]:
        def task(state: int) -> int:
            item = take(state)
            while item >= 0 and digest > 0:
                _item(state, item, kind, width)
                fetch_add(state + DONE, 1)
                item = take(state)
            drop(state)
            return 0

        return task

    return make


def _make_handler(kind: int, digest: int) -> Callable[[str], Callable[[int], int]]:
    size = 4 if kind == F32 else 2

    def make(symbol: str) -> Callable[[int], int]:
        def handler(frame: int) -> int:
            if not executes(frame):
                return 0
            state = new_state(_STATE_SIZE) if digest > 0 else 0
            if state != 0:
                items = _prepare(frame, state, size)
                weight = load_i64(state + _INPUTS) * load_i64(state + _OUTPUTS) * size
                task = symbol_address(symbol)
                if run_shared(frame, state, task, items, weight < _SMALL):
                    return 0
            return failure(frame, RESOURCE_EXHAUSTED, text_address("matmul: out of memory"))

        return handler

    return make


def prepare(dtype: str) -> str:
    """Compiles and registers the kernel for a weight's dtype; returns its FFI name."""
    kind, width, digest = KINDS[dtype], host_width(), source_digest(__file__)
    name = f"jpaged_matmul_{dtype}_{width}"
    ensure_registered(name, _make_task(kind, width, digest), _make_handler(kind, digest))
    return name


@jax.custom_jvp
def product(
    x: Float[Array, "rows inputs"], w: Float[Array, "outputs inputs"]
) -> Float[Array, "rows outputs"]:
    """`x @ w.T` in float32; its derivative is XLA's product."""
    call = jax.ffi.ffi_call(
        prepare(w.dtype.name),
        jax.ShapeDtypeStruct((x.shape[0], w.shape[0]), jnp.float32),
        vmap_method="sequential",
    )
    out: Array = call(x.astype(jnp.float32), w)
    return out


@product.defjvp
def _product_jvp(
    primals: tuple[Array, Array], tangents: tuple[Array, Array]
) -> tuple[Array, Array]:
    (x, w), (x_dot, w_dot) = primals, tangents
    change = xla.product(x_dot, w, platform="cpu") + xla.product(x, w_dot, platform="cpu")
    return product(x, w), change
