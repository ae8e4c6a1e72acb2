"""A step sent before the last one's tokens are known says what an engine with everything off says."""

import collections
import itertools
import random
from collections.abc import Iterator, Sequence
from types import NoneType
from typing import Any
from unittest import mock

import jax
import pytest

from jpaged import EngineDeadError, ModelLoadError, RequestOutput, SamplingParams
from jpaged.engine.llm_engine import LLMEngine
from jpaged.sampling.params import RequestOutputKind
from jpaged.worker.compile_cache import CompilationCounter
from tests.engine import driving, tiny
from tests.engine.driving import ids

LONGEST = 64
PAGE = 4
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
PROMPTS = tiny.prompts(8, 5, 13, 3, 21, 9)
STEMS = tiny.prompts(4, 17, 33, seed=1)
ENDS = ["length", "stop id", "stop string"]

ALL = list(itertools.product([True, False], [1, 4, 16], [1, 2, 7, 16, 64], [True, False]))
# Of the full product, enough that every value of each setting but the chunk of two occurs.
QUICK = [(False, 4, 16, True), (True, 1, 7, True), (True, 16, 64, False), (True, 1, 1, True)]
SETTINGS = [pytest.param(*s, marks=[] if s in QUICK else [pytest.mark.full]) for s in ALL]


# A request and the step before which it comes; a sample's tokens, text and end.
Arrival = tuple[int, list[int], SamplingParams]
Said = tuple[list[int], str, str | None, int | str | None]


def make_engine(
    *, caching: bool = True, page: int = PAGE, chunk: int = 16, is_small: bool = True, **more: Any
) -> LLMEngine:
    """Four rows, or as many as a chunk has tokens; a small pool holds one sequence and a little more."""
    return driving.engine(
        config=tiny.HF_CONFIG | {"eos_token_id": list(range(8, 24))},
        enable_prefix_caching=caching,
        page_size=page,
        max_num_batched_tokens=chunk,
        max_num_seqs=min(4, chunk),
        max_model_len=LONGEST,
        kv_cache_memory_bytes=(LONGEST + (2 if is_small else 1000) * page) * tiny.BYTES_PER_TOKEN,
        # By expected lengths none would be preempted.
        admission_policy="all",
        **more,
    )


@pytest.fixture(scope="module")
def plain() -> Iterator[LLMEngine]:
    """Nothing overlaps, nothing is cached, and there is room for all."""
    made = make_engine(caching=False, page=16, chunk=64, is_small=False, async_scheduling=False)
    yield made
    made.close()


@pytest.fixture(scope="module")
def twins() -> Iterator[list[LLMEngine]]:
    """Two that differ in this alone: the second sends a step before it looks at the last one."""
    made = [make_engine(async_scheduling=overlap) for overlap in (False, True)]
    yield made
    for engine in made:
        driving.check_idle(engine)
        engine.close()


def serve(engine: LLMEngine, arrivals: Sequence[Arrival]) -> list[list[Said]]:
    """What each sample says, in the order of arrival."""
    done: dict[str, list[Said]] = {}
    for step in itertools.count():
        for i, (at, prompt, params) in enumerate(arrivals):
            if at == step:
                engine.add_request(str(i), ids(prompt), params)
        for output in engine.step():
            done[output.request_id] = [
                (s.token_ids, s.text, s.finish_reason, s.stop_reason) for s in output.outputs
            ]
        engine.check()
        if step > arrivals[-1][0] and not engine.has_unfinished_requests():
            break
    driving.check_idle(engine)
    return [done[str(i)] for i in range(len(arrivals))]


