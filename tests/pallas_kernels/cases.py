"""Steps to try paged attention on: a pool, queries and metadata built from a list of rows."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.pallas_kernels import AttentionMetadata, KVGroup
from jpaged.pallas_kernels.kv import storage_dtype

IMPLEMENTATIONS = ("xla", "numba")


@dataclasses.dataclass(frozen=True)
class Case:
    """A step: row r has `rows[r][0]` tokens in its sequence, the last `rows[r][1]` of them new.

    Arrays are as large as the rows need unless told. Rows of equal `seeds` have equal contents, wherever
    their pages lie, which `order` decides.
    """

    rows: Sequence[tuple[int, int]]
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    page_size: int = 16
    dtype: str = "float32"
    layers: int = 2
    tokens: int | None = None
    num_rows: int | None = None
    table_width: int | None = None
    num_pages: int | None = None
    seeds: Sequence[int] | None = None
    order: int = 0

    def build(self) -> tuple[jax.Array, KVGroup, AttentionMetadata]:
        """Queries, pool and metadata. Page 0 and every slot that no row owns hold NaN."""
        seeds = self.seeds or range(len(self.rows))
        needed = [-(-length // self.page_size) for length, _ in self.rows]
        num_pages = self.num_pages or sum(needed) + 3
        num_rows = self.num_rows or len(self.rows) + 1
        pages = np.full(
            (self.layers, num_pages, self.page_size, 2 * self.kv_heads, self.head_dim),
            np.nan,
            np.float32,
        )
        table = np.zeros((num_rows, self.table_width or max(needed) + 1), np.int32)
        lengths = np.zeros(num_rows, np.int32)
        starts = np.zeros(num_rows + 1, np.int32)
        lengths[: len(self.rows)] = [length for length, _ in self.rows]
        starts[1 : len(self.rows) + 1] = np.cumsum([count for _, count in self.rows])
        starts[len(self.rows) + 1 :] = starts[len(self.rows)]
        tokens = self.tokens or int(starts[-1]) + 2
        slots = np.zeros(tokens, np.int32)
        q = np.random.default_rng(1).standard_normal(
            (tokens, self.heads, self.head_dim), np.float32
        )
        free = iter(1 + np.random.default_rng(self.order).permutation(num_pages - 1))
        for row, (length, count) in enumerate(self.rows):
            rng = np.random.default_rng(seeds[row])
            owned = np.array([next(free) for _ in range(needed[row])], np.int32)
            table[row, : len(owned)] = owned
            position = np.arange(length)
            page, offset = owned[position // self.page_size], position % self.page_size
            values = rng.standard_normal((length, self.layers, *pages.shape[3:]), np.float32)
            pages[:, page, offset] = np.moveaxis(values, 0, 1)
            new = slice(starts[row], starts[row + 1])
            slots[new] = (page * self.page_size + offset)[length - count :]
            q[new] = rng.standard_normal((count, self.heads, self.head_dim), np.float32)
        kv = pool_of(pages, self.dtype)
        metadata = AttentionMetadata(
            page_table=jnp.asarray(table),
            kv_lens=jnp.asarray(lengths),
            cu_q_lens=jnp.asarray(starts),
            slots=jnp.asarray(slots),
        )
        return jnp.asarray(q).astype(self.dtype), kv, metadata


def pool_of(values: np.ndarray, dtype: str) -> KVGroup:
    """A pool on the CPU that holds `values` `[layers, pages, page_size, 2 * kv_heads, head_dim]`."""
    stored = np.asarray(jnp.asarray(values).astype(dtype)).view(storage_dtype(dtype, "cpu"))
    return KVGroup(pages=jnp.asarray(stored), scales=None, dtype=dtype)


def tolerance(reference: jax.Array, dtype: str) -> float:
    """What a result may be off by: two roundings to `dtype`, and those of a sum in float32."""
    eps = 2 * float(jnp.finfo(dtype).eps) + 64 * float(jnp.finfo(jnp.float32).eps)
    return eps * float(jnp.abs(reference.astype(jnp.float32)).max())
