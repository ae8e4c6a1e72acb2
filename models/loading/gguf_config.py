"""The config.json that a GGUF file's metadata stands for.

Knows the metadata keys of each architecture and the choices that llama.cpp makes in code instead of in the
file. Does not decide what a config means: `jpaged.models.config` does.
"""

import math
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from jpaged.errors import ModelLoadError
from jpaged.models.loading.checkpoint import HostArray
from jpaged.models.loading.files import token_ids
from jpaged.models.loading.gguf_file import GGUFFile

Json: TypeAlias = dict[str, Any]

_CLASSES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
}
ROPE_FACTORS = "rope_freqs.weight"

# Gemma 3: every sixth layer attends to everything, the others rotate with this base. The file has neither.
_GEMMA_PERIOD = 6
_GEMMA_LOCAL_THETA = 10_000.0
# The only Gemma 3 whose queries are not scaled by head_dim: 62 layers, scaled by hidden_size / heads.
_GEMMA_27B_LAYERS = 62

# The file stores what "llama3" scaling does to each frequency, not its parameters. Scaling all of
# original length and both bounds together changes nothing, so low_freq_factor can be taken as 1.
_LLAMA3_LENGTHS = tuple(2**n for n in range(3, 21))
_LLAMA3_HIGH = (4.0, 2.0, 8.0, 16.0, 32.0)


