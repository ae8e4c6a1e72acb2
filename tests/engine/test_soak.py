"""Soaks: when thousands of requests have ended in every way there is, all is as it was before them."""

import asyncio
import contextlib
import gc
import logging
import random
import threading
from collections import Counter

import pytest

from jpaged import AsyncLLMEngine, EngineDeadError, RequestError, RequestOutput, SamplingParams
from jpaged.core.request import RequestStatus
from jpaged.engine.llm_engine import LLMEngine
from jpaged.errors import ModelLoadError, QueueFullError
from tests.engine import driving, tiny
from tests.engine.async_helpers import settled
from tests.engine.driving import Clock, ids
from tests.engine.faults import Injected
from tests.engine.soaking import LONGEST, PAGES, census, draw, ends_of, faults, make_engine

PLAIN = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
(PROMPT,) = tiny.prompts(5)
STATES = ("waiting", "prefilling", "running", "preempted", "ended")
# What must have happened in a soak, else it is of little worth.
ENDS = {"length", "eos", "stop token", "stop string", "abort", "deadline", "error"}
REFUSED = {"RequestError", "QueueFullError"}
HOW_MANY = pytest.mark.parametrize("count", [300, pytest.param(2000, marks=pytest.mark.full)])


@pytest.fixture(autouse=True)
def silence(caplog: pytest.LogCaptureFixture) -> None:
    """Records of faults have tracebacks, which keep alive what a soak looks for."""
    caplog.set_level(logging.CRITICAL, logger="jpaged")


