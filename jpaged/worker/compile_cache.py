"""JAX's persistent compilation cache around our own compilations only, and a count of these.

A library must not change the configuration of the program it runs in: whatever was set before is
set again afterwards.
"""

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

# The configuration is global to the process, so one engine at a time may change it.
_LOCK = threading.Lock()

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


def default_cache_dir() -> Path:
    """Where compiled steps are kept: below JPAGED_CACHE, XDG_CACHE_HOME or ~/.cache."""
    own = os.environ.get("JPAGED_CACHE")
    if own:
        return Path(own) / "xla"
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "jpaged" / "xla"


@contextlib.contextmanager
def compilation_cache_at(path: Path | None) -> Iterator[None]:
    """Compilations inside use the cache at `path`; None leaves the program's own setting alone.

    A program that has set a cache of its own keeps it.
    """
    if path is None or _setting("jax_compilation_cache_dir"):
        yield
        return
    with _LOCK:
        settings = {
            "jax_compilation_cache_dir": str(path),
            "jax_persistent_cache_min_compile_time_secs": 0.0,
            "jax_persistent_cache_min_entry_size_bytes": 0,
        }
        before = {name: _setting(name) for name in settings}
        compilation_cache.reset_cache()
        for name, value in settings.items():
            jax.config.update(name, value)
        try:
            yield
        finally:
            for name, value in before.items():
                jax.config.update(name, value)
            compilation_cache.reset_cache()


def _setting(name: str) -> object:
    return getattr(jax.config, name)


class CompilationCounter:
    """Counts backend compilations of the whole process, while it is open."""

    def __init__(self) -> None:
        self.count = 0

    def _listen(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == _COMPILE_EVENT:
            self.count += 1

    def __enter__(self) -> "CompilationCounter":
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        return self

    def __exit__(self, *exc: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._listen)
