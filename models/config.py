"""What a model is: its dimensions and every choice that changes its numbers, read from config.json.

Knows what the fields of each supported family mean, in both dialects. Knows nothing of weights or arrays.
"""

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

from jpaged.errors import ModelLoadError
from jpaged.models.hf_fields import Fields, text_config
from jpaged.models.rope import Rope, rope_from_hf

logger = logging.getLogger(__name__)
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_FULL, _SLIDING = "full_attention", "sliding_attention"


@dataclasses.dataclass(frozen=True)
class LayerGroup:
    """Layers whose pages live equally long: all of the context, or the last `window` positions."""

    window: int | None
    layers: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder's dimensions and choices. Per-layer fields have one entry a layer.

    `attention_scale` multiplies q.k; `embedding_scale` multiplies embeddings (rounded to the model's dtype
    first); `dtype` is the dtype the checkpoint was saved in.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    activation: str
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    attention_scale: float
    windows: tuple[int | None, ...]
    ropes: tuple[Rope, ...]
    embedding_scale: float | None = None
    final_logit_softcap: float | None = None
    dtype: str = "float32"

    @property
    def kv_groups(self) -> tuple[LayerGroup, ...]:
        """Groups of layers, full attention first, then by falling window."""
        windows = sorted(set(self.windows), key=lambda w: (w is not None, -(w or 0)))
        return tuple(
            LayerGroup(window, tuple(i for i, w in enumerate(self.windows) if w == window))
            for window in windows
        )

    @classmethod
    def from_hf(cls, hf_config: Mapping[str, Any]) -> "ModelConfig":
        """Reads a Hugging Face config.json. Raises ModelLoadError naming the field at fault."""
        return _Reader(text_config(hf_config)).read()


