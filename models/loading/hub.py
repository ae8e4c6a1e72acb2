"""The Hugging Face hub: fetching what a model needs of a repository, and saying what went wrong.

Knows which files are needed and how the hub refuses. The hub client's own settings count (HF_HOME, HF_TOKEN,
HF_ENDPOINT, HF_HUB_OFFLINE).
"""

import errno
import glob
import re
import threading
from pathlib import Path

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from jpaged.errors import ModelLoadError

_REPOSITORY = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_TOKENIZER = ("*.json", "*.jinja")
_WEIGHTS = ("*.safetensors",)
# Folders hold other exports (onnx, original weights); consolidated files repeat the shards.
_NOT_NEEDED = ("*/*", "consolidated*")


def is_repository_id(model: str) -> bool:
    """Whether a string can be a hub id: `name` or `organisation/name`."""
    return _REPOSITORY.fullmatch(model) is not None


def is_offline() -> bool:
    """Whether the user has forbidden requests to the hub (HF_HUB_OFFLINE)."""
    return bool(constants.HF_HUB_OFFLINE)


def fetch_folder(
    repository: str,
    *,
    revision: str | None = None,
    download_dir: str | None = None,
    weights: bool = True,
    local_files_only: bool = False,
) -> Path:
    """Folder with a repository's config, tokenizer and, if wanted, weights.

    Files that are in the hub client's cache (`download_dir`, if given) already are not fetched again.
    Raises ModelLoadError that says why and what to do.
    """
    found = _snapshot(
        repository,
        revision=revision,
        cache_dir=download_dir,
        allow_patterns=[*_TOKENIZER, *(_WEIGHTS if weights else ())],
        ignore_patterns=list(_NOT_NEEDED),
        local_files_only=local_files_only,
    )
    if weights and not any(found.glob("*.safetensors")):
        raise ModelLoadError(
            f"{repository}: the repository has no safetensors files; other formats are not loaded "
            f"from it, except a single GGUF file: give it as '{repository}:<file>.gguf'"
        )
    return found


def fetch_file(
    repository: str, filename: str, *, revision: str | None = None, download_dir: str | None = None
) -> Path:
    """One file of a repository."""
    folder = _snapshot(
        repository,
        revision=revision,
        cache_dir=download_dir,
        allow_patterns=[glob.escape(filename)],
        ignore_patterns=[],
        local_files_only=False,
    )
    path = folder / filename
    if ".." in path.parts or not path.is_file():
        raise ModelLoadError(
            f"{repository}: has no file {filename!r}; see {_url(repository)}/tree/main"
        )
    return path


def _snapshot(
    repository: str,
    *,
    revision: str | None,
    cache_dir: str | None,
    allow_patterns: list[str],
    ignore_patterns: list[str],
    local_files_only: bool,
) -> Path:
    """The hub client's folder for a repository, with the files that match."""
    try:
        return Path(
            huggingface_hub.snapshot_download(
                repository,
                revision=revision,
                cache_dir=cache_dir,
                allow_patterns=allow_patterns,
                ignore_patterns=ignore_patterns,
                local_files_only=local_files_only,
            )
        )
    except Exception as error:
        raise hub_error(repository, revision, error) from error


def _url(repository: str) -> str:
    return f"{constants.ENDPOINT}/{repository}"


def hub_answers(repository: str, *, seconds: float) -> str | None:
    """Asks the hub about a repository; None if it answers in time, otherwise why it does not.

    The deadline holds even where looking up the host's name hangs, which no client's timeout covers.
    """
    failure: list[str] = [f"no answer within {seconds:g} s"]

    def ask() -> None:
        try:
            huggingface_hub.HfApi().model_info(repository, timeout=seconds)
        except Exception as error:
            failure[:] = [str(hub_error(repository, None, error))]
        else:
            failure.clear()

    thread = threading.Thread(target=ask, name="jpaged-hub", daemon=True)
    thread.start()
    thread.join(seconds)
    return failure[0] if failure else None


def hub_error(repository: str, revision: str | None, error: BaseException) -> ModelLoadError:
    """What a failure of the hub client means to the person who gave the name."""
    url = _url(repository)
    chain: list[BaseException] = []
    step: BaseException | None = error
    while step is not None and step not in chain:
        chain.append(step)
        step = step.__cause__ or step.__context__
    if any(isinstance(e, OSError) and e.errno in (errno.ENOSPC, errno.EDQUOT) for e in chain):
        return ModelLoadError(
            f"{repository}: no space is left on the disk while downloading; free some, or set "
            "download_dir (or HF_HOME) to a folder on another disk"
        )
    if isinstance(error, GatedRepoError):
        return ModelLoadError(
            f"{repository}: is a gated model: accept its licence at {url}, then set HF_TOKEN to a "
            "token of your account"
        )
    if isinstance(error, RepositoryNotFoundError):
        return ModelLoadError(
            f"{repository}: the Hugging Face hub has no such model, or it is private (then set "
            f"HF_TOKEN); no folder or file of this name exists either. Looked at {url}"
        )
    if isinstance(error, RevisionNotFoundError):
        return ModelLoadError(f"{repository}: has no revision {revision!r} at {url}")
    if isinstance(error, HFValidationError):
        return ModelLoadError(
            f"{repository}: is neither an existing folder or file nor a Hugging Face id "
            "(organisation/name)"
        )
    if any(isinstance(e, OfflineModeIsEnabled) for e in chain) or (
        is_offline() and isinstance(error, LocalEntryNotFoundError)
    ):
        return ModelLoadError(
            f"{repository}: is not in the local cache as a whole, and HF_HUB_OFFLINE is set; unset "
            "it, or give a folder"
        )
    if isinstance(error, LocalEntryNotFoundError):
        return ModelLoadError(
            f"{repository}: the Hugging Face hub ({constants.ENDPOINT}) cannot be reached and the "
            "model is not in the local cache as a whole; check the network or proxy, or give a folder"
        )
    if isinstance(error, HfHubHTTPError):
        return ModelLoadError(f"{repository}: the Hugging Face hub refused: {error}")
    return ModelLoadError(
        f"{repository}: could not be fetched from {constants.ENDPOINT}: "
        f"{type(error).__name__}: {error}"
    )
