"""What all decoders have in common: embedding, a loop over blocks, final norm and output head.

Knows how a step's layers reach their group of the page pool, and that each block is one function under an
inner `jax.jit`, traced once for all layers of equal structure and window: lowering 30 layers then costs
little more than one. Knows nothing of what is inside a block.
"""

from functools import partial
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jpaged.models.config import ModelConfig
from jpaged.models.layers import Angles, Attend, Embedding, Linear, RMSNorm, causal_attention
from jpaged.models.projection import DIFFERENTIABLE, Backend, Dense, project
from jpaged.models.rope import Rope, rope_angles
from jpaged.pallas_kernels import AttentionMetadata, KVGroup, paged_attention, write_kv


@runtime_checkable
class Block(Protocol):
    """One layer of a family: attention and MLP with their norms and residuals."""

    def __call__(
        self, x: Array, angles: Angles, attend: Attend, *, backend: Backend
    ) -> tuple[Array, KVGroup | None]: ...


@runtime_checkable
class BlockType(Protocol):
    """Builds a block; with `fused`, in the layout that the engine runs."""

    def __call__(
        self, config: ModelConfig, *, fused: bool, dtype: DTypeLike, rngs: nnx.Rngs | None
    ) -> nnx.Module: ...


class Backbone(nnx.Module):
    """The part of a checkpoint under `model.`."""

    def __init__(
        self,
        config: ModelConfig,
        block: BlockType,
        *,
        one_plus_norm: bool,
        fused: bool,
        dtype: DTypeLike,
        rngs: nnx.Rngs | None,
    ) -> None:
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype=dtype, rngs=rngs)
        self.layers = nnx.List(
            [block(config, fused=fused, dtype=dtype, rngs=rngs) for _ in range(config.num_layers)]
        )
        self.norm = RMSNorm(
            config.hidden_size, eps=config.rms_norm_eps, one_plus=one_plus_norm, dtype=dtype
        )


