"""Faults that tests inject: calls of an engine's parts that raise where a test says so."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from jax.stages import Compiled

from jpaged.core.page_pool import PagePool
from jpaged.engine.output_processor import BackendDecoder, SampleState
from jpaged.worker.model_runner import ModelRunner
from jpaged.worker.step_input import StepPacker
from jpaged.worker.worker import Worker


class Injected(Exception):
    """What an injected fault raises."""


@dataclasses.dataclass(frozen=True)
class Place:
    """A function that may fail, before it has done anything or when all is done."""

    owner: type
    name: str
    after: bool = False


# Those that cost the request whose call it was.
REQUEST_FAULTS = {
    "allocate": Place(PagePool, "allocate"),
    "push": Place(SampleState, "push"),
    "decode": Place(BackendDecoder, "decode"),
}
# Those that cost a step, which is run again.
STEP_FAULTS = {
    "pack": Place(StepPacker, "pack"),
    "run": Place(ModelRunner, "_forward"),
    "run and donate": Place(Compiled, "__call__", after=True),
    "sample": Place(ModelRunner, "_sample"),
    "collect": Place(Worker, "collect"),
    "collect and lose": Place(Worker, "collect", after=True),
}


class Calls:
    """How often a place was called, and how many of the calls failed."""

    count = 0
    failed = 0


@contextlib.contextmanager
def failing(place: Place, when: Callable[[int], bool]) -> Iterator[Calls]:
    """Lets those calls of a place fail, the first being number 1, for which `when` says so."""
    calls, real = Calls(), getattr(place.owner, place.name)

    def call(*args: Any, **kwargs: Any) -> Any:
        calls.count += 1
        fails = when(calls.count)
        calls.failed += fails
        if fails and not place.after:
            raise Injected(f"call {calls.count} of {place.name}")
        result = real(*args, **kwargs)
        if fails:
            raise Injected(f"call {calls.count} of {place.name}, when it was done")
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(place.owner, place.name, call)
        yield calls
