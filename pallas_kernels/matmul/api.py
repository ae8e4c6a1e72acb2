"""The product with a weight that models call: checks, then dispatch by name, platform and shape."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..dispatch import choose, cpu_kernels_usable, resolve_platform
from . import xla

IMPLEMENTATIONS = ("reference", "xla", "numba")


def matmul(
    x: Float[Array, "*rows inputs"],
    w: Float[Array, "outputs inputs"],
    *,
    implementation: str | None = None,
    platform: str | None = None,
    out_dtype: Any = None,
) -> Float[Array, "*rows outputs"]:
    """`x @ w.T`, accumulated in float32 and rounded once to `out_dtype` (None: x's dtype).

    The bits of a row of the result do not depend on the other rows, for a given number of rows.

    Args:
        x: any number of leading axes, which count as rows.
        w: a weight as checkpoints store it, `[outputs, inputs]`.
        implementation: "reference" | "xla" | "numba"; None picks by platform, dtype and number of rows.
        platform: "cpu" | "gpu" | "tpu", where the program will run; None is the default backend.
        out_dtype: dtype of the result.

    Raises:
        ValueError: an argument's shape, dtype or name is not allowed; the message names it.
    """
    platform = resolve_platform(platform)
    if w.ndim != 2:
        raise ValueError(f"w has shape {w.shape}; allowed: [outputs, inputs]")
    if x.ndim < 1 or x.shape[-1] != w.shape[1]:
        raise ValueError(f"x has shape {x.shape}; w asks for [..., inputs = {w.shape[1]}]")
    for name, array in (("x", x), ("w", w)):
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"{name} has dtype {array.dtype}; allowed: a float dtype")
    out_dtype = jnp.dtype(x.dtype if out_dtype is None else out_dtype)
    num_rows = math.prod(x.shape[:-1])
    implementation = choose(
        implementation,
        platform,
        IMPLEMENTATIONS,
        numba_obstacle=lambda: _numba_obstacle(w),
        prefer_numba=platform == "cpu"
        and cpu_kernels_usable()
        and 0 < num_rows <= _most_numba_rows(w.dtype.name),
    )
    rows = x.reshape(num_rows, x.shape[-1])
    if implementation == "reference":
        product = _reference(rows, w)
    elif implementation == "numba":
        from . import numba_cpu

        product = numba_cpu.product(rows, w)
    else:
        product = xla.product(rows, w, platform=platform)
    return product.astype(out_dtype).reshape(*x.shape[:-1], w.shape[0])


def _numba_obstacle(w: Array) -> str | None:
    """Why the numba kernel cannot read this weight; None if it can."""
    if w.dtype.name not in ("float32", "bfloat16", "float16"):
        return f"w has dtype {w.dtype}, it reads float32, bfloat16, float16"
    if w.shape[1] % 16 or 0 in w.shape:
        return f"inputs={w.shape[1]} is not a multiple of 16, or there are no outputs"
    return None


@functools.cache
def _most_numba_rows(dtype: str) -> int:
    """The number of rows up to which the numba kernel was measured to beat XLA's product.

    One pass over the weight at the memory's rate wins while the product is bound by memory; where the
    machine multiplies bf16 itself, XLA's bf16 product catches up with few rows.
    """
    import llvmlite.binding

    features = llvmlite.binding.get_host_cpu_features()
    multiplies_bf16 = features.get("avx512bf16", False) or features.get("amx-bf16", False)
    if dtype == "bfloat16" and multiplies_bf16:
        return 4
    return 16 if dtype == "float32" and features.get("avx512f", False) else 8


def _reference(
    x: Float[Array, "rows inputs"], w: Float[Array, "outputs inputs"]
) -> Float[Array, "rows outputs"]:
    """What the product means, in float32."""
    return jnp.einsum(
        "ri,oi->ro",
        x.astype(jnp.float32),
        w.astype(jnp.float32),
        precision=jax.lax.Precision.HIGHEST,
    )