class CausalLM(nnx.Module):
    """A decoder-only language model. Families give their block by subclassing.

    Attributes:
        block: the family's block.
        one_plus_norm: whether norms multiply by `1 + weight`.
    """

    block: BlockType
    one_plus_norm = False

    def __init__(
        self, config: ModelConfig, *, fused: bool, dtype: DTypeLike, rngs: nnx.Rngs | None
    ) -> None:
        self.config = config
        self.model = Backbone(
            config,
            type(self).block,
            one_plus_norm=self.one_plus_norm,
            fused=fused,
            dtype=dtype,
            rngs=rngs,
        )
        self.lm_head = (
            None
            if config.tie_word_embeddings
            else Linear(config.hidden_size, config.vocab_size, bias=False, dtype=dtype, rngs=rngs)
        )

    def __call__(
        self,
        tokens: Int[Array, " tokens"],
        positions: Int[Array, " tokens"],
        kv: tuple[KVGroup, ...],
        metadata: tuple[AttentionMetadata, ...],
        *,
        attention: str | None = None,
        platform: str | None = None,
    ) -> tuple[Float[Array, "tokens embed"], tuple[KVGroup, ...]]:
        """One step over the page pool.

        Args:
            tokens, positions: of all rows of the step, row after row, then padding.
            kv, metadata: one for each of the config's `kv_groups`, in their order.
            attention: implementation of the paged ops; None picks by platform.
            platform: "cpu" | "gpu" | "tpu", where the program will run; None is the default backend.

        Returns:
            The hidden state of each token after the final norm, and the pool with this step's K and V.
        """
        backend = Backend(platform=platform, attention=attention)
        groups = self.config.kv_groups
        places = {i: (g, n) for g, group in enumerate(groups) for n, i in enumerate(group.layers)}
        angles = self._angles_once(positions, backend)
        pools = list(kv)
        x = self.embed(tokens)
        for i, block in enumerate(self.model.layers):
            group, index = places[i]
            structure, weights = nnx.split(block)
            x, pools[group] = _paged_block(
                structure,
                weights,
                x,
                angles[self.config.ropes[i]],
                pools[group],
                jnp.int32(index),
                metadata[group],
                scale=self.config.attention_scale,
                window=self.config.windows[i],
                backend=backend,
            )
        return self.model.norm(x), tuple(pools)

    def embed(self, tokens: Int[Array, "*rows"]) -> Float[Array, "*rows embed"]:
        """The first hidden state of each token."""
        x = self.model.embed_tokens(tokens)
        scale = self.config.embedding_scale
        return x if scale is None else x * jnp.asarray(scale, x.dtype)

    def logits(
        self, hidden: Float[Array, "*rows embed"], *, platform: str | None = None
    ) -> Float[Array, "*rows vocab"]:
        """Float32 logits of hidden states that the final norm has seen."""
        return self._logits(hidden, Backend(platform=platform))

    def dense_logits(
        self, tokens: Int[Array, "batch tokens"]
    ) -> Float[Array, "batch tokens vocab"]:
        """Logits at every position of whole sequences, without a pool; differentiable, for training."""
        angles = self._angles(jnp.arange(tokens.shape[1], dtype=jnp.int32))
        x = self.embed(tokens)
        for block, rope, window in zip(
            self.model.layers, self.config.ropes, self.config.windows, strict=True
        ):
            structure, weights = nnx.split(block)
            x = _dense_block(
                structure,
                weights,
                x,
                angles[rope],
                scale=self.config.attention_scale,
                window=window,
            )
        return self._logits(self.model.norm(x), DIFFERENTIABLE)

    def _logits(self, hidden: Array, backend: Backend) -> Array:
        head = self.model.embed_tokens if self.lm_head is None else self.lm_head
        logits = project(hidden, Dense(head.weight[...]), backend=backend, out_dtype=jnp.float32)
        cap = self.config.final_logit_softcap
        return logits if cap is None else cap * jnp.tanh(logits / cap)

    def _angles(self, positions: Int[Array, " tokens"]) -> dict[Rope, Angles]:
        return {
            rope: rope_angles(positions, rope, self.config.head_dim)
            for rope in dict.fromkeys(self.config.ropes)
        }

    def _angles_once(
        self, positions: Int[Array, " tokens"], backend: Backend
    ) -> dict[Rope, Angles]:
        """The same values, computed once a step wherever it runs."""
        if backend.platform != "cpu":
            return self._angles(positions)

        # XLA:CPU would compute cosine and sine again in each layer, for each head: it takes them into the
        # fusions that use them, across an optimization barrier too. A branch it leaves where it is.
        # As a tuple: jax would sort the keys of a dictionary, and these have no order.
        ropes = tuple(dict.fromkeys(self.config.ropes))

        def compute(positions: Int[Array, " tokens"]) -> tuple[Angles, ...]:
            return tuple(self._angles(positions).values())

        def zeros(positions: Int[Array, " tokens"]) -> tuple[Angles, ...]:
            shapes = jax.eval_shape(compute, positions)
            return jax.tree.map(lambda of: jnp.zeros(of.shape, of.dtype), shapes)

        angles = jax.lax.cond(jnp.any(positions >= 0), compute, zeros, positions)
        return dict(zip(ropes, angles, strict=True))


@partial(jax.jit, static_argnames=("structure", "scale", "window", "backend"))
def _paged_block(
    structure: nnx.GraphDef[Block],
    weights: nnx.State[Any, Any],
    x: Float[Array, "tokens embed"],
    angles: Angles,
    kv: KVGroup,
    layer: Int[Array, ""],
    metadata: AttentionMetadata,
    *,
    scale: float,
    window: int | None,
    backend: Backend,
) -> tuple[Float[Array, "tokens embed"], KVGroup]:
    """A block whose attention goes through the page pool."""

    def attend(q: Array, k: Array, v: Array) -> tuple[Array, KVGroup]:
        with jax.named_scope("write_kv"):
            pool = write_kv(
                kv,
                layer,
                k,
                v,
                metadata.slots,
                implementation=backend.attention,
                platform=backend.platform,
            )
        with jax.named_scope("attention"):
            out = paged_attention(
                q,
                pool,
                layer,
                metadata,
                scale=scale,
                window=window,
                implementation=backend.attention,
                platform=backend.platform,
            )
        return out, pool

    out, pool = nnx.merge(structure, weights)(x, angles, attend, backend=backend)
    assert pool is not None
    return out, pool


@partial(jax.jit, static_argnames=("structure", "scale", "window"))
def _dense_block(
    structure: nnx.GraphDef[Block],
    weights: nnx.State[Any, Any],
    x: Float[Array, "batch tokens embed"],
    angles: Angles,
    *,
    scale: float,
    window: int | None,
) -> Float[Array, "batch tokens embed"]:
    """A block whose attention sees whole sequences."""

    def attend(q: Array, k: Array, v: Array) -> tuple[Array, None]:
        return causal_attention(q, k, v, scale=scale, window=window), None

    return nnx.merge(structure, weights)(x, angles, attend, backend=DIFFERENTIABLE)[0]