class GGUFConfig:
    """Reads one file's metadata; errors name the key."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.path: Path = file.path
        self.arch = self.text("general.architecture")
        if self.arch not in _CLASSES:
            raise ModelLoadError(
                f"{self.path}: general.architecture is {self.arch!r}; supported are "
                f"{', '.join(_CLASSES)}"
            )
        if self.number("split.count", 0) > 1:
            raise ModelLoadError(
                f"{self.path}: is one part of a split model; join the parts first "
                "(`llama-gguf-split --merge first-part.gguf whole.gguf`)"
            )
        if self.number(f"{self.arch}.expert_count", 0):
            raise ModelLoadError(
                f"{self.path}: {self.arch}.expert_count is set: mixtures of experts are not supported"
            )

    def text(self, key: str) -> str:
        value = self.file.metadata.get(key)
        if not isinstance(value, str):
            raise ModelLoadError(f"{self.path}: metadata {key} is {value!r}; it must be a string")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number; one value that all layers share may be written as an array."""
        value = self.file.metadata.get(key, default)
        if isinstance(value, list) and len(set(value)) == 1:
            value = value[0]
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
        ):
            shown = "missing" if value is None else repr(value)[:60]
            raise ModelLoadError(f"{self.path}: metadata {key} is {shown}; it must be a number")
        return value

    def of_arch(self, key: str, default: float | None = None) -> float:
        return self.number(f"{self.arch}.{key}", default)

    def hf_config(self) -> Json:
        """The config as Hugging Face would write it."""
        model_type, class_name = _CLASSES[self.arch]
        embeddings = self.file.tensors.get("token_embd.weight")
        if embeddings is None:
            raise ModelLoadError(f"{self.path}: has no tensor token_embd.weight")
        hidden, heads = (
            int(self.of_arch("embedding_length")),
            int(self.of_arch("attention.head_count")),
        )
        if heads <= 0:
            raise ModelLoadError(
                f"{self.path}: metadata {self.arch}.attention.head_count is {heads}"
            )
        head_dim = self.of_arch(
            "attention.key_length", self.of_arch("rope.dimension_count", hidden // heads)
        )
        config: Json = {
            "model_type": model_type,
            "architectures": [class_name],
            "vocab_size": embeddings.shape[0],
            "hidden_size": hidden,
            "intermediate_size": int(self.of_arch("feed_forward_length")),
            "num_hidden_layers": int(self.of_arch("block_count")),
            "num_attention_heads": heads,
            "num_key_value_heads": int(self.of_arch("attention.head_count_kv", heads)),
            "head_dim": int(head_dim),
            "max_position_embeddings": int(self.of_arch("context_length")),
            "rms_norm_eps": shortest(self.of_arch("attention.layer_norm_rms_epsilon")),
            "rope_theta": shortest(self.of_arch("rope.freq_base", 10_000.0)),
            "rope_scaling": self.rope_scaling(),
            "tie_word_embeddings": "output.weight" not in self.file.tensors,
            # What such files are made from; the file itself does not say.
            "dtype": "bfloat16",
        }
        for name in ("bos", "eos"):
            config[f"{name}_token_id"] = self.file.metadata.get(f"tokenizer.ggml.{name}_token_id")
        getattr(self, f"add_{self.arch}")(config)
        return config

    def add_llama(self, config: Json) -> None:
        config["hidden_act"] = "silu"
        config["attention_bias"] = "blk.0.attn_q.bias" in self.file.tensors
        config["mlp_bias"] = "blk.0.ffn_up.bias" in self.file.tensors
        factors = self.file.tensors.get(ROPE_FACTORS)
        if factors is not None:
            config["rope_scaling"] = self.llama3_scaling(self.file.read(ROPE_FACTORS), config)
        window = int(self.of_arch("attention.sliding_window", 0))
        if window:
            config |= {
                "model_type": "mistral",
                "architectures": ["MistralForCausalLM"],
                "sliding_window": window,
            }

    def add_qwen2(self, config: Json) -> None:
        config |= {"hidden_act": "silu", "use_sliding_window": False}

    def add_qwen3(self, config: Json) -> None:
        config |= {"hidden_act": "silu", "use_sliding_window": False, "attention_bias": False}

    def add_gemma3(self, config: Json) -> None:
        layers, head_dim = config["num_hidden_layers"], config["head_dim"]
        period = int(self.of_arch("attention.sliding_window_pattern", _GEMMA_PERIOD))
        scalar = head_dim
        if layers == _GEMMA_27B_LAYERS:
            scalar = config["hidden_size"] // config["num_attention_heads"]
        config |= {
            "hidden_activation": "gelu_pytorch_tanh",
            "attention_bias": False,
            "query_pre_attn_scalar": scalar,
            "rope_local_base_freq": shortest(
                self.of_arch("rope.freq_base_swa", _GEMMA_LOCAL_THETA)
            ),
            "sliding_window": int(self.of_arch("attention.sliding_window")),
            "layer_types": [
                "full_attention" if (i + 1) % period == 0 else "sliding_attention"
                for i in range(layers)
            ],
        }

    def rope_scaling(self) -> Json | None:
        """Scaling that metadata describes."""
        key = f"{self.arch}.rope.scaling.type"
        if self.file.metadata.get(key, "none") == "none":
            return None
        kind = self.text(key)
        scaling: Json = {
            "rope_type": kind,
            "factor": shortest(self.of_arch("rope.scaling.factor", 1.0)),
        }
        if kind == "yarn":
            length = int(self.of_arch("rope.scaling.original_context_length", 0))
            if length:
                scaling["original_max_position_embeddings"] = length
        elif kind != "linear":
            raise ModelLoadError(
                f"{self.path}: metadata {key} is {kind!r}; supported are none, linear, yarn"
            )
        return scaling

    def llama3_scaling(self, divisors: HostArray, config: Json) -> Json:
        """The "llama3" parameters that give these divisors of the inverse frequencies."""
        given = np.asarray(divisors, np.float64)
        half = config["head_dim"] // 2
        if given.shape == (half,):
            factor = shortest(float(given.max()))
            for high in _LLAMA3_HIGH:
                for length in _LLAMA3_LENGTHS:
                    scaling = {
                        "rope_type": "llama3",
                        "factor": factor,
                        "low_freq_factor": 1.0,
                        "high_freq_factor": high,
                        "original_max_position_embeddings": length,
                    }
                    made = llama3_divisors(scaling, theta=config["rope_theta"], half=half)
                    if np.allclose(made, given, rtol=1e-5, atol=0):
                        return scaling
        raise ModelLoadError(
            f"{self.path}: the values of {ROPE_FACTORS} follow no Llama 3 rope scaling; other "
            "frequency factors are not supported"
        )


def llama3_divisors(scaling: Json, *, theta: float, half: int) -> HostArray:
    """What "llama3" scaling divides each inverse frequency by (the formula of Meta's llama-models)."""
    wavelength = 2 * math.pi * theta ** (np.arange(half) / half)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] / wavelength
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    divisors: HostArray = 1.0 / ((1.0 - smooth) / scaling["factor"] + smooth)
    return divisors


def shortest(value: float) -> float:
    """The shortest decimal that is the same float32: 1e-05 for 9.99999974e-06."""
    return float(str(np.float32(value)))


# Tokens that end a turn under whatever name a file gives the id of its eos.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end_of_text|>")
_CONTROL = 3


def gguf_eos_ids(file: GGUFFile) -> tuple[int, ...]:
    """Ids that end an answer: those the metadata names, and control tokens that end a turn."""
    named = [file.metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    kinds = file.metadata.get("tokenizer.ggml.token_type")
    if isinstance(tokens, list) and isinstance(kinds, list):
        ends = set(_TURN_ENDS)
        if file.metadata.get("tokenizer.ggml.pre") == "qwen2":
            ends.add("<|endoftext|>")
        named += [
            i
            for i, (token, kind) in enumerate(zip(tokens, kinds, strict=False))
            if kind == _CONTROL and token in ends
        ]
    return token_ids(named)
