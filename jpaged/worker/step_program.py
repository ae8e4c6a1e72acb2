"""The two programs of a step: forward yields hidden states, sample turns them into tokens.

Pure functions that know no scheduler and no page pool; what they are told comes in the packed
input. They are apart because forward comes in as many shapes as there are token buckets, and
sample, which takes as long to compile, in few. kv and rows are donated by whoever compiles them.
"""

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int32

from jpaged.models.weights import RunLayout
from jpaged.pallas_kernels import AttentionMetadata, KVGroup
from jpaged.sampling.row_params import NUM_WORDS, row_params_from_words
from jpaged.sampling.sampler import Sampled, sample
from jpaged.worker.step_input import LAST_TOKEN, StepInput, StepShape, unpack

KV = tuple[KVGroup, ...]

# XLA:CPU takes a program's scratch memory from malloc at each call. Beyond 32 MiB that is fresh memory,
# page by page, whichever branches run.
_CPU_ROWS_AT_ONCE = 8


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["last_token", "length", "sampling"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Rows:
    """What the device knows of each row: its structure never changes with what requests ask for.

    Attributes:
        last_token: the token sampled last.
        length: tokens whose K and V are in pages.
        sampling: sampling parameters, as the words that `row_params` reads.
    """

    last_token: Int32[Array, " rows"]
    length: Int32[Array, " rows"]
    sampling: Int32[Array, "rows words"]


def empty_rows(rows: int) -> Rows:
    """The state of `rows` rows and the dummy row behind them."""
    return Rows(
        last_token=jnp.zeros(rows + 1, jnp.int32),
        length=jnp.zeros(rows + 1, jnp.int32),
        sampling=jnp.zeros((rows + 1, NUM_WORDS), jnp.int32),
    )


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["kv", "rows", "hidden"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Forwarded:
    """The state after a forward, and the hidden state of each entry's last token."""

    kv: KV
    rows: Rows
    hidden: Float[Array, "rows embed"]


def make_forward(
    layout: RunLayout, shape: StepShape, *, attention: str | None, platform: str
) -> Callable[[tuple[Array, ...], KV, Rows, Array], Forwarded]:
    """The forward of one bucket. `attention` names an implementation, None takes the platform's."""

    def forward(params: tuple[Array, ...], kv: KV, rows: Rows, packed: Array) -> Forwarded:
        given = unpack(packed, shape)
        rows = _reset_rows(rows, given)
        start = rows.length[given.row_ids]
        counts = jnp.diff(given.cu_q_lens)
        tokens, positions, metadata = _place(given, rows, start, counts, kv)
        model = layout.merge(params)
        hidden, kv = model(tokens, positions, kv, metadata, attention=attention, platform=platform)
        last = hidden[jnp.maximum(given.cu_q_lens[1:] - 1, 0)]
        # Of one shape for all buckets, since it is sample's input.
        last = jnp.pad(last, ((0, shape.rows - shape.entries), (0, 0)))
        rows = dataclasses.replace(rows, length=rows.length.at[given.row_ids].set(start + counts))
        return Forwarded(kv=kv, rows=rows, hidden=last)

    return forward


def make_sample(
    layout: RunLayout, *, platform: str
) -> Callable[[tuple[Array, ...], Rows, Array, Array], tuple[Rows, Sampled]]:
    """Samples the first entries of a step, as many as `row_ids` has; the dummy row is for padding."""

    def sample_rows(
        params: tuple[Array, ...],
        rows: Rows,
        hidden: Float[Array, "rows embed"],
        row_ids: Int32[Array, " samples"],
    ) -> tuple[Rows, Sampled]:
        model = layout.merge(params)
        logits = model.logits(hidden[: row_ids.shape[0]], platform=platform)
        params_of_rows = row_params_from_words(rows.sampling[row_ids])
        # The new token will stand behind all that is computed.
        at_once = _CPU_ROWS_AT_ONCE if platform == "cpu" else None
        sampled = sample(logits, params_of_rows, rows.length[row_ids], rows_at_once=at_once)
        last_token = rows.last_token.at[row_ids].set(sampled.tokens)
        return dataclasses.replace(rows, last_token=last_token), sampled

    return sample_rows


def _reset_rows(rows: Rows, given: StepInput[jax.Array]) -> Rows:
    """Rows that begin a new sequence take its parameters, and the length that is in pages already."""
    # Rows that stay, and unused entries, write to the dummy row: zeros, which ask for nothing.
    target = jnp.where(given.reset > 0, given.row_ids, rows.length.shape[0] - 1)
    return dataclasses.replace(
        rows,
        sampling=rows.sampling.at[target].set(given.sampling),
        length=rows.length.at[target].set(jnp.maximum(given.reset - 1, 0)),
    )


def _place(
    given: StepInput[jax.Array],
    rows: Rows,
    start: Int[Array, " entries"],
    counts: Int[Array, " entries"],
    kv: KV,
) -> tuple[Int[Array, " tokens"], Int[Array, " tokens"], tuple[AttentionMetadata, ...]]:
    """Tokens, their positions, and where they lie in each KV group."""
    index = jnp.arange(given.tokens.shape[0], dtype=jnp.int32)
    real = index < given.cu_q_lens[-1]
    entry = jnp.sum(index[:, None] >= given.cu_q_lens[None, 1:], axis=1, dtype=jnp.int32)
    entry = jnp.minimum(entry, start.shape[0] - 1)
    positions = jnp.where(real, start[entry] + index - given.cu_q_lens[entry], 0)
    tokens = jnp.where(
        given.tokens == LAST_TOKEN, rows.last_token[given.row_ids[entry]], given.tokens
    )
    kv_lens = jnp.where(counts > 0, start + counts, 0)
    metadata = []
    for group, table in zip(kv, given.page_tables, strict=True):
        page = table[entry, positions // group.page_size]
        slots = page * group.page_size + positions % group.page_size
        metadata.append(
            AttentionMetadata(
                page_table=table,
                kv_lens=kv_lens,
                cu_q_lens=given.cu_q_lens,
                slots=jnp.where(real, slots, 0),
            )
        )
    return tokens, positions, tuple(metadata)
