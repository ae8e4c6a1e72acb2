"""Steps to try paged attention on: a pool, queries and metadata built from a list of rows."""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jpaged.pallas_kernels import AttentionMetadata, KVGroup
from jpaged.pallas_kernels.kv import storage_dtype


@dataclasses.dataclass(frozen=True)
class Case:
    """A step: row r has `rows[r][0]` tokens in its sequence, the last `rows[r][1]` of them new."""

    rows: Sequence[tuple[int, int]]
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    page_size: int = 16
    dtype: str = "float32"
    layers: int = 2
    padding: int = 2
    spare_width: int = 1
    spare_rows: int = 1
    seed: int = 0

    def build(self) -> tuple[jnp.ndarray, KVGroup, AttentionMetadata]:
        """Queries, pool and metadata. Page 0 and every slot no row owns hold NaN."""
        rng = np.random.default_rng(self.seed)
        needed = [-(-length // self.page_size) for length, _ in self.rows]
        num_pages = 1 + sum(needed) + 2
        shape = (self.layers, num_pages, self.page_size, 2 * self.kv_heads, self.head_dim)
        pages = np.full(shape, np.nan, np.float32)
        width = max([1, *needed]) + self.spare_width
        table = np.zeros((len(self.rows) + self.spare_rows, width), np.int32)
        order = 1 + rng.permutation(num_pages - 1)
        taken = 0
        for row, (length, _) in enumerate(self.rows):
            table[row, : needed[row]] = order[taken : taken + needed[row]]
            taken += needed[row]
            for position in range(length):
                page = table[row, position // self.page_size]
                slot = position % self.page_size
                pages[:, page, slot] = rng.standard_normal((self.layers, *shape[3:]))
        lengths = [length for length, _ in self.rows] + [0] * self.spare_rows
        counts = [count for _, count in self.rows] + [0] * self.spare_rows
        cu_q_lens = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        tokens = max(1, int(cu_q_lens[-1]) + self.padding)
        slots = np.zeros(tokens, np.int32)
        for row, (length, count) in enumerate(self.rows):
            for i in range(count):
                position = length - count + i
                page = table[row, position // self.page_size]
                slots[cu_q_lens[row] + i] = page * self.page_size + position % self.page_size
        q = rng.standard_normal((tokens, self.heads, self.head_dim), np.float32)
        stored = pages.astype(np.dtype(getattr(ml_dtypes, self.dtype, self.dtype)))
        kv = KVGroup(
            pages=jnp.asarray(stored.view(storage_dtype(self.dtype, "cpu"))),
            scales=None,
            dtype=self.dtype,
        )
        metadata = AttentionMetadata(
            page_table=jnp.asarray(table),
            kv_lens=jnp.asarray(lengths, jnp.int32),
            cu_q_lens=jnp.asarray(cu_q_lens),
            slots=jnp.asarray(slots),
        )
        return jnp.asarray(q).astype(self.dtype), kv, metadata
