"""Forecast against a walk through time over page tables, and what schedulers that heed it never do."""

import random
from collections import Counter
from collections.abc import Sequence

import pytest

from jpaged.core.admission import MARGIN, expected_peak
from jpaged.core.forecast import Forecast
from jpaged.core.kv_cache_manager import KVGroupSpec, pages_for, peak_pages
from jpaged.core.request import Request

from .fake_runner import FakeRunner, expected_output, random_request
from .test_scheduler import drain, request, runner


def walk_allows(run: FakeRunner, new: Request, end: int, hit: Sequence[bytes]) -> bool:
    """Whether all fit at each step from now until `new` has `end` tokens, last pages being half full."""
    (pool,), size = run.kv.pools, run.kv.page_size
    own, held = set(), set()
    walkers = [(new.num_tokens, end, len(hit) * size)]
    for r in run.scheduler._roster.running:
        table = run.kv.table(r.sequence, 0)
        own.update(table[r.num_hit :])
        held.update(table)
        walkers.append((r.num_tokens + r.num_pending, r.expected_tokens, r.num_hit * size))
    shared = (held - own) | ({pool.find(key) for key in hit} - held)
    pages = pool.num_usable - len(shared)
    room = (pages - int(pages * MARGIN)) * size
    time = 0
    while walkers:
        needed = sum(tokens + time - begun + (size - 1) / 2 for tokens, _, begun in walkers)
        if needed > room:
            return False
        time += 1
        # Whoever is there makes one token more at least.
        walkers = [(n, end, begun) for n, end, begun in walkers if n + time <= max(end, n + 1)]
    return True


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_it_allows_what_a_walk_through_time_allows(page_size: int) -> None:
    rng = random.Random(page_size)
    seen: Counter[tuple[bool, bool]] = Counter()
    for _ in range(12):
        run = runner(
            pages=1 + pages_for(rng.choice([60, 100, 200]), page_size),
            page_size=page_size,
            length=60,
            budget=rng.choice([8, 64]),
            overlap=rng.random() < 0.5,
        )
        judge = Forecast(run.kv, expected_peak, reserve=False)
        for sequence in range(40):
            run.scheduler.add(random_request(rng, sequence, 60))
            for event in run.step():
                if event.finish_reason:
                    judge.learn(event.request)
            new = random_request(rng, 1000, 60)
            new.arrival = rng.randrange(1000)
            hit, running = run.scheduler._reuse.hit(new), run.scheduler._roster.running
            demands = [*judge.demands(running), judge.demand(new, len(hit))]
            allowed = judge.allows(demands, running, hit)
            assert allowed == walk_allows(run, new, judge.expected_tokens(new), hit)
            seen[allowed, bool(hit)] += 1
        drain(run)
    assert len(seen) == 4, f"a case is missing: {seen}"


def run_all(rng: random.Random, run: FakeRunner, *, foreseen: bool) -> None:
    """Random requests, some together and some late, to their ends."""
    length = run.scheduler.config.max_model_len
    requests: list[Request] = []
    for sequence in range(30):
        options = {"stop_token_ids": frozenset(), "eos_token_ids": frozenset()} if foreseen else {}
        new = random_request(rng, sequence, length, **options)
        new.ends_by_length = foreseen
        run.scheduler.add(new)
        requests.append(new)
        for _ in range(rng.choice([0, 0, 1, 5])):
            run.step()
    drain(run)
    for r in requests:
        assert r.output_token_ids == expected_output(r, run.windows)


def test_lengths_that_are_known_preempt_nobody() -> None:
    """Where pages are of one token and each step has room for all, the forecast is exact.

    But for the step in flight, where there is one: whoever ends with it has pages for that long still.
    """
    most = 0
    for seed in range(25):
        rng = random.Random(seed)
        run = runner(
            pages=1 + rng.choice([60, 100]),
            page_size=1,
            length=60,
            budget=1000,
            admission="expected",
        )
        run_all(rng, run, foreseen=True)
        assert run.scheduler.num_preemptions == 0, seed
        most = max(most, run.num_tokens // run.num_steps)
    assert most > 1, "none ran beside another"


@pytest.mark.parametrize("window", [None, 1, 9])
def test_reserving_the_greatest_lengths_preempts_nobody(window: int | None) -> None:
    beside = 0
    for seed in range(25):
        rng = random.Random(seed)
        page_size, budget = rng.choice([1, 4, 16]), rng.choice([8, 64])
        least = peak_pages(60, page_size, window, budget)
        run = FakeRunner(
            groups=[KVGroupSpec(1 + rng.choice([1, 2, 3]) * least, window)],
            page_size=page_size,
            max_num_seqs=8,
            max_num_batched_tokens=budget,
            max_model_len=60,
            overlap=rng.random() < 0.5,
            admission="max",
        )
        run_all(rng, run, foreseen=False)
        assert run.scheduler.num_preemptions == 0, seed
        beside += run.num_tokens > run.num_steps
    assert beside > 0


def test_what_was_learned_keeps_more_from_being_preempted() -> None:
    """Outputs far below their limits: as many run as by their limits could not, and few are put back."""
    ends = frozenset(range(0, 50, 4))  # about one token in four
    counts, steps = {}, {}
    for admission in ("all", "expected", "max"):
        run = runner(pages=26, page_size=4, length=100, rows=8, budget=64, admission=admission)
        for sequence in range(200):
            run.scheduler.add(request(sequence, 12, 80, stop_token_ids=ends))
        drain(run)
        counts[admission], steps[admission] = run.scheduler.num_preemptions, run.num_steps
    assert counts["max"] == 0 and counts["expected"] <= counts["all"]
    assert steps["expected"] < steps["max"] / 2


def test_a_length_that_is_known_is_not_guessed() -> None:
    forecast = runner().scheduler._forecast
    known = request(0, 7, 30, ends_by_length=True)
    assert forecast.expected_tokens(known) == 37
    guessed = {forecast.expected_tokens(request(i, 7, 30, arrival=i)) for i in range(100)}
    assert min(guessed) > 7 and max(guessed) == 37 and len(guessed) > 1
