"""Products with a weight: the one function that models call, and the leaf types it takes.

A leaf type is how one weight lies in memory. `Dense` is the plain matrix; quantized weights and adapters
are further leaf types here, and no model file changes for them. Model files never multiply by a weight
themselves.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jpaged.pallas_kernels import matmul


@dataclasses.dataclass(frozen=True)
class Backend:
    """Where a program will run and which implementations it takes; None lets each op pick.

    `platform` is "cpu" | "gpu" | "tpu"; `attention` and `matmul` are names of implementations.
    """

    platform: str | None = None
    attention: str | None = None
    matmul: str | None = None


# Implementations with a derivative.
DIFFERENTIABLE = Backend(matmul="xla")


@partial(jax.tree_util.register_dataclass, data_fields=["weight"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Dense:
    """A weight as the checkpoint has it: `[outputs, inputs]`."""

    weight: Float[Array, "outputs inputs"]


def project(
    x: Float[Array, "*rows inputs"],
    w: Dense,
    *,
    backend: Backend,
    bias: Float[Array, " outputs"] | None = None,
    out_dtype: DTypeLike | None = None,
) -> Float[Array, "*rows outputs"]:
    """`x @ w.T + bias`, accumulated in float32 and rounded once to `out_dtype` (None: x's dtype)."""
    out_dtype = jnp.dtype(x.dtype if out_dtype is None else out_dtype)
    product = matmul(
        x,
        w.weight,
        implementation=backend.matmul,
        platform=backend.platform,
        out_dtype=out_dtype if bias is None else jnp.float32,
    )
    return product if bias is None else (product + bias).astype(out_dtype)
