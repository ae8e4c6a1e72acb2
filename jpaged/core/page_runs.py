"""PageRuns: a set of pages kept as runs of neighbours, so that what is taken is contiguous where possible.

Kernels move a run of pages as one copy. Runs lie in bins by length (exact up to 15, then eight to a
power of two, as in two-level segregated fit), with a bit for each bin that is not empty: finding a run
costs the same however many there are. Knows page numbers only.
"""

from collections.abc import Iterable, Iterator

_EXACT = 16
_SUB_BITS = 3


def _bin(length: int) -> int:
    """The bin in which a run of this length lies."""
    if length < _EXACT:
        return length
    power = length.bit_length() - 1
    sub = (length >> (power - _SUB_BITS)) & ((1 << _SUB_BITS) - 1)
    return _EXACT + ((power - _EXACT.bit_length() + 1) << _SUB_BITS) + sub


def _bin_that_fits(length: int) -> int:
    """The lowest bin all of whose runs have at least this length."""
    if length >= _EXACT:
        length += (1 << (length.bit_length() - 1 - _SUB_BITS)) - 1
    return _bin(length)


class PageRuns:
    """A set of page numbers: add pages, take as many as wanted."""

    def __init__(self) -> None:
        # start -> length, and end (exclusive) -> start.
        self._lengths: dict[int, int] = {}
        self._starts: dict[int, int] = {}
        # Starts of runs by bin, in order of insertion.
        self._bins: dict[int, dict[int, None]] = {}
        self._mask = 0
        self._count = 0

    def __len__(self) -> int:
        """Pages in the set."""
        return self._count

    def __iter__(self) -> Iterator[int]:
        """Pages in ascending order."""
        for start in sorted(self._lengths):
            yield from range(start, start + self._lengths[start])

    @property
    def num_runs(self) -> int:
        """Maximal runs of neighbouring pages in the set."""
        return len(self._lengths)

    def add(self, pages: Iterable[int]) -> None:
        """Puts pages that are not in the set into it. O(pages)."""
        start = stop = -1
        for page in pages:
            if page == stop:
                stop += 1
            elif page == start - 1:
                start -= 1
            else:
                if start >= 0:
                    self.add_run(start, stop - start)
                start, stop = page, page + 1
        if start >= 0:
            self.add_run(start, stop - start)

    def add_run(self, start: int, length: int) -> None:
        """Puts the pages [start, start + length) into the set, joined with their neighbours. O(1)."""
        self._count += length
        stop = start + length
        before = self._starts.get(start)
        if before is not None:
            length += self._remove(before)
            start = before
        if stop in self._lengths:
            length += self._remove(stop)
        self._insert(start, length)

    def take(self, count: int, *, after: int | None = None) -> list[int]:
        """Removes and returns `count` pages, of which the set has enough; else ValueError.

        First those that follow page `after`; then the shortest run that is long enough, by bin; if
        there is none, the longest runs. O(count).
        """
        if not 0 <= count <= self._count:
            raise ValueError(f"cannot take {count} pages of {self._count}")
        taken: list[int] = []
        if count and after is not None and after + 1 in self._lengths:
            taken += self._take_from(after + 1, count)
        while len(taken) < count:
            wanted = count - len(taken)
            fitting = self._mask >> (low := _bin_that_fits(wanted))
            if fitting:
                index = low + (fitting & -fitting).bit_length() - 1
            else:
                index = self._mask.bit_length() - 1
            taken += self._take_from(next(iter(self._bins[index])), wanted)
        return taken

    def check(self) -> None:
        """Raises AssertionError unless runs, ends, bins and the count agree."""
        assert self._count == sum(self._lengths.values()), "pages are miscounted"
        assert self._starts == {s + n: s for s, n in self._lengths.items()}, (
            "ends are not runs' ends"
        )
        assert not any(start in self._starts for start in self._lengths), (
            "neighbours are not joined"
        )
        binned = {start: index for index, starts in self._bins.items() for start in starts}
        assert binned == {s: _bin(n) for s, n in self._lengths.items()}, "a run is in a wrong bin"
        assert self._mask == sum(1 << i for i, starts in self._bins.items() if starts)
        previous = -1
        for start in sorted(self._lengths):
            assert start > previous, "runs overlap"
            previous = start + self._lengths[start] - 1

    def _take_from(self, start: int, count: int) -> list[int]:
        length = self._remove(start)
        taken = min(length, count)
        if length > taken:
            self._insert(start + taken, length - taken)
        self._count -= taken
        return list(range(start, start + taken))

    def _insert(self, start: int, length: int) -> None:
        self._lengths[start] = length
        self._starts[start + length] = start
        index = _bin(length)
        self._bins.setdefault(index, {})[start] = None
        self._mask |= 1 << index

    def _remove(self, start: int) -> int:
        length = self._lengths.pop(start)
        del self._starts[start + length]
        index = _bin(length)
        starts = self._bins[index]
        del starts[start]
        if not starts:
            self._mask &= ~(1 << index)
        return length
