"""The hub: what is asked of it, and what each of its refusals becomes. No test here has a network."""

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants, errors

from jpaged.errors import ConfigError, ModelLoadError
from jpaged.models.loading import open_checkpoint
from jpaged.models.loading.hub import fetch_folder, hub_answers, is_repository_id
from tests.models.loading.test_folder import single, write_tokenizer

Raise = Callable[..., Any]


def http_error(kind: type[errors.HfHubHTTPError], message: str = "from the hub") -> Exception:
    """An error of the client, without the response that it would carry."""
    error = kind.__new__(kind)
    error.args = (message,)
    return error


def raising(error: BaseException) -> Raise:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


def caused(error: Exception, cause: BaseException) -> Exception:
    error.__cause__ = cause
    return error


@pytest.fixture(autouse=True)
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", raising(AssertionError("asked")))


def test_asks_for_what_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def download(repository: str, **options: Any) -> str:
        asked.update(options, repository=repository)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    single(tmp_path)
    write_tokenizer(tmp_path)
    checkpoint = open_checkpoint("org/name", revision="v2", download_dir="somewhere")
    assert checkpoint.name == "org/name" and checkpoint.source == "hub"
    assert set(dict(checkpoint.tensors())) == {"model.a", "model.b", "model.c"}
    assert checkpoint.load_tokenizer() is not None
    assert (asked["repository"], asked["revision"], asked["cache_dir"]) == (
        "org/name",
        "v2",
        "somewhere",
    )
    repository = [
        "config.json",
        "generation_config.json",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "pytorch_model.bin",
        "model.gguf",
        "README.md",
        "consolidated.safetensors",
        "original/params.json",
        "onnx/model.safetensors",
    ]
    wanted = huggingface_hub.utils.filter_repo_objects(
        repository,
        allow_patterns=asked["allow_patterns"],
        ignore_patterns=asked["ignore_patterns"],
    )
    assert list(wanted) == repository[:7]


def test_a_gguf_file_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def download(repository: str, **options: Any) -> str:
        asked.extend([repository, options["allow_patterns"], options["revision"]])
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ModelLoadError, match=r"org/name: has no file 'model-q4\.gguf'"):
        open_checkpoint("org/name:model-q4.gguf", revision="main")
    assert asked == ["org/name", ["model-q4.gguf"], "main"]
    (tmp_path / "model-q4.gguf").write_bytes(b"not one")
    with pytest.raises(ModelLoadError, match=r"model-q4\.gguf.*not a GGUF file"):
        open_checkpoint("org/name:model-q4.gguf")
    with pytest.raises(ModelLoadError, match="has no file"):
        open_checkpoint(f"org/name:../{tmp_path.name}/model-q4.gguf")


def test_a_repository_without_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path))
    with pytest.raises(ModelLoadError, match=r"no safetensors.*'org/name:<file>\.gguf'"):
        open_checkpoint("org/name")


REFUSALS: dict[str, tuple[Callable[[], Exception], tuple[str, ...]]] = {
    "unknown": (
        lambda: http_error(errors.RepositoryNotFoundError),
        ("no such model", "no folder or file", "HF_TOKEN", "/org/name"),
    ),
    "gated": (
        lambda: http_error(errors.GatedRepoError),
        ("gated", "accept its licence at https://", "/org/name", "set HF_TOKEN"),
    ),
    "revision": (lambda: http_error(errors.RevisionNotFoundError), ("no revision 'v2'",)),
    "no network": (
        lambda: errors.LocalEntryNotFoundError("cannot reach"),
        ("cannot be reached", "network or proxy"),
    ),
    "offline": (
        lambda: caused(errors.LocalEntryNotFoundError("x"), errors.OfflineModeIsEnabled("x")),
        ("HF_HUB_OFFLINE is set",),
    ),
    "server": (lambda: http_error(errors.HfHubHTTPError, "503 busy"), ("refused: 503 busy",)),
    "disk full": (
        lambda: OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        ("no space is left on the disk", "download_dir"),
    ),
    "disk full within": (
        lambda: caused(RuntimeError("x"), OSError(errno.ENOSPC, "x")),
        ("no space is left on the disk",),
    ),
    "proxy": (
        lambda: ConnectionError("proxy says no"),
        ("could not be fetched", "ConnectionError: proxy says no"),
    ),
}


@pytest.mark.parametrize("refusal", REFUSALS)
def test_refusals_say_what_to_do(refusal: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, said = REFUSALS[refusal]
    monkeypatch.setattr(huggingface_hub, "snapshot_download", raising(make()))
    with pytest.raises(ModelLoadError) as caught:
        open_checkpoint("org/name", revision="v2")
    assert str(caught.value).startswith("org/name: ")
    for words in said:
        assert words in str(caught.value)


def test_offline_asks_the_cache_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real client, told to be offline, with an empty cache."""
    monkeypatch.undo()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelLoadError, match="HF_HUB_OFFLINE is set"):
        fetch_folder("org/name", download_dir=str(tmp_path))


@pytest.mark.parametrize(
    "model", ["/none/here", "./none", "../none", "~/none", "a/b/c", "none.gguf", "a b", "", "a:b"]
)
def test_what_cannot_be_an_id_is_not_asked_for(model: str) -> None:
    with pytest.raises(ModelLoadError, match="no such f"):
        open_checkpoint(model)


def test_ids() -> None:
    for good in ("gpt2", "org/name", "HuggingFaceTB/SmolLM2-135M-Instruct", "a_b/c.d-1"):
        assert is_repository_id(good)
    for bad in ("/a", "a/", "a/b/c", ".", "..", "a//b", "a b", "~", "C:\\x"):
        assert not is_repository_id(bad)


def test_formats_that_do_not_go_with_the_model(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").touch()
    for model, load_format in (
        (str(tmp_path), "gguf"),
        (str(tmp_path / "m.gguf"), "safetensors"),
        ("org/name", "gguf"),
        ("org/name:m.gguf", "safetensors"),
        ("org/name", "pickle"),
    ):
        with pytest.raises(ConfigError, match=f"load_format is '{load_format}'") as caught:
            open_checkpoint(model, load_format=load_format)
        assert caught.value.field == "load_format"


def test_a_hub_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: time.sleep(3))
    begun = time.monotonic()
    assert hub_answers("org/name", seconds=0.2) == "no answer within 0.2 s"
    assert time.monotonic() - begun < 2


def test_a_hub_that_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: None)
    assert hub_answers("org/name", seconds=5) is None
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", raising(ConnectionError("down")))
    assert "ConnectionError: down" in str(hub_answers("org/name", seconds=5))
