"""How a numba kernel becomes a target of XLA's FFI, and how its work is shared among threads.

A handler reads the call frame, cuts the work into items, and asks XLA's own thread pool for help: no other
threads exist, so nothing competes with XLA's, and engines in one process share one pool. Items are taken
from a shared counter; each is computed by itself, so that its bits do not depend on who took it. The
caller works too and waits for the items that others have begun, never for a helper that has not started:
a busy pool makes it slower, not stuck. Knows no kernel.
"""

import ctypes
import hashlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import jax
import llvmlite.binding as llvm
import numba
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .abi import API_MAJOR, API_MINOR, EXTENSION_METADATA, FIELDS, STAGE_EXECUTE
from .memory import (
    call_address,
    fetch_add,
    load_i32,
    load_i64,
    load_shared,
    store_i32,
    store_i64,
)

INVALID_ARGUMENT, RESOURCE_EXHAUSTED = 3, 8

# The state of one call, in bytes from its start. What an op needs follows at OP.
NEXT, DONE, REFERENCES, TOTAL, FAILED, _CALL, OP = 0, 8, 16, 24, 32, 64, 128

_FRAME, _BUFFER, _API = (
    FIELDS["XLA_FFI_CallFrame"],
    FIELDS["XLA_FFI_Buffer"],
    FIELDS["XLA_FFI_Api"],
)
_EXTENSION, _FRAME_API, _CONTEXT, _STAGE = (
    _FRAME["extension_start"],
    _FRAME["api"],
    _FRAME["ctx"],
    _FRAME["stage"],
)
_ARGUMENTS = _FRAME["args"] + FIELDS["XLA_FFI_Args"]["args"]
_RESULTS = _FRAME["rets"] + FIELDS["XLA_FFI_Rets"]["rets"]
_DATA, _DIMS = _BUFFER["data"], _BUFFER["dims"]
_METADATA = FIELDS["XLA_FFI_Metadata_Extension"]["metadata"]
_VERSION = FIELDS["XLA_FFI_Metadata"]["api_version"]
_MAJOR = _VERSION + FIELDS["XLA_FFI_Api_Version"]["major_version"]
_MINOR = _VERSION + FIELDS["XLA_FFI_Api_Version"]["minor_version"]
_CREATE, _DESTROY = _API["XLA_FFI_Error_Create"], _API["XLA_FFI_Error_Destroy"]
_SCHEDULE, _NUM_THREADS = (
    _API["XLA_FFI_ThreadPool_Schedule"],
    _API["XLA_FFI_ThreadPool_NumThreads"],
)

allocate: Callable[[int], int] = types.ExternalFunction("malloc", types.int64(types.int64))
release_memory: Callable[[int], None] = types.ExternalFunction("free", types.void(types.int64))
_yield_processor: Callable[[], int] = types.ExternalFunction("sched_yield", types.int32())

_Function = TypeVar("_Function", bound=Callable[..., Any])

_SIGNATURE = types.int64(types.int64)


def compiled(function: _Function) -> _Function:
    """A function that kernels call, compiled anew for each set of types and literals."""
    made: _Function = numba.njit(error_model="numpy", nogil=True)(function)
    return made


