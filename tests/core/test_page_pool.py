"""PagePool against a dictionary of reference counts, and what it refuses."""

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from jpaged.core.page_pool import PagePool


class PoolMachine(RuleBasedStateMachine):
    """Random allocate, share and release; the oracle counts owners."""

    @initialize(num_pages=st.integers(2, 12))
    def start(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.pool = PagePool(num_pages)
        self.owners: dict[int, int] = {}

    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        free = self.num_pages - 1 - len(self.owners)
        pages = self.pool.allocate(data.draw(st.integers(0, free)))
        assert len(set(pages)) == len(pages)
        for page in pages:
            assert 0 < page < self.num_pages and page not in self.owners
            self.owners[page] = 1

    @rule(extra=st.integers(1, 5))
    def allocate_too_many(self, extra: int) -> None:
        with pytest.raises(ValueError, match="free"):
            self.pool.allocate(self.pool.num_free + extra)

    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        if self.owners:
            pages = data.draw(st.lists(st.sampled_from(sorted(self.owners)), max_size=4))
            self.pool.share(pages)
            for page in pages:
                self.owners[page] += 1

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.owners:
            pages = data.draw(st.lists(st.sampled_from(sorted(self.owners)), unique=True))
            self.pool.release(pages)
            for page in pages:
                self.owners[page] -= 1
                if self.owners[page] == 0:
                    del self.owners[page]

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check(self.owners)
            assert self.pool.num_held == len(self.owners)
            assert self.pool.num_free + self.pool.num_held == self.pool.num_usable
            assert self.pool.num_usable == self.num_pages - 1


TestPoolMachine = PoolMachine.TestCase


def test_pages_return_in_the_order_they_were_taken() -> None:
    pool = PagePool(9)
    first = pool.allocate(5)
    assert first == [1, 2, 3, 4, 5]
    pool.release(first)
    assert pool.allocate(5) == first


@pytest.mark.parametrize("num_pages", [-1, 0, 1])
def test_a_pool_needs_a_page_beside_page_0(num_pages: int) -> None:
    with pytest.raises(ValueError, match="at least 2"):
        PagePool(num_pages)


@pytest.mark.parametrize("page", [-1, 0, 3])
def test_pages_nobody_holds_are_neither_shared_nor_released(page: int) -> None:
    pool = PagePool(5)
    pool.allocate(2)
    with pytest.raises(ValueError, match=f"page {page} is not held"):
        pool.share([page])
    with pytest.raises(ValueError, match=f"page {page} is not held"):
        pool.release([page])
    pool.check({1: 1, 2: 1})


def test_a_page_released_twice_is_an_error() -> None:
    pool = PagePool(5)
    pages = pool.allocate(1)
    pool.release(pages)
    with pytest.raises(ValueError, match="not held"):
        pool.release(pages)


def test_check_finds_a_leak_a_double_free_and_page_0() -> None:
    pool = PagePool(5)
    (page,) = pool.allocate(1)
    with pytest.raises(AssertionError, match="1 references, 0 owners"):
        pool.check({})
    pool._free.append(page)
    with pytest.raises(AssertionError, match="1 owners, free"):
        pool.check()
    pool._free.append(page)
    with pytest.raises(AssertionError, match="free twice"):
        pool.check()
    pool._free = [0]
    with pytest.raises(AssertionError, match="page 0"):
        pool.check()
