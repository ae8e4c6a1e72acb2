"""One safetensors file: its header checked, its tensors read one at a time.

Knows the file format (https://github.com/huggingface/safetensors, "Format"). Knows no tensor's meaning.
"""

import dataclasses
import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

import ml_dtypes
import numpy as np

from jpaged.errors import ModelLoadError
from jpaged.models.loading.checkpoint import HostArray, TensorSpec
from jpaged.models.loading.files import file_size, read_bytes_at, refuse_pointer, truncated

# The format's own limit; anything above it is a corrupt length.
_MAX_HEADER = 100_000_000

_DTYPES: dict[str, np.dtype[np.generic]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}


@dataclasses.dataclass(frozen=True)
class _Entry:
    spec: TensorSpec
    begin: int
    end: int


@dataclasses.dataclass(frozen=True)
class SafetensorsFile:
    """An opened file. Offsets in `entries` are from the start of the file."""

    path: Path
    entries: Mapping[str, _Entry]

    @classmethod
    def open(cls, path: Path) -> "SafetensorsFile":
        """Reads and checks the header. Raises ModelLoadError naming the file and the tensor."""
        size = file_size(path)
        with path.open("rb") as file:
            head = file.read(min(size, 64))
            refuse_pointer(path, head)
            if size < 8:
                raise truncated(path, "the header's length", end=8, size=size)
            (length,) = struct.unpack("<Q", head[:8])
            if length > _MAX_HEADER:
                raise ModelLoadError(
                    f"{path}: the header claims {length} bytes (at most {_MAX_HEADER}): "
                    "this is not a safetensors file"
                )
            if 8 + length > size:
                raise truncated(path, "the header", end=8 + length, size=size)
            file.seek(8)
            raw = file.read(length)
        return cls(path, _entries(path, raw, start=8 + length, size=size))

    def specs(self) -> dict[str, TensorSpec]:
        """Shape and dtype of each tensor."""
        return {name: entry.spec for name, entry in self.entries.items()}

    def names(self) -> list[str]:
        """Names in the order of their data, so that reading them in turn reads the file forwards."""
        return sorted(self.entries, key=lambda name: self.entries[name].begin)

    def read(self, name: str) -> HostArray:
        """Reads one tensor into a new array."""
        entry = self.entries[name]
        with self.path.open("rb", buffering=0) as file:
            raw = read_bytes_at(file, self.path, entry.begin, entry.end - entry.begin)
        return raw.view(entry.spec.dtype).reshape(entry.spec.shape)


def _entries(path: Path, raw: bytes, *, start: int, size: int) -> dict[str, _Entry]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            names = [key for key, _ in pairs]
            twice = sorted({key for key in names if names.count(key) > 1})
            raise ModelLoadError(f"{path}: the header names {', '.join(twice[:5])} twice")
        return found

    try:
        header = json.loads(raw, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(
            f"{path}: the header is not JSON ({error}): this is not a safetensors file, or it is "
            "corrupt; download it again"
        ) from error
    if not isinstance(header, dict):
        raise ModelLoadError(f"{path}: the header is not an object: this is no safetensors file")
    header.pop("__metadata__", None)
    entries = {name: _entry(path, name, item, start, size) for name, item in header.items()}
    last_end, last_name = start, ""
    for name, entry in sorted(entries.items(), key=lambda pair: (pair[1].begin, pair[1].end)):
        if entry.begin < last_end:
            raise ModelLoadError(
                f"{path}: the data of {name} and {last_name} overlap: the file is corrupt; "
                "download it again"
            )
        last_end, last_name = entry.end, name
    return entries


def _entry(path: Path, name: str, item: object, start: int, size: int) -> _Entry:
    if not isinstance(item, dict):
        raise ModelLoadError(f"{path}: tensor {name}: the header's entry is not an object")
    kind, shape, offsets = item.get("dtype"), item.get("shape"), item.get("data_offsets")
    if kind not in _DTYPES:
        raise ModelLoadError(
            f"{path}: tensor {name}: dtype {kind!r} is not supported; supported are "
            f"{', '.join(_DTYPES)}"
        )
    if not _naturals(shape) or not _naturals(offsets) or len(offsets) != 2:
        raise ModelLoadError(
            f"{path}: tensor {name}: shape {shape!r} or data_offsets {offsets!r} is malformed"
        )
    begin, end = offsets
    dtype = _DTYPES[kind]
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise ModelLoadError(
            f"{path}: tensor {name}: {kind} of shape {shape} takes "
            f"{math.prod(shape) * dtype.itemsize} bytes, but data_offsets {offsets} span "
            f"{end - begin}"
        )
    if start + end > size:
        raise truncated(path, f"tensor {name}", end=start + end, size=size)
    return _Entry(TensorSpec(tuple(shape), dtype), start + begin, start + end)


def _naturals(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(
        isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in value
    )
