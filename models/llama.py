"""Llama and its like (Llama 2 and 3.x, SmolLM2, TinyLlama, Mistral)."""

from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jpaged.models.config import ModelConfig
from jpaged.models.decoder import CausalLM
from jpaged.models.layers import Angles, Attend, GatedMLP, Linear, Projections, RMSNorm
from jpaged.models.projection import Backend
from jpaged.models.rope import rotate
from jpaged.pallas_kernels import KVGroup


class LlamaAttention(Projections):
    """Grouped-query attention with rotary positions; a norm per head on q and k where a family has it."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        fused: bool,
        dtype: DTypeLike,
        rngs: nnx.Rngs | None,
        qk_norm: bool = False,
        one_plus_norm: bool = False,
    ) -> None:
        self.head_dim = config.head_dim
        self.add_projections(
            config.hidden_size,
            {
                "q_proj": config.num_heads * config.head_dim,
                "k_proj": config.num_kv_heads * config.head_dim,
                "v_proj": config.num_kv_heads * config.head_dim,
            },
            fused_name="qkv_proj",
            fused=fused,
            bias=config.qkv_bias,
            dtype=dtype,
            rngs=rngs,
        )
        self.o_proj = Linear(
            config.num_heads * config.head_dim,
            config.hidden_size,
            bias=config.o_bias,
            dtype=dtype,
            rngs=rngs,
        )

        def norm() -> RMSNorm | None:
            if not qk_norm:
                return None
            return RMSNorm(
                config.head_dim, eps=config.rms_norm_eps, one_plus=one_plus_norm, dtype=dtype
            )

        self.q_norm, self.k_norm = norm(), norm()

    def __call__(
        self, x: Float[Array, "*rows embed"], angles: Angles, attend: Attend, *, backend: Backend
    ) -> tuple[Float[Array, "*rows embed"], KVGroup | None]:
        q, k, v = (
            part.reshape(*part.shape[:-1], -1, self.head_dim)
            for part in self.projections(x, backend=backend)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        out, kv = attend(rotate(q, angles), rotate(k, angles), v)
        return self.o_proj(out.reshape(*out.shape[:-2], -1), backend=backend), kv


class LlamaBlock(nnx.Module):
    """Attention and MLP, each on a normed input and added to the residual."""

    qk_norm = False

    def __init__(
        self, config: ModelConfig, *, fused: bool, dtype: DTypeLike, rngs: nnx.Rngs | None
    ) -> None:
        self.input_layernorm = self._norm(config, dtype)
        self.self_attn = LlamaAttention(
            config, fused=fused, dtype=dtype, rngs=rngs, qk_norm=self.qk_norm
        )
        self.post_attention_layernorm = self._norm(config, dtype)
        self.mlp = GatedMLP(
            config.hidden_size,
            config.intermediate_size,
            activation=config.activation,
            bias=config.mlp_bias,
            fused=fused,
            dtype=dtype,
            rngs=rngs,
        )

    @staticmethod
    def _norm(config: ModelConfig, dtype: DTypeLike) -> RMSNorm:
        return RMSNorm(config.hidden_size, eps=config.rms_norm_eps, one_plus=False, dtype=dtype)

    def __call__(
        self, x: Float[Array, "*rows embed"], angles: Angles, attend: Attend, *, backend: Backend
    ) -> tuple[Float[Array, "*rows embed"], KVGroup | None]:
        attended, kv = self.self_attn(self.input_layernorm(x), angles, attend, backend=backend)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x), backend=backend), kv


class LlamaForCausalLM(CausalLM):
    """Llama and Mistral."""

    block = LlamaBlock
