"""StepInput: a plan as one packed int32 vector, and how the device reads it.

Both sides are here so that they cannot disagree. One vector is one host-to-device copy a step.
Positions, write slots and lengths are not in it: the device derives them from its own row state and
the counts, so that a step can be planned before the one ahead of it has ended.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Generic, TypeVar

import jax
import numpy as np
from jaxtyping import Int32

from jpaged.core.kv_cache_manager import KVCacheManager
from jpaged.core.step_plan import PlanEntry
from jpaged.sampling.row_params import NUM_WORDS, SequenceSampling

A = TypeVar("A", np.ndarray, jax.Array)

# A token id that stands for "the last token of this row, which only the device has".
LAST_TOKEN = -1


@dataclasses.dataclass(frozen=True)
class StepShape:
    """The sizes of one step program.

    Attributes:
        tokens: tokens of the bucket.
        entries: most rows that take part, at most `tokens`.
        rows: rows of the engine; row number `rows` is a dummy that unused entries write to.
        table_widths: pages of a sequence at max_model_len, by KV group.
    """

    tokens: int
    entries: int
    rows: int
    table_widths: tuple[int, ...]

    @functools.cached_property
    def fields(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of each part of the vector, in order."""
        parts: dict[str, tuple[int, ...]] = {
            "tokens": (self.tokens,),
            "cu_q_lens": (self.entries + 1,),
            "row_ids": (self.entries,),
            "reset": (self.entries,),
            "sampling": (self.entries, NUM_WORDS),
        }
        for group, width in enumerate(self.table_widths):
            parts[f"page_table_{group}"] = (self.entries, width)
        return parts

    @functools.cached_property
    def size(self) -> int:
        """Length of the vector."""
        return sum(int(np.prod(shape)) for shape in self.fields.values())


@dataclasses.dataclass(frozen=True)
class StepInput(Generic[A]):
    """The parts of the vector: views on the host, slices on the device.

    Attributes:
        tokens: `[tokens]`, LAST_TOKEN where the row's own last token is meant; 0 for padding.
        cu_q_lens: `[entries + 1]`, where each entry's tokens begin.
        row_ids: `[entries]`, the dummy row for unused entries.
        reset: `[entries]`, where the row begins a new sequence one more than the position it begins at,
            else 0.
        sampling: `[entries, NUM_WORDS]`, sampling parameters of rows that are reset.
        page_tables: `[entries, table_width]` by KV group.
    """

    tokens: A
    cu_q_lens: A
    row_ids: A
    reset: A
    sampling: A
    page_tables: tuple[A, ...]


def _split(vector: A, shape: StepShape) -> StepInput[A]:
    parts = {}
    start = 0
    for name, dims in shape.fields.items():
        stop = start + int(np.prod(dims))
        parts[name] = vector[start:stop].reshape(dims)
        start = stop
    tables = tuple(parts.pop(f"page_table_{g}") for g in range(len(shape.table_widths)))
    return StepInput(**parts, page_tables=tables)


def unpack(vector: Int32[jax.Array, " size"], shape: StepShape) -> StepInput[jax.Array]:
    """The parts of a packed vector on the device."""
    return _split(vector, shape)


def pack_nothing(shape: StepShape) -> np.ndarray:
    """The vector of a step without entries: it changes nothing but page 0 and the dummy row."""
    vector = np.zeros(shape.size, np.int32)
    _split(vector, shape).row_ids[:] = shape.rows
    return vector


class StepPacker:
    """Turns plans into vectors. Keeps the page table of each row, so that a step writes only new pages."""

    def __init__(self, rows: int, table_widths: Sequence[int]) -> None:
        self._tables = tuple(np.zeros((rows + 1, width), np.int32) for width in table_widths)
        # Entries of a row's table that are written, by group.
        self._written = np.zeros((len(table_widths), rows + 1), np.int64).tolist()

    def pack(
        self, entries: Sequence[PlanEntry], kv: KVCacheManager, shape: StepShape
    ) -> np.ndarray:
        """The vector for `entries`, which fit `shape`."""
        vector = pack_nothing(shape)
        step = _split(vector, shape)
        at = 0
        for i, entry in enumerate(entries):
            request = entry.request
            stop = at + entry.num_tokens
            if entry.on_device:
                step.tokens[at] = LAST_TOKEN
            else:
                step.tokens[at:stop] = request.tokens(entry.first, entry.first + entry.num_tokens)
            at = stop
            step.cu_q_lens[i + 1] = at
            step.row_ids[i] = entry.row
            if entry.is_new:
                sampling = request.sampling
                assert isinstance(sampling, SequenceSampling)
                step.reset[i] = 1 + entry.first
                step.sampling[i] = sampling.words()
            self._update_tables(entry, kv)
        step.cu_q_lens[len(entries) + 1 :] = at
        rows = step.row_ids
        for ours, table in zip(step.page_tables, self._tables, strict=True):
            np.take(table, rows, axis=0, out=ours)
        return vector

    def _update_tables(self, entry: PlanEntry, kv: KVCacheManager) -> None:
        row = entry.row
        for group, table in enumerate(self._tables):
            written = self._written[group]
            if entry.is_new:
                table[row] = 0
                written[row] = 0
            pages = kv.table(entry.request.sequence, group)
            if len(pages) > written[row]:
                table[row, written[row] : len(pages)] = pages[written[row] :]
                written[row] = len(pages)


def token_buckets(max_num_batched_tokens: int, max_num_seqs: int) -> tuple[int, ...]:
    """The at most eight step sizes of an engine, ascending; the last is the token budget.

    Decode steps have one token a row, so the sizes are dense up to max_num_seqs, where most steps
    are, and sparse from there to the budget.
    """
    rows = min(max_num_seqs, max_num_batched_tokens)
    sizes = {1, max_num_batched_tokens}
    sizes.update(size for size in (8, 16) if size < rows)
    # Quarters of the rows, rounded to whole vectors: a step of rows that decode pads at most a third.
    for quarter in (2, 3, 4):
        sizes.add(min(rows, (-(-rows * quarter // 4) + 7) // 8 * 8))
    middle = max(rows, int((rows * max_num_batched_tokens) ** 0.5) // 8 * 8)
    if len(sizes) < 8:
        sizes.add(min(middle, max_num_batched_tokens))
    return tuple(sorted(sizes))


def sample_buckets(max_num_seqs: int) -> tuple[int, ...]:
    """Sizes in which tokens are sampled, ascending.

    The vocabulary is a large product, and most prefill steps end few prompts.
    """
    smaller = {1, 8, max_num_seqs // 2}
    sizes = {size for size in smaller if size == 1 or 8 <= size < max_num_seqs}
    return tuple(sorted(sizes | {max_num_seqs}))


def bucket_for(count: int, buckets: Sequence[int]) -> int:
    """The smallest bucket that holds so many."""
    return next(size for size in buckets if size >= count)
