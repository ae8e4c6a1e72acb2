"""Faults at the k-th call of each part of a step: what they cost, and whom; the others notice nothing."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from jpaged import EngineDeadError, SamplingParams
from jpaged.engine.llm_engine import LLMEngine
from jpaged.sampling.params import RequestOutputKind
from tests.engine import driving, tiny
from tests.engine.driving import ids
from tests.engine.faults import REQUEST_FAULTS, STEP_FAULTS, Injected, Place, failing

PAGES = 12
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.3, seed=5, max_tokens=14, ignore_eos=True)
SHORT, STEM, OTHER, LONG = tiny.prompts(3, 13, 8, 21)
# In the order of arrival. Prompts that begin alike, samples, and texts that are made as they come or at
# the end.
REQUESTS: dict[str, tuple[list[int], SamplingParams]] = {
    "greedy": (OTHER, GREEDY),
    "samples": (STEM, SEEDED.replace(n=2)),
    "short": (SHORT, SEEDED.replace(max_tokens=30, output_kind=RequestOutputKind.FINAL_ONLY)),
    "prefix": ([*STEM, 70, 71], GREEDY.replace(stop="\0\0\0", max_tokens=16)),
    "long": (LONG, GREEDY.replace(logprobs=2, max_tokens=9)),
    "again": (STEM, SEEDED.replace(seed=9)),
}
# A spread that reaches from the first prefill to the last decode.
SPREAD = (1, 2, 3, 5, 8, 13, 21, 34, 55)
EACH = tuple(range(1, 201))


@dataclasses.dataclass(frozen=True)
class Said:
    """What one sample has come to."""

    tokens: list[int]
    text: str
    reason: str | None


def serve(engine: LLMEngine) -> dict[str, list[Said]]:
    """All requests to their ends, the second half after a few steps; one that is refused says nothing."""
    done: dict[str, list[Said]] = {}

    def add(names: list[str]) -> None:
        for name in names:
            prompt, params = REQUESTS[name]
            try:
                engine.add_request(name, ids(prompt), params)
            except Injected:
                done[name] = [Said([], "", "error")] * params.n

    def step() -> None:
        for output in engine.step():
            if output.finished:
                done[output.request_id] = [
                    Said(sample.token_ids, sample.text, sample.finish_reason)
                    for sample in output.outputs
                ]

    add(list(REQUESTS)[:3])
    for _ in range(5):
        step()
    add(list(REQUESTS)[3:])
    while engine.has_unfinished_requests():
        step()
    driving.check_idle(engine)
    return {name: done[name] for name in REQUESTS}


def make_engine(overlap: bool) -> LLMEngine:
    """A pool that does not hold all four rows to their ends."""
    return driving.engine(
        max_model_len=44,
        kv_cache_memory_bytes=(PAGES + 1) * 4 * tiny.BYTES_PER_TOKEN,
        admission_policy="all",
        async_scheduling=overlap,
    )


@pytest.fixture(scope="module", params=[True, False], ids=["overlap", "no overlap"])
def engine(request: pytest.FixtureRequest) -> Iterator[LLMEngine]:
    made = make_engine(request.param)
    yield made
    made.close()


@pytest.fixture(scope="module")
def undisturbed(engine: LLMEngine) -> dict[str, list[Said]]:
    """What the requests say when nothing fails."""
    said = serve(engine)
    for name in ("greedy", "prefix", "long"):
        prompt, params = REQUESTS[name]
        assert params.max_tokens is not None
        assert said[name][0].tokens == tiny.greedy(prompt, params.max_tokens)
    first, second = said["samples"]
    assert len(first.tokens) == len(second.tokens) == 14 and first != second
    assert engine.stats().num_preemptions > 0, "the pool is too large to be interesting"
    assert engine.stats().prefix_cache_hits > 0
    return said


def check_one_failed(said: dict[str, list[Said]], wanted: dict[str, list[Said]]) -> None:
    """One request, or one sample of it, ended with "error" and told no wrong token; the rest are right."""
    failed = [name for name in said if any(sample.reason == "error" for sample in said[name])]
    assert len(failed) == 1, f"{failed} failed"
    for name in REQUESTS:
        for sample, right in zip(said[name], wanted[name], strict=True):
            if sample.reason == "error":
                assert sample.tokens == right.tokens[: len(sample.tokens)]
            else:
                assert sample == right, f"{name} was disturbed"


def check_faults(
    engine: LLMEngine,
    wanted: dict[str, list[Said]],
    place: Place,
    at: tuple[int, ...],
    check: Callable[[dict[str, list[Said]], dict[str, list[Said]]], None] | None,
) -> None:
    """A run with a fault at each call of `at`, each followed by one without; `check` None: all is right."""
    with failing(place, lambda call: False) as calls:
        assert serve(engine) == wanted
    rounds = -(-max(at) // calls.count)
    fired = 0
    for k in at:
        with failing(place, lambda call, k=k: call == k) as calls:  # type: ignore[misc]
            said = [serve(engine) for _ in range(rounds)]
        fired += calls.failed
        disturbed = [one for one in said if one != wanted]
        if check is None or not calls.failed:
            assert not disturbed, f"call {k}"
        else:
            assert len(disturbed) <= 1, f"call {k}"
            for one in disturbed:
                check(one, wanted)
        if k in SPREAD:
            engine.add_request("next", ids(SHORT), GREEDY.replace(max_tokens=4))
            assert driving.drain(engine)["next"].outputs[0].token_ids == tiny.greedy(SHORT, 4)
    # A request that ends early leaves fewer calls than there were.
    assert fired >= 0.9 * len(at), "there are hardly so many calls"


@pytest.mark.parametrize("place", list(REQUEST_FAULTS))
def test_a_fault_ends_the_request_whose_call_it_was(
    engine: LLMEngine, undisturbed: dict[str, list[Said]], place: str
) -> None:
    check_faults(engine, undisturbed, REQUEST_FAULTS[place], SPREAD, check_one_failed)


@pytest.mark.parametrize("place", list(STEP_FAULTS))
def test_a_step_that_fails_costs_nobody_a_token(
    engine: LLMEngine, undisturbed: dict[str, list[Said]], place: str
) -> None:
    check_faults(engine, undisturbed, STEP_FAULTS[place], SPREAD, None)


@pytest.mark.full
@pytest.mark.parametrize("place", list(REQUEST_FAULTS))
def test_two_hundred_faults_end_the_request_whose_call_it_was(
    engine: LLMEngine, undisturbed: dict[str, list[Said]], place: str
) -> None:
    check_faults(engine, undisturbed, REQUEST_FAULTS[place], EACH, check_one_failed)


@pytest.mark.full
@pytest.mark.parametrize("place", list(STEP_FAULTS))
def test_two_hundred_steps_that_fail_cost_nobody_a_token(
    engine: LLMEngine, undisturbed: dict[str, list[Said]], place: str
) -> None:
    check_faults(engine, undisturbed, STEP_FAULTS[place], EACH, None)


@pytest.mark.parametrize("place", list(STEP_FAULTS))
def test_two_steps_in_a_row_may_fail_again_and_again(
    engine: LLMEngine, undisturbed: dict[str, list[Said]], place: str
) -> None:
    with failing(STEP_FAULTS[place], lambda call: call % 7 in (3, 4)) as calls:
        assert serve(engine) == undisturbed
    assert calls.failed > 10


def test_the_request_whose_tokens_have_no_text_ends_alone(
    engine: LLMEngine, undisturbed: dict[str, list[Said]]
) -> None:
    """A decoder that fails on the same token each time, at the request's end too."""
    others = {t for name in REQUESTS if name != "greedy" for t in undisturbed[name][0].tokens}
    others |= {t for s in undisturbed["samples"] for t in s.tokens}
    others |= {t for prompt, _ in REQUESTS.values() for t in prompt}
    tokens = undisturbed["greedy"][0].tokens
    bad = next(token for token in tokens if token not in others)
    decoder: Any = engine._decoder
    real = decoder.decode

    def decode(token_ids: list[int], **options: Any) -> str:
        if bad in token_ids:
            raise Injected("no text")
        return str(real(token_ids, **options))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoder, "decode", decode)
        said = serve(engine)
    check_one_failed(said, undisturbed)
    (failed,) = said["greedy"]
    assert failed.reason == "error"
    assert failed.tokens == tokens[: tokens.index(bad) + 1]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("place", ["pack", "run and donate", "collect"])
def test_three_failed_steps_in_a_row_are_the_end_and_each_call_says_so(
    place: str, overlap: bool
) -> None:
    engine = make_engine(overlap)
    for name, (prompt, params) in REQUESTS.items():
        engine.add_request(name, ids(prompt), params)
    with failing(STEP_FAULTS[place], lambda call: call > 9) as calls:
        with pytest.raises(EngineDeadError, match="step failed: call 12 of"):
            while True:
                engine.step()
        assert calls.failed == 3
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="step failed: call 12 of"):
            engine.step()
        with pytest.raises(EngineDeadError, match="step failed: call 12 of"):
            engine.add_request("late", ids(SHORT), GREEDY)
        with pytest.raises(EngineDeadError, match="step failed: call 12 of"):
            engine.update_params(tiny.model())
    aborted = engine.abort_request(list(REQUESTS))
    assert {output.request_id for output in aborted} <= REQUESTS.keys()
    driving.check_idle(engine)
    engine.close()
