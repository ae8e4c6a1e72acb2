"""Scheduler under random load: every request gets the tokens it would get alone, and nothing leaks.

What a request gets alone is the meaning of all options: whatever is switched on, tokens are the same.
"""

import random
from collections import Counter
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

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
        overlap=rng.random() < 0.6,
        prefix_caching=rng.random() < 0.7,
        policy=rng.choice(["fcfs", "priority"]),
        admission=rng.choice(["expected", "all", "max"]),
        reserve=rng.random() < 0.7,
        patience=rng.choice([0, 3, 8]),
    )


class Driver:
    """A runner and everything that was ever asked of it."""

    def __init__(self, run: FakeRunner, rng: random.Random) -> None:
        self.run, self.rng = run, rng
        self.everything: list[Request] = []
        self.ended_from_outside: dict[int, FinishReason] = {}
        self.seen: Counter[str] = Counter()
        self.now = 0.0
        self.steps_without_token = 0

    def add(self, n: int = 1, **kw: Any) -> None:
        """A request with n samples."""
        sequence = len(self.everything)
        first = random_request(self.rng, sequence, self.run.scheduler.config.max_model_len, **kw)
        first.leader = sequence if n > 1 else None
        samples = [first]
        for i in range(1, n):
            samples.append(
                Request(
                    sequence=sequence + i,
                    prompt_token_ids=first.prompt_token_ids,
                    max_tokens=first.max_tokens,
                    stop_token_ids=first.stop_token_ids,
                    eos_token_ids=first.eos_token_ids,
                    ends_by_length=first.ends_by_length,
                    priority=first.priority,
                    extras=first.extras,
                    reads_cache=first.reads_cache,
                    leader=sequence,
                )
            )
        for request in samples:
            self.run.scheduler.add(request)
            self.run.scheduler.check()
            self.everything.append(request)

    def live(self) -> list[Request]:
        """Requests that have not ended."""
        return [r for r in self.everything if r.status is not RequestStatus.FINISHED]

    def end(self, request: Request, reason: FinishReason) -> None:
        """Ends a request from outside: an abort, or a stop string."""
        self.seen[f"ended {request.status.value}"] += 1
        assert self.run.scheduler.finish(request.sequence, reason, "why")
        self.run.scheduler.check()
        self.ended_from_outside[request.sequence] = reason

    def step(self) -> None:
        """One step; tokens come, or work goes on, within a bounded number of steps."""
        before = {r.sequence: r.num_computed for r in self.everything}
        events = self.run.step()
        moved = any(r.num_computed > before[r.sequence] for r in self.live())
        idle = not self.live()
        self.steps_without_token = 0 if events or moved or idle else self.steps_without_token + 1
        assert self.steps_without_token <= 2, "nothing gets on"

    def drain(self) -> None:
        """Runs all there is, and looks at the result of every request."""
        steps = 0
        while self.run.scheduler.has_unfinished():
            self.step()
            steps += 1
            assert steps < 100_000, "it does not end"
        self.run.settle()
        self.run.assert_empty()
        for request in self.everything:
            want = expected_output(request, self.run.windows)
            reason = self.ended_from_outside.get(request.sequence)
            if reason is not None:
                assert request.finish_reason is reason
                assert request.output_token_ids == want[: len(request.output_token_ids)]
                continue
            assert request.output_token_ids == want, f"sequence {request.sequence}"
            ends = request.stop_token_ids | request.eos_token_ids
            assert request.finish_reason is (
                FinishReason.STOP if want[-1] in ends else FinishReason.LENGTH
            )
            assert len(want) == request.max_tokens or want[-1] in ends
        self.seen["preempted"] += self.run.scheduler.num_preemptions
        self.seen["hits"] += self.run.scheduler.prefix_hits
        self.seen["requests"] += len(self.everything)
        self.everything.clear()


