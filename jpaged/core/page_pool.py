"""PagePool: which pages are free, and how many owners each held page has.

Knows page numbers and reference counts only: not tokens, not requests, not what pages hold. Page 0 belongs
to nobody and is never handed out.
"""

from collections.abc import Iterable, Sequence


class PagePool:
    """Fixed-size pages 1 .. num_pages - 1, handed out and taken back with reference counts."""

    def __init__(self, num_pages: int) -> None:
        """`num_pages` counts page 0, so num_pages - 1 can be held. Raises ValueError below 2."""
        if num_pages < 2:
            raise ValueError(f"num_pages must be at least 2 (page 0 is reserved), got {num_pages}")
        self._refs = [0] * num_pages
        # A stack with the lowest number on top: a fresh pool hands out pages in ascending order.
        self._free = list(range(num_pages - 1, 0, -1))

    @property
    def num_usable(self) -> int:
        """Pages that can be held at once."""
        return len(self._refs) - 1

    @property
    def num_free(self) -> int:
        """Pages nobody holds."""
        return len(self._free)

    @property
    def num_held(self) -> int:
        """Pages with at least one owner."""
        return self.num_usable - self.num_free

    def allocate(self, count: int) -> list[int]:
        """`count` pages with one owner each. The caller has checked `num_free`; else ValueError."""
        if not 0 <= count <= len(self._free):
            raise ValueError(f"cannot allocate {count} pages, {len(self._free)} are free")
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._refs[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """One more owner for each of `pages`, which must be held."""
        for page in pages:
            if page < 1 or self._refs[page] < 1:
                raise ValueError(f"page {page} is not held and cannot be shared")
            self._refs[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """One owner fewer for each of `pages`; those without an owner are free again.

        Released in reverse, so that a sequence that comes back gets its pages in the same order.
        """
        for page in reversed(pages):
            if page < 1 or self._refs[page] < 1:
                raise ValueError(f"page {page} is not held and cannot be released")
            self._refs[page] -= 1
            if self._refs[page] == 0:
                self._free.append(page)

    def check(self, owners: dict[int, int] | None = None) -> None:
        """Raises AssertionError unless the books balance.

        free + held = total, no page is free twice, free pages have no owner, page 0 is nobody's; with
        `owners` (page -> number of owners, counted by whoever holds them) the counts are equal.
        """
        free = set(self._free)
        assert len(free) == len(self._free), "a page is free twice"
        assert 0 not in free and self._refs[0] == 0, "page 0 has been handed out"
        for page in range(1, len(self._refs)):
            assert (page in free) == (self._refs[page] == 0), (
                f"page {page}: {self._refs[page]} owners, {'free' if page in free else 'not free'}"
            )
            if owners is not None:
                assert self._refs[page] == owners.get(page, 0), (
                    f"page {page}: {self._refs[page]} references, {owners.get(page, 0)} owners"
                )
