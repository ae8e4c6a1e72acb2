"""Layers that all families share: linear maps, embedding, norm, gated MLP, and attention without a cache.

Module and parameter names are those of Hugging Face checkpoints, and weights keep their `[outputs, inputs]`.
Layers know nothing of pages: attention takes the function that attends as an argument.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jpaged.models.projection import Backend, Dense, project
from jpaged.pallas_kernels import KVGroup

# Takes q, k and v, `[*batch, tokens, heads, head_dim]`, and returns the attended values and the pool.
Attend = Callable[[Array, Array, Array], tuple[Array, KVGroup | None]]
Angles = tuple[Float[Array, "tokens planes"], Float[Array, "tokens planes"]]

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
}
# Standard deviation of fresh weights, as in transformers.
_INIT_STD = 0.02


def fresh_weight(shape: tuple[int, ...], dtype: DTypeLike, rngs: nnx.Rngs | None) -> Array:
    """A random matrix, or zeros without `rngs`, where only the shape is wanted."""
    if rngs is None:
        return jnp.zeros(shape, dtype)
    return jax.random.normal(rngs.params(), shape, dtype) * jnp.asarray(_INIT_STD, dtype)


class Linear(nnx.Module):
    """A linear map with an optional bias."""

    def __init__(
        self, inputs: int, outputs: int, *, bias: bool, dtype: DTypeLike, rngs: nnx.Rngs | None
    ) -> None:
        self.weight = nnx.Param(fresh_weight((outputs, inputs), dtype, rngs))
        self.bias = nnx.Param(jnp.zeros((outputs,), dtype)) if bias else None

    def __call__(
        self, x: Float[Array, "*rows inputs"], *, backend: Backend
    ) -> Float[Array, "*rows outputs"]:
        bias = None if self.bias is None else self.bias[...]
        return project(x, Dense(self.weight[...]), backend=backend, bias=bias)


class Projections(nnx.Module):
    """Several linear maps of one input: separate as in the checkpoint, or fused as one product.

    Subclasses name the parts; a fused module has one `Linear` whose outputs are the parts', in order.
    """

    def add_projections(
        self,
        inputs: int,
        parts: dict[str, int],
        *,
        fused_name: str,
        fused: bool,
        bias: bool,
        dtype: DTypeLike,
        rngs: nnx.Rngs | None,
    ) -> None:
        """Creates the maps; `parts` gives each part's number of outputs by its name."""
        self.parts = tuple(parts.items())
        self.fused_name = fused_name if fused else None
        widths = {fused_name: sum(parts.values())} if fused else parts
        for name, outputs in widths.items():
            setattr(self, name, Linear(inputs, outputs, bias=bias, dtype=dtype, rngs=rngs))

    def projections(self, x: Float[Array, "*rows inputs"], *, backend: Backend) -> list[Array]:
        """The result of each part."""
        if self.fused_name is None:
            return [getattr(self, name)(x, backend=backend) for name, _ in self.parts]
        together = getattr(self, self.fused_name)(x, backend=backend)
        ends = [sum(width for _, width in self.parts[: i + 1]) for i in range(len(self.parts))]
        return jnp.split(together, ends[:-1], axis=-1)


class Embedding(nnx.Module):
    """A vector per token id; also the output head of models that tie the two."""

    def __init__(self, vocab: int, embed: int, *, dtype: DTypeLike, rngs: nnx.Rngs | None) -> None:
        self.weight = nnx.Param(fresh_weight((vocab, embed), dtype, rngs))

    def __call__(self, tokens: Int[Array, "*rows"]) -> Float[Array, "*rows embed"]:
        return jnp.take(self.weight[...], tokens, axis=0, mode="clip")


class RMSNorm(nnx.Module):
    """Division by the root mean square, then a factor per feature: `weight`, or `1 + weight`.

    Statistics and product are float32; the result is rounded once to x's dtype.
    """

    def __init__(self, features: int, *, eps: float, one_plus: bool, dtype: DTypeLike) -> None:
        self.eps = eps
        self.one_plus = one_plus
        self.weight = nnx.Param((jnp.zeros if one_plus else jnp.ones)((features,), dtype))

    def __call__(self, x: Float[Array, "*rows features"]) -> Float[Array, "*rows features"]:
        wide = x.astype(jnp.float32)
        mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        factor = self.weight[...].astype(jnp.float32) + (1.0 if self.one_plus else 0.0)
        return (wide * jax.lax.rsqrt(mean_square + self.eps) * factor).astype(x.dtype)


class GatedMLP(Projections):
    """`down(activation(gate(x)) * up(x))`; between the products float32, rounded once."""

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        *,
        activation: str,
        bias: bool,
        fused: bool,
        dtype: DTypeLike,
        rngs: nnx.Rngs | None,
    ) -> None:
        self.activation = activation
        self.add_projections(
            hidden,
            {"gate_proj": intermediate, "up_proj": intermediate},
            fused_name="gate_up_proj",
            fused=fused,
            bias=bias,
            dtype=dtype,
            rngs=rngs,
        )
        self.down_proj = Linear(intermediate, hidden, bias=bias, dtype=dtype, rngs=rngs)

    def __call__(
        self, x: Float[Array, "*rows embed"], *, backend: Backend
    ) -> Float[Array, "*rows embed"]:
        gate, up = (part.astype(jnp.float32) for part in self.projections(x, backend=backend))
        inner = ACTIVATIONS[self.activation](gate) * up
        return self.down_proj(inner.astype(x.dtype), backend=backend)


def causal_attention(
    q: Float[Array, "batch tokens heads head_dim"],
    k: Float[Array, "batch tokens kv_heads head_dim"],
    v: Float[Array, "batch tokens kv_heads head_dim"],
    *,
    scale: float,
    window: int | None,
) -> Float[Array, "batch tokens heads head_dim"]:
    """Attention of each token to itself and those before it, at most `window` in all; no pool.

    Scores and softmax are float32. Query head h reads kv head h // (heads // kv_heads).
    """
    batch, tokens, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    grouped = q.reshape(batch, tokens, kv_heads, heads // kv_heads, head_dim)
    scores = scale * jnp.einsum("bqkgd,bskd->bkgqs", grouped, k, preferred_element_type=jnp.float32)
    distance = jnp.arange(tokens)[:, None] - jnp.arange(tokens)[None, :]
    seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
    out = jnp.einsum(
        "bkgqs,bskd->bqkgd", weights, v.astype(jnp.float32), preferred_element_type=jnp.float32
    )
    return out.reshape(q.shape).astype(q.dtype)
