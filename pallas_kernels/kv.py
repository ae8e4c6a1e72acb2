"""The page arrays: the one file that knows the axes of `pages`.

A page pool is `[layers, pages, page_size, 2 * kv_heads, head_dim]`: K of head h lies at 2h, V at 2h + 1
of the fourth axis. Page 0 belongs to nobody: padding tokens write to its slot 0, page tables are padded
with it, and it may hold anything.

On the CPU 16-bit and 8-bit float pools are stored as unsigned integers of the same width, because XLA:CPU
rewrites a whole bf16 or fp8 array when a few rows of it are scattered into; only written values and
gathered pages are bitcast, never the pool.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

_BITS = {1: jnp.uint8, 2: jnp.uint16}


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["pages", "scales"],
    meta_fields=["dtype"],
)
@dataclasses.dataclass(frozen=True)
class KVGroup:
    """The pages of one group of layers.

    Attributes:
        pages: `[layers, pages, page_size, 2 * kv_heads, head_dim]` in the storage dtype.
        scales: None, or `[layers, 2 * kv_heads]` float32 factors that stored values are multiplied by.
        dtype: the dtype that the stored bits mean (a string, so that it is hashable and comparable).
    """

    pages: Array
    scales: Float[Array, "layers twice_kv_heads"] | None
    dtype: str

    @property
    def page_size(self) -> int:
        return int(self.pages.shape[2])

    @property
    def kv_heads(self) -> int:
        return int(self.pages.shape[3]) // 2

    @property
    def head_dim(self) -> int:
        return int(self.pages.shape[4])


def storage_dtype(dtype: Any, platform: str) -> jnp.dtype[Any]:
    """The dtype in which a pool of `dtype` lives on `platform` ("cpu", "gpu", "tpu")."""
    dtype = jnp.dtype(dtype)
    if platform == "cpu" and jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize in _BITS:
        return jnp.dtype(_BITS[dtype.itemsize])
    return dtype


def to_storage(x: Array, pages: Array) -> Array:
    """Values as the bits that `pages` stores."""
    return x if x.dtype == pages.dtype else jax.lax.bitcast_convert_type(x, pages.dtype)


def from_storage(bits: Array, dtype: Any) -> Array:
    """Stored bits as the values they mean."""
    dtype = jnp.dtype(dtype)
    return bits if bits.dtype == dtype else jax.lax.bitcast_convert_type(bits, dtype)


def bytes_per_page(
    num_layers: int, page_size: int, kv_heads: int, head_dim: int, dtype: Any
) -> int:
    """Bytes one page takes over all layers of its group."""
    return num_layers * page_size * 2 * kv_heads * head_dim * jnp.dtype(dtype).itemsize


def allocate_kv(
    num_layers: int,
    num_pages: int,
    page_size: int,
    kv_heads: int,
    head_dim: int,
    *,
    dtype: Any,
    device: Any = None,
    platform: str | None = None,
) -> KVGroup:
    """A pool of zeros on `device` (a Device or Sharding; None is the default device).

    `num_pages` counts page 0.
    """
    platform = platform or jax.default_backend()
    shape = (num_layers, num_pages, page_size, 2 * kv_heads, head_dim)
    pages = jnp.zeros(shape, storage_dtype(dtype, platform), device=device)
    return KVGroup(pages=pages, scales=None, dtype=jnp.dtype(dtype).name)


def interleave_kv(
    k: Float[Array, "tokens kv_heads head_dim"], v: Float[Array, "tokens kv_heads head_dim"]
) -> Float[Array, "tokens twice_kv_heads head_dim"]:
    """K and V in the order of the fourth axis of `pages`."""
    tokens, kv_heads, head_dim = k.shape
    return jnp.stack([k, v], axis=2).reshape(tokens, 2 * kv_heads, head_dim)


def to_group_dtype(
    group: KVGroup,
    layer: Int[Array, ""],
    values: Float[Array, "tokens twice_kv_heads head_dim"],
) -> Array:
    """Values as the pool holds them: divided by its scales, rounded to its dtype."""
    dtype = jnp.dtype(group.dtype)
    if group.scales is not None:
        values = values.astype(jnp.float32) / group.scales[layer][:, None]
    if jnp.issubdtype(dtype, jnp.integer):
        info = np.iinfo(dtype)
        values = jnp.clip(jnp.round(values.astype(jnp.float32)), info.min, info.max)
    return values.astype(dtype)


def scatter_slots(
    group: KVGroup,
    layer: Int[Array, ""],
    values: Float[Array, "tokens twice_kv_heads head_dim"],
    slots: Int[Array, " tokens"],
) -> KVGroup:
    """Writes `values[t]` into slot `slots[t]`."""
    bits = to_storage(to_group_dtype(group, layer, values), group.pages)
    page, offset = slots // group.page_size, slots % group.page_size
    pages = group.pages.at[layer, page, offset].set(bits, mode="promise_in_bounds")
    return dataclasses.replace(group, pages=pages)
