"""Qwen2, Qwen2.5 and Qwen3: Llama's block with biases on q, k and v, or with a norm per head on q and k.

Their windows (`use_sliding_window`, `max_window_layers`) are per layer and come from the config.
"""

from jpaged.models.decoder import CausalLM
from jpaged.models.llama import LlamaBlock


class Qwen2ForCausalLM(CausalLM):
    """Qwen2 and Qwen2.5; the config says that q, k and v have biases and the output has none."""

    block = LlamaBlock


class Qwen3Block(LlamaBlock):
    """Norms each head of q and k before the rotation."""

    qk_norm = True


class Qwen3ForCausalLM(CausalLM):
    """Qwen3 (dense)."""

    block = Qwen3Block
