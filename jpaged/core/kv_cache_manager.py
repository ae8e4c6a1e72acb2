"""KVCacheManager: the page tables of sequences, over one PagePool a group of layers.

Knows how many pages a sequence of so many tokens needs, and which pages a window has left behind. Does not
know why a sequence wants to grow, nor what to do when it cannot: that is the scheduler's.
"""

import dataclasses
from collections import Counter
from collections.abc import Sequence

from jpaged.core.page_pool import PagePool


@dataclasses.dataclass(frozen=True)
class KVGroupSpec:
    """All that the scheduler sees of a group of layers whose pages live equally long.

    Attributes:
        num_pages: pages of this group, page 0 included.
        window: attention window in tokens, None for full attention.
    """

    num_pages: int
    window: int | None = None


def pages_for(num_tokens: int, page_size: int) -> int:
    """Pages that hold `num_tokens` tokens."""
    return -(-num_tokens // page_size)


def peak_pages(num_tokens: int, page_size: int, window: int | None, max_step_tokens: int) -> int:
    """The most pages a sequence that reaches `num_tokens` holds at once in a group.

    With a window, a step of up to `max_step_tokens` tokens needs the window before it and itself; it can
    begin and end inside a page, hence one page more.
    """
    full = pages_for(num_tokens, page_size)
    if window is None:
        return full
    return min(full, pages_for(window + max_step_tokens, page_size) + 1)


class KVCacheManager:
    """Owns the pools and one page table a sequence and group."""

    def __init__(
        self, specs: Sequence[KVGroupSpec], page_size: int, *, max_step_tokens: int
    ) -> None:
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1, got {page_size}")
        self.specs = tuple(specs)
        self.page_size = page_size
        self._max_step_tokens = max_step_tokens
        self._pools = tuple(PagePool(spec.num_pages) for spec in self.specs)
        # One list of pages a group; 0 where the window has passed a page by.
        self._tables: dict[int, tuple[list[int], ...]] = {}
        # Pages before this index have been returned, per group.
        self._passed: dict[int, list[int]] = {}

    @property
    def num_usable(self) -> int:
        """Pages that can be held at once, over all groups."""
        return sum(pool.num_usable for pool in self._pools)

    @property
    def num_held(self) -> int:
        """Pages held now, over all groups."""
        return sum(pool.num_held for pool in self._pools)

    def max_tokens(self) -> int:
        """The longest sequence that fits when it is alone (unbounded groups do not count)."""
        full = [p.num_usable for p, s in zip(self._pools, self.specs, strict=True) if not s.window]
        fits_window = all(
            pool.num_usable >= peak_pages(2**62, self.page_size, spec.window, self._max_step_tokens)
            for pool, spec in zip(self._pools, self.specs, strict=True)
            if spec.window
        )
        if not fits_window:
            full += [p.num_usable for p, s in zip(self._pools, self.specs, strict=True) if s.window]
        return min(full) * self.page_size if full else 2**62

    def can_hold(self, num_tokens: int) -> bool:
        """Whether so long a sequence fits beside those that hold pages now."""
        return all(
            pool.num_free
            >= peak_pages(num_tokens, self.page_size, spec.window, self._max_step_tokens)
            for pool, spec in zip(self._pools, self.specs, strict=True)
        )

    def open(self, sequence: int) -> None:
        """An empty page table for a new sequence."""
        if sequence in self._tables:
            raise ValueError(f"sequence {sequence} has a page table already")
        self._tables[sequence] = tuple([] for _ in self.specs)
        self._passed[sequence] = [0] * len(self.specs)

    def grow(self, sequence: int, num_tokens: int) -> bool:
        """Makes the table cover `num_tokens` in every group; in none, and False, if one lacks pages."""
        tables = self._tables[sequence]
        need = [max(0, pages_for(num_tokens, self.page_size) - len(table)) for table in tables]
        if any(n > pool.num_free for n, pool in zip(need, self._pools, strict=True)):
            return False
        for table, pool, n in zip(tables, self._pools, need, strict=True):
            table.extend(pool.allocate(n))
        return True

    def pass_window(self, sequence: int, num_computed: int) -> None:
        """Returns pages that no later token can attend to, `num_computed` tokens being done.

        The next query is at position num_computed and attends to positions > num_computed - window.
        """
        passed = self._passed[sequence]
        for group, (spec, table) in enumerate(zip(self.specs, self._tables[sequence], strict=True)):
            if spec.window is None:
                continue
            first_live = max(0, num_computed - spec.window + 1) // self.page_size
            gone = table[passed[group] : first_live]
            if gone:
                self._pools[group].release(gone)
                table[passed[group] : first_live] = [0] * len(gone)
                passed[group] = first_live

    def release(self, sequence: int) -> None:
        """Returns every page of a sequence and forgets its table."""
        passed = self._passed.pop(sequence)
        for pool, table, first in zip(self._pools, self._tables.pop(sequence), passed, strict=True):
            pool.release(table[first:])

    def table(self, sequence: int, group: int) -> list[int]:
        """Pages of a sequence in a group, in order of position; 0 where the window has passed."""
        return self._tables[sequence][group]

    def check(self, lengths: dict[int, int] | None = None) -> None:
        """Raises AssertionError unless tables and pools agree.

        `lengths` maps each open sequence to the tokens its table must cover exactly.
        """
        for group, pool in enumerate(self._pools):
            owners: Counter[int] = Counter()
            for sequence, tables in self._tables.items():
                first = self._passed[sequence][group]
                assert not any(tables[group][:first]), "a passed page is still in a table"
                owners.update(tables[group][first:])
            pool.check(dict(owners))
        if lengths is not None:
            assert lengths.keys() == self._tables.keys(), (
                "open tables are not the running sequences"
            )
            for sequence, tokens in lengths.items():
                for table in self._tables[sequence]:
                    assert len(table) == pages_for(tokens, self.page_size), (
                        f"sequence {sequence}: {len(table)} pages for {tokens} tokens"
                    )
