"""Fields of a Hugging Face config.json: kinds of model, defaults, and checks of single values.

Knows what transformers' config classes fill in, and which fields are refused because they would change the
numbers. Does not know what the fields mean for a model: `config.py` does.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

from jpaged.errors import ModelLoadError

T = TypeVar("T")

# The class that a checkpoint of each kind must name in `architectures`, if it names any.
ARCHITECTURES = {
    "llama": ("LlamaForCausalLM",),
    "mistral": ("MistralForCausalLM",),
    "qwen2": ("Qwen2ForCausalLM",),
    "qwen3": ("Qwen3ForCausalLM",),
    "gemma3_text": ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
}

# Fields that change the numbers: the values with which they do not, on every family here.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "quantization_config": (None, {}),
    "partial_rotary_factor": (None, 1, 1.0),
    "rope_interleaved": (None, False),
    "use_mrope": (None, False),
    "use_bidirectional_attention": (None, False),
    "per_layer_config": (None, {}),
    "add_cross_attention": (None, False),
    "is_encoder_decoder": (None, False),
    "pruned_heads": (None, {}),
}

_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008},
    "mistral": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    "qwen2": {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
    },
    "qwen3": {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
    },
    "gemma3_text": {
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256,
        "hidden_activation": "gelu_pytorch_tanh",
    },
}
_DEFAULTS_ALL: dict[str, Any] = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
}


def text_config(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The language model's part of a config, with `model_type` and `architectures` checked."""
    model_type = hf.get("model_type")
    if model_type == "gemma3":
        inner = hf.get("text_config")
        if not isinstance(inner, Mapping):
            raise ModelLoadError("config field text_config is missing; a gemma3 model has one")
        outer = {k: hf[k] for k in ("architectures", "quantization_config") if k in hf}
        for key in ("dtype", "torch_dtype", "tie_word_embeddings"):
            if key in hf and key not in inner:
                outer[key] = hf[key]
        model_type = inner.get("model_type", "gemma3_text")
        hf = {**inner, **outer}
    if model_type not in ARCHITECTURES:
        raise ModelLoadError(
            f"config field model_type is {model_type!r}; "
            f"supported are gemma3, {', '.join(sorted(ARCHITECTURES))}"
        )
    named = hf.get("architectures") or ()
    if named and not set(named) & set(ARCHITECTURES[model_type]):
        raise ModelLoadError(
            f"config field architectures is {list(named)}; for model_type {model_type!r} supported "
            f"are {', '.join(ARCHITECTURES[model_type])}"
        )
    return {**hf, "model_type": model_type}


class Fields:
    """Takes fields from the config of one language model, with defaults and checks."""

    def __init__(self, hf: dict[str, Any]) -> None:
        self.hf = hf
        self.kind: str = hf["model_type"]
        self.defaults = {**_DEFAULTS_ALL, **_DEFAULTS[self.kind]}

    def get(self, field: str, kind: type[T], *, optional: bool = False) -> T:
        value = self.hf.get(field, self.defaults.get(field))
        if value is None and not optional:
            value = self.defaults.get(field)
        if value is None and optional:
            return value  # type: ignore[return-value]
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ModelLoadError(f"config field {field} is {value!r}; it must be {kind.__name__}")
        if kind in (int, float) and not value > 0:  # type: ignore[operator]
            raise ModelLoadError(f"config field {field} is {value!r}; it must be positive")
        return value

    def check_neutral(self) -> None:
        """Refuses fields that would change the numbers and are not supported."""
        for field, neutral in _NEUTRAL.items():
            if field in self.hf and self.hf[field] not in neutral:
                raise ModelLoadError(
                    f"config field {field} is {self.hf[field]!r}; supported is {neutral[-1]!r}"
                )
