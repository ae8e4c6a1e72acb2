"""Deadlines of requests, on a clock that the tests put forward."""

import asyncio
import itertools
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from jpaged import AsyncLLMEngine, RequestError, RequestOutput, SamplingParams
from jpaged.engine.llm_engine import LLMEngine
from jpaged.sampling.params import RequestOutputKind
from tests.engine import driving, tiny
from tests.engine.async_helpers import run, settled
from tests.engine.driving import LATER, Clock, drain, ids

GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
OTHER, VICTIM = tiny.prompts(8, 12)
PAGES = 12


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(scope="module")
def shared() -> Iterator[LLMEngine]:
    """A pool that does not hold two of the longest sequences at once."""
    made = driving.engine(
        max_model_len=44,
        kv_cache_memory_bytes=(PAGES + 1) * 4 * tiny.BYTES_PER_TOKEN,
        admission_policy="all",
    )
    yield made
    made.close()


@pytest.fixture
def engine(shared: LLMEngine, clock: Clock) -> Iterator[LLMEngine]:
    shared._clock = clock
    yield shared
    driving.check_idle(shared)


STATES: dict[str, Callable[[LLMEngine, int], bool]] = {
    "waiting": lambda engine, told: True,
    "prefilling": lambda engine, told: engine.stats().num_running == 2,
    "running": lambda engine, told: told > 3,
    "two samples": lambda engine, told: told > 5,
    "preempted": lambda engine, told: engine.stats().num_waiting > 0,
}


