"""The product with a weight as one XLA dot, in the form that XLA runs fast on each platform."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

# XLA:CPU runs a 16-bit product of fewer rows as scalar loops, up to 60 times slower than this many.
_FEWEST_ROWS_16_BIT = 8


def product(
    x: Float[Array, "rows inputs"], w: Float[Array, "outputs inputs"], *, platform: str
) -> Float[Array, "rows outputs"]:
    """`x @ w.T` in float32."""
    dtype = jnp.promote_types(x.dtype, w.dtype)
    rows = x.shape[0]
    if platform == "cpu" and dtype.itemsize == 2 and 0 < rows < _FEWEST_ROWS_16_BIT:
        x = jnp.pad(x, ((0, _FEWEST_ROWS_16_BIT - rows), (0, 0)))
    # Accelerators would multiply float32 in fewer bits by default.
    precision = jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None
    out = jax.lax.dot_general(
        x.astype(dtype),
        w.astype(dtype),
        (((1,), (1,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    return out[:rows]
