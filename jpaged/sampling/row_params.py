"""The sampling parameters of each row as device arrays, and as the int32 words that carry them there.

One table of fields drives both, so that a parameter cannot be sent and not read. The structure
never changes with what a request asked for.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Int32, UInt32

from jpaged.sampling.params import SamplingParams


@partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "temperature",
        "top_k",
        "top_p",
        "seed_low",
        "seed_high",
        "sample",
        "top_logprobs",
    ],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class RowParams:
    """Sampling parameters by row; `top_logprobs` is -1 where none were asked for."""

    temperature: Float[Array, " rows"]
    top_k: Int[Array, " rows"]
    top_p: Float[Array, " rows"]
    seed_low: UInt32[Array, " rows"]
    seed_high: UInt32[Array, " rows"]
    sample: Int[Array, " rows"]
    top_logprobs: Int[Array, " rows"]


_DTYPES = {
    "temperature": np.float32,
    "top_k": np.int32,
    "top_p": np.float32,
    "seed_low": np.uint32,
    "seed_high": np.uint32,
    "sample": np.int32,
    "top_logprobs": np.int32,
}
NUM_WORDS = len(_DTYPES)


@dataclasses.dataclass(frozen=True, slots=True)
class SequenceSampling:
    """What the sampler needs of one sequence: the request's parameters, its seed, and which sample it is."""

    params: SamplingParams
    seed: int
    sample: int

    def words(self) -> np.ndarray:
        """The fields of RowParams as int32 words, in their order."""
        params, seed = self.params, self.seed % 2**64
        values = {
            # What float32 cannot hold: beyond it is as good as uniform, below it nothing would be kept.
            "temperature": min(params.temperature, 1e38),
            "top_k": params.top_k,
            "top_p": max(params.top_p, 1e-30),
            "seed_low": seed % 2**32,
            "seed_high": seed >> 32,
            "sample": self.sample,
            # One more than asked for, so that words of 0 ask for nothing.
            "top_logprobs": 0 if params.logprobs is None else params.logprobs + 1,
        }
        return np.concatenate(
            [np.array([values[name]], dtype).view(np.int32) for name, dtype in _DTYPES.items()]
        )


def empty_row_params(rows: int) -> RowParams:
    """Rows that ask for nothing: greedy, no filter, no log-probabilities."""
    return row_params_from_words(jnp.zeros((rows, NUM_WORDS), jnp.int32))


def row_params_from_words(words: Int32[Array, "rows words"]) -> RowParams:
    """Inverse of `SequenceSampling.words`, on device. Words of 0 ask for nothing."""
    columns = {}
    for i, (name, dtype) in enumerate(_DTYPES.items()):
        column = words[:, i]
        same = jnp.dtype(dtype) == column.dtype
        columns[name] = column if same else jax.lax.bitcast_convert_type(column, dtype)
    return RowParams(**columns | {"top_logprobs": columns["top_logprobs"] - 1})
