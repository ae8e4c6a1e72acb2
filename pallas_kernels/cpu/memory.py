"""Loads, stores, atomics and calls through plain addresses, for numba code that XLA:CPU calls.

Addresses are int64 throughout (numba turns mixed signedness into floats). Knows no kernel.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

_Generator = Callable[..., Any]

_F32, _I32, _I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)


def _pointer(builder: Any, address: Any, to: Any) -> Any:
    return builder.inttoptr(address, to.as_pointer())


def gives_int(function: _Generator) -> Callable[..., int]:
    """An intrinsic with an int64 result; its arguments may be literal."""
    made: Callable[..., int] = intrinsic(prefer_literal=True)(function)
    return made


def gives_nothing(function: _Generator) -> Callable[..., None]:
    """An intrinsic without a result; its arguments may be literal."""
    made: Callable[..., None] = intrinsic(prefer_literal=True)(function)
    return made


def _loader(numba_type: Any, llvm_type: Any) -> Any:
    def load(typingctx: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.load(_pointer(builder, args[0], llvm_type))

        return numba_type(types.int64), generate

    return intrinsic(load)


def _storer(numba_type: Any, llvm_type: Any) -> Callable[[int, Any], None]:
    def store(typingctx: Any, address: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            builder.store(args[1], _pointer(builder, args[0], llvm_type))
            return context.get_dummy_value()

        return types.void(types.int64, numba_type), generate

    made: Callable[[int, Any], None] = intrinsic(store)
    return made


load_f32: Callable[[int], float] = _loader(types.float32, _F32)
load_i32: Callable[[int], int] = _loader(types.int32, _I32)
load_i64: Callable[[int], int] = _loader(types.int64, _I64)
store_f32 = _storer(types.float32, _F32)
store_i32 = _storer(types.int32, _I32)
store_i64 = _storer(types.int64, _I64)


@gives_int
def fetch_add(typingctx: Any, address: Any, value: Any) -> Any:
    """Adds to the word at `address` and returns what it held, ordered with all other memory."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", _pointer(builder, args[0], _I64), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@gives_int
def load_shared(typingctx: Any, address: Any) -> Any:
    """The word at `address` as other threads last wrote it."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(_pointer(builder, args[0], _I64), "acquire", 8)

    return types.int64(types.int64), generate


@gives_int
def call_address(typingctx: Any, function: Any, argument: Any) -> Any:
    """Calls the C function `int64 f(int64)` at an address."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _pointer(builder, args[0], ir.FunctionType(_I64, [_I64]))
        return builder.call(pointer, [args[1]])

    return types.int64(types.int64, types.int64), generate


@gives_int
def symbol_address(typingctx: Any, name: Any) -> Any:
    """The address of a symbol that is known to the process when this code is linked."""
    symbol = name.literal_value

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        known = builder.module.globals.get(symbol)
        function = known or ir.Function(builder.module, ir.FunctionType(_I64, [_I64]), symbol)
        return builder.ptrtoint(function, _I64)

    return types.int64(name), generate


@gives_int
def text_address(typingctx: Any, text: Any) -> Any:
    """The address of a literal as a C string."""
    data = bytearray(text.literal_value.encode() + b"\0")

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        constant = context.insert_unique_const(
            builder.module, "jpaged_text", ir.Constant(ir.ArrayType(ir.IntType(8), len(data)), data)
        )
        return builder.ptrtoint(constant, _I64)

    return types.int64(text), generate


@gives_nothing
def copy_bytes(typingctx: Any, to: Any, source: Any, count: Any) -> Any:
    """memcpy."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        byte = ir.IntType(8).as_pointer()
        function = builder.module.declare_intrinsic("llvm.memcpy", [byte, byte, _I64])
        pointers = [builder.inttoptr(args[0], byte), builder.inttoptr(args[1], byte)]
        builder.call(function, [*pointers, args[2], ir.Constant(ir.IntType(1), 0)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@gives_nothing
def zero_bytes(typingctx: Any, to: Any, count: Any) -> Any:
    """memset to 0."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        byte = ir.IntType(8).as_pointer()
        function = builder.module.declare_intrinsic("llvm.memset", [byte, _I64])
        zero = ir.Constant(ir.IntType(8), 0)
        pointer = builder.inttoptr(args[0], byte)
        builder.call(function, [pointer, zero, args[1], ir.Constant(ir.IntType(1), 0)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate
