"""Gemma 3, text only: norms of `1 + weight` before and after attention and MLP, and on each head of q and k.

Five layers of sliding window to one of full attention, each kind with its own rotary base; embeddings are
scaled by sqrt(hidden_size), and the output head is tied to them. The config says which layer is which.
"""

from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jpaged.models.config import ModelConfig
from jpaged.models.decoder import CausalLM
from jpaged.models.layers import Angles, Attend, GatedMLP, RMSNorm
from jpaged.models.llama import LlamaAttention
from jpaged.models.projection import Backend
from jpaged.pallas_kernels import KVGroup


class Gemma3Block(nnx.Module):
    """Attention and MLP, each normed before and after, then added to the residual."""

    def __init__(
        self, config: ModelConfig, *, fused: bool, dtype: DTypeLike, rngs: nnx.Rngs | None
    ) -> None:
        def norm() -> RMSNorm:
            return RMSNorm(config.hidden_size, eps=config.rms_norm_eps, one_plus=True, dtype=dtype)

        self.input_layernorm = norm()
        self.self_attn = LlamaAttention(
            config, fused=fused, dtype=dtype, rngs=rngs, qk_norm=True, one_plus_norm=True
        )
        self.post_attention_layernorm = norm()
        self.pre_feedforward_layernorm = norm()
        self.mlp = GatedMLP(
            config.hidden_size,
            config.intermediate_size,
            activation=config.activation,
            bias=config.mlp_bias,
            fused=fused,
            dtype=dtype,
            rngs=rngs,
        )
        self.post_feedforward_layernorm = norm()

    def __call__(
        self, x: Float[Array, "*rows embed"], angles: Angles, attend: Attend, *, backend: Backend
    ) -> tuple[Float[Array, "*rows embed"], KVGroup | None]:
        attended, kv = self.self_attn(self.input_layernorm(x), angles, attend, backend=backend)
        x = x + self.post_attention_layernorm(attended)
        out = self.mlp(self.pre_feedforward_layernorm(x), backend=backend)
        return x + self.post_feedforward_layernorm(out), kv


class Gemma3ForCausalLM(CausalLM):
    """The language model of Gemma 3."""

    block = Gemma3Block
    one_plus_norm = True
