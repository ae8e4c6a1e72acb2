"""Engines of these tests share compiled programs, through a cache that lives as long as the session."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from jpaged import LLM
from tests.engine import tiny


@pytest.fixture(scope="session", autouse=True)
def compiled_programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder of compiled programs for all engines."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JPAGED_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="module")
def shared_llm() -> Iterator[LLM]:
    """One engine for all tests of a module that leave it idle."""
    with tiny.llm() as made:
        yield made


@pytest.fixture
def llm(shared_llm: LLM) -> Iterator[LLM]:
    """The module's engine, which must be idle again when the test ends."""
    yield shared_llm
    tiny.check_idle(shared_llm)
