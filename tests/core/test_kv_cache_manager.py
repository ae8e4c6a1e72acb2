"""KVCacheManager: page tables of sequences that grow, pass windows and end, against a plain model."""

import hypothesis.strategies as st
import pytest
from hypothesis import given
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from jpaged.core.kv_cache_manager import KVCacheManager, KVGroupSpec, pages_for, peak_pages

windows = st.one_of(st.none(), st.integers(1, 20))


class ManagerMachine(RuleBasedStateMachine):
    """Sequences as the scheduler drives them; the model knows only tokens and windows."""

    @initialize(
        page_size=st.integers(1, 8),
        groups=st.lists(st.tuples(st.integers(2, 14), windows), min_size=1, max_size=3),
        max_step=st.integers(1, 12),
    )
    def start(self, page_size: int, groups: list[tuple[int, int | None]], max_step: int) -> None:
        self.specs = [KVGroupSpec(num_pages=n, window=w) for n, w in groups]
        self.page_size, self.max_step = page_size, max_step
        self.kv = KVCacheManager(self.specs, page_size, max_step_tokens=max_step)
        # sequence -> [computed tokens, tokens its table covers]
        self.sequences: dict[int, list[int]] = {}
        self.next = 0

    @rule()
    def open(self) -> None:
        self.kv.open(self.next)
        with pytest.raises(ValueError, match="already"):
            self.kv.open(self.next)
        self.sequences[self.next] = [0, 0]
        self.next += 1

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """The scheduler's order: pass the window, grow, and later the tokens are computed."""
        if not self.sequences:
            return
        sequence = data.draw(st.sampled_from(sorted(self.sequences)))
        count = data.draw(st.integers(1, self.max_step))
        computed, covered = self.sequences[sequence]
        before = [list(self.kv.table(sequence, g)) for g in range(len(self.specs))]
        alone = len(self.sequences) == 1
        self.kv.pass_window(sequence, computed)
        target = max(covered, computed + count)
        if self.kv.grow(sequence, target):
            self.sequences[sequence] = [computed + count, target]
        else:
            assert not (alone and computed + count <= self.kv.max_tokens()), "it fits alone"
            for group, table in enumerate(before):
                assert len(self.kv.table(sequence, group)) == len(table), "a failed grow took pages"

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.sequences:
            sequence = data.draw(st.sampled_from(sorted(self.sequences)))
            self.kv.release(sequence)
            del self.sequences[sequence]

    @rule(num_tokens=st.integers(1, 60))
    def can_hold_is_kept(self, num_tokens: int) -> None:
        """A sequence that can_hold accepts reaches its length in steps of any size up to the limit."""
        if not self.kv.can_hold(num_tokens):
            return
        self.kv.open(-1)
        computed = 0
        while computed < num_tokens:
            count = min(self.max_step, num_tokens - computed)
            self.kv.pass_window(-1, computed)
            assert self.kv.grow(-1, computed + count)
            computed += count
        self.kv.release(-1)

    @invariant()
    def tables_are_right(self) -> None:
        if not hasattr(self, "kv"):
            return
        self.kv.check({sequence: covered for sequence, (_, covered) in self.sequences.items()})
        for group, spec in enumerate(self.specs):
            held: list[int] = []
            for sequence, (_, covered) in self.sequences.items():
                table = self.kv.table(sequence, group)
                live = [page for page in table if page]
                held += live
                if spec.window is None:
                    assert len(live) == pages_for(covered, self.page_size)
                else:
                    bound = peak_pages(2**40, self.page_size, spec.window, self.max_step)
                    assert len(live) <= bound
            assert len(set(held)) == len(held), "two sequences own a page"
        if not self.sequences:
            assert self.kv.num_held == 0


TestManagerMachine = ManagerMachine.TestCase


@given(
    window=st.integers(1, 40),
    page_size=st.integers(1, 9),
    counts=st.lists(st.integers(1, 12), min_size=1, max_size=12),
)
def test_pages_inside_the_window_are_kept_and_all_others_returned(
    window: int, page_size: int, counts: list[int]
) -> None:
    kv = KVCacheManager([KVGroupSpec(200, window)], page_size, max_step_tokens=12)
    kv.open(0)
    computed = 0
    for count in counts:
        kv.pass_window(0, computed)
        assert kv.grow(0, computed + count)
        table = kv.table(0, 0)
        for index, page in enumerate(table):
            positions = range(index * page_size, (index + 1) * page_size)
            # The queries of this step are at [computed, computed + count).
            needed = any(computed - position < window for position in positions)
            assert (page != 0) == needed
        assert len([p for p in table if p]) <= peak_pages(2**40, page_size, window, max(counts))
        computed += count
    kv.release(0)
    kv.check({})
    assert kv.num_held == 0


def test_decode_within_a_window_holds_one_page_more_than_the_window() -> None:
    kv = KVCacheManager([KVGroupSpec(10, 8)], 4, max_step_tokens=1)
    kv.open(0)
    for computed in range(60):
        kv.pass_window(0, computed)
        assert kv.grow(0, computed + 1)
        assert kv.num_held <= 8 // 4 + 1
    kv.release(0)
    assert kv.num_held == 0


@pytest.mark.parametrize(
    ("specs", "max_tokens"),
    [
        ([KVGroupSpec(5)], 4 * 4),
        ([KVGroupSpec(5), KVGroupSpec(3)], 2 * 4),
        # window 4 + 8 tokens a step in pages of 4: three pages and one more.
        ([KVGroupSpec(100), KVGroupSpec(5, window=4)], 99 * 4),
        ([KVGroupSpec(100), KVGroupSpec(4, window=4)], 3 * 4),
        ([KVGroupSpec(5, window=4)], 2**62),
    ],
)
def test_max_tokens_is_the_longest_sequence_that_fits_alone(
    specs: list[KVGroupSpec], max_tokens: int
) -> None:
    assert KVCacheManager(specs, 4, max_step_tokens=8).max_tokens() == max_tokens


def test_growing_is_all_groups_or_none() -> None:
    kv = KVCacheManager([KVGroupSpec(10), KVGroupSpec(3)], 2, max_step_tokens=8)
    kv.open(0)
    assert kv.grow(0, 4)
    assert not kv.grow(0, 6)
    kv.check({0: 4})
    assert kv.num_held == 4


def test_page_size_must_be_positive() -> None:
    with pytest.raises(ValueError, match="page_size must be at least 1, got 0"):
        KVCacheManager([KVGroupSpec(2)], 0, max_step_tokens=1)


def test_check_finds_a_table_that_does_not_cover_its_tokens() -> None:
    kv = KVCacheManager([KVGroupSpec(10)], 2, max_step_tokens=8)
    kv.open(7)
    kv.grow(7, 4)
    with pytest.raises(AssertionError, match="2 pages for 5 tokens"):
        kv.check({7: 5})
    with pytest.raises(AssertionError, match="open tables"):
        kv.check({})
    kv.table(7, 0).pop()
    with pytest.raises(AssertionError, match="references"):
        kv.check()