def draw(plain: LLMEngine, seed: int) -> list[Arrival]:
    """A mixed batch of prompts that begin alike, some of which stop in the midst of what they would say."""
    rng = random.Random(seed)
    arrivals, step = [], 0
    for _ in range(rng.randint(5, 8)):
        step += rng.choice([0, 0, 1, 2, 9])
        prompt = rng.choice(STEMS)[: rng.choice([1, 4, 16, 17, 33])]
        prompt = prompt + rng.choices(range(8, 200), k=rng.randint(0, 5))
        params = SamplingParams(
            n=rng.choice([1, 1, 2, 3]),
            temperature=rng.choice([0, 1.3]),
            seed=rng.randrange(1000),
            max_tokens=rng.choice([1, 2, 9, 16, 24]),
            ignore_eos=rng.random() < 0.8,
        )
        arrivals.append((step, prompt, params))
    for i, samples in enumerate(serve(plain, arrivals)):
        tokens, text, *_ = rng.choice(samples)
        at = rng.randrange(max(1, len(text)))
        stops = [{"stop_token_ids": [rng.choice(tokens)]}, {"stop": text[at : at + 2] or None}, {}]
        step, prompt, params = arrivals[i]
        arrivals[i] = (step, prompt, params.replace(**rng.choice(stops)))
    return arrivals


@pytest.mark.parametrize(("caching", "page", "chunk", "is_small"), SETTINGS)
def test_tokens_are_those_of_an_engine_with_everything_off(
    plain: LLMEngine, caching: bool, page: int, chunk: int, is_small: bool
) -> None:
    engine = make_engine(caching=caching, page=page, chunk=chunk, is_small=is_small)
    ends = set()
    for seed in range(6):
        arrivals = draw(plain, seed)
        wanted = serve(plain, arrivals)
        with CompilationCounter() as compilations:
            assert serve(engine, arrivals) == wanted, f"seed {seed}"
        assert compilations.count == 0
        ends |= {(end, type(stop)) for samples in wanted for *_, end, stop in samples}
    assert ends == {("length", NoneType), ("stop", NoneType), ("stop", int), ("stop", str)}
    stats = engine.stats()
    assert (stats.num_preemptions > 0) == is_small or chunk < 4  # few rows need few pages
    assert (stats.prefix_cache_hits > 0) == caching
    engine.close()


def ending(engine: LLMEngine, prompt: list[int], end: str) -> SamplingParams:
    """What ends a greedy answer in its midst."""
    engine.add_request("r", ids(prompt), GREEDY)
    (sample,) = driving.drain(engine)["r"].outputs
    stop_id, stop_string = [sample.token_ids[9]], sample.text[7:9]
    changes = {"stop id": {"stop_token_ids": stop_id}, "stop string": {"stop": stop_string}}
    return GREEDY.replace(**changes.get(end, {"max_tokens": 7}))


@pytest.mark.parametrize("end", ENDS)
def test_steps_overlap_and_a_batch_takes_at_most_one_more(twins: list[LLMEngine], end: str) -> None:
    """The device none where the end is foreseen; it wastes one where the tokens bring it."""
    costs = []
    for served, order in zip(twins, ("dcdc", "ddcd"), strict=True):
        params = ending(served, PROMPTS[3], end)
        for i in range(12):
            served.add_request(str(i), ids(PROMPTS[3]), params)
        sent, calls = served.stats().num_steps, 0
        worker = mock.Mock(wraps=served._worker)
        with mock.patch.object(served._steps, "_worker", worker):
            while served.has_unfinished_requests():
                served.step()
                calls += 1
        assert "".join(name[0] for name, *_ in worker.mock_calls).startswith(order)
        costs.append((served.stats().num_steps - sent, calls))
    (steps, calls), (overlapped, more_calls) = costs
    assert steps <= overlapped <= steps + (0 if end == "length" else 3)
    assert calls < more_calls <= calls + 3


