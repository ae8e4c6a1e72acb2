"""A folder in Hugging Face's layout as a checkpoint.

Knows which files there are and how shards make one set of tensors. Knows no model.
"""

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
from tqdm import tqdm

from jpaged.errors import ModelLoadError
from jpaged.models.loading.checkpoint import HostArray
from jpaged.models.loading.files import read_json, read_json_if_there, token_ids
from jpaged.models.loading.safetensors_file import SafetensorsFile
from jpaged.models.loading.tokenizer import load_tokenizer, tokenizer_eos_id

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")


@dataclasses.dataclass(frozen=True)
class FolderCheckpoint:
    """An opened folder."""

    folder: Path
    name: str
    source: str
    hf_config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    files: tuple[SafetensorsFile, ...]
    tokenizer_path: Path | None = None

    @classmethod
    def open(
        cls, folder: Path, *, name: str, source: str, weights: bool = True
    ) -> "FolderCheckpoint":
        """Reads config and all headers. Raises ModelLoadError naming the file at fault.

        Without `weights` the folder need not hold any, and no tensors are found.
        """
        config = read_json(folder / "config.json")
        if not isinstance(config.get("model_type"), str):
            raise ModelLoadError(
                f"{folder / 'config.json'}: field model_type is {config.get('model_type')!r}; it "
                "must name the kind of model"
            )
        generation = read_json_if_there(folder / "generation_config.json")
        files = _weight_files(folder) if weights else ()
        return cls(folder, name, source, config, generation, files)

    @property
    def tokenizer_at(self) -> Path:
        """Where the tokenizer comes from."""
        return self.tokenizer_path or self.folder

    @functools.cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        text_config = self.hf_config.get("text_config")
        return token_ids(
            self.generation_config.get("eos_token_id"),
            self.hf_config.get("eos_token_id"),
            text_config.get("eos_token_id") if isinstance(text_config, dict) else None,
            tokenizer_eos_id(self.tokenizer_at),
        )

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        return {name: spec.struct for file in self.files for name, spec in file.specs().items()}

    def tensors(self, *, progress: bool = False) -> Iterator[tuple[str, HostArray]]:
        total = sum(entry.end - entry.begin for f in self.files for entry in f.entries.values())
        with tqdm(
            total=total, unit="B", unit_scale=True, desc="Loading weights", disable=not progress
        ) as bar:
            for file in self.files:
                for name in file.names():
                    yield name, file.read(name)
                    bar.update(file.entries[name].end - file.entries[name].begin)

    def load_tokenizer(self) -> "PreTrainedTokenizerFast | None":
        return load_tokenizer(self.tokenizer_at)


def _weight_files(folder: Path) -> tuple[SafetensorsFile, ...]:
    if (folder / _INDEX).is_file():
        return _sharded(folder)
    if (folder / _SINGLE).is_file():
        return (SafetensorsFile.open(folder / _SINGLE),)
    if shards := sorted(path.name for path in folder.iterdir() if _SHARD.fullmatch(path.name)):
        raise ModelLoadError(f"{folder / _INDEX}: no such file, but there are {', '.join(shards)}")
    other = sorted(
        path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".gguf")
    )
    raise ModelLoadError(
        f"{folder}: has no {_SINGLE} and no {_INDEX}"
        + (f"; it has {', '.join(other[:8])}" if other else "")
        + "; supported are safetensors folders and single .gguf files (give the file's path)"
    )


def _sharded(folder: Path) -> tuple[SafetensorsFile, ...]:
    index = folder / _INDEX
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise ModelLoadError(f"{index}: weight_map is missing or does not name files")
    shards = sorted(set(weight_map.values()))
    if outside := [shard for shard in shards if Path(shard).name != shard]:
        raise ModelLoadError(f"{index}: names files outside its folder: {', '.join(outside[:5])}")
    if absent := [shard for shard in shards if not (folder / shard).is_file()]:
        raise ModelLoadError(
            f"{index}: names {len(absent)} files that are not there: {', '.join(absent[:5])}; "
            "download the model again"
        )
    files = tuple(SafetensorsFile.open(folder / shard) for shard in shards)
    holder: dict[str, str] = {}
    for file in files:
        for name in file.entries:
            if name in holder:
                raise ModelLoadError(
                    f"{file.path}: tensor {name} is also in {holder[name]}; it must be in one file"
                )
            holder[name] = file.path.name
    wrong = [
        f"{name} in {shard}" for name, shard in weight_map.items() if holder.get(name) != shard
    ]
    if wrong:
        raise ModelLoadError(
            f"{index}: {len(wrong)} tensors are not where it says: {', '.join(wrong[:5])}; "
            "download the model again"
        )
    if extra := sorted(holder.keys() - weight_map.keys()):
        raise ModelLoadError(f"{index}: does not list {', '.join(extra[:5])}, which the files hold")
    return files
