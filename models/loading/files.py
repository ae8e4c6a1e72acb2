"""Reading files that may be broken, and saying which and how.

Knows nothing of what the files mean.
"""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from jpaged.errors import ModelLoadError

_LFS_POINTER = b"version https://git-lfs"


def file_size(path: Path) -> int:
    """Size of a regular file in bytes. Raises ModelLoadError if it cannot be had."""
    try:
        if not path.is_file():
            raise ModelLoadError(f"{path}: no such file")
        return path.stat().st_size
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read: {error.strerror or error}") from error


def refuse_pointer(path: Path, head: bytes) -> None:
    """Raises if a file's first bytes are those of a Git LFS pointer instead of the real file."""
    if head.startswith(_LFS_POINTER):
        raise ModelLoadError(
            f"{path}: is a Git LFS pointer, not the file itself; run `git lfs pull` in its folder, "
            "or download the model again"
        )


def truncated(path: Path, what: str, *, end: int, size: int) -> ModelLoadError:
    """The error for a file that ends before `what` does."""
    return ModelLoadError(
        f"{path}: {what} ends at byte {end}, but the file has {size} bytes: it is truncated or "
        "corrupt; download it again"
    )


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise ModelLoadError(f"{path}: no such file") from None
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read: {error.strerror or error}") from error
    refuse_pointer(path, raw)
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path}: is not valid JSON ({error}); download it again") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path}: holds a {type(value).__name__}; it must hold an object")
    return value


def read_json_if_there(path: Path) -> dict[str, Any]:
    """As `read_json`, but empty where there is no such file."""
    return read_json(path) if path.is_file() else {}


def read_bytes_at(file: io.FileIO, path: Path, begin: int, count: int) -> npt.NDArray[np.uint8]:
    """Reads `count` bytes into a new array. A short read is an error, never a silent zero."""
    out = np.empty(count, np.uint8)
    try:
        file.seek(begin)
        got, view = 0, memoryview(out.data)
        while got < count:
            n = file.readinto(view[got:])
            if n == 0:
                raise truncated(path, "tensor data", end=begin + count, size=begin + got)
            got += n
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read: {error.strerror or error}") from error
    return out


def token_ids(*values: object) -> tuple[int, ...]:
    """Union of token ids given as an int, a list of ints or nothing, ascending."""
    found: set[int] = set()
    for value in values:
        for item in value if isinstance(value, list | tuple) else [value]:
            if isinstance(item, int) and not isinstance(item, bool) and item >= 0:
                found.add(item)
    return tuple(sorted(found))
