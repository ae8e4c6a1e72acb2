"""Tiny models of each family with all traps on, shared by the tests and the script that makes goldens.

Imports numpy only, so that the script can run beside torch and without jax. Weights are made from names and
shapes alone, so only configs and logits are stored.
"""

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np

GOLDENS = Path(__file__).parent.parent / "goldens" / "families"
TEXT_LENGTH = 44

_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 6.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}

# Configs in the older dialect (rope_theta and rope_scaling), as most checkpoints are written.
# head_dim differs from hidden_size / heads, and the vocabulary is odd.
CASES: dict[str, dict[str, Any]] = {
    "llama3": {
        "model_type": "llama",
        "vocab_size": 97,
        "hidden_size": 40,
        "intermediate_size": 56,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "rms_norm_eps": 1e-3,
        "max_position_embeddings": 64,
        "rope_theta": 200.0,
        "rope_scaling": _LLAMA3,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": False,
    },
    "llama_linear_tied": {
        "model_type": "llama",
        "vocab_size": 83,
        "hidden_size": 36,
        "intermediate_size": 44,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        "rope_scaling": {"type": "linear", "factor": 3.0},
        "tie_word_embeddings": True,
    },
    "llama_yarn": {
        "model_type": "llama",
        "vocab_size": 83,
        "hidden_size": 36,
        "intermediate_size": 44,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "head_dim": 16,
        "max_position_embeddings": 64,
        "rope_theta": 300.0,
        "rope_scaling": _YARN,
    },
    "mistral": {
        "model_type": "mistral",
        "vocab_size": 89,
        "hidden_size": 48,
        "intermediate_size": 60,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "sliding_window": 7,
        "rope_theta": 150.0,
    },
    "qwen2_window": {
        "model_type": "qwen2",
        "vocab_size": 101,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "use_sliding_window": True,
        "sliding_window": 6,
        "max_window_layers": 1,
        "rope_theta": 250.0,
        "tie_word_embeddings": True,
    },
    "qwen2_full": {
        "model_type": "qwen2",
        "vocab_size": 101,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "use_sliding_window": False,
        "sliding_window": 6,
        "max_window_layers": 0,
        "rope_theta": 250.0,
    },
    "qwen3": {
        "model_type": "qwen3",
        "vocab_size": 91,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 20,
        "attention_bias": True,
        "use_sliding_window": True,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_theta": 120.0,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        "vocab_size": 103,
        "hidden_size": 36,
        "intermediate_size": 52,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 20,
        "sliding_window": 8,
        "sliding_window_pattern": 3,
        "query_pre_attn_scalar": 11,
        "rope_theta": 900.0,
        "rope_local_base_freq": 70.0,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        "final_logit_softcapping": 15.0,
        "attn_logit_softcapping": 3.0,
    },
}


def weight(name: str, shape: tuple[int, ...], *, one_plus_norm: bool) -> np.ndarray:
    """A random tensor that depends on its name only: norms around 1, biases that matter, scores of size 1."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    values = rng.standard_normal(shape)
    if "norm" in name:
        values = 0.4 * values + (0.0 if one_plus_norm else 1.0)
    elif name.endswith(".bias"):
        values = 0.5 * values
    elif "embed_tokens" not in name:
        values = 1.2 * values / np.sqrt(shape[-1])
    return values.astype(np.float32)


def tokens(case: str) -> np.ndarray:
    """The text of a case, `[TEXT_LENGTH]`."""
    rng = np.random.default_rng(zlib.crc32(case.encode()))
    return rng.integers(0, CASES[case]["vocab_size"], TEXT_LENGTH, dtype=np.int32)


def golden_logits(case: str) -> np.ndarray:
    """What transformers gave, float32 `[TEXT_LENGTH, vocab]`."""
    with np.load(GOLDENS / f"{case}.npz") as stored:
        return stored["logits"]


def saved_config(case: str) -> dict[str, Any]:
    """The config as transformers 5 writes it."""
    with np.load(GOLDENS / f"{case}.npz") as stored:
        config = json.loads(str(stored["config"]))
    assert isinstance(config, dict)
    return config
