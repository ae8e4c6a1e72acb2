"""PagePool against lists and dictionaries that are gone through from end to end, and what it refuses."""

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from jpaged.core.page_pool import PagePool

OWNERS = st.integers(0, 3)


class PoolMachine(RuleBasedStateMachine):
    """Random allocate, share, release, register, set aside; the model is the pool's contract written out."""

    @initialize(num_pages=st.integers(2, 14), retain=st.booleans())
    def start(self, num_pages: int, retain: bool) -> None:
        self.num_pages, self.retain = num_pages, retain
        self.pool = PagePool(num_pages, retain=retain)
        self.refs: dict[int, int] = {}
        self.keys: dict[int, bytes] = {}
        self.newest: list[int] = []  # pages with a key, in the order in which they got it
        self.cached: list[int] = []  # least recently used first
        self.aside: dict[int, list[int]] = {}  # in the order in which owners came
        self.next_key = 0

    @rule(data=st.data(), owner=st.none() | OWNERS, after=st.none() | st.integers(0, 14))
    def allocate(self, data: st.DataObject, owner: int | None, after: int | None) -> None:
        available = self.num_pages - 1 - len(self.refs)
        count = data.draw(st.integers(0, available))
        mine = self.aside.get(owner, []) if owner is not None else []
        pages = self.pool.allocate(count, owner=owner, after=after)
        assert len(set(pages)) == len(pages) == count and not set(pages) & self.refs.keys()
        own = min(count, len(mine))
        assert pages[:own] == mine[::-1][:own], "what was set aside comes first, in order"
        del mine[len(mine) - own :]
        wanted = count - own
        free = self.num_pages - 1 - len(self.refs) - len(self.cached) - own
        free -= sum(map(len, self.aside.values()))
        evicted = max(0, min(wanted - free, len(self.cached)))
        for page in self.cached[:evicted]:
            self._lose_key(page)
        del self.cached[:evicted]
        assert not set(pages[own:]) & set(self.cached), "the least recently used are evicted"
        missing = wanted - free - evicted
        for other in reversed(list(self.aside)):
            if missing <= 0:
                break
            if self.aside[other]:
                missing -= len(self.aside.pop(other))
        kept = {page for others in self.aside.values() for page in others}
        assert not set(pages[own:]) & kept, "promised pages are taken last, the newest first"
        self.aside = {who: what for who, what in self.aside.items() if what}
        for page in pages:
            self.refs[page] = 1

    @rule(extra=st.integers(1, 5))
    def allocate_too_many(self, extra: int) -> None:
        with pytest.raises(ValueError, match="available"):
            self.pool.allocate(self.pool.num_available + extra)

    @rule(count=st.integers(-2, 14), owner=OWNERS)
    def set_aside(self, count: int, owner: int) -> None:
        free = self.num_pages - 1 - len(self.refs) - len(self.cached)
        free -= sum(map(len, self.aside.values()))
        got = self.pool.set_aside(count, owner)
        assert got == max(0, min(count, free + len(self.cached)))
        for page in self.cached[: max(0, got - free)]:
            self._lose_key(page)
        del self.cached[: max(0, got - free)]
        if got:
            promised = list(self.pool._set_aside[owner])
            mine = self.aside.setdefault(owner, [])
            assert promised[got:] == mine, "earlier promises are used first"
            self.aside[owner] = promised
            others = {p for who, ps in self.aside.items() if who != owner for p in ps}
            assert len(set(promised)) == len(promised)
            assert not set(promised) & (others | self.refs.keys() | set(self.cached))

    @rule(owner=OWNERS)
    def return_set_aside(self, owner: int) -> None:
        self.pool.return_set_aside(owner)
        self.aside.pop(owner, None)

    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        known = sorted(self.refs.keys() | set(self.cached))
        if known:
            pages = data.draw(st.lists(st.sampled_from(known), max_size=4))
            self.pool.share(pages)
            for page in pages:
                if page in self.cached:
                    self.cached.remove(page)
                self.refs[page] = self.refs.get(page, 0) + 1

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.refs:
            pages = data.draw(st.lists(st.sampled_from(sorted(self.refs)), unique=True))
            self.pool.release(pages)
            for page in pages:
                self.refs[page] -= 1
                if self.refs[page] == 0:
                    del self.refs[page]
                    if page in self.keys and self.retain:
                        self.cached.append(page)
                    elif page in self.keys:
                        self._lose_key(page)

    @rule(data=st.data(), again=st.booleans())
    def register(self, data: st.DataObject, again: bool) -> None:
        bare = sorted(self.refs.keys() - self.keys.keys())
        if bare:
            page = data.draw(st.sampled_from(bare))
            if again and self.keys:
                key = data.draw(st.sampled_from(sorted(self.keys.values())))
            else:
                key, self.next_key = self.next_key.to_bytes(4, "big"), self.next_key + 1
            self.pool.register(page, key)
            self.keys[page] = key
            self.newest.append(page)

    @rule()
    def forget_all(self) -> None:
        self.pool.forget_all()
        self.keys.clear()
        self.newest.clear()
        self.cached.clear()

    def _lose_key(self, page: int) -> None:
        del self.keys[page]
        self.newest.remove(page)

    @invariant()
    def books_balance(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check(self.refs)
        aside = sum(map(len, self.aside.values()))
        assert self.pool.num_held == len(self.refs)
        assert self.pool.num_cached == len(self.cached)
        assert self.pool.num_set_aside == aside
        total = self.pool.num_free + self.pool.num_held + self.pool.num_cached
        assert total == self.pool.num_usable == self.num_pages - 1
        assert list(self.pool._cache.idle()) == self.cached, "not in the order of last use"
        for key in set(self.keys.values()):
            pages = [page for page in self.newest if self.keys[page] == key]
            assert self.pool.find(key) == pages[-1], "the newest page of a key is found"
        assert self.pool.find(b"never") is None
        for page in range(1, self.num_pages):
            assert self.pool.is_registered(page) == (page in self.keys)
            assert self.pool.is_cached(page) == (page in self.cached)
            assert self.pool.num_owners(page) == self.refs.get(page, 0)


TestPoolMachine = PoolMachine.TestCase


def test_pages_return_in_the_order_they_were_taken() -> None:
    pool = PagePool(9)
    first = pool.allocate(5)
    assert first == [1, 2, 3, 4, 5]
    pool.release(reversed(first))
    assert pool.allocate(5) == first


def test_what_is_set_aside_follows_what_the_owner_has() -> None:
    pool = PagePool(20)
    mine, other = pool.allocate(2, owner=1), pool.allocate(2, owner=2)
    assert pool.set_aside(3, 1, after=mine[-1]) == 3
    promised = pool.allocate(3, owner=1)
    assert promised == [5, 6, 7], (
        "one run, though not behind the owner's pages, which are hemmed in"
    )
    assert pool.set_aside(3, 1, after=promised[-1]) == 3
    assert pool.allocate(3, owner=2, after=other[-1]) == [11, 12, 13]
    assert pool.allocate(4, owner=1) == [8, 9, 10, 14]


@pytest.mark.parametrize("num_pages", [-1, 0, 1])
def test_a_pool_needs_a_page_beside_page_0(num_pages: int) -> None:
    with pytest.raises(ValueError, match="at least 2"):
        PagePool(num_pages)


@pytest.mark.parametrize("page", [-1, 0, 3])
def test_pages_nobody_holds_are_neither_shared_released_nor_registered(page: int) -> None:
    pool = PagePool(5)
    pool.allocate(2)
    for call in (
        lambda: pool.share([page]),
        lambda: pool.release([page]),
        lambda: pool.register(page, b"key"),
    ):
        with pytest.raises(ValueError, match=f"page {page} is not held"):
            call()
    pool.check({1: 1, 2: 1})


def test_a_page_released_twice_is_an_error() -> None:
    pool = PagePool(5)
    pages = pool.allocate(1)
    pool.release(pages)
    with pytest.raises(ValueError, match="not held"):
        pool.release(pages)


def test_a_page_has_one_key() -> None:
    pool = PagePool(5)
    pages = pool.allocate(1)
    pool.register(pages[0], b"one")
    with pytest.raises(ValueError, match="has a key already"):
        pool.register(pages[0], b"two")


def test_check_finds_a_leak_a_double_free_and_page_0() -> None:
    pool = PagePool(5)
    (page,) = pool.allocate(1)
    with pytest.raises(AssertionError, match="1 references, 0 owners"):
        pool.check({})
    pool._free.add([page])
    with pytest.raises(AssertionError, match="1 owners, free"):
        pool.check()
    pool._set_aside[0] = [page]
    pool._num_set_aside = 1
    with pytest.raises(AssertionError, match="two lists"):
        pool.check()
    pool = PagePool(5)
    pool._free.add([0])
    with pytest.raises(AssertionError, match="page 0"):
        pool.check()
