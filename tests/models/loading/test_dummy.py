"""Random weights: the model's own shapes, small, the same in every run."""

import json
from pathlib import Path

import numpy as np
import pytest

from jpaged.models.config import ModelConfig
from jpaged.models.loading import open_checkpoint
from jpaged.models.weights import check_public, public_shapes
from tests.models.loading.gguf_samples import CONFIGS, write_gguf
from tests.models.loading.test_folder import write_tokenizer
from tests.models.loading.test_gguf_checkpoint import sample


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_config_is_enough(dtype: str, tmp_path: Path) -> None:
    config = CONFIGS["gemma3"] | {"dtype": dtype, "eos_token_id": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    checkpoint = open_checkpoint(str(tmp_path), load_format="dummy")
    assert checkpoint.source.startswith("random weights")
    assert checkpoint.eos_token_ids == (1,)
    assert checkpoint.load_tokenizer() is None
    first, again = dict(checkpoint.tensors()), dict(checkpoint.tensors())
    check_public(public_shapes(ModelConfig.from_hf(config), np.dtype(dtype)), first)
    assert checkpoint.shapes().keys() == first.keys()
    for name, values in first.items():
        np.testing.assert_array_equal(values, again[name])
        assert 0 < np.abs(values.astype(np.float32)).max() < 0.2, name
    different = {values.astype(np.float32).tobytes()[:64] for values in first.values()}
    assert len(different) == len(first), "tensors do not repeat one another"


def test_the_tokenizer_is_kept_where_there_is_one(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["llama"]))
    write_tokenizer(tmp_path)
    tokenizer = open_checkpoint(str(tmp_path), load_format="dummy").load_tokenizer()
    assert tokenizer is not None and tokenizer("hello")["input_ids"] == [1]


def test_a_gguf_file_may_give_the_config(tmp_path: Path) -> None:
    config, tensors = sample("qwen3")
    path = write_gguf(tmp_path / "m.gguf", config, tensors)
    checkpoint = open_checkpoint(str(path), load_format="dummy")
    assert checkpoint.shapes().keys() == tensors.keys()
