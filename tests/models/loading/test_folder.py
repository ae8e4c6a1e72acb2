"""A folder in Hugging Face's layout: shards, config, end tokens, tokenizer, and what may be wrong."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from jpaged.errors import ModelLoadError
from jpaged.models.loading import open_checkpoint
from tests.models.loading.test_gguf_tokenizer import TEXTS, original

TENSORS = {
    "model.a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "model.b": np.arange(4).astype(ml_dtypes.bfloat16),
    "model.c": np.ones((1, 2), np.float16),
}
CONFIG = {"model_type": "llama", "eos_token_id": 2}


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))


def single(folder: Path, config: Mapping[str, Any] = CONFIG) -> Path:
    write_json(folder / "config.json", dict(config))
    safetensors.numpy.save_file(TENSORS, folder / "model.safetensors")
    return folder


def sharded(folder: Path) -> dict[str, str]:
    """Two shards and their index; returns the index's map."""
    write_json(folder / "config.json", CONFIG)
    shards = {
        "model-00001-of-00002.safetensors": ["model.a", "model.c"],
        "model-00002-of-00002.safetensors": ["model.b"],
    }
    for shard, names in shards.items():
        safetensors.numpy.save_file({name: TENSORS[name] for name in names}, folder / shard)
    weight_map = {name: shard for shard, names in shards.items() for name in names}
    index(folder, weight_map)
    return weight_map


def index(folder: Path, weight_map: object) -> None:
    write_json(folder / "model.safetensors.index.json", {"weight_map": weight_map})


def write_tokenizer(folder: Path, **config: object) -> None:
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "hello": 1, "world": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["[UNK]", "<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]", **config},
    )


@pytest.mark.parametrize("write", [single, sharded])
def test_tensors_come_back_with_their_dtypes(write: Any, tmp_path: Path) -> None:
    write(tmp_path)
    checkpoint = open_checkpoint(str(tmp_path))
    assert checkpoint.name == str(tmp_path) and checkpoint.source == f"folder {tmp_path}"
    shapes = checkpoint.shapes()
    found = dict(checkpoint.tensors())
    assert found.keys() == shapes.keys() == TENSORS.keys()
    for name, expected in TENSORS.items():
        assert shapes[name].shape == expected.shape
        assert shapes[name].dtype == found[name].dtype == expected.dtype
        np.testing.assert_array_equal(found[name], expected)


def test_tensors_are_read_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sharded(tmp_path)
    from jpaged.models.loading import safetensors_file

    reads: list[int] = []
    read = safetensors_file.read_bytes_at

    def counted(file: Any, path: Path, begin: int, count: int) -> Any:
        reads.append(count)
        return read(file, path, begin, count)

    monkeypatch.setattr(safetensors_file, "read_bytes_at", counted)
    stream = open_checkpoint(str(tmp_path)).tensors()
    assert reads == [], "opening reads headers only"
    for done, (_, array) in enumerate(stream, start=1):
        assert len(reads) == done and reads[-1] == array.nbytes


def test_progress_is_shown_when_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = open_checkpoint(str(single(tmp_path)))
    dict(checkpoint.tensors())
    assert capsys.readouterr().err == ""
    dict(checkpoint.tensors(progress=True))
    shown = capsys.readouterr()
    assert "Loading weights" in shown.err and "100%" in shown.err and shown.out == ""


def test_end_tokens_are_those_of_all_files(tmp_path: Path) -> None:
    single(tmp_path, {"model_type": "llama", "eos_token_id": [7, 5]})
    assert open_checkpoint(str(tmp_path)).eos_token_ids == (5, 7)
    write_json(tmp_path / "generation_config.json", {"eos_token_id": [9, 5], "temperature": 0.6})
    checkpoint = open_checkpoint(str(tmp_path))
    assert checkpoint.eos_token_ids == (5, 7, 9)
    assert checkpoint.generation_config["temperature"] == 0.6
    for token in ("<end>", {"content": "<end>"}):
        write_tokenizer(tmp_path, eos_token=token)
        assert open_checkpoint(str(tmp_path)).eos_token_ids == (3, 5, 7, 9)


def test_no_end_token_is_no_error(tmp_path: Path) -> None:
    single(tmp_path, {"model_type": "llama", "eos_token_id": None})
    checkpoint = open_checkpoint(str(tmp_path))
    assert checkpoint.eos_token_ids == () and checkpoint.generation_config == {}


def test_tokenizer_with_template(tmp_path: Path) -> None:
    single(tmp_path)
    write_tokenizer(tmp_path, eos_token="<end>", chat_template="in tokenizer_config")
    tokenizer = open_checkpoint(str(tmp_path)).load_tokenizer()
    assert tokenizer is not None
    assert tokenizer("hello world")["input_ids"] == [1, 2]
    assert tokenizer.chat_template == "in tokenizer_config"
    (tmp_path / "chat_template.jinja").write_text("in a file")
    again = open_checkpoint(str(tmp_path)).load_tokenizer()
    assert again is not None and again.chat_template == "in a file"