def drive(seed: int, num_steps: int) -> Counter[str]:
    """Random runs of so many steps together; what happened in them."""
    rng = random.Random(seed)
    seen: Counter[str] = Counter()
    while seen["steps"] < num_steps:
        driver = Driver(random_runner(rng), rng)
        rough = rng.random() < 0.5
        crowd = rng.choice([3, 10, 30])
        for _ in range(rng.choice([30, 100, 300])):
            if len(driver.live()) < crowd:
                for _ in range(rng.choice([0, 0, 0, 1, 1, 3, 10])):
                    late = rng.choice([None, None, driver.now + rng.randint(1, 40)])
                    driver.add(rng.choice([1, 1, 1, 2, 4]), deadline=late if rough else None)
            if rough and rng.random() < 0.1 and driver.live():
                reason = rng.choice([FinishReason.ABORT, FinishReason.STOP])
                driver.end(rng.choice(driver.live()), reason)
            if rough and rng.random() < 0.02:
                driver.run.change_weights()
                driver.seen["weights"] += 1
            if rough and rng.random() < 0.02:
                driver.run.lose_steps()
                driver.seen["lost"] += 1
            driver.now += 1
            for request in driver.run.scheduler.expire(driver.now):
                assert request.stop_reason == "deadline" and request.deadline is not None
                assert request.deadline <= driver.now
                driver.ended_from_outside[request.sequence] = FinishReason.ABORT
                driver.seen["expired"] += 1
            driver.step()
            seen["steps"] += 1
        driver.drain()
        seen += driver.seen
    return seen


def enough(seen: Counter[str]) -> None:
    """The runs reached what they are for."""
    for what in ("preempted", "hits", "weights", "lost", "expired"):
        assert seen[what] > seen["steps"] / 1000, f"hardly any {what}: {seen}"
    for state in ("waiting", "running", "preempted"):
        assert seen[f"ended {state}"], f"none ended while {state}: {seen}"


def test_five_thousand_random_steps() -> None:
    enough(drive(seed=1, num_steps=5_000))


@pytest.mark.full
def test_a_hundred_thousand_random_steps() -> None:
    enough(drive(seed=2, num_steps=100_000))


def test_thousands_of_small_workloads_give_the_tokens_of_each_alone() -> None:
    """Each with options of its own: prefix cache, chunk and page sizes, tiny pools, overlap, windows."""
    total = 0
    for seed in range(500):
        rng = random.Random(seed)
        driver = Driver(random_runner(rng), rng)
        for _ in range(rng.randint(1, 6)):
            driver.add(rng.choice([1, 1, 3]))
            if rng.random() < 0.5:
                driver.step()
        total += len(driver.everything)
        driver.drain()
    assert total > 2000


class SchedulerMachine(RuleBasedStateMachine):
    """The same, searched by hypothesis, which also shortens what it finds."""

    @initialize(seed=st.integers(0, 2**32))
    def start(self, seed: int) -> None:
        rng = random.Random(seed)
        self.driver = Driver(random_runner(rng), rng)

    @rule(n=st.sampled_from([1, 1, 2, 4]), late=st.none() | st.integers(1, 20))
    def add(self, n: int, late: int | None) -> None:
        deadline = None if late is None else self.driver.now + late
        self.driver.add(n, deadline=deadline)

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.driver.step()

    @precondition(lambda self: self.driver.live())
    @rule(data=st.data(), reason=st.sampled_from([FinishReason.ABORT, FinishReason.STOP]))
    def end(self, data: st.DataObject, reason: FinishReason) -> None:
        live = self.driver.live()
        self.driver.end(live[data.draw(st.integers(0, len(live) - 1))], reason)

    @rule()
    def change_weights(self) -> None:
        self.driver.run.change_weights()

    @rule()
    def lose_steps(self) -> None:
        self.driver.run.lose_steps()

    @rule(seconds=st.integers(1, 20))
    def time_passes(self, seconds: int) -> None:
        self.driver.now += seconds
        for request in self.driver.run.scheduler.expire(self.driver.now):
            self.driver.ended_from_outside[request.sequence] = FinishReason.ABORT

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            self.driver.drain()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=60, stateful_step_count=30, suppress_health_check=[HealthCheck.too_slow]
)


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
            run.abort(sequence)
        while run.scheduler.num_running + run.scheduler.num_waiting > 6:
            run.step()
    while run.scheduler.has_unfinished():
        run.step()
    run.assert_empty()
