"""Limits on the queue: what is beyond them is refused, by name, and costs the others nothing."""

from collections.abc import Iterator

import pytest

from jpaged import LLM, SamplingParams
from jpaged.engine.llm_engine import LLMEngine
from jpaged.errors import QueueFullError
from tests.engine import tiny
from tests.engine.driving import drain, ids

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SHORT = tiny.prompts(*[2] * 12)
CHAT_TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def shared() -> Iterator[LLM]:
    tokenizer = tiny.tokenizer.__wrapped__()
    tokenizer.chat_template = CHAT_TEMPLATE
    limits = {"max_num_queued_reqs": 3, "max_num_queued_tokens": 40}
    with tiny.llm(max_num_seqs=2, tokenizer=tokenizer, **limits) as made:
        yield made


@pytest.fixture
def limited(shared: LLM) -> Iterator[LLM]:
    """Two rows, and a queue of three sequences and forty tokens; idle again when the test ends."""
    yield shared
    shared.engine.abort_request(list(shared.engine._requests))
    tiny.check_idle(shared)


@pytest.fixture
def engine(limited: LLM) -> LLMEngine:
    return limited.engine


def refused(engine: LLMEngine, name: str, prompt: list[int], limit: str, n: int = 1) -> None:
    """A request is refused, and nothing of it is left."""
    before = engine.stats()
    with pytest.raises(QueueFullError, match=limit):
        engine.add_request(name, ids(prompt), GREEDY.replace(n=n))
    assert engine.stats() == before
    engine.check()


def test_a_sequence_too_many_is_refused_and_taken_once_there_is_room(engine: LLMEngine) -> None:
    for i in range(3):
        engine.add_request(f"r{i}", ids(SHORT[i]), GREEDY)
    refused(engine, "r3", SHORT[3], "max_num_queued_reqs is 3")
    engine.step()
    assert engine.stats().num_running == 2, "those that run are not in the queue"
    engine.add_request("r3", ids(SHORT[3]), GREEDY)
    engine.add_request("r4", ids(SHORT[4]), GREEDY)
    refused(engine, "r5", SHORT[5], "max_num_queued_reqs is 3")
    outputs = drain(engine)
    assert outputs.keys() == {f"r{i}" for i in range(5)}
    for i in range(5):
        assert outputs[f"r{i}"].outputs[0].token_ids == tiny.greedy(SHORT[i], 6)


def test_a_token_too_many_is_refused(engine: LLMEngine) -> None:
    first, second, third = tiny.prompts(20, 14, 7)
    engine.add_request("first", ids(first), GREEDY)
    engine.add_request("second", ids(second), GREEDY)
    refused(engine, "third", third, "max_num_queued_tokens 40")
    engine.add_request("third", ids(third[:6]), GREEDY)  # forty in all
    outputs = drain(engine)
    for name, prompt in ("first", first), ("second", second), ("third", third[:6]):
        assert outputs[name].outputs[0].token_ids == tiny.greedy(prompt, 6)


def test_samples_count_one_by_one(engine: LLMEngine) -> None:
    (long,) = tiny.prompts(20)
    engine.add_request("r", ids(SHORT[0]), GREEDY)
    refused(engine, "many", SHORT[1], "max_num_queued_reqs is 3", n=3)
    refused(engine, "long", long, "40 more .* max_num_queued_tokens 40", n=2)
    engine.add_request("long", ids(long[:19]), GREEDY.replace(n=2))
    outputs = drain(engine)
    assert [s.token_ids for s in outputs["long"].outputs] == [tiny.greedy(long[:19], 6)] * 2


def test_an_empty_queue_takes_any_request(engine: LLMEngine) -> None:
    """Else one that is larger than the limit could never be served."""
    (long,) = tiny.prompts(90)
    engine.add_request("long", ids(long), GREEDY)
    refused(engine, "r", SHORT[0], "90 tokens wait")
    assert drain(engine)["long"].outputs[0].token_ids == tiny.greedy(long, 6)
    engine.add_request("many", ids(SHORT[0]), GREEDY.replace(n=5))
    refused(engine, "r", SHORT[0], "5 sequences wait")
    assert [s.token_ids for s in drain(engine)["many"].outputs] == [tiny.greedy(SHORT[0], 6)] * 5


def test_an_abort_makes_room(engine: LLMEngine) -> None:
    for i in range(3):
        engine.add_request(f"r{i}", ids(SHORT[i]), GREEDY)
    engine.abort_request("r1")
    engine.add_request("r3", ids(SHORT[3]), GREEDY)
    refused(engine, "r4", SHORT[4], "max_num_queued_reqs")
    assert drain(engine).keys() == {"r0", "r2", "r3"}


def test_generate_feeds_the_queue(limited: LLM) -> None:
    """A program with all its prompts at hand has nobody else's to be protected from."""
    outputs = limited.generate(tiny.as_dicts(SHORT), GREEDY, use_tqdm=False)
    for prompt, output in zip(SHORT, outputs, strict=True):
        assert output.outputs[0].token_ids == tiny.greedy(prompt, 6)


def test_generate_feeds_the_queue_with_samples_of_long_prompts(limited: LLM) -> None:
    prompts = tiny.prompts(25, 30, 45, 3, 25)
    params = [GREEDY.replace(n=n) for n in (1, 2, 5, 3, 1)]
    outputs = limited.generate(tiny.as_dicts(prompts), params, use_tqdm=False)
    for prompt, param, output in zip(prompts, params, outputs, strict=True):
        assert [s.token_ids for s in output.outputs] == [tiny.greedy(prompt, 6)] * param.n


def test_chat_feeds_the_queue(limited: LLM) -> None:
    texts = [chr(97 + i) * 3 for i in range(8)]
    conversations = [[{"role": "user", "content": text}] for text in texts]
    outputs = limited.chat(conversations, GREEDY, use_tqdm=False)
    for text, output in zip(texts, outputs, strict=True):
        prompt = [int(i) for i in tiny.tokenizer().encode(text)]
        assert output.outputs[0].token_ids == tiny.greedy(prompt, 6)
