"""Where downloaded models are kept, and how files get there whole or not at all.

Knows nothing of where files come from.
"""

import contextlib
import errno
import hashlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from jpaged.errors import ModelLoadError

_CHUNK = 1 << 20
_PREFIX = "tmp-"
_STALE_SECONDS = 24 * 3600


def cache_dir() -> Path:
    """The user's cache folder for jpaged: $JPAGED_CACHE, or the platform's usual place."""
    if given := os.environ.get("JPAGED_CACHE"):
        return Path(given).expanduser()
    if given := os.environ.get("XDG_CACHE_HOME"):
        return Path(given).expanduser() / "jpaged"
    if sys.platform == "win32" and (given := os.environ.get("LOCALAPPDATA")):
        return Path(given) / "jpaged"
    return Path.home() / ".cache" / "jpaged"


@contextlib.contextmanager
def scratch_folder(parent: Path, *, need: int) -> Iterator[Path]:
    """A new folder inside `parent`, removed at the end whatever happens.

    Being on the same file system, its files can be moved into `parent` atomically. Raises ModelLoadError if
    fewer than `need` bytes are free, or if writing inside the context runs out of space.
    """
    try:
        parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(parent)
        free = shutil.disk_usage(parent).free
        if free < need:
            raise ModelLoadError(
                f"{parent}: the disk has {free >> 20} MiB free, {need >> 20} MiB are needed; free "
                "some space or set JPAGED_CACHE to a folder on another disk"
            )
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    except OSError as error:
        raise write_error(parent, error) from error
    try:
        yield folder
    except OSError as error:
        raise write_error(parent, error) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_stale(parent: Path) -> None:
    """Removes what processes left that were killed; a running one is younger than a day."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if time.time() - folder.stat().st_mtime > _STALE_SECONDS:
                shutil.rmtree(folder)


def write_error(parent: Path, error: OSError) -> ModelLoadError:
    """Says why nothing could be written and what to do."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        reason = "no space is left on the disk; free some"
    else:
        reason = f"cannot be written ({error.strerror or error}); make it writable"
    return ModelLoadError(
        f"{parent}: {reason} or set JPAGED_CACHE to a folder elsewhere. Nothing was left behind"
    )


def sha256_of(path: Path) -> str:
    """Hex digest of a file's contents."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