@pytest.mark.parametrize("end", ENDS)
def test_pages_are_back_when_the_end_is_told(twins: list[LLMEngine], end: str) -> None:
    calls = [0, 0]
    for lag, served in enumerate(twins):
        served.add_request("first", ids(PROMPTS[0]), ending(served, PROMPTS[0], end))
        served.add_request("other", ids(PROMPTS[1]), GREEDY.replace(max_tokens=30))
        outputs: dict[str, RequestOutput] = {}
        while "first" not in outputs or not outputs["first"].finished:
            outputs = {output.request_id: output for output in served.step()}
            calls[lag] += 1
        computed = len(PROMPTS[1]) + len(outputs["other"].outputs[0].token_ids) - 1 + lag
        assert served.stats().pages_used == -(-computed // PAGE)
        driving.drain(served)
    assert calls[1] == calls[0] + 1


def test_an_abort_frees_id_row_and_pages_at_once(twins: list[LLMEngine]) -> None:
    """It tells what was told; whoever comes next takes the place under the step in flight."""
    engine = twins[1]
    wanted = [tiny.greedy(prompt, 20) for prompt in PROMPTS]
    for steps in range(1, 12):
        for i in range(5):
            engine.add_request(str(i), ids(PROMPTS[i]), GREEDY.replace(n=1 + (i == 2)))
        told: dict[str, list[int]] = {}
        for _ in range(steps):
            told |= {o.request_id: o.outputs[0].token_ids for o in engine.step()}
        held = engine.stats().pages_used
        for aborted in engine.abort_request(["0", "2"]):
            assert aborted.outputs[0].token_ids == told.get(aborted.request_id, [])
        assert engine.stats().pages_used < held
        engine.add_request("0", ids(PROMPTS[5]), GREEDY)
        outputs = driving.drain(engine)
        assert outputs.keys() == {"0", "1", "3", "4"}
        for name, output in outputs.items():
            assert output.outputs[0].token_ids == wanted[int(name) or 5], (steps, name)


def test_new_weights_begin_behind_the_step_in_flight(twins: list[LLMEngine]) -> None:
    """Whether a request runs, fills its pages or waits, no later token is of old weights or pages."""
    params = GREEDY.replace(output_kind=RequestOutputKind.DELTA, max_tokens=12)
    engine = twins[1]
    for steps, (seed, new_seed) in enumerate([(0, 1), (1, 0)] * 4):
        version = engine.weights_version
        outputs: list[RequestOutput] = []
        for i in range(4):
            engine.add_request(str(i), ids(PROMPTS[i + 1]), params.replace(n=1 + (i == 1)))
        for _ in range(steps):
            outputs += engine.step()
        with CompilationCounter() as compilations:
            with pytest.raises(ModelLoadError):
                engine.update_params({})
            engine.update_params(tiny.model(new_seed))
            while engine.has_unfinished_requests():
                outputs += engine.step()
        assert compilations.count == 0
        tokens: dict[tuple[str, int, int], list[int]] = collections.defaultdict(list)
        for output in outputs:
            for sample in output.outputs:
                tokens[output.request_id, sample.index, sample.weights_version] += sample.token_ids
        for name, index in [("0", 0), ("1", 0), ("1", 1), ("2", 0), ("3", 0)]:
            prompt, old = PROMPTS[int(name) + 1], tokens[name, index, version]
            assert old == tiny.greedy(prompt, len(old), seed=seed)
            rest = tiny.greedy(prompt + old, 12 - len(old), seed=new_seed)
            assert tokens[name, index, version + 1] == rest, (steps, name)


def test_close_gives_everything_back_under_a_step_in_flight() -> None:
    def taken() -> int:
        return sum(array.nbytes for array in jax.live_arrays())

    before = taken()
    closing = make_engine()
    closing.add_request("r", ids(PROMPTS[0]), GREEDY)
    for _ in range(4):
        closing.step()
    assert taken() > before + 1000
    closing.close()
    assert taken() < before + 1000
    with pytest.raises(EngineDeadError, match="closed"):
        closing.step()
    (output,) = closing.abort_request("r")
    assert output.outputs[0].token_ids == tiny.greedy(PROMPTS[0], 3)
    driving.check_idle(closing)
