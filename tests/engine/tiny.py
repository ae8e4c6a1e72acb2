"""A tiny random Llama, engines over it, and what it would say by plain attention over whole sequences."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jpaged import LLM
from jpaged.models.config import ModelConfig
from jpaged.models.decoder import CausalLM
from jpaged.models.registry import build_model

VOCAB = 256
HF_CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "eos_token_id": 7,
}
# A page of one token in bytes: layers, K and V, kv heads, head_dim, float32.
BYTES_PER_TOKEN = 2 * 2 * 2 * 16 * 4


@functools.cache
def model(seed: int = 0) -> CausalLM:
    """The model, with weights large enough that its tokens vary."""
    built = build_model(ModelConfig.from_hf(HF_CONFIG), rngs=nnx.Rngs(seed))
    state = jax.tree.map(lambda x: x * 6 if x.ndim == 2 else x, nnx.state(built, nnx.Param))
    nnx.update(built, state)
    return built


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def llm(**engine_args: Any) -> LLM:
    """An LLM over the tiny model; small limits, unless others are given."""
    defaults: dict[str, Any] = {
        "params": model(),
        "config": HF_CONFIG,
        "tokenizer": tokenizer(),
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "page_size": 4,
        "use_tqdm": False,
    }
    return LLM(**defaults | engine_args)


@functools.cache
def _next_logits(seed: int) -> Any:
    built = model(seed)
    return jax.jit(lambda tokens, last: built.dense_logits(tokens[None])[0, last])


def logits_after(ids: Sequence[int], seed: int = 0) -> np.ndarray:
    """Logits of the token behind `ids`, without pages."""
    padded = np.zeros(HF_CONFIG["max_position_embeddings"], np.int32)
    padded[: len(ids)] = ids
    return np.asarray(_next_logits(seed)(jnp.asarray(padded), len(ids) - 1))


def greedy(prompt: Sequence[int], count: int, seed: int = 0) -> list[int]:
    """The `count` tokens that greedy decoding without pages gives."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(np.argmax(logits_after(ids, seed))))
    return ids[len(prompt) :]


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    """Random prompts of these lengths."""
    rng = np.random.default_rng(seed)
    return [rng.integers(8, VOCAB, n).tolist() for n in lengths]


def as_dicts(ids: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    """Token ids as `generate` takes them."""
    return [{"prompt_token_ids": list(i)} for i in ids]


def check_idle(engine_owner: LLM) -> None:
    """Nothing is left: the books balance, and every page is free."""
    engine_owner.engine.check()
    stats = engine_owner.engine.stats()
    assert stats.num_running == stats.num_waiting == stats.pages_used == 0
