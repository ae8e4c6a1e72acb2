"""Array operations over the page pool. Imports jax (and numba for the CPU) only, never jpaged."""

from .kv import KVGroup, allocate_kv, bytes_per_page
from .paged_attention.api import AttentionMetadata, paged_attention, write_kv

__all__ = [
    "AttentionMetadata",
    "KVGroup",
    "allocate_kv",
    "bytes_per_page",
    "paged_attention",
    "write_kv",
]
