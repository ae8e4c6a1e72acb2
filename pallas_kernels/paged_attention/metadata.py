"""Where the tokens of a step lie in the page pool. Knows no kernel."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


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


def token_rows(
    metadata: AttentionMetadata, num_tokens: int
) -> tuple[Int[Array, " tokens"], Int[Array, " tokens"], Bool[Array, " tokens"]]:
    """The row of each token, its position there, and whether it is a token at all (not padding)."""
    tokens = jnp.arange(num_tokens, dtype=jnp.int32)
    ends = metadata.cu_q_lens[1:]
    rows = jnp.searchsorted(ends, tokens, side="right", method="compare_all").astype(jnp.int32)
    rows = jnp.minimum(rows, ends.shape[0] - 1)
    positions = metadata.kv_lens[rows] - ends[rows] + tokens
    return rows, positions, tokens < ends[-1]
