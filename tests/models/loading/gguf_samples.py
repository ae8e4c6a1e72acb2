"""Tiny GGUF files written with the `gguf` package, for the tests of this folder.

Names come from that package's own table, and values are changed here the way llama.cpp's converter does it,
so that reading them back is checked against something else than the reader.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

_COMMON = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
}
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **_COMMON},
    "llama_biased": {
        "model_type": "llama",
        **_COMMON,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": False,
    },
    "llama3": {"model_type": "llama", **_COMMON, "rope_scaling": LLAMA3_SCALING},
    "qwen2": {"model_type": "qwen2", **_COMMON, "head_dim": 8},
    "qwen3": {"model_type": "qwen3", **_COMMON, "tie_word_embeddings": False},
    "gemma3": {
        "model_type": "gemma3_text",
        **_COMMON,
        "num_hidden_layers": 7,
        "sliding_window": 8,
        "rope_local_base_freq": 10_000.0,
        "query_pre_attn_scalar": 16,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "layer_types": ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"],
    },
}
ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
}


def random_tensors(shapes: Mapping[str, Any]) -> dict[str, Floats]:
    """Random values of these shapes; norms near their neutral value."""
    random = np.random.default_rng(7)
    return {name: random.standard_normal(spec.shape, np.float32) for name, spec in shapes.items()}


def write_gguf(
    path: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Floats],
    *,
    metadata: Mapping[str, object] | None = None,
    extra: Mapping[str, Floats] | None = None,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
) -> Path:
    """Writes what llama.cpp's converter would. `metadata` adds keys; None as a value leaves one out."""
    arch = ARCHITECTURES[config["model_type"]]
    name = gguf.MODEL_ARCH_NAMES[arch]
    keys: dict[str, object] = {
        f"{name}.block_count": config["num_hidden_layers"],
        f"{name}.context_length": config["max_position_embeddings"],
        f"{name}.embedding_length": config["hidden_size"],
        f"{name}.feed_forward_length": config["intermediate_size"],
        f"{name}.attention.head_count": config["num_attention_heads"],
        f"{name}.attention.head_count_kv": config["num_key_value_heads"],
        f"{name}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        f"{name}.rope.freq_base": config["rope_theta"],
        f"{name}.attention.key_length": config["head_dim"],
    }
    if name == "llama":
        keys[f"{name}.rope.dimension_count"] = config["head_dim"]
        del keys[f"{name}.attention.key_length"]
    if name == "gemma3":
        keys[f"{name}.attention.sliding_window"] = config["sliding_window"]
    scaling = config.get("rope_scaling") or {}
    if scaling.get("rope_type") == "linear":
        keys |= {f"{name}.rope.scaling.type": "linear", f"{name}.rope.scaling.factor": 8.0}
    writer = gguf.GGUFWriter(path, name)
    for key, value in (keys | dict(metadata or {})).items():
        _add(writer, key, value)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    for public, values in tensors.items():
        stored = names.get_name(public, try_suffixes=(".weight", ".bias"))
        assert stored is not None, public
        stored_values = _converted(public, values, config)
        if values.ndim == 2 and kind != gguf.GGMLQuantizationType.F32:
            writer.add_tensor(stored, gguf.quantize(stored_values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(stored, stored_values)
    if scaling.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", rope_divisors(config))
    for stored, values in (extra or {}).items():
        writer.add_tensor(stored, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    if value is None:
        return
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        assert isinstance(value, list)
        writer.add_array(key, value)


def _converted(public: str, values: Floats, config: Mapping[str, Any]) -> Floats:
    """What the converter stores for a tensor."""
    kind = config["model_type"]
    if kind == "gemma3_text" and public.endswith("norm.weight"):
        return values + np.float32(1)
    heads = {
        "q_proj": config["num_attention_heads"],
        "k_proj": config["num_key_value_heads"],
    }.get(public.split(".")[-2])
    if kind == "llama" and heads is not None:
        halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
        return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
    return values


def rope_divisors(config: Mapping[str, Any]) -> Floats:
    """Factors of Llama 3 rope scaling, one frequency at a time."""
    scaling, dim = config["rope_scaling"], config["head_dim"]
    length = scaling["original_max_position_embeddings"]
    longest = length / scaling["low_freq_factor"]
    shortest = length / scaling["high_freq_factor"]
    factors = []
    for i in range(0, dim, 2):
        wavelength = 2 * math.pi * config["rope_theta"] ** (i / dim)
        if wavelength < shortest:
            factors.append(1.0)
        elif wavelength > longest:
            factors.append(scaling["factor"])
        else:
            smooth = (length / wavelength - scaling["low_freq_factor"]) / (
                scaling["high_freq_factor"] - scaling["low_freq_factor"]
            )
            factors.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    return np.array(factors, np.float32)
