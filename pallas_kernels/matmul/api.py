"""The product with a weight that models call: checks, then dispatch by name, platform and shape."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..dispatch import check_implementation, resolve_platform
from . import xla

IMPLEMENTATIONS = ("reference", "xla")


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
        implementation: "reference" | "xla"; None picks by platform, dtype and number of rows.
        platform: "cpu" | "gpu" | "tpu", where the program will run; None is the default backend.
        out_dtype: dtype of the result.

    Raises:
        ValueError: an argument's shape, dtype or name is not allowed; the message names it.
    """
    platform = resolve_platform(platform)
    implementation = implementation or "xla"
    check_implementation(implementation, IMPLEMENTATIONS)
    if w.ndim != 2:
        raise ValueError(f"w has shape {w.shape}; allowed: [outputs, inputs]")
    if x.ndim < 1 or x.shape[-1] != w.shape[1]:
        raise ValueError(f"x has shape {x.shape}; w asks for [..., inputs = {w.shape[1]}]")
    for name, array in (("x", x), ("w", w)):
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"{name} has dtype {array.dtype}; allowed: a float dtype")
    out_dtype = jnp.dtype(x.dtype if out_dtype is None else out_dtype)
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    if implementation == "reference":
        product = _reference(rows, w)
    else:
        product = xla.product(rows, w, platform=platform)
    return product.astype(out_dtype).reshape(*x.shape[:-1], w.shape[0])


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
