"""Prefix caching as a user meets it: what is said to be cached, and answers that do not depend on it."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from jpaged import RequestError, RequestOutput, SamplingParams
from jpaged.engine.llm_engine import LLMEngine
from tests.engine import driving, tiny
from tests.engine.driving import drain, ids

PAGE = 4
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=2)


@pytest.fixture(scope="module")
def shared() -> Iterator[LLMEngine]:
    made = driving.engine(page_size=PAGE)
    yield made
    made.close()


@pytest.fixture
def engine(shared: LLMEngine) -> Iterator[LLMEngine]:
    """An engine that has seen prompts of other tests, and is idle again when the test ends."""
    yield shared
    driving.check_idle(shared)


@pytest.fixture(scope="module")
def uncached() -> Iterator[LLMEngine]:
    """The same without prefix caching, and with steps that take four prompts at once."""
    made = driving.engine(page_size=PAGE, enable_prefix_caching=False, max_num_batched_tokens=128)
    yield made
    driving.check_idle(made)
    made.close()


def fresh(length: int, seed: int) -> list[int]:
    """A prompt that no other test has sent; two seeds are two beginnings."""
    return tiny.prompts(length, seed=1000 + seed)[0]


def ask(engine: LLMEngine, prompt: Any, params: SamplingParams = GREEDY) -> RequestOutput:
    """One request by itself."""
    engine.add_request("r", ids(prompt) if isinstance(prompt, list) else prompt, params)
    return drain(engine)["r"]


def counts(engine: LLMEngine) -> tuple[int, int]:
    stats = engine.stats()
    return stats.prefix_cache_queries, stats.prefix_cache_hits


def assert_same(one: RequestOutput, other: RequestOutput) -> None:
    """The same tokens and text, and log-probabilities as near as the order of sums lets them be."""
    for mine, theirs in zip(one.outputs, other.outputs, strict=True):
        assert (mine.token_ids, mine.text) == (theirs.token_ids, theirs.text)
        assert mine.logprobs is not None and theirs.logprobs is not None
        for position, expected in zip(mine.logprobs, theirs.logprobs, strict=True):
            assert {t: (p.rank, p.decoded_token) for t, p in position.items()} == {
                t: (p.rank, p.decoded_token) for t, p in expected.items()
            }
            for token, probability in position.items():
                assert probability.logprob == pytest.approx(expected[token].logprob, abs=1e-4)


@pytest.mark.parametrize("beside", [-1, 0, 1])
@pytest.mark.parametrize("pages", [1, 2, 3, 4, 8])
def test_a_hit_is_all_full_pages_but_the_last_token(
    engine: LLMEngine, pages: int, beside: int
) -> None:
    length = pages * PAGE + beside
    prompt = fresh(length, seed=10 * pages + beside)
    queries, hits = counts(engine)
    first, second = ask(engine, prompt), ask(engine, list(prompt))
    cached = (length - 1) // PAGE * PAGE
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, cached)
    assert counts(engine) == (queries + 2 * length, hits + cached)
    assert first.outputs[0].token_ids == tiny.greedy(prompt, 8)
    assert_same(second, first)


def test_a_conversation_finds_what_its_last_answer_left(engine: LLMEngine) -> None:
    turn = fresh(9, seed=200)
    for seed in range(4):
        output = ask(engine, turn)
        assert output.outputs[0].token_ids == tiny.greedy(turn, 8)
        before, turn = len(turn), [*turn, *output.outputs[0].token_ids, *fresh(5, seed=201 + seed)]
        # The last token of the answer was sampled and never computed.
        again = ask(engine, turn)
        assert again.num_cached_tokens == (before + 7) // PAGE * PAGE


def test_salts_part_requests_and_join_their_own(engine: LLMEngine) -> None:
    prompt = fresh(22, seed=300)
    salts = [None, "a", "b", "a", None, "b", "a" * 500, "é"]
    seen, outputs = set(), []
    for salt in salts:
        given = ids(prompt) if salt is None else ids(prompt) | {"cache_salt": salt}
        outputs.append(ask(engine, given))
        assert outputs[-1].num_cached_tokens == (20 if salt in seen else 0), salt
        seen.add(salt)
    for output in outputs:
        assert_same(output, outputs[0])


def test_a_salt_goes_with_text_as_with_ids(engine: LLMEngine) -> None:
    text = "a salt goes with text"
    prompt = [int(i) for i in tiny.tokenizer().encode(text)]
    first = ask(engine, {"prompt": text, "cache_salt": "text"})
    assert first.num_cached_tokens == 0
    assert ask(engine, {"prompt": text}).num_cached_tokens == 0
    same = ask(engine, {"prompt_token_ids": prompt, "cache_salt": "text"})
    assert same.num_cached_tokens == (len(prompt) - 1) // PAGE * PAGE


@pytest.mark.parametrize("salt", ["", 1, b"a", "\ud800"], ids=repr)
def test_a_bad_salt_is_refused_and_leaves_nothing(engine: LLMEngine, salt: object) -> None:
    before = engine.stats()
    with pytest.raises(RequestError, match="cache_salt") as error:
        engine.add_request("bad", ids(fresh(5, seed=400)) | {"cache_salt": salt}, GREEDY)
    assert error.value.field == "cache_salt"
    assert engine.stats() == before
    engine.add_request("bad", ids(fresh(5, seed=400)), GREEDY)  # the id is free
    assert drain(engine).keys() == {"bad"}


def test_a_request_may_opt_out_of_reading(engine: LLMEngine) -> None:
    """It computes all, is not counted, says the same, and leaves its pages to others."""
    prompt, aloof = fresh(19, seed=500), GREEDY.replace(skip_reading_prefix_cache=True)
    first = ask(engine, prompt, aloof)
    before = counts(engine)
    again = ask(engine, prompt, aloof)
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 0)
    assert counts(engine) == before
    reading = ask(engine, prompt)
    assert reading.num_cached_tokens == 16
    assert_same(again, first)
    assert_same(reading, first)


def test_nothing_is_kept_where_it_is_switched_off(uncached: LLMEngine) -> None:
    prompt = fresh(19, seed=600)
    outputs = [ask(uncached, prompt) for _ in range(2)]
    assert [output.num_cached_tokens for output in outputs] == [0, 0]
    assert counts(uncached) == (0, 0) and uncached.stats().pages_cached == 0
    assert_same(outputs[1], outputs[0])


def test_requests_side_by_side_share_what_is_there(engine: LLMEngine) -> None:
    """Sent together behind one that has ended; each goes on in a way of its own."""
    stem = fresh(24, seed=700)
    ask(engine, stem)
    prompts = [stem + fresh(3, seed=701 + i) for i in range(6)]
    for i, prompt in enumerate(prompts):
        engine.add_request(f"r{i}", ids(prompt), GREEDY)
    outputs = drain(engine)
    for i, prompt in enumerate(prompts):
        assert outputs[f"r{i}"].num_cached_tokens == 24
        assert outputs[f"r{i}"].outputs[0].token_ids == tiny.greedy(prompt, 8)


def test_nothing_is_said_to_be_cached_before_the_first_token(engine: LLMEngine) -> None:
    engine.add_request("r", ids(fresh(9, seed=800)), GREEDY)
    (aborted,) = engine.abort_request("r")
    assert aborted.num_cached_tokens is None


def most_pages(engine: LLMEngine) -> int:
    """The most pages held at once until all have ended."""
    most = 0
    while engine.has_unfinished_requests():
        engine.step()
        most = max(most, engine.stats().pages_used)
    driving.check_idle(engine)
    return most


@pytest.mark.parametrize("caching", [True, False], ids=["caching", "no caching"])
def test_samples_share_the_full_pages_of_their_prompt(
    engine: LLMEngine, uncached: LLMEngine, caching: bool
) -> None:
    """21 tokens are 5 pages and a token; 12 more, the last of which is not computed, end in the eighth."""
    served = engine if caching else uncached
    prompt, params = fresh(21, seed=900 + caching), GREEDY.replace(max_tokens=12)
    hits = counts(served)[1]
    served.add_request("r", ids(prompt), params.replace(n=4))
    assert most_pages(served) == 5 + 4 * 3
    assert counts(served)[1] == hits, "one's own samples are no hits"
    for i in range(4):
        uncached.add_request(f"r{i}", ids(prompt), params)
    assert most_pages(uncached) == 4 * 8


def test_samples_say_what_requests_with_their_seeds_say(
    engine: LLMEngine, uncached: LLMEngine
) -> None:
    """A sample is a function of seed, number and position: of n, and of whose pages it reads, it is not."""
    prompt = fresh(18, seed=1000)
    params = SamplingParams(temperature=1.3, seed=11, max_tokens=10, ignore_eos=True, logprobs=1)
    outputs = [
        ask(served, prompt, params.replace(n=n))
        for served in (uncached, engine, engine)
        for n in (1, 2, 4)
    ]
    assert [output.num_cached_tokens for output in outputs] == [0, 0, 0, 0, 16, 16, 16, 16, 16]
    whole = outputs[2]
    assert len({tuple(sample.token_ids) for sample in whole.outputs}) == 4
    for output in outputs:
        part = dataclasses.replace(whole, outputs=whole.outputs[: len(output.outputs)])
        assert_same(output, part)


def test_greedy_samples_are_all_the_greedy_answer(engine: LLMEngine) -> None:
    for length in (1, 4, 5, 17, 40):
        prompt = fresh(length, seed=1100 + length)
        output = ask(engine, prompt, GREEDY.replace(n=3))
        assert [s.token_ids for s in output.outputs] == [tiny.greedy(prompt, 8)] * 3
