"""The part of XLA's typed FFI that our handlers read: where its fields lie, and whether they still do.

Handlers are machine code without a C compiler's view of the header, so the offsets are constants here.
The header that ships with jaxlib says whether they hold.
"""

import functools
import importlib
import logging
import os
import re
import sys
from pathlib import Path

import jax

_log = logging.getLogger(__name__)

# Offsets in bytes, by struct of `xla/ffi/api/c_api.h` and field.
FIELDS: dict[str, dict[str, int]] = {
    "XLA_FFI_CallFrame": {
        "extension_start": 8,
        "api": 16,
        "ctx": 24,
        "stage": 32,
        "args": 40,
        "rets": 80,
        "attrs": 120,
    },
    "XLA_FFI_Args": {"size": 16, "types": 24, "args": 32},
    "XLA_FFI_Rets": {"size": 16, "types": 24, "rets": 32},
    "XLA_FFI_Buffer": {"dtype": 16, "data": 24, "rank": 32, "dims": 40},
    "XLA_FFI_Metadata_Extension": {"metadata": 24},
    "XLA_FFI_Metadata": {"api_version": 8, "traits": 32},
    "XLA_FFI_Api_Version": {"major_version": 16, "minor_version": 20},
    "XLA_FFI_Error_Create_Args": {"extension_start": 8, "message": 16, "errc": 24},
    "XLA_FFI_Error_Destroy_Args": {"extension_start": 8, "error": 16},
    "XLA_FFI_ThreadPool_Schedule_Args": {
        "extension_start": 8,
        "ctx": 16,
        "task": 24,
        "data": 32,
    },
    "XLA_FFI_ThreadPool_NumThreads_Args": {
        "extension_start": 8,
        "ctx": 16,
        "num_threads": 24,
    },
    "XLA_FFI_Api": {
        "XLA_FFI_Error_Create": 48,
        "XLA_FFI_Error_Destroy": 64,
        "XLA_FFI_ThreadPool_Schedule": 136,
        "XLA_FFI_ThreadPool_NumThreads": 144,
    },
}
API_MAJOR, API_MINOR = 0, 3
STAGE_EXECUTE = 3
EXTENSION_METADATA = 1

_CONSTANTS = {
    "XLA_FFI_ExecutionStage_EXECUTE": STAGE_EXECUTE,
    "XLA_FFI_Error_Code_INVALID_ARGUMENT": 3,
    "XLA_FFI_Error_Code_RESOURCE_EXHAUSTED": 8,
}
_SIZES = {"size_t": 8, "int64_t": 8, "uint64_t": 8, "int": 4, "int32_t": 4, "uint32_t": 4}


def differences(header: str) -> list[str]:
    """What in the text of `c_api.h` differs from what our handlers assume; empty if nothing."""
    header = re.sub(r"//[^\n]*|/\*.*?\*/", "", header, flags=re.DOTALL)
    structs = dict(re.findall(r"struct (\w+) \{([^{}]*)\}", header))
    found: list[str] = []
    for struct, fields in FIELDS.items():
        if struct not in structs:
            found.append(f"{struct} is gone")
            continue
        offsets = _offsets(struct, structs)[0]
        found += [
            f"{struct}.{field} lies at {offsets.get(field)}, not {offset}"
            for field, offset in fields.items()
            if offsets.get(field) != offset
        ]
    for name, value in _CONSTANTS.items():
        if not re.search(rf"\b{name} = {value}\b", header):
            found.append(f"{name} is not {value}")
    major = re.search(r"XLA_FFI_API_MAJOR (\d+)", header)
    minor = re.search(r"XLA_FFI_API_MINOR (\d+)", header)
    if not major or not minor or int(major[1]) != API_MAJOR or int(minor[1]) < API_MINOR:
        found.append(f"the API's version is not {API_MAJOR}.{API_MINOR} or a later minor one")
    return found


def _offsets(struct: str, structs: dict[str, str]) -> tuple[dict[str, int], int, int]:
    """The offset of each field of a struct, its size and its alignment, by C's rules."""
    offsets: dict[str, int] = {}
    end, alignment = 0, 1
    for declaration in structs[struct].split(";"):
        declaration = declaration.strip()
        if not declaration:
            continue
        if macro := re.fullmatch(r"_XLA_FFI_API_STRUCT_FIELD\((\w+)\)", declaration):
            name, size, align = macro[1], 8, 8
        elif "(*" in declaration:
            name, size, align = declaration, 8, 8
        else:
            kind, name = re.sub(r"\bconst\b|\bstruct\b", "", declaration).rsplit(None, 1)
            kind = kind.strip()
            if "*" in kind or name.startswith("*"):
                size = align = 8
            elif kind in structs:
                _, size, align = _offsets(kind, structs)
            elif kind == "XLA_FFI_Handler_Traits" or kind not in _SIZES:
                size = align = 4  # an enum
            else:
                size = align = _SIZES[kind]
        end = -(-end // align) * align
        offsets[name.lstrip("*")] = end
        end += size
        alignment = max(alignment, align)
    return offsets, -(-end // alignment) * alignment, alignment


def _obstacles() -> list[str]:
    """Why numba kernels cannot run in this process; empty if they can."""
    if os.name != "posix" or sys.maxsize < 2**32 or sys.byteorder != "little":
        return ["they need a 64-bit little-endian POSIX system"]
    try:
        importlib.import_module("numba")
    except ImportError as error:  # not installed, or not made for this numpy
        return [f"numba cannot be imported ({error})"]
    path = Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
    try:
        return differences(path.read_text())
    except OSError as error:
        return [f"the header of XLA's FFI cannot be read ({error})"]


@functools.cache
def usable() -> bool:
    """Whether numba kernels can run in this process; says why not once, in the log."""
    found = _obstacles()
    if found:
        _log.warning(
            "CPU kernels are off, XLA's own operations run instead (jax %s): %s",
            jax.__version__,
            "; ".join(found),
        )
    return not found
