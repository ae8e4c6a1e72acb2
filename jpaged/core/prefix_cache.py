"""PrefixCache: which pages hold what key, and in which order those that nobody holds are given up.

Knows pages and keys only. Whoever releases a sequence's pages begins with the last, so that the least
recently used order puts leaves before roots: a page is given up before the one it was computed behind.
"""

from collections import OrderedDict
from collections.abc import Iterator


class PrefixCache:
    """Keys of pages. A page with a key is in use, or idle: held by nobody and kept for its content."""

    def __init__(self) -> None:
        # Pages that hold a key, oldest first. Two requests that computed the same tokens side by side
        # have a page each: the second keeps its own, since a chain that hangs on a page of another
        # request could lose its root before its leaves.
        self._pages: dict[bytes, list[int]] = {}
        self._keys: dict[int, bytes] = {}
        # Least recently used first.
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def num_idle(self) -> int:
        """Pages that nobody holds and that are kept."""
        return len(self._idle)

    def idle(self) -> Iterator[int]:
        """Idle pages, least recently used first."""
        return iter(self._idle)

    def key_of(self, page: int) -> bytes | None:
        """The key of a page, None if it has none."""
        return self._keys.get(page)

    def is_idle(self, page: int) -> bool:
        """Whether nobody holds the page, and it is kept."""
        return page in self._idle

    def find(self, key: bytes) -> int | None:
        """The newest page of a key."""
        pages = self._pages.get(key)
        return pages[-1] if pages else None

    def register(self, page: int, key: bytes) -> None:
        """Names what a page holds. ValueError if it has a key already."""
        if page in self._keys:
            raise ValueError(f"page {page} has a key already")
        self._keys[page] = key
        self._pages.setdefault(key, []).append(page)

    def retire(self, page: int) -> bool:
        """Its last owner lets go of a page: whether it is kept, which takes a key."""
        if page not in self._keys:
            return False
        self._idle[page] = None
        return True

    def revive(self, page: int) -> None:
        """An idle page is held again."""
        del self._idle[page]

    def evict(self) -> int:
        """The least recently used idle page, which loses its key."""
        page, _ = self._idle.popitem(last=False)
        self.forget(page)
        return page

    def forget(self, page: int) -> None:
        """A page's content is to be read no more; it must not be idle."""
        key = self._keys.pop(page)
        pages = self._pages[key]
        pages.remove(page)
        if not pages:
            del self._pages[key]

    def forget_all(self) -> list[int]:
        """No page has a key any more; those that were idle."""
        idle = list(self._idle)
        self._idle.clear()
        self._keys.clear()
        self._pages.clear()
        return idle

    def check(self) -> None:
        """Raises AssertionError unless both directions agree and idle pages have keys."""
        pairs = sorted((page, key) for key, pages in self._pages.items() for page in pages)
        assert pairs == sorted(self._keys.items()), "pages and keys disagree"
        assert all(self._pages.values()), "a key without pages is kept"
        assert self._idle.keys() <= self._keys.keys(), "an idle page has no key"