class _Reader(Fields):
    """Reads a ModelConfig from the fields of one language model."""

    def read(self) -> ModelConfig:
        self.check_neutral()
        heads = self.get("num_attention_heads", int)
        hidden = self.get("hidden_size", int)
        kv_heads = self.get("num_key_value_heads", int, optional=True) or heads
        if heads % kv_heads:
            raise ModelLoadError(
                f"config field num_key_value_heads is {kv_heads}; it must divide "
                f"num_attention_heads, {heads}"
            )
        head_dim = self.get("head_dim", int, optional=True) or hidden // heads
        if head_dim % 2:
            raise ModelLoadError(f"config field head_dim is {head_dim}; it must be even")
        gemma = self.kind == "gemma3_text"
        bias = self.kind not in ("mistral", "qwen2") and self.get("attention_bias", bool)
        scale = self.get("query_pre_attn_scalar", float) if gemma else float(head_dim)
        layer_types = self.layer_types()
        return ModelConfig(
            model_type=self.kind,
            vocab_size=self.get("vocab_size", int),
            hidden_size=hidden,
            intermediate_size=self.get("intermediate_size", int),
            num_layers=len(layer_types),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            max_position_embeddings=self.get("max_position_embeddings", int),
            rms_norm_eps=self.get("rms_norm_eps", float),
            activation=self.activation(),
            tie_word_embeddings=self.get("tie_word_embeddings", bool),
            qkv_bias=self.kind == "qwen2" or bias,
            o_bias=bias,
            mlp_bias=self.kind == "llama" and self.get("mlp_bias", bool),
            attention_scale=scale**-0.5,
            windows=self.windows(layer_types),
            ropes=self.ropes(layer_types),
            embedding_scale=hidden**0.5 if gemma else None,
            final_logit_softcap=self.soft_cap() if gemma else None,
            dtype=self.dtype(),
        )

    def activation(self) -> str:
        field = "hidden_activation" if self.kind == "gemma3_text" else "hidden_act"
        name = self.get(field, str)
        if name not in _ACTIVATIONS:
            raise ModelLoadError(
                f"config field {field} is {name!r}; supported are {', '.join(_ACTIVATIONS)}"
            )
        return _ACTIVATIONS[name]

    def dtype(self) -> str:
        name = self.hf.get("dtype") or self.hf.get("torch_dtype") or "float32"
        short = str(name).removeprefix("torch.")
        if short not in ("float32", "bfloat16", "float16"):
            raise ModelLoadError(
                f"config field dtype is {name!r}; supported are float32, bfloat16, float16"
            )
        return short

    def soft_cap(self) -> float | None:
        # The reference implementation of Gemma 3 reads this field and does not apply it, so its
        # checkpoints were made without.
        if self.hf.get("attn_logit_softcapping") is not None:
            logger.warning("config field attn_logit_softcapping is not applied by Gemma 3; ignored")
        return self.get("final_logit_softcapping", float, optional=True)

    def layer_types(self) -> list[str]:
        """One of the two kinds of attention for each layer."""
        count = self.get("num_hidden_layers", int)
        natural = self.natural_layer_types(count)
        given = self.hf.get("layer_types")
        if given is None:
            return natural
        if not isinstance(given, list) or len(given) != count or set(given) - {_FULL, _SLIDING}:
            raise ModelLoadError(
                f"config field layer_types is {given!r}; it must hold {_FULL!r} or {_SLIDING!r} "
                f"for each of the {count} layers"
            )
        if self.kind in ("llama", "mistral") and given != natural:
            raise ModelLoadError(
                f"config field layer_types is {given!r}; a {self.kind} model with this "
                f"sliding_window has {natural[0]!r} in every layer"
            )
        return given

    def natural_layer_types(self, count: int) -> list[str]:
        if self.kind == "gemma3_text":
            period = self.hf.get("sliding_window_pattern", 6)
            if isinstance(period, bool) or not isinstance(period, int) or period < 1:
                raise ModelLoadError(
                    f"config field sliding_window_pattern is {period!r}; it must be a positive int"
                )
            return [_SLIDING if (i + 1) % period else _FULL for i in range(count)]
        if self.window() is None:
            return [_FULL] * count
        if self.kind == "mistral":
            return [_SLIDING] * count
        first = self.hf.get("max_window_layers", 28)
        if isinstance(first, bool) or not isinstance(first, int) or first < 0:
            raise ModelLoadError(
                f"config field max_window_layers is {first!r}; it must be an int, 0 or more"
            )
        return [_SLIDING if i >= first else _FULL for i in range(count)]

    def window(self) -> int | None:
        if self.kind == "llama":
            if self.hf.get("sliding_window") is not None:
                raise ModelLoadError(
                    f"config field sliding_window is {self.hf['sliding_window']!r}; "
                    "a llama model has none"
                )
            return None
        if self.kind in ("qwen2", "qwen3") and not self.hf.get("use_sliding_window", False):
            return None
        return self.get("sliding_window", int, optional=True)

    def windows(self, layer_types: list[str]) -> tuple[int | None, ...]:
        window = self.window()
        if _SLIDING in layer_types and window is None:
            raise ModelLoadError(
                f"config field sliding_window is not set, but layer_types has {_SLIDING!r}"
            )
        return tuple(window if kind == _SLIDING else None for kind in layer_types)

    def ropes(self, layer_types: list[str]) -> tuple[Rope, ...]:
        new, old = self.hf.get("rope_parameters"), self.hf.get("rope_scaling")
        for field, value in (("rope_parameters", new), ("rope_scaling", old)):
            if value is not None and not isinstance(value, Mapping):
                raise ModelLoadError(f"config field {field} is {value!r}; it must be a dictionary")
        longest = self.get("max_position_embeddings", int)
        if self.kind != "gemma3_text":
            field, given = ("rope_scaling", old) if old else ("rope_parameters", new or {})
            rope = self.rope(field, given, "rope_theta", 10_000.0, longest)
            return (rope,) * len(layer_types)
        nested = dict(new or {})
        if unknown := sorted(nested.keys() - {_FULL, _SLIDING}):
            raise ModelLoadError(
                f"config field rope_parameters has {', '.join(unknown)}; a gemma3 model has one "
                f"dictionary under each of {_FULL} and {_SLIDING}"
            )
        full = {**(nested.get(_FULL) or {}), **(old or {})}
        by_type = {
            _FULL: self.rope("rope_parameters", full, "rope_theta", 1e6, longest),
            _SLIDING: self.rope(
                f"rope_parameters.{_SLIDING}",
                nested.get(_SLIDING) or {},
                "rope_local_base_freq",
                10_000.0,
                longest,
            ),
        }
        return tuple(by_type[kind] for kind in layer_types)

    def rope(
        self, field: str, given: Mapping[str, Any], theta_field: str, theta: float, longest: int
    ) -> Rope:
        self.defaults[theta_field] = theta
        kind = given.get("rope_type") or given.get("type")
        original = self.hf.get("original_max_position_embeddings")
        if original is not None and kind in ("llama3", "yarn"):
            given = {**given, "original_max_position_embeddings": original}
        return rope_from_hf(
            given,
            field=field,
            theta=self.get(theta_field, float),
            max_position_embeddings=longest,
        )
