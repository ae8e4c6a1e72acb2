"""What every checkpoint offers, whatever it is stored in.

Knows no file format and no model: those who load weights or build an engine need only this.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import jax
import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

HostArray: TypeAlias = npt.NDArray[np.generic]


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a tensor that has not been read."""

    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]

    @property
    def struct(self) -> jax.ShapeDtypeStruct:
        """The same as jax says it."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype)


class Checkpoint(Protocol):
    """A model's config, tokenizer and tensors, under Hugging Face names.

    Opening reads headers only, and finds every fault that headers can show.
    """

    @property
    def name(self) -> str:
        """The name under which the model is served."""

    @property
    def source(self) -> str:
        """Where the weights came from, in words for a log line."""

    @property
    def hf_config(self) -> Mapping[str, Any]:
        """The contents of config.json, or what it would contain."""

    @property
    def generation_config(self) -> Mapping[str, Any]:
        """The contents of generation_config.json; empty if there is none."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Every token id that ends an answer, ascending."""

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and dtypes of all tensors, read from headers."""

    def tensors(self, *, progress: bool = False) -> Iterator[tuple[str, HostArray]]:
        """Yields each tensor once, read when it is asked for; the caller owns the array."""

    def load_tokenizer(self) -> "PreTrainedTokenizerFast | None":
        """The fast tokenizer with its chat template; None if a dummy checkpoint has no files."""
