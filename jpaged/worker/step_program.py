"""The step program: forward and sample, as one pure function of (params, kv, rows, input).

Knows no scheduler and no page pool; what it is told comes in the packed input. kv and rows are
donated by whoever compiles it.
"""

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Int32

from jpaged.models.weights import RunLayout
from jpaged.pallas_kernels import AttentionMetadata, KVGroup
from jpaged.sampling.row_params import RowParams, empty_row_params, row_params_from_words
from jpaged.sampling.sampler import Sampled, sample
from jpaged.worker.step_input import LAST_TOKEN, StepInput, StepShape, unpack

KV = tuple[KVGroup, ...]
# Steps of few samples compute the vocabulary for so many rows only.
FEW_SAMPLES = 8


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["last_token", "length", "params"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Rows:
    """What the device knows of each row: its structure never changes with what requests ask for.

    Attributes:
        last_token: the token sampled last.
        length: tokens whose K and V are in pages.
        params: sampling parameters.
    """

    last_token: Int32[Array, " rows"]
    length: Int32[Array, " rows"]
    params: RowParams


def empty_rows(rows: int) -> Rows:
    """The state of `rows` rows and the dummy row behind them."""
    return Rows(
        last_token=jnp.zeros(rows + 1, jnp.int32),
        length=jnp.zeros(rows + 1, jnp.int32),
        params=empty_row_params(rows + 1),
    )


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["kv", "rows", "sampled"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class StepResult:
    """The state after a step, and what it sampled, by entry."""

    kv: KV
    rows: Rows
    sampled: Sampled


def make_step(
    layout: RunLayout, shape: StepShape, *, attention: str | None, platform: str
) -> Callable[[tuple[Array, ...], KV, Rows, Array], StepResult]:
    """The step of one bucket. `attention` names an implementation, None takes the platform's."""

    def step(params: tuple[Array, ...], kv: KV, rows: Rows, packed: Array) -> StepResult:
        given = unpack(packed, shape)
        rows = _reset_rows(rows, given)
        start = rows.length[given.row_ids]
        counts = jnp.diff(given.cu_q_lens)
        tokens, positions, metadata = _place(given, rows, start, counts, kv)
        model = layout.merge(params)
        with jax.named_scope("forward"):
            hidden, kv = model(
                tokens, positions, kv, metadata, attention=attention, platform=platform
            )
        with jax.named_scope("sample"):
            last = hidden[jnp.maximum(given.cu_q_lens[1:] - 1, 0)]
            row_params = jax.tree.map(lambda x: x[given.row_ids], rows.params)
            sampled = _sample_first(
                partial(model.logits, platform=platform),
                last,
                row_params,
                start + counts,
                given.num_samples[0],
            )
        takes = given.samples == 1
        rows = dataclasses.replace(
            rows,
            last_token=rows.last_token.at[given.row_ids].set(
                jnp.where(takes, sampled.tokens, rows.last_token[given.row_ids])
            ),
            length=rows.length.at[given.row_ids].set(start + counts),
        )
        return StepResult(kv=kv, rows=rows, sampled=sampled)

    return step


def _reset_rows(rows: Rows, given: StepInput[jax.Array]) -> Rows:
    """Rows that begin a new sequence take its parameters and length 0."""
    fresh = row_params_from_words(given.sampling)
    # Rows that stay, and unused entries, write to the dummy row.
    dummy = rows.length.shape[0] - 1
    target = jnp.where(given.reset == 1, given.row_ids, dummy)
    params = jax.tree.map(lambda old, new: old.at[target].set(new), rows.params, fresh)
    # The dummy row must ask for nothing, or it would switch the filters on for everyone.
    nothing = empty_row_params(1)
    params = jax.tree.map(lambda x, none: x.at[dummy].set(none[0]), params, nothing)
    return dataclasses.replace(rows, params=params, length=rows.length.at[target].set(0))


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


def _sample_first(
    logits: Callable[[Array], Array],
    hidden: Array,
    params: RowParams,
    positions: Int[Array, " entries"],
    count: Int[Array, ""],
) -> Sampled:
    """Samples the first `count` entries: none, few, or all; the vocabulary is a large product."""
    entries = hidden.shape[0]

    def of_first(size: int) -> Sampled:
        part = jax.tree.map(lambda x: x[:size], params)
        sampled = sample(logits(hidden[:size]), part, positions[:size])
        return jax.tree.map(
            lambda x: jnp.pad(x, [(0, entries - size)] + [(0, 0)] * (x.ndim - 1)), sampled
        )

    sizes = [size for size in (FEW_SAMPLES,) if size < entries] + [entries]
    nothing = jax.eval_shape(lambda: of_first(entries))
    branches: list[Callable[[], Sampled]] = [
        lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), nothing)
    ]
    branches += [partial(of_first, size) for size in sizes]
    # 0 for no samples, then the first size that holds them.
    branch = jnp.where(count > 0, 1 + jnp.sum(count > jnp.asarray(sizes)), 0)
    return jax.lax.switch(branch, branches)
