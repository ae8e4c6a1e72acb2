"""PageRuns against a set of numbers, and how contiguous what it gives is."""

import hypothesis.strategies as st
import pytest
from hypothesis import given
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from jpaged.core.page_runs import PageRuns, _bin, _bin_that_fits


class RunsMachine(RuleBasedStateMachine):
    """Random adds and takes of few enough pages that runs meet often."""

    def __init__(self) -> None:
        super().__init__()
        self.runs = PageRuns()
        self.pages: set[int] = set()

    @rule(data=st.data())
    def add(self, data: st.DataObject) -> None:
        absent = sorted(set(range(1, 60)) - self.pages)
        if absent:
            pages = data.draw(st.lists(st.sampled_from(absent), unique=True))
            self.runs.add(pages)
            self.pages |= set(pages)

    @rule(data=st.data(), after=st.none() | st.integers(0, 60))
    def take(self, data: st.DataObject, after: int | None) -> None:
        count = data.draw(st.integers(0, len(self.pages)))
        before = _maximal_runs(self.pages)
        taken = self.runs.take(count, after=after)
        assert len(set(taken)) == len(taken) == count and set(taken) <= self.pages
        self.pages -= set(taken)
        if count and after is not None and after + 1 in (run[0] for run in before):
            assert taken[0] == after + 1, "what follows comes first"
        elif count and any(len(run) >= _fits_for_sure(count) for run in before):
            assert taken == list(range(taken[0], taken[0] + count)), "a run was long enough"

    @rule(extra=st.integers(1, 5))
    def take_too_many(self, extra: int) -> None:
        with pytest.raises(ValueError, match="cannot take"):
            self.runs.take(len(self.pages) + extra)

    @invariant()
    def same_pages(self) -> None:
        self.runs.check()
        assert list(self.runs) == sorted(self.pages) and len(self.runs) == len(self.pages)
        assert self.runs.num_runs == len(_maximal_runs(self.pages))


TestRunsMachine = RunsMachine.TestCase


def _maximal_runs(pages: set[int]) -> list[list[int]]:
    runs: list[list[int]] = []
    for page in sorted(pages):
        if runs and runs[-1][-1] == page - 1:
            runs[-1].append(page)
        else:
            runs.append([page])
    return runs


def _fits_for_sure(count: int) -> int:
    """Within one bin lengths differ by an eighth; only longer runs are found for sure."""
    return next(n for n in range(count, 2 * count + 1) if _bin(n) >= _bin_that_fits(count))


@given(st.integers(1, 10**9), st.integers(1, 10**9))
def test_bins_are_ordered_by_length(one: int, other: int) -> None:
    low, high = sorted((one, other))
    assert _bin(low) <= _bin(high)
    if _bin(low) >= _bin_that_fits(high):
        assert low >= high, "a run of this bin would be too short"
    assert _bin(low) < 16 + 8 * 30


def test_the_shortest_run_that_fits_is_taken() -> None:
    runs = PageRuns()
    for start, length in ((10, 5), (20, 3), (30, 9)):
        runs.add_run(start, length)
    assert runs.take(3) == [20, 21, 22]
    assert runs.take(4) == [10, 11, 12, 13]
    assert runs.take(2, after=29) == [30, 31]


def test_the_longest_runs_are_taken_when_none_fits() -> None:
    runs = PageRuns()
    for start, length in ((10, 2), (20, 3), (30, 1)):
        runs.add_run(start, length)
    assert runs.take(5) == [20, 21, 22, 10, 11]


def test_check_finds_what_is_wrong() -> None:
    runs = PageRuns()
    runs.add_run(5, 3)
    runs._count = 4
    with pytest.raises(AssertionError, match="miscounted"):
        runs.check()
    runs._count = 3
    runs._bins[3].clear()
    with pytest.raises(AssertionError, match="wrong bin"):
        runs.check()
