"""Which class defines which `model_type`, and the two ways to make one: with weights, or shapes only."""

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jpaged.models.config import ModelConfig
from jpaged.models.decoder import CausalLM
from jpaged.models.gemma3 import Gemma3ForCausalLM
from jpaged.models.llama import LlamaForCausalLM
from jpaged.models.qwen import Qwen2ForCausalLM, Qwen3ForCausalLM

_CLASSES: dict[str, type[CausalLM]] = {
    "llama": LlamaForCausalLM,
    "mistral": LlamaForCausalLM,
    "qwen2": Qwen2ForCausalLM,
    "qwen3": Qwen3ForCausalLM,
    "gemma3_text": Gemma3ForCausalLM,
}


def build_model(
    config: ModelConfig, *, rngs: nnx.Rngs | None = None, dtype: DTypeLike = jnp.float32
) -> CausalLM:
    """A model with fresh random weights, in the public layout: parameters named as in a checkpoint."""
    rngs = nnx.Rngs(0) if rngs is None else rngs
    return _CLASSES[config.model_type](config, fused=False, dtype=dtype, rngs=rngs)


def abstract_model(config: ModelConfig, dtype: DTypeLike, *, fused: bool = False) -> CausalLM:
    """A model whose parameters are shapes without data; `fused` is the layout that the engine runs."""

    def build() -> CausalLM:
        return _CLASSES[config.model_type](config, fused=fused, dtype=dtype, rngs=None)

    return nnx.eval_shape(build)
