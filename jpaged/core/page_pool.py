"""PagePool: who may have which page: free, held (with how many owners), or kept for what it holds.

Knows page numbers, owners' numbers and opaque keys: not tokens, not requests. Page 0 belongs to nobody and
is never handed out.

Pages that are set aside are free pages promised to an owner that is expected to grow. The promise is
soft: whoever would otherwise go without takes them.
"""

from collections.abc import Iterable

from jpaged.core.page_runs import PageRuns
from jpaged.core.prefix_cache import PrefixCache


class PagePool:
    """Fixed-size pages 1 .. num_pages - 1, handed out and taken back with reference counts."""

    def __init__(self, num_pages: int, *, retain: bool = True) -> None:
        """`num_pages` counts page 0, so num_pages - 1 can be held. Raises ValueError below 2.

        With `retain`, pages with a key are kept when their last owner has gone, until they are needed.
        """
        if num_pages < 2:
            raise ValueError(f"num_pages must be at least 2 (page 0 is reserved), got {num_pages}")
        self._refs = [0] * num_pages
        self._free = PageRuns()
        self._free.add_run(1, num_pages - 1)
        self._cache = PrefixCache()
        self._retain = retain
        # Pages set aside by owner, each next one last; the owner who came last is robbed first.
        self._set_aside: dict[int, list[int]] = {}
        self._num_set_aside = 0
        # Times that pages were sought among the free ones.
        self.num_searches = 0

    @property
    def num_usable(self) -> int:
        """Pages that can be held at once."""
        return len(self._refs) - 1

    @property
    def num_free(self) -> int:
        """Pages that nobody holds and that hold nothing of worth, set aside or not."""
        return len(self._free) + self._num_set_aside

    @property
    def num_cached(self) -> int:
        """Pages that nobody holds, kept for what they hold."""
        return self._cache.num_idle

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can give: free and cached ones."""
        return self.num_free + self.num_cached

    @property
    def num_held(self) -> int:
        """Pages with at least one owner."""
        return self.num_usable - self.num_available

    @property
    def num_set_aside(self) -> int:
        """Free pages that are promised to somebody."""
        return self._num_set_aside

    def allocate(
        self, count: int, *, owner: int | None = None, after: int | None = None
    ) -> list[int]:
        """`count` pages with one reference each, those that follow page `after` where possible.

        Taken from what is set aside for `owner`, then free pages, then cached ones, least recently
        used first, then what is set aside for others. ValueError beyond `num_available`.
        """
        if not 0 <= count <= self.num_available:
            raise ValueError(f"cannot allocate {count} pages, {self.num_available} are available")
        pages = self._take_set_aside(owner, count) if owner is not None else []
        wanted = count - len(pages)
        if wanted:
            self._make_free(wanted)
            while len(self._free) < wanted:
                self.return_set_aside(next(reversed(self._set_aside)))
            self.num_searches += 1
            pages += self._free.take(wanted, after=pages[-1] if pages else after)
        for page in pages:
            self._refs[page] = 1
        return pages

    def set_aside(self, count: int, owner: int, *, after: int | None = None) -> int:
        """Promises `owner` up to `count` more pages, free or cached ones; how many it came to.

        `after` is the last page the owner has: the promised ones follow it where possible.
        """
        count = min(count, len(self._free) + self.num_cached)
        if count <= 0:
            return 0
        self._make_free(count)
        mine = self._set_aside.setdefault(owner, [])
        self.num_searches += 1
        pages = self._free.take(count, after=mine[0] if mine else after)
        # The next one to be used is last.
        self._set_aside[owner] = pages[::-1] + mine
        self._num_set_aside += count
        return count

    def return_set_aside(self, owner: int) -> None:
        """Whatever is set aside for `owner` is anybody's again."""
        pages = self._set_aside.pop(owner, None)
        if pages:
            self._num_set_aside -= len(pages)
            self._free.add(pages)

    def num_set_aside_for(self, owner: int) -> int:
        """Pages set aside for `owner`."""
        return len(self._set_aside.get(owner, ()))

    def owners_set_aside(self) -> list[int]:
        """Owners for whom pages are set aside, in the order in which they came."""
        return list(self._set_aside)

    def share(self, pages: Iterable[int]) -> None:
        """One more owner for each of `pages`, which must be held or cached."""
        for page in pages:
            if page < 1 or (self._refs[page] < 1 and not self._cache.is_idle(page)):
                raise ValueError(f"page {page} is not held and cannot be shared")
            if self._refs[page] == 0:
                self._cache.revive(page)
            self._refs[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One owner fewer for each of `pages`; those without an owner are free or cached again.

        The first of `pages` will be evicted first.
        """
        free = []
        for page in pages:
            if page < 1 or self._refs[page] < 1:
                raise ValueError(f"page {page} is not held and cannot be released")
            self._refs[page] -= 1
            if self._refs[page]:
                continue
            if not self._retain and self._cache.key_of(page) is not None:
                self._cache.forget(page)
            if not self._cache.retire(page):
                free.append(page)
        self._free.add(free)

    def register(self, page: int, key: bytes) -> None:
        """Says what a held page holds; from now on `find` gives it."""
        if page < 1 or self._refs[page] < 1:
            raise ValueError(f"page {page} is not held and cannot have a key")
        self._cache.register(page, key)

    def find(self, key: bytes) -> int | None:
        """A page, held or cached, that holds what `key` says."""
        return self._cache.find(key)

    def is_registered(self, page: int) -> bool:
        """Whether somebody may find the page, so that it must not be written."""
        return self._cache.key_of(page) is not None

    def is_cached(self, page: int) -> bool:
        """Whether the page is kept though nobody holds it."""
        return self._cache.is_idle(page)

    def num_owners(self, page: int) -> int:
        """References to a page."""
        return self._refs[page]

    def forget_all(self) -> None:
        """What pages hold is to be found no more; cached ones are free."""
        self._free.add(self._cache.forget_all())

    def check(self, owners: dict[int, int] | None = None) -> None:
        """Raises AssertionError unless the books balance.

        free + cached + held = total, no page is in two lists, those that nobody holds have no
        references, page 0 is nobody's; with `owners` (page -> number of owners, counted by whoever
        holds them) the counts are equal.
        """
        self._free.check()
        self._cache.check()
        unheld: list[int] = list(self._free)
        aside = [page for pages in self._set_aside.values() for page in pages]
        assert len(aside) == self._num_set_aside, "pages set aside are miscounted"
        unheld += aside
        assert not any(self._cache.key_of(page) for page in unheld), "a free page has a key"
        unheld += self._cache.idle()
        free = set(unheld)
        assert len(free) == len(unheld), "a page is in two lists"
        assert 0 not in free and self._refs[0] == 0, "page 0 has been handed out"
        for page in range(1, len(self._refs)):
            assert (page in free) == (self._refs[page] == 0), (
                f"page {page}: {self._refs[page]} owners, {'free' if page in free else 'not free'}"
            )
            if owners is not None:
                assert self._refs[page] == owners.get(page, 0), (
                    f"page {page}: {self._refs[page]} references, {owners.get(page, 0)} owners"
                )

    def _make_free(self, count: int) -> None:
        """Evicts cached pages until `count` are free, or none is cached."""
        missing = min(count - len(self._free), self.num_cached)
        if missing > 0:
            self._free.add([self._cache.evict() for _ in range(missing)])

    def _take_set_aside(self, owner: int, count: int) -> list[int]:
        mine = self._set_aside.get(owner)
        if not mine or not count:
            return []
        taken = mine[: -count - 1 : -1]
        del mine[-len(taken) :]
        if not mine:
            del self._set_aside[owner]
        self._num_set_aside -= len(taken)
        return taken