def _reader(offset: int) -> Callable[[int, int], int]:
    """Reads word `index` of what the pointer at `offset` points to."""

    def read(typingctx: Any, address: Any, index: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            word = ir.IntType(64)
            place = builder.add(args[0], ir.Constant(word, offset))
            words = builder.load(builder.inttoptr(place, word.as_pointer()))
            place = builder.add(words, builder.mul(args[1], ir.Constant(word, 8)))
            return builder.load(builder.inttoptr(place, word.as_pointer()))

        return types.int64(types.int64, types.int64), generate

    made: Callable[[int, int], int] = intrinsic(read)
    return made


# Of a frame and an index: the address of an argument's or a result's buffer struct. Of a buffer and an
# axis: its length.
argument = _reader(_ARGUMENTS)
result = _reader(_RESULTS)
dimension = _reader(_DIMS)


@compiled
def data(buffer: int) -> int:
    """The address of a buffer's first byte."""
    return load_i64(buffer + _DATA)


@compiled
def executes(frame: int) -> bool:
    """Whether a call is one to compute; answers XLA's question for the API's version itself."""
    extension = load_i64(frame + _EXTENSION)
    if extension != 0 and load_i32(extension + 8) == EXTENSION_METADATA:
        metadata = load_i64(extension + _METADATA)
        store_i32(metadata + _MAJOR, API_MAJOR)
        store_i32(metadata + _MINOR, API_MINOR)
        return False
    return load_i32(frame + _STAGE) == STAGE_EXECUTE


@compiled
def failure(frame: int, code: int, message: int) -> int:
    """An FFI error with a C string as its message, to be returned by the handler."""
    args = allocate(32)
    store_i64(args, 28)
    store_i64(args + 8, 0)
    store_i64(args + 16, message)
    store_i32(args + 24, code)
    error = call_address(load_i64(load_i64(frame + _FRAME_API) + _CREATE), args)
    release_memory(args)
    return error


@compiled
def _worked(api: int, args: int, error: int) -> bool:
    """Whether an FFI call gave no error; destroys the error otherwise."""
    if error == 0:
        return True
    store_i64(args, 24)
    store_i64(args + 8, 0)
    store_i64(args + 16, error)
    call_address(load_i64(api + _DESTROY), args)
    return False


@compiled
def new_state(size: int) -> int:
    """Memory for the state of one call, `size` bytes for the op; 0 if there is none."""
    state = allocate(OP + size)
    if state != 0:
        store_i64(state + NEXT, 0)
        store_i64(state + DONE, 0)
        store_i64(state + FAILED, 0)
    return state


@compiled
def drop(state: int) -> None:
    """Gives up one reference to a state, and its memory with the last."""
    if fetch_add(state + REFERENCES, -1) == 1:
        release_memory(state)


@compiled
def take(state: int) -> int:
    """The next item that nobody works on; -1 if there is none."""
    item = fetch_add(state + NEXT, 1)
    return item if item < load_i64(state + TOTAL) else -1


@compiled
def run_shared(frame: int, state: int, task: int, items: int, alone: bool) -> bool:
    """Runs `task(state)` here and on XLA's pool until all items are done; False if one failed.

    The task takes items until none is left, counts each in DONE, and drops its reference.
    """
    store_i64(state + TOTAL, items)
    helpers, api, args = 0, load_i64(frame + _FRAME_API), state + _CALL
    context = load_i64(frame + _CONTEXT)
    if not alone and items > 1:
        store_i64(args, 32)
        store_i64(args + 8, 0)
        store_i64(args + 16, context)
        store_i64(args + 24, args + 32)
        store_i64(args + 32, 1)
        if _worked(api, args, call_address(load_i64(api + _NUM_THREADS), args)):
            helpers = min(load_i64(args + 32), items) - 1
    # One for each helper, one for the task that runs here, one for the reading of FAILED below.
    store_i64(state + REFERENCES, helpers + 2)
    for _ in range(helpers):
        store_i64(args, 40)
        store_i64(args + 8, 0)
        store_i64(args + 16, context)
        store_i64(args + 24, task)
        store_i64(args + 32, state)
        if not _worked(api, args, call_address(load_i64(api + _SCHEDULE), args)):
            drop(state)
    call_address(task, state)
    while load_shared(state + DONE) < items:
        _yield_processor()
    good = load_i64(state + FAILED) == 0
    drop(state)
    return good


_lock = threading.Lock()
_registered: dict[str, Any] = {}


def source_digest(*files: str) -> int:
    """A number that changes with the text of a kernel's files.

    numba's cache on disk looks at the file of the outermost function alone; a kernel that closes over
    this number is not taken from it when a file that it calls into has changed.
    """
    here = Path(__file__).parent
    paths = sorted(here.glob("*.py"))
    text = b"".join(path.read_bytes() for path in [*paths, *map(Path, files)])
    return int.from_bytes(hashlib.sha256(text).digest()[:6], "little")


def _compile(function: Callable[[int], int]) -> Any:
    """A C function of `function`, from numba's cache on disk where one can be kept."""
    try:
        return numba.cfunc(_SIGNATURE, cache=True, error_model="numpy", nogil=True)(function)
    except RuntimeError:  # no folder that a cache may be kept in
        return numba.cfunc(_SIGNATURE, error_model="numpy", nogil=True)(function)


def ensure_registered(
    name: str,
    make_task: Callable[[], Callable[[int], int]] | None,
    make_handler: Callable[[str], Callable[[int], int]],
) -> None:
    """Compiles a kernel and registers it with XLA as `name`, once in a process.

    The handler is made with the name of the symbol under which it finds the task's address.
    """
    with _lock:
        if name in _registered:
            return
        symbol = f"{name}_task"
        task = None
        if make_task is not None:
            task = _compile(make_task())
            llvm.add_symbol(symbol, task.address)
        handler = _compile(make_handler(symbol))
        new_capsule = ctypes.pythonapi.PyCapsule_New
        new_capsule.restype = ctypes.py_object
        new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        jax.ffi.register_ffi_target(
            name, new_capsule(handler.address, None, None), platform="cpu", api_version=1
        )
        _registered[name] = (task, handler)  # keeps the machine code alive