@pytest.mark.parametrize("state", list(STATES))
def test_a_request_ends_in_any_state_and_the_others_go_on(
    engine: LLMEngine, clock: Clock, state: str
) -> None:
    params = GREEDY.replace(n=2 if state == "two samples" else 1)
    engine.add_request("other", ids(OTHER), GREEDY)
    if state != "waiting":
        engine.step()
    engine.add_request("victim", ids(VICTIM), params, timeout=1000)
    clock.ahead = 900
    told = 0
    while not STATES[state](engine, told):
        for output in engine.step():
            assert not output.finished
            if output.request_id == "victim":
                told = sum(len(sample.token_ids) for sample in output.outputs)
    clock.ahead = 1001
    outputs = {output.request_id: output for output in engine.step()}
    victim = outputs["victim"]
    assert victim.finished
    for sample in victim.outputs:
        assert (sample.finish_reason, sample.stop_reason) == ("abort", "deadline")
        assert sample.token_ids == tiny.greedy(VICTIM, len(sample.token_ids))
    assert sum(len(sample.token_ids) for sample in victim.outputs) == told
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting) == (1, 0)
    assert stats.pages_used <= -(-(len(OTHER) + 30) // 4)
    assert drain(engine)["other"].outputs[0].token_ids == tiny.greedy(OTHER, 30)


def test_pages_come_back_with_the_step_that_gives_a_request_up(
    engine: LLMEngine, clock: Clock
) -> None:
    for i in range(2):
        engine.add_request(f"r{i}", ids(VICTIM), GREEDY.replace(n=2), timeout=1000)
    for _ in range(4):
        engine.step()
    assert engine.stats().pages_used > 0
    clock.ahead = LATER
    assert sorted(output.request_id for output in engine.step()) == ["r0", "r1"]
    driving.check_idle(engine)
    assert not engine.has_unfinished_requests()


def test_each_request_has_its_own_deadline(engine: LLMEngine, clock: Clock) -> None:
    for i, timeout in enumerate((300, 100, None, 200)):
        engine.add_request(f"r{i}", ids(OTHER), GREEDY, timeout=timeout)
    ended = []
    for clock.ahead in (50, 150, 250, 350):
        ended.append([output.request_id for output in engine.step() if output.finished])
    assert ended == [[], ["r1"], ["r3"], ["r0"]]
    assert drain(engine)["r2"].outputs[0].token_ids == tiny.greedy(OTHER, 30)


def test_a_deadline_that_does_not_come_changes_nothing(engine: LLMEngine, clock: Clock) -> None:
    engine.add_request("r", ids(OTHER), GREEDY, timeout=np.float32(1000))
    output = drain(engine)["r"]
    assert output.outputs[0].token_ids == tiny.greedy(OTHER, 30)
    assert output.outputs[0].finish_reason == "length"
    clock.ahead = LATER
    engine.add_request("r", ids(OTHER), GREEDY)
    assert drain(engine)["r"].outputs[0].finish_reason == "length", "the old deadline is gone"


def test_a_sample_that_has_ended_keeps_its_end(engine: LLMEngine, clock: Clock) -> None:
    params = SamplingParams(temperature=1.5, seed=3, n=2, max_tokens=30, ignore_eos=True)
    engine.add_request("r", ids(OTHER), params)
    first, second = (sample.token_ids for sample in drain(engine)["r"].outputs)
    stop = next(token for token in first if token not in second)
    engine.add_request("r", ids(OTHER), params.replace(stop_token_ids=[stop]), timeout=1000)
    for _ in range(first.index(stop) + 4):
        engine.step()
    clock.ahead = LATER
    (output,) = engine.step()
    assert [sample.finish_reason for sample in output.outputs] == ["stop", "abort"]
    assert [sample.stop_reason for sample in output.outputs] == [stop, "deadline"]
    assert output.outputs[0].token_ids == first[: first.index(stop) + 1]


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_the_text_is_told_as_far_as_it_came(
    engine: LLMEngine, clock: Clock, kind: RequestOutputKind
) -> None:
    """What an abort from outside at the same step would tell, halves of characters included."""
    params = SamplingParams(
        temperature=1.5, seed=8, max_tokens=30, ignore_eos=True, output_kind=kind
    )

    def told(outputs: list[RequestOutput]) -> tuple[str, list[int]]:
        parts = [output.outputs[0] for output in outputs]
        if kind is not RequestOutputKind.DELTA:
            parts = parts[-1:]
        return "".join(p.text for p in parts), [t for p in parts for t in p.token_ids]

    for steps in range(1, 12):
        engine.add_request("r", ids(OTHER), params)
        outputs = [output for _ in range(steps) for output in engine.step()]
        aborted = told(outputs + engine.abort_request("r"))
        clock.ahead = 0.0
        engine.add_request("r", ids(OTHER), params, timeout=1000)
        outputs = [output for _ in range(steps) for output in engine.step()]
        clock.ahead = LATER
        outputs += engine.step()
        assert outputs[-1].outputs[0].stop_reason == "deadline"
        assert told(outputs) == aborted
        assert bool(aborted[0]) == bool(aborted[1])


BAD = [0, 0.0, -1, -0.5, float("nan"), float("inf"), True, "1", [1], 1j, 10**400]


@pytest.mark.parametrize("timeout", BAD, ids=lambda value: repr(value)[:8])
def test_a_bad_timeout_is_refused_by_name(engine: LLMEngine, timeout: object) -> None:
    before = engine.stats()
    with pytest.raises(RequestError, match="timeout") as error:
        engine.add_request("r", ids(OTHER), GREEDY, timeout=timeout)  # type: ignore[arg-type]
    assert error.value.field == "timeout"
    assert engine.stats() == before
    engine.add_request("r", ids(OTHER), GREEDY.replace(max_tokens=1))  # the id is free
    assert drain(engine).keys() == {"r"}


def test_the_engine_for_asyncio_gives_a_last_output() -> None:
    """Awaited, iterated, and in the queue behind these."""
    clock = Clock()
    clock.hold_at = 12
    serving = AsyncLLMEngine(driving.engine(clock, max_num_seqs=2))
    long = GREEDY.replace(max_tokens=200)

    async def main() -> list[RequestOutput]:
        awaited = asyncio.ensure_future(serving.generate(ids(OTHER), long, timeout=1000)._final())
        stream = serving.generate(ids(VICTIM), long, timeout=1000)
        first = await anext(stream)
        assert not first.finished
        queued = asyncio.ensure_future(serving.generate(ids(OTHER), long, timeout=1000)._final())
        await settled(lambda: len(serving.loop.active_ids()) == 3)
        clock.ahead = LATER
        clock.release()
        iterated = [output async for output in stream]
        rest = await serving.generate(ids(OTHER), GREEDY)
        assert rest.outputs[0].token_ids == tiny.greedy(OTHER, 30)
        return [await awaited, iterated[-1], await queued]

    try:
        outputs = run(main())
    finally:
        clock.release()
        serving.close()
    for output, prompt in zip(outputs, (OTHER, VICTIM, OTHER), strict=True):
        (sample,) = output.outputs
        assert (sample.finish_reason, sample.stop_reason) == ("abort", "deadline")
        assert sample.token_ids == tiny.greedy(prompt, len(sample.token_ids))
    assert len(outputs[1].outputs[0].token_ids) > 0


def test_deadlines_do_not_change_what_the_others_say(engine: LLMEngine, clock: Clock) -> None:
    """One request after the other is given up, in a pool that preempts."""
    prompts = tiny.prompts(8, 5, 11, 3, 9, 6, seed=4)
    for i, prompt in enumerate(prompts):
        timeout = 100.0 * i if i % 2 else None
        engine.add_request(f"r{i}", ids(prompt), GREEDY, timeout=timeout)
    done = {}
    for step in itertools.count():
        clock.ahead = 8.0 * step
        done |= {output.request_id: output for output in engine.step() if output.finished}
        engine.check()
        if not engine.has_unfinished_requests():
            break
    assert engine.stats().num_preemptions > 0
    for i, prompt in enumerate(prompts):
        (sample,) = done[f"r{i}"].outputs
        assert sample.token_ids == tiny.greedy(prompt, len(sample.token_ids))
        if i % 2 == 0:
            assert len(sample.token_ids) == 30
    assert any(output.outputs[0].stop_reason == "deadline" for output in done.values())
