"""A checkpoint with random weights: for trying a model's speed and memory without its files.

Knows no values worth knowing; everything but the tensors is another checkpoint's.
"""

import dataclasses
import functools
import zlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from jpaged.models.config import ModelConfig
from jpaged.models.loading.checkpoint import Checkpoint, HostArray
from jpaged.models.weights import public_shapes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_SCALE = 0.02


@dataclasses.dataclass(frozen=True)
class DummyCheckpoint:
    """`base` with random tensors, small enough that no model overflows, the same in every run."""

    base: Checkpoint
    with_tokenizer: bool

    @property
    def name(self) -> str:
        return self.base.name

    @property
    def source(self) -> str:
        return f"random weights (config of {self.base.source})"

    @property
    def hf_config(self) -> Mapping[str, Any]:
        return self.base.hf_config

    @property
    def generation_config(self) -> Mapping[str, Any]:
        return self.base.generation_config

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self.base.eos_token_ids

    @functools.cached_property
    def _shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        config = ModelConfig.from_hf(self.hf_config)
        return public_shapes(config, jnp.dtype(config.dtype))

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        return dict(self._shapes)

    def tensors(self, *, progress: bool = False) -> Iterator[tuple[str, HostArray]]:
        shapes = self._shapes.items()
        for name, spec in tqdm(shapes, desc="Making weights", disable=not progress):
            random = np.random.default_rng(zlib.crc32(name.encode()))
            values = random.standard_normal(spec.shape, np.float32) * np.float32(_SCALE)
            yield name, values.astype(spec.dtype)

    def load_tokenizer(self) -> "PreTrainedTokenizerFast | None":
        return self.base.load_tokenizer() if self.with_tokenizer else None