@pytest.mark.parametrize("named", ["GPT2Tokenizer", "Qwen2Tokenizer", "LlamaTokenizer", None])
def test_tokenizer_json_decides_whatever_class_is_named(named: str | None, tmp_path: Path) -> None:
    single(tmp_path)
    trained = original("smollm")
    trained.save(str(tmp_path / "tokenizer.json"))
    write_json(tmp_path / "tokenizer_config.json", {"tokenizer_class": named} if named else {})
    tokenizer = open_checkpoint(str(tmp_path)).load_tokenizer()
    assert tokenizer is not None
    for text in TEXTS:
        assert tokenizer(text)["input_ids"] == trained.encode(text).ids, text


@pytest.mark.parametrize("adds", [True, False])
def test_tokenizer_json_decides_on_bos(adds: bool, tmp_path: Path) -> None:
    single(tmp_path)
    write_tokenizer(tmp_path, bos_token="<end>", add_bos_token=not adds)
    if adds:
        inner = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
        inner.post_processor = processors.TemplateProcessing(
            single="<end> $A", special_tokens=[("<end>", 3)]
        )
        inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = open_checkpoint(str(tmp_path)).load_tokenizer()
    assert tokenizer is not None
    assert tokenizer("hello")["input_ids"] == ([3, 1] if adds else [1])
    assert tokenizer("hello", add_special_tokens=False)["input_ids"] == [1]


def test_tokenizer_from_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "other").mkdir()
    single(tmp_path / "model")
    write_tokenizer(tmp_path / "other", eos_token="<end>")
    checkpoint = open_checkpoint(str(tmp_path / "model"), tokenizer=str(tmp_path / "other"))
    tokenizer = checkpoint.load_tokenizer()
    assert tokenizer is not None and tokenizer("world")["input_ids"] == [2]
    assert checkpoint.eos_token_ids == (2, 3)
    with pytest.raises(ModelLoadError, match="tokenizer ./none: no such folder"):
        open_checkpoint(str(tmp_path / "model"), tokenizer="./none")


def test_tokenizer_faults(tmp_path: Path) -> None:
    single(tmp_path)
    checkpoint = open_checkpoint(str(tmp_path))
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json: no such file.*tokenizer="):
        checkpoint.load_tokenizer()
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json: is not valid JSON"):
        checkpoint.load_tokenizer()
    write_json(tmp_path / "tokenizer.json", {"model": 3})
    write_json(tmp_path / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
    with pytest.raises(ModelLoadError, match="the tokenizer cannot be loaded"):
        checkpoint.load_tokenizer()


def refused(folder: Path, *said: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        open_checkpoint(str(folder))
    for words in said:
        assert words in str(caught.value)


def test_config_faults(tmp_path: Path) -> None:
    single(tmp_path)
    config = tmp_path / "config.json"
    for text, said in (
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("[1]", "must hold an object"),
        ("{}", "model_type is None"),
        ('{"model_type": 3}', "model_type is 3"),
        ("version https://git-lfs.github.com/spec/v1", "git lfs pull"),
        ("\xff", "not valid JSON"),
    ):
        config.write_bytes(text.encode("latin-1"))
        refused(tmp_path, "config.json", said)
    config.unlink()
    refused(tmp_path, "config.json: no such file")
    config.mkdir()
    refused(tmp_path, "config.json: cannot be read")


def test_folders_without_safetensors(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", CONFIG)
    refused(tmp_path, "has no model.safetensors")
    (tmp_path / "pytorch_model.bin").touch()
    (tmp_path / "model-q4.gguf").touch()
    refused(tmp_path, "it has model-q4.gguf, pytorch_model.bin", "give the file's path")
    (tmp_path / "model-00001-of-00002.safetensors").touch()
    refused(tmp_path, "index.json: no such file", "model-00001-of-00002.safetensors")


def test_index_faults(tmp_path: Path) -> None:
    good = sharded(tmp_path)
    first, second = sorted(set(good.values()))
    index(tmp_path, good | {"model.d": "model-00003-of-00003.safetensors"})
    refused(tmp_path, "names 1 files that are not there: model-00003-of-00003.safetensors")
    index(tmp_path, good | {"model.d": second})
    refused(tmp_path, f"1 tensors are not where it says: model.d in {second}")
    index(tmp_path, good | {"model.b": first})
    refused(tmp_path, f"model.b in {first}")
    index(tmp_path, {name: shard for name, shard in good.items() if name != "model.c"})
    refused(tmp_path, "does not list model.c")
    index(tmp_path, good | {"model.d": "../elsewhere.safetensors"})
    refused(tmp_path, "outside its folder")
    for broken in (None, [], {"model.a": 3}):
        index(tmp_path, broken)
        refused(tmp_path, "index.json: weight_map")
    index(tmp_path, good)
    safetensors.numpy.save_file(TENSORS, tmp_path / second)
    refused(tmp_path, f"{second}: tensor model.a is also in {first}")


def test_a_truncated_shard_is_found_before_anything_is_read(tmp_path: Path) -> None:
    weight_map = sharded(tmp_path)
    shard = tmp_path / weight_map["model.b"]
    shard.write_bytes(shard.read_bytes()[:-1])
    refused(tmp_path, shard.name, "tensor model.b ends at byte", "truncated")
