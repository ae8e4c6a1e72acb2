"""Priorities: who is served first, who keeps its pages, and an engine that does not have them."""

from collections.abc import Iterator

import pytest

from jpaged import RequestError, SamplingParams
from jpaged.engine.llm_engine import LLMEngine
from tests.engine import driving, tiny
from tests.engine.driving import drain, ids

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPTS = tiny.prompts(5, 9, 3, 7)


@pytest.fixture(scope="module", params=[True, False], ids=["overlap", "no overlap"])
def shared(request: pytest.FixtureRequest) -> Iterator[LLMEngine]:
    made = driving.engine(
        scheduling_policy="priority", max_num_seqs=1, async_scheduling=request.param
    )
    yield made
    made.close()


@pytest.fixture
def engine(shared: LLMEngine) -> Iterator[LLMEngine]:
    """One row."""
    yield shared
    driving.check_idle(shared)


def test_the_lowest_goes_first_and_among_equals_who_came_first(engine: LLMEngine) -> None:
    for i, priority in enumerate((5, 1, -(10**30), 1)):
        engine.add_request(f"r{i}", ids(PROMPTS[i]), GREEDY, priority=priority)
    outputs = drain(engine)
    assert list(outputs) == ["r2", "r1", "r3", "r0"]
    for i, prompt in enumerate(PROMPTS):
        assert outputs[f"r{i}"].outputs[0].token_ids == tiny.greedy(prompt, 6)


def test_one_that_comes_later_passes_those_that_wait_and_stops_nobody(engine: LLMEngine) -> None:
    engine.add_request("first", ids(PROMPTS[0]), GREEDY, priority=9)
    for _ in range(3):
        engine.step()
    engine.add_request("second", ids(PROMPTS[1]), GREEDY, priority=1)
    engine.add_request("late", ids(PROMPTS[2]), GREEDY, priority=0)
    outputs = drain(engine)
    assert list(outputs) == ["first", "late", "second"]
    assert engine.stats().num_preemptions == 0


def test_all_samples_of_a_request_have_its_priority(engine: LLMEngine) -> None:
    engine.add_request("low", ids(PROMPTS[0]), GREEDY.replace(n=2), priority=1)
    engine.add_request("high", ids(PROMPTS[1]), GREEDY.replace(n=3), priority=0)
    outputs = drain(engine)
    assert list(outputs) == ["high", "low"]
    assert [s.token_ids for s in outputs["high"].outputs] == [tiny.greedy(PROMPTS[1], 6)] * 3


def test_the_lowest_is_preempted_last() -> None:
    """A pool that does not hold two to their ends, whoever came first."""
    engine = driving.engine(
        scheduling_policy="priority",
        max_model_len=44,
        kv_cache_memory_bytes=13 * 4 * tiny.BYTES_PER_TOKEN,
        admission_policy="all",
    )
    params = GREEDY.replace(max_tokens=30)
    for i, priority in enumerate((3, 2, 0, 1)):
        engine.add_request(f"r{i}", ids(PROMPTS[i]), params, priority=priority)
    outputs = drain(engine)
    assert list(outputs) == ["r2", "r3", "r1", "r0"]
    counts = [outputs[f"r{i}"].metrics.num_preemptions for i in range(4)]
    assert counts[2] == 0 < counts[0]
    for i, prompt in enumerate(PROMPTS):
        assert outputs[f"r{i}"].outputs[0].token_ids == tiny.greedy(prompt, 30)
    engine.close()


@pytest.mark.parametrize("priority", [1, -1])
def test_first_come_first_served_refuses_them_by_name(priority: int) -> None:
    engine = driving.engine()
    before = engine.stats()
    with pytest.raises(RequestError, match="scheduling_policy='priority'") as error:
        engine.add_request("r", ids(PROMPTS[0]), GREEDY, priority=priority)
    assert error.value.field == "priority"
    assert engine.stats() == before
    engine.add_request("r", ids(PROMPTS[0]), GREEDY, priority=0)
    assert drain(engine).keys() == {"r"}
    engine.close()


@pytest.mark.parametrize("priority", [True, 1.0, "1", None])
def test_a_priority_is_an_integer(engine: LLMEngine, priority: object) -> None:
    with pytest.raises(RequestError, match="priority must be an integer") as error:
        engine.add_request("r", ids(PROMPTS[0]), GREEDY, priority=priority)  # type: ignore[arg-type]
    assert error.value.field == "priority"
