"""A GGUF file as a checkpoint: tensors under Hugging Face names, in Hugging Face's layout.

Knows the tensor names of each architecture and what conversion to GGUF did to the values, and undoes it.
"""

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from tqdm import tqdm

from jpaged.errors import ModelLoadError
from jpaged.models.loading.checkpoint import HostArray
from jpaged.models.loading.gguf_config import ROPE_FACTORS, GGUFConfig, gguf_eos_ids
from jpaged.models.loading.gguf_file import GGUFFile
from jpaged.models.loading.gguf_tokenizer import build_tokenizer
from jpaged.models.loading.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_OUTER = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_INNER_GEMMA = _INNER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_NAME = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<part>[a-z_]+)\.(?P<leaf>weight|bias)")


@dataclasses.dataclass(frozen=True)
class GGUFCheckpoint:
    """An opened GGUF file. `names`: Hugging Face name -> name in the file, in the order of the data."""

    file: GGUFFile
    name: str
    source: str
    hf_config: Mapping[str, Any]
    names: Mapping[str, str]
    tokenizer_path: Path | None = None

    @classmethod
    def open(cls, path: Path, *, name: str, source: str) -> "GGUFCheckpoint":
        """Reads and checks the header. Raises ModelLoadError naming the file and what is wrong."""
        file = GGUFFile.open(path)
        return cls(file, name, source, GGUFConfig(file).hf_config(), _names(file))

    @property
    def tokenizer_at(self) -> Path:
        """Where the tokenizer comes from."""
        return self.tokenizer_path or self.file.path

    @functools.cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        return gguf_eos_ids(self.file)

    @property
    def generation_config(self) -> Mapping[str, Any]:
        config = self.hf_config
        return {
            "bos_token_id": config["bos_token_id"],
            "eos_token_id": list(self.eos_token_ids),
        }

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        return {public: self.file.tensors[name].spec.struct for public, name in self.names.items()}

    def tensors(self, *, progress: bool = False) -> Iterator[tuple[str, HostArray]]:
        total = sum(tensor.end - tensor.begin for tensor in self.file.tensors.values())
        with tqdm(
            total=total, unit="B", unit_scale=True, desc="Loading weights", disable=not progress
        ) as bar:
            for public, name in self.names.items():
                yield public, self._undo(public, self.file.read(name))
                bar.update(self.file.tensors[name].end - self.file.tensors[name].begin)

    def _undo(self, public: str, array: HostArray) -> HostArray:
        """Takes back what conversion to GGUF did to a tensor's values."""
        config = self.hf_config
        arch = self.file.metadata["general.architecture"]
        if arch == "llama" and ".q_proj." in public:
            return _interleaved_to_halves(array, config["num_attention_heads"], self.file, public)
        if arch == "llama" and ".k_proj." in public:
            return _interleaved_to_halves(array, config["num_key_value_heads"], self.file, public)
        if arch == "gemma3" and public.endswith("norm.weight"):
            # Stored as the factor 1 + w; the checkpoint, and so the model, has w.
            return (array.astype(np.float32) - np.float32(1)).astype(array.dtype)
        return array

    def load_tokenizer(self) -> "PreTrainedTokenizerFast | None":
        if self.tokenizer_path is not None:
            return load_tokenizer(self.tokenizer_path)
        return build_tokenizer(self.file)


def _names(file: GGUFFile) -> dict[str, str]:
    """Name of each tensor as a checkpoint has it -> in the file, in the order of the data."""
    arch = file.metadata["general.architecture"]
    found: dict[str, str] = {}
    unknown: list[str] = []
    for name in sorted(file.tensors, key=lambda name: file.tensors[name].begin):
        public = _public_name(name, gemma=arch == "gemma3")
        if public is not None:
            found[public] = name
        elif name != ROPE_FACTORS or arch != "llama":
            unknown.append(name)
    if unknown:
        raise ModelLoadError(
            f"{file.path}: {len(unknown)} tensors have no place in a {arch} model: "
            f"{', '.join(unknown[:20])}{' ...' if len(unknown) > 20 else ''}"
        )
    return found


def _public_name(name: str, *, gemma: bool) -> str | None:
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    if match["layer"] is None:
        outer = _OUTER.get(match["part"])
        return f"{outer}.{match['leaf']}" if outer else None
    inner = (_INNER_GEMMA if gemma else _INNER).get(match["part"])
    return f"model.layers.{match['layer']}.{inner}.{match['leaf']}" if inner else None


def _interleaved_to_halves(array: HostArray, heads: int, file: GGUFFile, public: str) -> HostArray:
    """Rows of each head from (pair, half) order, which llama.cpp's rope takes, to (half, pair)."""
    if array.shape[0] % (2 * heads):
        raise ModelLoadError(
            f"{file.path}: tensor {public} has {array.shape[0]} rows, which {heads} heads of an "
            "even size do not make"
        )
    pairs = array.reshape(heads, -1, 2, *array.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(array.shape)
