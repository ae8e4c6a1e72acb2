"""Scheduling: who is served, passed, preempted and given up, and when; steps are counted."""

import pytest

from jpaged.core.request import FinishReason, RequestStatus

from .fake_runner import expected_output
from .test_scheduler import drain, request, runner


def test_the_lowest_priority_is_served_first_and_preempted_last() -> None:
    run = runner(pages=8, page_size=4, length=28, budget=32, rows=2, policy="priority")
    requests = [request(i, 8, 20, priority=p) for i, p in enumerate((5, 1, 0, 1))]
    for r in requests:
        run.scheduler.add(r)
    ended = []
    while run.scheduler.has_unfinished():
        ended += [e.request.sequence for e in run.step() if e.finish_reason]
    assert ended == [2, 1, 3, 0]
    assert requests[2].num_preemptions == 0 and run.scheduler.num_preemptions > 0
    for r in requests:
        assert r.output_token_ids == expected_output(r, [None])


def test_priorities_mean_nothing_when_the_first_comes_first() -> None:
    run = runner(rows=1)
    for i, p in enumerate((5, 1, 0)):
        run.scheduler.add(request(i, 4, 3, priority=p))
    ended = []
    while run.scheduler.has_unfinished():
        ended += [e.request.sequence for e in run.step() if e.finish_reason]
    assert ended == [0, 1, 2]


def test_each_step_of_a_thrashing_pool_makes_a_token() -> None:
    """B36: whoever is preempted does not come back at once to preempt others, step after step."""
    run = runner(pages=15, page_size=4, length=56, budget=64, rows=8)
    requests = [request(i, 6, 50) for i in range(8)]
    for r in requests:
        run.scheduler.add(r)
    while run.scheduler.has_unfinished():
        assert run.step(), "a step without a token"
    assert run.scheduler.num_preemptions > 0
    assert requests[0].num_preemptions == 0
    run.assert_empty()


