"""One GGUF file: its header checked, its tensors dequantised one at a time.

Knows the file format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md) and, through the `gguf`
package, the quantised types. Knows no key's or tensor's meaning. The header is parsed here and not by that
package because its reader builds one numpy array for each token of a vocabulary (20 s for 262,144).
"""

import dataclasses
import io
import math
import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

import gguf
import ml_dtypes
import numpy as np

from jpaged.errors import ModelLoadError
from jpaged.models.loading.checkpoint import HostArray, TensorSpec
from jpaged.models.loading.files import file_size, read_bytes_at, refuse_pointer, truncated

MetaValue: TypeAlias = int | float | bool | str | list[int] | list[float] | list[bool] | list[str]

_SCALARS = dict(zip(range(8), ("B", "b", "H", "h", "I", "i", "f", "?"), strict=True))
_SCALARS |= {10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4
_PIECE_ELEMENTS = 1 << 22

# Types stored as they are; every other supported type is dequantised to float32.
_PLAIN: dict[str, np.dtype[np.generic]] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F64": np.dtype(np.float64),
}
_QUANTISED = frozenset(
    [
        "Q4_0",
        "Q4_1",
        "Q5_0",
        "Q5_1",
        "Q8_0",
        "Q2_K",
        "Q3_K",
        "Q4_K",
        "Q5_K",
        "Q6_K",
        "TQ1_0",
        "TQ2_0",
        "MXFP4",
        "IQ1_S",
        "IQ1_M",
        "IQ2_XXS",
        "IQ2_XS",
        "IQ2_S",
        "IQ3_XXS",
        "IQ3_S",
        "IQ4_NL",
        "IQ4_XS",
    ]
)


@dataclasses.dataclass(frozen=True)
class GGUFTensor:
    """Where a tensor lies. `shape` is in numpy's order, the reverse of the file's."""

    shape: tuple[int, ...]
    kind: gguf.GGMLQuantizationType
    begin: int
    end: int

    @property
    def spec(self) -> TensorSpec:
        """Shape and dtype once read."""
        return TensorSpec(self.shape, _PLAIN.get(self.kind.name, np.dtype(np.float32)))


