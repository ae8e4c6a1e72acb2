"""The compilation cache: on for our own programs, warm the second time, and gone from the settings after."""

from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jpaged.worker.compile_cache import (
    CompilationCounter,
    compilation_cache_at,
    default_cache_dir,
)


@pytest.fixture
def hits() -> Iterator[list[str]]:
    seen: list[str] = []

    def listen(event: str, **kwargs: str | int) -> None:
        if event == "/jax/compilation_cache/cache_hits":
            seen.append(event)

    jax.monitoring.register_event_listener(listen)
    yield seen
    jax.monitoring.unregister_event_listener(listen)


def compile_one(cache: Path | None) -> None:
    with compilation_cache_at(cache):
        jax.jit(lambda x: jnp.sin(x) * 3 + 1).lower(jnp.zeros(7)).compile()


def test_the_second_time_is_read_from_disk(tmp_path: Path, hits: list[str]) -> None:
    settings = dict(jax.config.values)
    compile_one(tmp_path / "cache")
    assert not hits and list((tmp_path / "cache").iterdir())
    compile_one(tmp_path / "cache")
    assert len(hits) == 1
    compile_one(None)
    assert len(hits) == 1
    assert dict(jax.config.values) == settings


def test_the_programs_own_cache_is_kept(tmp_path: Path) -> None:
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "theirs"))
    try:
        compile_one(tmp_path / "ours")
        assert jax.config.values["jax_compilation_cache_dir"] == str(tmp_path / "theirs")
        assert not (tmp_path / "ours").exists()
    finally:
        jax.config.update("jax_compilation_cache_dir", None)


def test_settings_come_back_after_an_error(tmp_path: Path) -> None:
    settings = dict(jax.config.values)
    with pytest.raises(RuntimeError), compilation_cache_at(tmp_path):
        raise RuntimeError
    assert dict(jax.config.values) == settings


def test_the_folder_follows_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("JPAGED_CACHE", str(tmp_path))
    assert default_cache_dir() == tmp_path / "xla"
    monkeypatch.delenv("JPAGED_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert default_cache_dir() == tmp_path / "x/jpaged/xla"


def test_compilations_are_counted_while_the_counter_is_open() -> None:
    with CompilationCounter() as counter:
        jax.jit(lambda x: x * 7 - 2).lower(jnp.zeros(5)).compile()
    seen = counter.count
    assert seen >= 1
    jax.jit(lambda x: x * 8 - 2).lower(jnp.zeros(5)).compile()
    assert counter.count == seen
