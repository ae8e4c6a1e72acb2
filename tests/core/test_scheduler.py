"""Scheduler: what single situations must lead to."""

import math
import random
from typing import Any

import pytest

from jpaged.core.kv_cache_manager import KVCacheManager, KVGroupSpec
from jpaged.core.request import FinishReason, Request, RequestStatus
from jpaged.core.scheduler import Scheduler
from jpaged.core.scheduler_config import SchedulerConfig

from .fake_runner import FakeRunner, expected_output


def runner(
    *,
    pages: int = 1000,
    page_size: int = 4,
    rows: int = 8,
    budget: int = 16,
    length: int = 100,
    window: int | None = None,
    **options: Any,
) -> FakeRunner:
    # As many as have room, unless a test is about admission: preemption is what most are about.
    options = {"admission": "all", **options}
    return FakeRunner(
        groups=[KVGroupSpec(pages, window)],
        page_size=page_size,
        max_num_seqs=rows,
        max_num_batched_tokens=budget,
        max_model_len=length,
        **options,
    )


def request(sequence: int, prompt: int, max_tokens: int, **kw: object) -> Request:
    ids = [(7 * sequence + 3 * i) % 50 for i in range(prompt)]
    return Request(sequence=sequence, prompt_token_ids=ids, max_tokens=max_tokens, **kw)  # type: ignore[arg-type]


def drain(run: FakeRunner, limit: int = 10_000) -> None:
    while run.scheduler.has_unfinished():
        run.step()
        assert run.num_steps < limit
    run.assert_empty()


def test_a_prompt_is_cut_into_chunks_of_the_budget() -> None:
    run = runner(budget=16)
    run.scheduler.add(request(0, 40, 3))
    chunks = []
    while run.scheduler.has_unfinished():
        plan = run.begin_step()
        (entry,) = plan.entries
        chunks.append((entry.first, entry.num_tokens, entry.samples))
        run.finish_step(plan)
    assert chunks == [(0, 16, False), (16, 16, False), (32, 8, True), (40, 1, True), (41, 1, True)]
    run.assert_empty()


def test_decodes_go_before_a_long_prefill() -> None:
    run = runner(budget=4, rows=4)
    for i in range(3):
        run.scheduler.add(request(i, 1, 50))
    run.step()
    run.scheduler.add(request(3, 60, 1))
    for _ in range(20):
        plan = run.begin_step()
        assert [e.request.sequence for e in plan.entries] == [0, 1, 2, 3]
        run.finish_step(plan)


def test_a_request_joins_at_the_next_step_and_leaves_at_once() -> None:
    run = runner()
    run.scheduler.add(request(0, 4, 30))
    run.step()
    run.scheduler.add(request(1, 4, 1))
    events = run.step()
    assert {e.request.sequence: e.finish_reason for e in events} == {
        0: None,
        1: FinishReason.LENGTH,
    }
    assert run.kv.num_held == 2
    drain(run)


def test_the_youngest_is_preempted_and_computed_again() -> None:
    run = runner(pages=8, page_size=4, length=28, budget=32)
    requests = [request(i, 8, 20) for i in range(3)]
    for r in requests:
        run.scheduler.add(r)
    drain(run)
    assert run.scheduler.num_preemptions > 0
    assert requests[0].num_preemptions == 0, "the oldest is never preempted"
    for r in requests:
        assert r.output_token_ids == expected_output(r, [None])


def test_a_preempted_request_comes_back_before_younger_ones() -> None:
    run = runner(pages=8, page_size=4, length=28, budget=32)
    for i in range(4):
        run.scheduler.add(request(i, 8, 20))
    finished = []
    while run.scheduler.has_unfinished():
        finished += [e.request.sequence for e in run.step() if e.finish_reason]
    assert finished == [0, 1, 2, 3]


@pytest.mark.parametrize("state", ["waiting", "prefilling", "running", "preempted", "in flight"])
def test_abort_in_any_state_returns_all_pages(state: str) -> None:
    run = runner(pages=8, page_size=4, length=28, budget=8)
    other, victim = request(0, 8, 20), request(1, 12, 14)
    run.scheduler.add(other)
    run.step()
    run.scheduler.add(victim)
    plan = None
    if state != "waiting":
        run.step()
        assert victim.status is RequestStatus.RUNNING and victim.num_computed == 7
    if state in ("running", "in flight", "preempted"):
        run.step()
        assert victim.output_token_ids
    if state == "preempted":
        while victim.status is not RequestStatus.PREEMPTED:
            run.step()
    if state == "in flight":
        plan = run.begin_step()
    had = list(victim.output_token_ids)
    assert run.scheduler.finish(1, FinishReason.ABORT)
    run.scheduler.check()
    assert victim.status is RequestStatus.FINISHED and victim.finish_reason is FinishReason.ABORT
    assert run.kv.num_held == len(run.kv.table(0, 0))
    assert not run.scheduler.finish(1, FinishReason.ABORT), "it has ended already"
    if plan is not None:
        assert all(event.request is other for event in run.finish_step(plan))
    drain(run)
    assert victim.output_token_ids == had
    assert other.output_token_ids == expected_output(other, [None])


