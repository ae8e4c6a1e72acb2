"""KVCacheManager: the page tables of sequences, over one PagePool a group of layers.

Knows how many pages a sequence of so many tokens needs, which pages a window has left behind, and which
pages of earlier sequences hold a new one's beginning. Does not know why a sequence wants to grow, nor what
to do when it cannot: that is the scheduler's.
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


def first_live_page(num_computed: int, page_size: int, window: int | None) -> int:
    """The first page that later tokens can attend to, `num_computed` tokens being done.

    The next query is at position num_computed and attends to positions > num_computed - window.
    """
    return 0 if window is None else max(0, num_computed - window + 1) // page_size


class KVCacheManager:
    """Owns the pools and one page table a sequence and group."""

    def __init__(
        self,
        specs: Sequence[KVGroupSpec],
        page_size: int,
        *,
        max_step_tokens: int,
        prefix_caching: bool = True,
    ) -> None:
        """`prefix_caching` keeps pages with a key for later sequences when nobody holds them."""
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1, got {page_size}")
        self.specs = tuple(specs)
        self.page_size = page_size
        self.prefix_caching = prefix_caching
        self._max_step_tokens = max_step_tokens
        self.pools = tuple(PagePool(spec.num_pages, retain=prefix_caching) for spec in self.specs)
        # One list of pages a group; 0 where the window has passed a page by.
        self._tables: dict[int, tuple[list[int], ...]] = {}
        # Pages before this index have been returned, or were never taken, per group.
        self._passed: dict[int, list[int]] = {}

    @property
    def num_usable(self) -> int:
        """Pages that can be held at once, over all groups."""
        return sum(pool.num_usable for pool in self.pools)

    @property
    def num_held(self) -> int:
        """Pages held now, over all groups."""
        return sum(pool.num_held for pool in self.pools)

    @property
    def num_cached(self) -> int:
        """Pages that nobody holds and that are kept for what they hold, over all groups."""
        return sum(pool.num_cached for pool in self.pools)

    @property
    def num_searches(self) -> int:
        """Times that pages were sought among the free ones, over all groups."""
        return sum(pool.num_searches for pool in self.pools)

    def max_tokens(self) -> int:
        """The longest sequence that fits when it is alone (unbounded groups do not count)."""
        full = [p.num_usable for p, s in zip(self.pools, self.specs, strict=True) if not s.window]
        fits_window = all(
            pool.num_usable >= self.peak(2**62, group)
            for group, (pool, spec) in enumerate(zip(self.pools, self.specs, strict=True))
            if spec.window
        )
        if not fits_window:
            full += [p.num_usable for p, s in zip(self.pools, self.specs, strict=True) if s.window]
        return min(full) * self.page_size if full else 2**62

    def match(self, keys: Sequence[bytes]) -> int:
        """How many of the pages with these keys, from the first, need not be computed.

        The most for which a full group has every page, and a windowed group those that the token
        behind them can attend to.
        """
        best, found = 0, [0] * len(self.specs)  # found: pages in a row, up to this one
        for index, key in enumerate(keys):
            hit = True
            for group, (pool, spec) in enumerate(zip(self.pools, self.specs, strict=True)):
                found[group] = found[group] + 1 if pool.find(key) is not None else 0
                if spec.window is None and not found[group]:
                    return best
                first = first_live_page((index + 1) * self.page_size, self.page_size, spec.window)
                hit = hit and found[group] >= index + 1 - first
            if hit:
                best = index + 1
        return best

    def can_hold(self, num_tokens: int, hit: Sequence[bytes] = ()) -> bool:
        """Whether so long a sequence fits beside those that hold pages now.

        `hit` are the keys of its first pages, which `match` has found.
        """
        for group, (pool, spec) in enumerate(zip(self.pools, self.specs, strict=True)):
            need = self.peak(num_tokens, group)
            if need <= pool.num_available:
                continue  # without the hit, which makes it easier
            if spec.window is not None:
                return False
            if need - len(hit) > pool.num_available - self.num_unheld(hit, group):
                return False
        return True

    def num_unheld(self, hit: Sequence[bytes], group: int) -> int:
        """How many of the pages with these keys nobody holds."""
        pool = self.pools[group]
        pages = [pool.find(key) for key in hit]
        return sum(page is not None and pool.is_cached(page) for page in pages)

    def peak(self, num_tokens: int, group: int) -> int:
        """The most pages that a sequence which reaches `num_tokens` holds at once in a group."""
        window = self.specs[group].window
        return peak_pages(num_tokens, self.page_size, window, self._max_step_tokens)

    def open(self, sequence: int, hit: Sequence[bytes] = ()) -> None:
        """A page table for a new sequence, which begins with the pages that `match` has found."""
        if sequence in self._tables:
            raise ValueError(f"sequence {sequence} has a page table already")
        # Stored first: whatever fails from here on, `release` gives back what was taken.
        tables: tuple[list[int], ...] = tuple([] for _ in self.specs)
        passed = [0] * len(self.specs)
        self._tables[sequence], self._passed[sequence] = tables, passed
        for group, (pool, spec) in enumerate(zip(self.pools, self.specs, strict=True)):
            first = first_live_page(len(hit) * self.page_size, self.page_size, spec.window)
            tables[group].extend([0] * first)
            passed[group] = first
            for key in hit[first:]:
                page = pool.find(key)
                assert page is not None, "match has found each of these"
                pool.share([page])
                tables[group].append(page)

    def grow(self, sequence: int, num_tokens: int) -> bool:
        """Makes the table cover `num_tokens` in every group; in none, and False, if one lacks pages."""
        tables = self._tables[sequence]
        total = pages_for(num_tokens, self.page_size)
        missing = [total - len(table) for table in tables]
        if all(count <= 0 for count in missing):
            return True
        if any(n > pool.num_available for n, pool in zip(missing, self.pools, strict=True)):
            return False
        for table, pool, count in zip(tables, self.pools, missing, strict=True):
            if count > 0:
                after = table[-1] if table else None
                table.extend(pool.allocate(count, owner=sequence, after=after))
        return True

    def set_aside(self, sequence: int, num_tokens: int) -> None:
        """Promises a sequence, softly, the pages it needs to reach `num_tokens`."""
        for group, (pool, spec) in enumerate(zip(self.pools, self.specs, strict=True)):
            table = self._tables[sequence][group]
            missing = pages_for(num_tokens, self.page_size) - len(table)
            if spec.window is not None:
                # A window gives as many pages back as it takes, once it is filled.
                live = len(table) - self._passed[sequence][group]
                missing = min(missing, self.peak(num_tokens, group) - live)
            missing -= pool.num_set_aside_for(sequence)
            pool.set_aside(missing, sequence, after=table[-1] if table else None)

    def pass_window(self, sequence: int, num_computed: int) -> None:
        """Returns pages that no later token can attend to, `num_computed` tokens being done."""
        passed = self._passed[sequence]
        for group, (spec, table) in enumerate(zip(self.specs, self._tables[sequence], strict=True)):
            if spec.window is None:
                continue
            first_live = min(len(table), first_live_page(num_computed, self.page_size, spec.window))
            gone = table[passed[group] : first_live]
            if gone:
                # The oldest first: a later sequence needs the window's last pages only.
                self.pools[group].release(gone)
                table[passed[group] : first_live] = [0] * len(gone)
                passed[group] = first_live

    def register(self, sequence: int, index: int, key: bytes) -> None:
        """Says what page `index` of a sequence holds, in each group that still has it."""
        for pool, table in zip(self.pools, self._tables[sequence], strict=True):
            if table[index]:
                pool.register(table[index], key)

    def forget_all(self) -> None:
        """No page is found by its key any more."""
        for pool in self.pools:
            pool.forget_all()

    def release(self, sequence: int) -> None:
        """Returns every page of a sequence, and what was set aside for it, and forgets its table."""
        passed = self._passed.pop(sequence)
        for pool, table, first in zip(self.pools, self._tables.pop(sequence), passed, strict=True):
            pool.release(reversed(table[first:]))
            pool.return_set_aside(sequence)

    def table(self, sequence: int, group: int) -> list[int]:
        """Pages of a sequence in a group, in order of position; 0 where the window has passed."""
        return self._tables[sequence][group]

    def check(self, lengths: dict[int, int] | None = None) -> None:
        """Raises AssertionError unless tables and pools agree.

        `lengths` maps each open sequence to the tokens its table must cover exactly.
        """
        for group, pool in enumerate(self.pools):
            owners: Counter[int] = Counter()
            for sequence, tables in self._tables.items():
                first = self._passed[sequence][group]
                assert not any(tables[group][:first]), "a passed page is still in a table"
                owners.update(tables[group][first:])
            pool.check(dict(owners))
            for sequence in pool.owners_set_aside():
                assert sequence in self._tables, "pages are set aside for a sequence that is gone"
        if lengths is not None:
            assert lengths.keys() == self._tables.keys(), (
                "open tables are not the running sequences"
            )
            for sequence, tokens in lengths.items():
                for table in self._tables[sequence]:
                    assert len(table) == pages_for(tokens, self.page_size), (
                        f"sequence {sequence}: {len(table)} pages for {tokens} tokens"
                    )
