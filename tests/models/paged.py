"""Runs a model over a page pool as an engine would: rows, chunks and scattered pages, in plain Python."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jpaged.models.config import ModelConfig
from jpaged.models.weights import RunLayout
from jpaged.pallas_kernels import AttentionMetadata, KVGroup, allocate_kv

PAGE_SIZE = 4
TOKENS = 16

# One step: (row, number of its next tokens) in order.
Step = Sequence[tuple[int, int]]


def fresh_pool(config: ModelConfig, num_pages: int, dtype: DTypeLike) -> tuple[KVGroup, ...]:
    """A pool for each group, full of NaN: whatever is read must have been written."""
    pools = []
    for group in config.kv_groups:
        pool = allocate_kv(
            len(group.layers),
            num_pages,
            PAGE_SIZE,
            config.num_kv_heads,
            config.head_dim,
            dtype=dtype,
        )
        bits = np.full(pool.pages.shape, np.nan, jnp.dtype(pool.dtype)).view(pool.pages.dtype)
        pools.append(dataclasses.replace(pool, pages=jnp.array(bits)))
    return tuple(pools)


def run_paged(
    layout: RunLayout,
    params: tuple[jax.Array, ...],
    texts: Sequence[np.ndarray],
    steps: Sequence[Step],
    *,
    attention: str | None = None,
) -> list[np.ndarray]:
    """Logits at every position of each text, computed step by step through the page pool."""
    config = layout.config
    width = max(-(-len(text) // PAGE_SIZE) for text in texts)
    rng = np.random.default_rng(7)
    tables = [
        1 + rng.permutation(len(texts) * width).astype(np.int32).reshape(len(texts), width)
        for _ in config.kv_groups
    ]
    kv = fresh_pool(config, 1 + len(texts) * width, layout.specs[0].dtype)

    @jax.jit
    def step(params, kv, tokens, positions, metadata):  # type: ignore[no-untyped-def]
        model = layout.merge(params)
        hidden, kv = model(tokens, positions, kv, metadata, attention=attention)
        return model.logits(hidden), kv

    done = [0] * len(texts)
    logits: list[list[np.ndarray]] = [[] for _ in texts]
    for plan in steps:
        tokens, positions = np.zeros(TOKENS, np.int32), np.zeros(TOKENS, np.int32)
        cu_q_lens = np.zeros(len(texts) + 1, np.int32)
        kv_lens = np.zeros(len(texts), np.int32)
        order = [row for row, _ in plan]
        start = 0
        for entry, (row, count) in enumerate(plan):
            span = np.arange(done[row], done[row] + count)
            tokens[start : start + count] = texts[row][span]
            positions[start : start + count] = span
            start += count
            done[row] += count
            kv_lens[entry] = done[row]
            cu_q_lens[entry + 1] = start
        cu_q_lens[len(plan) + 1 :] = start
        metadata = []
        for group, table in zip(config.kv_groups, tables, strict=True):
            rows = np.zeros((len(texts), width), np.int32)
            rows[: len(plan)] = table[order]
            slots = np.zeros(TOKENS, np.int32)
            for entry, (row, _) in enumerate(plan):
                part = slice(cu_q_lens[entry], cu_q_lens[entry + 1])
                at = positions[part]
                slots[part] = table[row][at // PAGE_SIZE] * PAGE_SIZE + at % PAGE_SIZE
                if group.window is not None:
                    # Pages wholly before the window of the first query may be gone.
                    first = int(at[0]) - group.window + 1
                    rows[entry, : max(first, 0) // PAGE_SIZE] = 0
            metadata.append(AttentionMetadata(*map(jnp.asarray, (rows, kv_lens, cu_q_lens, slots))))
        out, kv = step(params, kv, jnp.asarray(tokens), jnp.asarray(positions), tuple(metadata))
        for entry, (row, _) in enumerate(plan):
            logits[row].append(np.asarray(out)[cu_q_lens[entry] : cu_q_lens[entry + 1]])
    assert done == [len(text) for text in texts]
    return [np.concatenate(parts) for parts in logits]


def mixed_steps(lengths: Sequence[int]) -> list[Step]:
    """Chunks and decodes of three rows, mixed, until each text is done."""
    counts = [
        [(0, 7), (1, 5)],
        [(1, 6), (2, 1), (0, 9)],
        [(2, 11), (0, 1), (1, 1)],
        [(0, 1)],
        [(1, 1), (0, 1), (2, 4)],
    ]
    left = list(lengths)
    steps: list[Step] = []
    for plan in [*counts, *([[(2, 1), (0, 1), (1, 5)]] * max(lengths))]:
        step = [(row, min(count, left[row])) for row, count in plan if left[row]]
        for row, count in step:
            left[row] -= count
        if step:
            steps.append(step)
    return steps
