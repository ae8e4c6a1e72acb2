"""Trains a tiny Llama with Flax and Optax, and samples from its own weights as they get better.

The engine takes the live weights at start (`LLM(params=module)`) and again after each round
(`llm.update_params`): no checkpoint is written, and nothing is compiled a second time. This is the shape of
an RL loop: roll out, learn, swap the weights.
"""

import argparse
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jpaged import LLM, SamplingParams
from jpaged.models.config import ModelConfig
from jpaged.models.decoder import CausalLM
from jpaged.models.registry import build_model

TEXT = (
    "the page pool holds pages of keys and values. a request takes pages as it grows, and gives them "
    "back when it ends. the scheduler joins requests at every step. "
)
LETTERS = sorted(set(TEXT))
CONFIG = {
    "model_type": "llama",
    "vocab_size": len(LETTERS),
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}


def encode(text: str) -> list[int]:
    """One token for each letter."""
    return [LETTERS.index(letter) for letter in text]


def decode(ids: list[int]) -> str:
    """The letters of tokens."""
    return "".join(LETTERS[i] for i in ids)


def batches(rng: np.random.Generator, size: int, length: int) -> Iterator[jax.Array]:
    """Random pieces of the text, `[size, length]`."""
    ids = np.array(encode(TEXT * 4))
    while True:
        starts = rng.integers(0, len(ids) - length, size)
        yield jnp.asarray(ids[starts[:, None] + np.arange(length)])


@nnx.jit
def train_step(model: CausalLM, optimizer: nnx.Optimizer[CausalLM], tokens: jax.Array) -> jax.Array:
    """One step of gradient descent on the next letter; the loss in nats."""

    def loss(model: CausalLM) -> jax.Array:
        logits = model.dense_logits(tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    value, gradients = nnx.value_and_grad(loss)(model)
    optimizer.update(model, gradients)
    return value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=4, help="rounds of training")
    parser.add_argument("--steps", type=int, default=60, help="steps of a round")
    args = parser.parse_args()

    model = build_model(ModelConfig.from_hf(CONFIG), rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)
    data = batches(np.random.default_rng(0), size=16, length=64)

    prompt = {"prompt_token_ids": encode("the page pool ")}
    greedy = SamplingParams(temperature=0, max_tokens=60)
    with LLM(params=model, config=CONFIG, max_num_seqs=4, use_tqdm=False) as llm:
        for turn in range(args.rounds + 1):
            if turn:
                for _ in range(args.steps):
                    loss = train_step(model, optimizer, next(data))
                llm.update_params(model)
                print(f"round {turn}: loss {float(loss):.3f}", flush=True)
            (output,) = llm.generate([prompt], greedy, use_tqdm=False)
            sample = output.outputs[0]
            print(f"weights {sample.weights_version}: {decode(sample.token_ids)!r}", flush=True)


if __name__ == "__main__":
    main()