@dataclasses.dataclass(frozen=True)
class GGUFFile:
    """An opened file."""

    path: Path
    metadata: Mapping[str, MetaValue]
    tensors: Mapping[str, GGUFTensor]

    @classmethod
    def open(cls, path: Path) -> "GGUFFile":
        """Reads and checks the header. Raises ModelLoadError naming the file and what is wrong."""
        size = file_size(path)
        with path.open("rb") as file:
            refuse_pointer(path, head := file.read(64))
            if head[:4] != b"GGUF":
                raise ModelLoadError(
                    f"{path}: begins with {head[:4]!r}, not b'GGUF': this is not a GGUF file"
                )
            if size < 24:
                raise truncated(path, "the header", end=24, size=size)
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Header(path, data, size).read()

    def read(self, name: str) -> HostArray:
        """Reads one tensor into a new array, dequantised to float32 if it is quantised."""
        tensor = self.tensors[name]
        with self.path.open("rb", buffering=0) as file:
            if tensor.kind.name in _PLAIN:
                raw = read_bytes_at(file, self.path, tensor.begin, tensor.end - tensor.begin)
                return raw.view(_PLAIN[tensor.kind.name]).reshape(tensor.shape)
            return self._dequantised(file, tensor)

    def _dequantised(self, file: io.FileIO, tensor: GGUFTensor) -> HostArray:
        """Reads some rows at a time, so that only the result is ever in memory as a whole."""
        width = tensor.shape[-1]
        _, row_bytes = gguf.quant_shape_to_byte_shape((1, width), tensor.kind)
        out = np.empty((math.prod(tensor.shape[:-1]), width), np.float32)
        step = max(1, _PIECE_ELEMENTS // max(1, width))
        for row in range(0, len(out), step):
            piece = out[row : row + step]
            begin = tensor.begin + row * row_bytes
            raw = read_bytes_at(file, self.path, begin, len(piece) * row_bytes)
            piece[...] = gguf.dequantize(raw.reshape(len(piece), row_bytes), tensor.kind)
        return out.reshape(tensor.shape)


class _Header:
    """A cursor over the header; every read is checked against the file's size first."""

    def __init__(self, path: Path, data: mmap.mmap, size: int) -> None:
        self.path, self.data, self.size, self.at = path, data, size, 4

    def fault(self, message: str) -> ModelLoadError:
        return ModelLoadError(f"{self.path}: {message}")

    def take(self, count: int, what: str) -> int:
        """Moves past `count` bytes; returns where they begin."""
        begin = self.at
        if begin + count > self.size:
            raise truncated(self.path, what, end=begin + count, size=self.size)
        self.at = begin + count
        return begin

    def scalar(self, code: str, what: str) -> int | float | bool:
        begin = self.take(struct.calcsize("<" + code), what)
        value: int | float | bool = struct.unpack_from("<" + code, self.data, begin)[0]
        return value

    def natural(self, code: str, what: str) -> int:
        return int(self.scalar(code, what))

    def string(self, what: str) -> str:
        count = self.natural("Q", what)
        begin = self.take(count, what)
        try:
            return self.data[begin : begin + count].decode()
        except UnicodeDecodeError as error:
            raise self.fault(f"{what} is not UTF-8 ({error}): the file is corrupt") from error

    def value(self, kind: int, what: str) -> MetaValue:
        if kind == _STRING:
            return self.string(what)
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind], what)
        if kind != _ARRAY:
            raise self.fault(f"{what} has the unknown value type {kind}: the file is corrupt")
        item, count = self.natural("I", what), self.natural("Q", what)
        if item == _STRING:
            if count * 8 > self.size - self.at:
                raise truncated(self.path, what, end=self.at + count * 8, size=self.size)
            return [self.string(what) for _ in range(count)]
        if item not in _SCALARS:
            raise self.fault(f"{what} is an array of the unsupported value type {item}")
        dtype = np.dtype(_SCALARS[item]).newbyteorder("<")
        begin = self.take(count * dtype.itemsize, what)
        values: list[int] = np.frombuffer(self.data[begin : self.at], dtype).tolist()
        return values

    def read(self) -> GGUFFile:
        version = self.natural("I", "the version")
        if version not in (2, 3):
            raise self.fault(
                f"GGUF version {version} is not supported; supported are 2 and 3, little-endian"
            )
        tensors, entries = self.natural("Q", "counts"), self.natural("Q", "counts")
        metadata: dict[str, MetaValue] = {}
        for _ in range(entries):
            key = self.string("a metadata key")
            if key in metadata:
                raise self.fault(f"metadata key {key} is there twice")
            metadata[key] = self.value(self.natural("I", f"metadata {key}"), f"metadata {key}")
        infos = [self.info() for _ in range(tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise self.fault(f"general.alignment is {alignment!r}; it must be a power of two")
        start = -(-self.at // alignment) * alignment
        return GGUFFile(self.path, metadata, self.place(infos, start, alignment))

    def info(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape, type and offset of the next tensor."""
        name = self.string("a tensor's name")
        dims = self.natural("I", f"tensor {name}")
        if not 0 < dims <= _MAX_DIMS:
            raise self.fault(f"tensor {name} has {dims} dimensions; supported are 1 to {_MAX_DIMS}")
        shape = tuple(self.natural("Q", f"tensor {name}") for _ in range(dims))[::-1]
        return name, shape, self.natural("I", f"tensor {name}"), self.natural("Q", f"tensor {name}")

    def place(
        self, infos: list[tuple[str, tuple[int, ...], int, int]], start: int, alignment: int
    ) -> dict[str, GGUFTensor]:
        """Where each tensor's data lies; refuses twins, overlaps and what is beyond the file."""
        found: dict[str, GGUFTensor] = {}
        for name, shape, raw_kind, offset in infos:
            if name in found:
                raise self.fault(f"tensor {name} is there twice")
            kind = self.kind(name, raw_kind)
            block, nbytes = gguf.GGML_QUANT_SIZES[kind]
            if shape[-1] % block:
                raise self.fault(
                    f"tensor {name}: rows of {shape[-1]} are no multiple of {kind.name}'s {block}"
                )
            if offset % alignment:
                raise self.fault(f"tensor {name}: offset {offset} is not aligned to {alignment}")
            begin = start + offset
            end = begin + math.prod(shape) // block * nbytes
            if end > self.size:
                raise truncated(self.path, f"tensor {name}", end=end, size=self.size)
            found[name] = GGUFTensor(shape, kind, begin, end)
        last_end, last_name = start, ""
        for name, tensor in sorted(found.items(), key=lambda pair: (pair[1].begin, pair[1].end)):
            if tensor.begin < last_end:
                raise self.fault(f"the data of {name} and {last_name} overlap: the file is corrupt")
            last_end, last_name = tensor.end, name
        return found

    def kind(self, name: str, raw: int) -> gguf.GGMLQuantizationType:
        names = {int(kind): kind for kind in gguf.GGMLQuantizationType}
        kind = names.get(raw)
        if kind is None or kind.name not in _QUANTISED | _PLAIN.keys():
            raise self.fault(
                f"tensor {name}: type {kind.name if kind else raw} is not supported; supported "
                f"are {', '.join([*_PLAIN, *sorted(_QUANTISED)])}"
            )
        return kind
