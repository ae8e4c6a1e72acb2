"""Scheduler under random load: every request gets the tokens it would get alone, and nothing leaks."""

import random
from collections.abc import Iterator

import pytest

from jpaged.core.kv_cache_manager import KVGroupSpec, pages_for, peak_pages
from jpaged.core.request import FinishReason, Request, RequestStatus

from .fake_runner import FakeRunner, expected_output, random_request


def random_runner(rng: random.Random) -> FakeRunner:
    """Any configuration the engine may have, pools from just enough to plenty."""
    page_size = rng.choice([1, 2, 4, 7, 16])
    max_model_len = rng.choice([8, 20, 50, 120])
    rows = rng.choice([1, 2, 5, 16])
    budget = max(rows, rng.choice([1, 2, 7, 16, 64, 300]))
    windows = rng.choice([[None], [None], [None, rng.randint(1, 30)], [rng.randint(1, 30)]])
    groups = []
    for window in windows:
        least = peak_pages(max_model_len, page_size, window, budget)
        if window is not None and rng.random() < 0.5:
            least = peak_pages(2**40, page_size, window, budget)
        least = max(least, pages_for(max_model_len, page_size) if window is None else least)
        groups.append(KVGroupSpec(1 + least + rng.choice([0, 0, 1, least, 10 * least]), window))
    return FakeRunner(
        groups=groups,
        page_size=page_size,
        max_num_seqs=rows,
        max_num_batched_tokens=budget,
        max_model_len=max_model_len,
    )


def arrivals(rng: random.Random, run: FakeRunner, count: int) -> Iterator[list[Request]]:
    """Per step, the requests that arrive before it: in bursts and one by one."""
    sequence = 0
    while sequence < count:
        burst = rng.choice([0, 0, 0, 1, 1, 3, 10])
        yield [
            random_request(rng, sequence + i, run.scheduler.config.max_model_len)
            for i in range(min(burst, count - sequence))
        ]
        sequence += min(burst, count - sequence)


def fuzz(seed: int, count: int) -> int:
    """One random run; returns how often it preempted."""
    rng = random.Random(seed)
    run = random_runner(rng)
    aborts = rng.choice([0.0, 0.0, 0.05])
    everything: list[Request] = []
    aborted: set[int] = set()
    source = arrivals(rng, run, count)
    oldest_first: dict[int, int] = {}
    while True:
        new = next(source, None)
        if new is None and not run.scheduler.has_unfinished():
            break
        for request in new or []:
            run.scheduler.add(request)
            run.scheduler.check()
            everything.append(request)
        plan = run.begin_step()
        for request in everything:
            live = request.status is not RequestStatus.FINISHED
            if live and rng.random() < aborts * rng.random():
                assert run.scheduler.finish(request.sequence, FinishReason.ABORT)
                run.scheduler.check()
                aborted.add(request.sequence)
        run.finish_step(plan)
        # No starvation: the oldest unfinished request moves at every step.
        live_requests = [r for r in everything if r.status is not RequestStatus.FINISHED]
        if plan.entries and live_requests:
            oldest = live_requests[0]
            progress = oldest.num_computed + len(oldest.output_token_ids)
            if oldest.row >= 0 and not oldest.row_is_new:
                assert progress > oldest_first.get(oldest.sequence, -1), f"seed {seed}: no progress"
                oldest_first[oldest.sequence] = progress
        assert run.num_steps < 200_000, f"seed {seed} does not end"
    run.assert_empty()
    for request in everything:
        want = expected_output(request, run.windows)
        if request.sequence in aborted:
            assert request.finish_reason is FinishReason.ABORT
            assert request.output_token_ids == want[: len(request.output_token_ids)]
        else:
            assert request.output_token_ids == want, f"seed {seed}, sequence {request.sequence}"
            at_limit = len(want) == request.max_tokens
            ends = request.stop_token_ids | request.eos_token_ids
            assert request.finish_reason is (
                FinishReason.STOP if want[-1] in ends else FinishReason.LENGTH
            )
            assert at_limit or want[-1] in ends
    return run.scheduler.num_preemptions


def test_random_loads() -> None:
    preemptions = sum(fuzz(seed, count=25) for seed in range(120))
    assert preemptions > 100, "the runs did not reach what they are for"


@pytest.mark.full
def test_random_loads_at_full_size() -> None:
    assert sum(fuzz(seed, count=60) for seed in range(1000, 1600)) > 600


def test_pages_are_back_after_two_thousand_requests() -> None:
    """One page lost a request would end this run; the pool has room for few at a time."""
    rng = random.Random(1)
    run = FakeRunner(
        groups=[KVGroupSpec(13), KVGroupSpec(9, 6)],
        page_size=4,
        max_num_seqs=4,
        max_num_batched_tokens=8,
        max_model_len=40,
    )
    for sequence in range(2000):
        request = random_request(rng, sequence, 16)
        run.scheduler.add(request)
        if sequence % 7 == 0:
            run.step()
            run.scheduler.finish(sequence, FinishReason.ABORT)
        while run.scheduler.num_running + run.scheduler.num_waiting > 6:
            run.step()
    while run.scheduler.has_unfinished():
        run.step()
    run.assert_empty()