@pytest.mark.parametrize("page_size", [1, 4, 16, 32])
def test_pages_of_any_size_run_out_by_preemption_not_by_error(page_size: int) -> None:
    """B41: what is needed is counted in pages."""
    pages = -(-96 // page_size) + 1 + (page_size < 16)
    run = runner(pages=pages, page_size=page_size, length=96, budget=64, rows=4)
    requests = [request(i, 3 + i, 90 - i) for i in range(4)]
    for r in requests:
        run.scheduler.add(r)
    drain(run)
    assert run.scheduler.num_preemptions > 0
    for r in requests:
        assert r.output_token_ids == expected_output(r, [None])


@pytest.mark.parametrize("overlap", [False, True])
def test_a_long_prefill_stalls_no_decode(overlap: bool) -> None:
    """Who decodes gets a token at every step while a long prompt is taken in: the trace has no gap."""
    run = runner(budget=8, rows=4, length=400, pages=1000, overlap=overlap)
    for i in range(3):
        run.scheduler.add(request(i, 1, 90))
    for _ in range(4):
        run.step()
    run.scheduler.add(request(3, 300, 5))
    trace: list[list[int]] = []
    while True:
        events = run.step()
        if any(event.finish_reason for event in events):
            break
        trace.append(sorted(event.request.sequence for event in events))
    assert all(step[:3] == [0, 1, 2] for step in trace)
    assert [3] in [step[3:] for step in trace], "the prompt got on meanwhile"


def test_small_ones_pass_a_big_one_for_eight_steps() -> None:
    """B35: a request that does not fit holds nobody up, and is not passed for ever."""
    run = runner(pages=25, page_size=4, length=96, budget=64, rows=8)
    run.scheduler.add(request(0, 60, 30))
    run.step()
    big = request(1, 90, 6)
    run.scheduler.add(big)
    passed_at = []
    for step in range(30):
        small = request(2 + step, 3, 2)
        run.scheduler.add(small)
        run.step()
        if small.row >= 0 or small.status is RequestStatus.FINISHED:
            passed_at.append(step)
    assert passed_at == list(range(8)), "small ones pass for patience, and then no more"
    waited = 0
    while big.status is RequestStatus.WAITING:
        fits = run.kv.can_hold(91) and run.scheduler.num_running < 8
        waited += fits
        run.step()
        assert waited <= 8, "there was room for it"
    drain(run)


def test_a_long_prompt_leaves_a_part_of_the_step_to_one_that_waits() -> None:
    """Tokens of a step are capacity, too: a short prompt does not wait for the end of a long one."""
    run = runner(budget=8, rows=4, length=400, pages=1000)
    long, late = request(0, 390, 2), request(1, 12, 2)
    run.scheduler.add(long)
    run.step()
    assert long.num_computed == 8, "nobody else wants any"
    run.scheduler.add(late)
    steps = 0
    while not late.output_token_ids:
        run.step()
        steps += 1
    assert steps == 12 // 2, "a quarter of each step"
    assert long.num_computed == 8 + 6 * steps
    drain(run)


def test_what_a_long_prompt_leaves_is_not_wasted_on_one_that_does_not_fit() -> None:
    run = runner(budget=8, rows=4, length=400, pages=102)
    long = request(0, 390, 2)
    run.scheduler.add(long)
    for _ in range(20):
        run.step()
    run.scheduler.add(request(1, 300, 2))
    run.step()
    assert long.num_computed == 21 * 8
    drain(run)


def test_no_running_prefill_is_left_out_for_long() -> None:
    run = runner(budget=4, rows=4, length=400, pages=1000, policy="priority")
    low = request(0, 200, 2, priority=9)
    run.scheduler.add(low)
    run.step()
    for i in range(1, 4):
        run.scheduler.add(request(i, 390, 2, priority=0))
    gaps, last = [], low.num_computed
    gap = 0
    for _ in range(60):
        run.step()
        gap = 0 if low.num_computed > last else gap + 1
        gaps.append(gap)
        last = low.num_computed
    assert max(gaps) <= 9
    drain(run)


@pytest.mark.parametrize("state", ["waiting", "prefilling", "running", "preempted"])
def test_a_deadline_ends_a_request_in_any_state(state: str) -> None:
    run = runner(pages=8, page_size=4, length=28, budget=8)
    other, victim = request(0, 8, 20), request(1, 12, 14, deadline=100.0)
    run.scheduler.add(other)
    run.step()
    run.scheduler.add(victim)
    wanted = {
        "waiting": lambda: True,
        "prefilling": lambda: victim.row >= 0,
        "running": lambda: bool(victim.output_token_ids),
        "preempted": lambda: victim.status is RequestStatus.PREEMPTED,
    }[state]
    while not wanted():
        run.step()
    assert run.scheduler.expire(99.9) == []
    assert run.scheduler.expire(100.0) == [victim]
    assert run.scheduler.expire(1000.0) == []
    assert (victim.finish_reason, victim.stop_reason) == (FinishReason.ABORT, "deadline")
    run.scheduler.check()
    drain(run)
    assert other.output_token_ids == expected_output(other, [None])


def test_deadlines_of_ended_requests_are_not_kept() -> None:
    run = runner()
    for i in range(1000):
        run.scheduler.add(request(i, 2, 1, deadline=1e9 + i))
        run.step()
    assert len(run.scheduler._roster._deadlines) < 100


@pytest.mark.parametrize("samples", [1, 3])
def test_aborting_one_sample_leaves_the_others(samples: int) -> None:
    run = runner()
    group = [request(0, 21, 8)]
    group += [request(i, 21, 8) for i in range(1, samples + 1)]
    for r in group:
        r.prompt_token_ids, r.leader = group[0].prompt_token_ids, 0
        run.scheduler.add(r)
    run.step()
    assert run.abort(0), "the one that the others wait for"
    drain(run)
    for r in group[1:]:
        assert r.output_token_ids == expected_output(r, [None])


def test_overlap_plans_ahead_and_wastes_a_row_only_where_an_end_is_not_foreseen() -> None:
    want = expected_output(request(0, 4, 10), [None])
    for ends, extra in ({}, 0), ({"stop_token_ids": frozenset([want[3]])}, 1):
        run = runner(overlap=True)
        r = request(0, 4, 10, **ends)
        run.scheduler.add(r)
        drain(run)
        run.settle()
        assert run.num_tokens == 4 + len(r.output_token_ids) - 1 + extra
        assert r.output_token_ids == want[: len(r.output_token_ids)]


def test_an_ended_request_gives_its_pages_back_with_the_step_that_ended_it() -> None:
    run = runner(overlap=True)
    want = expected_output(request(0, 4, 10), [None])
    run.scheduler.add(request(0, 4, 10, stop_token_ids=frozenset([want[0]])))
    assert run.step() == [] and run.kv.num_held == 1
    (event,) = run.step()
    assert event.finish_reason is FinishReason.STOP
    assert run.in_flight is not None, "the next step has it still"
    assert run.kv.num_held == 0 and run.scheduler.num_running == 0
    run.settle()
