"""Greedy tokens are those of plain attention, whatever the chunks, pages, company and preemptions."""

import itertools

import pytest

from jpaged import SamplingParams
from tests.engine import tiny

PROMPTS = tiny.prompts(1, 5, 16, 50, 90, 7)
COUNT = 24
GREEDY = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)

ALL = list(itertools.product([1, 7, 64, 2048], [1, 16, 64], [False, True]))
# Of the full product, enough that every value of each setting occurs.
QUICK = [(1, 16, True), (7, 1, True), (64, 64, False), (2048, 16, False), (7, 16, True)]


def _settings() -> list[object]:
    return [
        pytest.param(*setting, marks=[] if setting in QUICK else [pytest.mark.full])
        for setting in ALL
    ]


@pytest.mark.parametrize(("chunk", "page_size", "preempt"), _settings())
def test_tokens_are_those_of_plain_attention(chunk: int, page_size: int, preempt: bool) -> None:
    longest = 128
    pages = longest // page_size + (2 if preempt else 1000)
    if preempt and page_size == 64:
        # Three pages, of which the longest sequence takes two.
        pages = 4
    rows = min(4, chunk)
    with tiny.llm(
        max_num_batched_tokens=chunk,
        max_num_seqs=rows,
        page_size=page_size,
        max_model_len=longest,
        kv_cache_memory_bytes=pages * page_size * tiny.BYTES_PER_TOKEN,
        # By expected lengths none would be preempted.
        admission_policy="all",
    ) as llm:
        together = llm.generate(tiny.as_dicts(PROMPTS), GREEDY, use_tqdm=False)
        for prompt, output in zip(PROMPTS, together, strict=True):
            assert output.outputs[0].token_ids == tiny.greedy(prompt, COUNT)
            assert output.outputs[0].finish_reason == "length"
        stats = llm.engine.stats()
        if preempt and rows > 1:
            assert stats.num_preemptions > 0
        elif not preempt:
            assert stats.num_preemptions == 0
        tiny.check_idle(llm)
        alone = [llm.generate(p, GREEDY, use_tqdm=False)[0] for p in tiny.as_dicts(PROMPTS)]
        assert [o.outputs[0].token_ids for o in alone] == [o.outputs[0].token_ids for o in together]
        tiny.check_idle(llm)


def test_a_request_that_joins_late_answers_before_the_longest_ends() -> None:
    with tiny.llm() as llm:
        engine = llm.engine
        engine.add_request("long", {"prompt_token_ids": [9] * 20}, GREEDY.replace(max_tokens=60))
        order = []
        for step in range(1000):
            if step == 10:
                engine.add_request("late", {"prompt_token_ids": [11] * 5}, GREEDY)
            order += [output.request_id for output in engine.step() if output.finished]
            if step > 10 and not engine.has_unfinished_requests():
                break
        assert order == ["late", "long"]
        tiny.check_idle(llm)