def test_finish_with_a_stop_string_keeps_the_reason() -> None:
    run = runner()
    r = request(0, 4, 10)
    run.scheduler.add(r)
    run.step()
    assert run.scheduler.finish(0, FinishReason.STOP, "END")
    assert (r.finish_reason, r.stop_reason) == (FinishReason.STOP, "END")
    run.assert_empty()
    assert not run.scheduler.has_unfinished()


def test_stop_ids_name_themselves_and_eos_does_not() -> None:
    want = expected_output(request(0, 4, 10), [None])
    for ends, stop_reason in (
        ({"stop_token_ids": frozenset([want[0]])}, want[0]),
        ({"eos_token_ids": frozenset([want[0]])}, None),
    ):
        run = runner()
        r = request(0, 4, 10, **ends)
        run.scheduler.add(r)
        drain(run)
        assert r.output_token_ids == want[:1]
        assert (r.finish_reason, r.stop_reason) == (FinishReason.STOP, stop_reason)


def test_a_too_long_prompt_is_refused_and_holds_nobody_up() -> None:
    run = runner(length=32)
    ok = request(0, 4, 4)
    run.scheduler.add(ok)
    for prompt, max_tokens in ((32, 1), (1000, 1), (4, 29)):
        with pytest.raises(ValueError, match="max_model_len"):
            run.scheduler.add(request(1, prompt, max_tokens))
    with pytest.raises(ValueError, match="at least one prompt token"):
        run.scheduler.add(request(1, 0, 1))
    with pytest.raises(ValueError, match="added already"):
        run.scheduler.add(request(0, 4, 4))
    run.scheduler.check()
    assert run.scheduler.num_waiting == 1
    drain(run)
    assert ok.output_token_ids == expected_output(ok, [None])


def test_a_pool_too_small_for_max_model_len_is_refused() -> None:
    config = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=8, max_model_len=17)
    kv = KVCacheManager([KVGroupSpec(5)], 4, max_step_tokens=8)
    with pytest.raises(ValueError, match="holds 16 tokens, max_model_len is 17"):
        Scheduler(config, kv)


def test_mixed_requests_are_batched_continuously() -> None:
    """64 requests: late ones emit before the longest ends, and no step is wasted."""
    rng = random.Random(0)
    budget = 512
    run = runner(pages=2000, page_size=16, rows=64, budget=budget, length=800, prefix_caching=False)

    def length(median: int, most: int) -> int:
        return min(most, max(16, round(median * math.exp(rng.gauss(0, 0.9)))))

    requests = [request(i, length(120, 512), length(96, 256)) for i in range(64)]
    longest = max(requests, key=lambda r: r.max_tokens)
    late = request(64, 16, 16)
    for r in requests:
        run.scheduler.add(r)
    order: list[tuple[int, bool]] = []
    while run.scheduler.has_unfinished():
        if run.num_steps == 90:
            run.scheduler.add(late)
        order += [(e.request.sequence, e.finish_reason is not None) for e in run.step()]
    assert order.index((late.sequence, False)) < order.index((longest.sequence, True))
    everything = [*requests, late]
    alone = max(-(-len(r.prompt_token_ids) // budget) + r.max_tokens - 1 for r in everything)
    total = sum(len(r.prompt_token_ids) + r.max_tokens - 1 for r in everything)
    assert run.num_tokens == total, "nothing was computed twice"
    assert run.num_steps <= 1.15 * max(alone, total / budget)
    for r in everything:
        assert r.output_token_ids == expected_output(r, [None])
    run.assert_empty()


@pytest.mark.parametrize("page_size", [1, 4, 16, 32])
@pytest.mark.parametrize("prompt", [15, 16, 17, 31, 32, 33])
def test_prompts_around_a_multiple_of_the_page_size(page_size: int, prompt: int) -> None:
    run = runner(pages=80 // page_size + 2, page_size=page_size, length=80, budget=16)
    r = request(0, prompt, 80 - prompt)
    run.scheduler.add(r)
    drain(run)
    assert r.output_token_ids == expected_output(r, [None])
    assert run.scheduler.num_preemptions == 0
