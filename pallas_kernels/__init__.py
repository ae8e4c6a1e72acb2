"""Array operations over the page pool. Imports jax (and numba for the CPU) only, never jpaged."""

from .kv import KVGroup, allocate_kv, bytes_per_page
from .matmul.api import matmul
from .paged_attention.api import paged_attention, write_kv
from .paged_attention.metadata import AttentionMetadata

__all__ = [
    "AttentionMetadata",
    "KVGroup",
    "allocate_kv",
    "bytes_per_page",
    "matmul",
    "paged_attention",
    "write_kv",
]
