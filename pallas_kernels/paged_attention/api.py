"""The functions people call: checks, then dispatch to an implementation by name or platform."""

import dataclasses
from functools import partial

import jax
from jaxtyping import Array, Float, Int

from ..kv import KVGroup, interleave_kv, scatter_slots


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["page_table", "kv_lens", "cu_q_lens", "slots"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class AttentionMetadata:
    """How the tokens of one step lie in the page pool of one group of layers.

    Row r owns query tokens [cu_q_lens[r], cu_q_lens[r + 1]), which are its last positions: token i of them
    is at position kv_lens[r] - q_len + i. Rows beyond those in use have no tokens (cu_q_lens repeats its
    last value). Tokens from cu_q_lens[-1] on are padding: their output is zero.

    Attributes:
        page_table: `[rows, table_width]` int32, the page of positions [i * page_size, (i + 1) * page_size);
            padded with 0. Entries wholly before a window may be 0 as well.
        kv_lens: `[rows]` int32, tokens in the row's sequence after this step's write; 0 for unused rows.
        cu_q_lens: `[rows + 1]` int32.
        slots: `[tokens]` int32, page * page_size + offset where each token's K and V are written; 0 for
            padding.
    """

    page_table: Int[Array, "rows table_width"]
    kv_lens: Int[Array, " rows"]
    cu_q_lens: Int[Array, " rows_plus_1"]
    slots: Int[Array, " tokens"]


def write_kv(
    kv: KVGroup,
    layer: Int[Array, ""] | int,
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    slots: Int[Array, " tokens"],
) -> KVGroup:
    """Writes each token's K and V into its slot; in place where the pool is donated."""
    return scatter_slots(kv, layer, interleave_kv(k, v), slots)


def paged_attention(
    q: Float[Array, "tokens heads head_dim"],
    kv: KVGroup,
    layer: Int[Array, ""] | int,
    metadata: AttentionMetadata,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " heads"] | None = None,
    implementation: str | None = None,
) -> Float[Array, "tokens heads head_dim"]:
    """Causal attention of each token over the positions of its own row up to itself.

    A position p attends to positions j with j <= p and, with a window, p - j < window. Scores are
    `scale * q.k`, then `soft_cap * tanh(score / soft_cap)` if given; `sinks[h]` is one more logit per head
    that takes part in the softmax and contributes no value. Query head h reads kv head
    h // (heads // kv_heads). Accumulates in float32 and returns q's dtype.
    """
    raise NotImplementedError