class Load:
    """Requests to an engine, and how they have ended."""

    def __init__(self, engine: LLMEngine, clock: Clock, seed: int) -> None:
        self.engine, self.clock, self.rng = engine, clock, random.Random(seed)
        self.seen: Counter[str] = Counter()
        self._open: set[str] = set()
        # Requests to be aborted once one of their samples is in a state.
        self._aims: dict[str, str] = {}

    def serve(self, count: int) -> None:
        """So many requests to their ends; each is told of its end once."""
        rng = self.rng
        for number in range(count):
            self._add(f"r{number}")
            for _ in range(rng.choice([0, 1, 2, 3, 9])):
                self._step()
            if rng.random() < 0.05:
                self.clock.ahead += 1000
            if rng.random() < 0.03:
                self.engine.update_params(tiny.model(rng.randrange(2)))
            if rng.random() < 0.03:
                with pytest.raises(ModelLoadError):
                    self.engine.update_params({})
        while self.engine.has_unfinished_requests():
            self._step()
        assert not self._open, "they were not told of their ends"

    def _add(self, name: str) -> None:
        rng = self.rng
        prompt, params = draw(rng)
        if rng.random() < 0.05:
            prompt = rng.choice([[], [256], [9] * LONGEST])
        late = self.clock.ahead + rng.uniform(1, 1000) if rng.random() < 0.15 else None
        try:
            self.engine.add_request(name, ids(prompt), params, timeout=late)
        except (RequestError, QueueFullError, Injected) as error:
            self.seen[type(error).__name__] += 1
            return
        self._open.add(name)
        if rng.random() < 0.4:
            self._aims[name] = rng.choice(STATES)

    def _step(self) -> None:
        for name, aim in list(self._aims.items()):
            if name in self._open and aim in self._states(name):
                self.seen[f"aborted {aim}"] += 1
                self._take(self.engine.abort_request(name))
        self._take(self.engine.step())

    def _states(self, name: str) -> set[str]:
        """Where the samples of a request are."""
        states = set()
        for sequence in self.engine._requests[name].sequences:
            request = self.engine._scheduler._roster.by_sequence.get(sequence)
            if request is None:
                states.add("ended")
            elif request.status is RequestStatus.RUNNING and request.num_missing > 1:
                states.add("prefilling")
            else:
                states.add(request.status.value)
        return states

    def _take(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            if output.finished:
                self._open.remove(output.request_id)
                self._aims.pop(output.request_id, None)
                self.seen.update(ends_of(output))


@HOW_MANY
def test_requests_that_end_in_every_way_leave_nothing_behind(count: int) -> None:
    clock = Clock()
    tiny.model(1)
    engine = make_engine(clock)

    def soak(seed: int, count: int) -> Counter[str]:
        load = Load(engine, clock, seed)
        with faults():
            load.serve(count)
        # Ends where it is expected to, so that no step with it is on its way any more.
        engine.update_params(tiny.model(0))
        engine.add_request("last", ids(PROMPT), PLAIN)
        assert driving.drain(engine)["last"].outputs[0].token_ids == tiny.greedy(PROMPT, 6)
        return load.seen

    soak(0, 100)
    before, pages = census(), engine.stats().pages_total
    seen = soak(1, count)
    assert census() == before
    assert engine.stats().pages_total == pages == PAGES
    missing = (ENDS | REFUSED | {f"aborted {state}" for state in STATES}) - seen.keys()
    assert not missing
    engine.close()


class Readers:
    """Tasks that read streams of an AsyncLLMEngine, to their ends or not, and what came of them."""

    def __init__(self, engine: AsyncLLMEngine, clock: Clock) -> None:
        self.engine, self.clock = engine, clock
        self.seen: Counter[str] = Counter()

    async def serve(self, seed: int, count: int) -> None:
        """So many requests, ten at a time."""
        numbers = iter(range(count))

        async def some() -> None:
            for number in numbers:
                rng = random.Random(f"{seed} {number}")
                with contextlib.suppress(Injected):
                    await self._read(rng)
                if rng.random() < 0.03:
                    await self.engine.update_params(tiny.model(rng.randrange(2)))

        await asyncio.gather(*(some() for _ in range(10)))

    async def _read(self, rng: random.Random) -> None:
        way = rng.choice(["await", "read", "cancel", "aclose", "drop", "abort", "late", "wrong"])
        self.seen[way] += 1
        prompt, params = draw(rng)
        late = self.clock.ahead + 1000 if way == "late" else None
        prompt = [256] if way == "wrong" else prompt
        stream = self.engine.generate(prompt, params, timeout=late)
        try:
            if way in ("await", "wrong"):
                self.seen.update(ends_of(await stream))
                return
            output = None
            for _ in range(rng.choice([0, 1, 1, 4])):
                output = await anext(stream, output)
            if way == "cancel":
                task = asyncio.ensure_future(stream._final())
                for _ in range(rng.choice([0, 1, 2, 20])):
                    await asyncio.sleep(0)
                self.seen["cancelled"] += task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
            elif way == "aclose":
                await stream.aclose()
                assert await anext(stream, None) is None
            elif way != "drop":
                if way == "abort":
                    self.engine.abort(stream.request_id)
                self.clock.ahead += 1000 * (way == "late")
                while output is None or not output.finished:
                    output = await anext(stream)
                self.seen.update(ends_of(output))
        except (RequestError, QueueFullError) as error:
            self.seen[type(error).__name__] += 1


@HOW_MANY
def test_readers_who_stay_or_leave_leave_nothing_behind(count: int) -> None:
    clock = Clock()
    tiny.model(1)
    at_first = {thread.ident for thread in threading.enumerate()}
    engine = AsyncLLMEngine(make_engine(clock))
    readers = Readers(engine, clock)

    async def soak(seed: int, count: int) -> dict[str, object]:
        with faults():
            await readers.serve(seed, count)
            # Of the streams that were dropped, some are in cycles.
            gc.collect()
            await settled(lambda: not engine.loop.active_ids())
        await engine.update_params(tiny.model(0))
        last = await engine.generate(PROMPT, PLAIN)
        assert last.outputs[0].token_ids == tiny.greedy(PROMPT, 6)
        del last
        # Runs behind all that the engine's thread had to do.
        await asyncio.wrap_future(engine.loop.call(engine.engine.check))
        assert engine.get_stats().pages_used == 0
        return census()

    async def main() -> None:
        both = threading.Barrier(2)
        await asyncio.gather(*(engine.run_in_thread(both.wait, 20) for _ in range(2)))
        before = await soak(0, 100)
        readers.seen.clear()
        assert await soak(1, count) == before
        assert engine.get_stats().pages_total == PAGES
        streams = [engine.generate(PROMPT, PLAIN.replace(max_tokens=39)) for _ in range(6)]
        await anext(streams[0])
        engine.close()
        for stream in streams:
            with pytest.raises(EngineDeadError):
                await stream
        await settled(lambda: {t.ident for t in threading.enumerate()} <= at_first)

    asyncio.run(main())
    # Most are refused by the queue; the engine's own ends are those of the test above.
    assert not (REFUSED | {"length", "deadline", "cancelled"}) - readers.seen.keys()


@pytest.mark.parametrize("overlap", [True, False])
def test_a_closed_engine_leaves_nothing_behind(overlap: bool) -> None:
    def live_and_close() -> None:
        clock = Clock()
        engine = make_engine(clock, overlap=overlap)
        with faults():
            Load(engine, clock, 2).serve(20)
        engine.close()

    live_and_close()
    before = census()
    live_and_close()
    assert census() == before
