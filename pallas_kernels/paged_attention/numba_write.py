"""The write into the page pool as a numba kernel that XLA:CPU calls: bytes to slots, in place."""

import dataclasses
from collections.abc import Callable

import jax
from jaxtyping import Array, Float, Int

from ..cpu.memory import copy_bytes, load_i32, text_address
from ..cpu.runtime import (
    INVALID_ARGUMENT,
    argument,
    compiled,
    data,
    dimension,
    ensure_registered,
    executes,
    failure,
    result,
    source_digest,
)
from ..kv import KVGroup, to_group_dtype, to_storage


@compiled
def _copy_rows(frame: int, size: int) -> bool:
    """Copies each token's row of values into its slot; False if a slot lies outside of the pool."""
    pages, values, slots = argument(frame, 0), argument(frame, 1), data(argument(frame, 3))
    layer, out = load_i32(data(argument(frame, 2))), data(result(frame, 0))
    num_slots = dimension(pages, 1) * dimension(pages, 2)
    row = size * dimension(pages, 3) * dimension(pages, 4)
    if layer < 0 or layer >= dimension(pages, 0):
        return False
    for token in range(dimension(values, 0)):
        slot = load_i32(slots + 4 * token)
        if slot < 0 or slot >= num_slots:
            return False
        copy_bytes(out + (layer * num_slots + slot) * row, data(values) + token * row, row)
    return True


def _make_writer(size: int, digest: int) -> Callable[[str], Callable[[int], int]]:
    def make(symbol: str) -> Callable[[int], int]:
        def handler(frame: int) -> int:
            if not executes(frame) or (digest > 0 and _copy_rows(frame, size)):
                return 0
            return failure(
                frame,
                INVALID_ARGUMENT,
                text_address("write_kv: layer or slots point outside of the pool"),
            )

        return handler

    return make


def prepare_writer(itemsize: int) -> str:
    """Compiles and registers the write into a pool of `itemsize` bytes a number."""
    name = f"jpaged_write_{8 * itemsize}"
    ensure_registered(name, None, _make_writer(itemsize, source_digest(__file__)))
    return name


def write(
    kv: KVGroup,
    layer: Int[Array, ""],
    values: Float[Array, "tokens twice_kv_heads head_dim"],
    slots: Int[Array, " tokens"],
) -> KVGroup:
    """Writes `values[t]` into slot `slots[t]`, into the very memory of a pool that is donated."""
    bits = to_storage(to_group_dtype(kv, layer, values), kv.pages)
    call = jax.ffi.ffi_call(
        prepare_writer(kv.pages.dtype.itemsize),
        jax.ShapeDtypeStruct(kv.pages.shape, kv.pages.dtype),
        input_output_aliases={0: 0},
    )
    return dataclasses.replace(kv, pages=call(kv.pages, bits, layer, slots))
