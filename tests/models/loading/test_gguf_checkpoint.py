"""A GGUF file gives the config and tensors that the Hugging Face checkpoint it was made from has."""

from pathlib import Path

import gguf
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.errors import ModelLoadError
from jpaged.models.config import ModelConfig
from jpaged.models.loading import open_checkpoint
from jpaged.models.weights import check_public, public_shapes
from tests.models.loading.gguf_samples import (
    CONFIGS,
    LLAMA3_SCALING,
    Floats,
    random_tensors,
    write_gguf,
)


def sample(name: str) -> tuple[dict[str, object], dict[str, Floats]]:
    shapes = public_shapes(ModelConfig.from_hf(CONFIGS[name]), jnp.float32)
    return CONFIGS[name], random_tensors(shapes)


@pytest.mark.parametrize("name", CONFIGS)
def test_config_and_tensors_come_back(name: str, tmp_path: Path) -> None:
    config, tensors = sample(name)
    checkpoint = open_checkpoint(str(write_gguf(tmp_path / "m.gguf", config, tensors)))
    read = ModelConfig.from_hf(checkpoint.hf_config)
    # The dtype is that of the models such files are made from; the file does not say.
    assert read == ModelConfig.from_hf({**config, "dtype": "bfloat16"})
    found = dict(checkpoint.tensors())
    check_public(public_shapes(read, jnp.float32), checkpoint.shapes())
    assert found.keys() == tensors.keys()
    for tensor, values in tensors.items():
        if name == "gemma3" and tensor.endswith("norm.weight"):
            # 1 + w rounds to float32, and so does taking the 1 away.
            np.testing.assert_allclose(found[tensor], values, rtol=0, atol=2.0**-22)
        else:
            np.testing.assert_array_equal(found[tensor], values, err_msg=tensor)


def test_each_stored_type_is_dequantised_once(tmp_path: Path) -> None:
    config, tensors = sample("qwen2")
    name = "model.layers.1.mlp.up_proj.weight"
    kinds = gguf.GGMLQuantizationType
    for kind in (kinds.F16, kinds.BF16, kinds.Q4_0, kinds.Q4_1, kinds.Q5_0, kinds.Q5_1, kinds.Q8_0):
        path = write_gguf(tmp_path / f"{kind.name}.gguf", config, tensors, kind=kind)
        checkpoint = open_checkpoint(str(path))
        found = dict(checkpoint.tensors())[name]
        expected = gguf.dequantize(gguf.quantize(tensors[name], kind), kind)
        assert found.dtype == checkpoint.shapes()[name].dtype
        np.testing.assert_array_equal(found.astype(np.float32), expected)
        # Each step is at most a sixteenth of a block's range, so the values are those that were stored.
        assert np.abs(expected - tensors[name]).max() < 0.35


def test_llama3_scaling_is_recovered(tmp_path: Path) -> None:
    config, tensors = sample("llama3")
    for factor, length, high in ((8.0, 16, 4.0), (32.0, 8192, 4.0), (4.0, 32, 2.0)):
        scaling = LLAMA3_SCALING | {
            "factor": factor,
            "original_max_position_embeddings": length,
            "high_freq_factor": high,
        }
        theta = 500_000.0 if length == 8192 else 500.0
        given = config | {"rope_scaling": scaling, "rope_theta": theta}
        checkpoint = open_checkpoint(str(write_gguf(tmp_path / "m.gguf", given, tensors)))
        assert checkpoint.hf_config["rope_scaling"] == scaling


def test_frequency_factors_of_another_kind_are_refused(tmp_path: Path) -> None:
    config, tensors = sample("llama")
    path = write_gguf(
        tmp_path / "m.gguf",
        config,
        tensors,
        extra={"rope_freqs.weight": np.linspace(1, 3, 8, dtype=np.float32)},
    )
    with pytest.raises(ModelLoadError, match=r"m\.gguf.*rope_freqs\.weight"):
        open_checkpoint(str(path))


def test_metadata_that_changes_the_model(tmp_path: Path) -> None:
    config, tensors = sample("llama")

    def config_of(**metadata: object) -> ModelConfig:
        keys = {f"llama.{key.replace('__', '.')}": value for key, value in metadata.items()}
        path = write_gguf(tmp_path / "m.gguf", config, tensors, metadata=keys)
        return ModelConfig.from_hf(open_checkpoint(str(path)).hf_config)

    assert config_of(attention__sliding_window=7).windows == (7, 7)
    assert config_of(rope__scaling__type="linear", rope__scaling__factor=4.0).ropes[0].factor == 4
    yarn = config_of(
        rope__scaling__type="yarn",
        rope__scaling__factor=4.0,
        rope__scaling__original_context_length=16,
    ).ropes[0]
    assert (yarn.kind, yarn.factor, yarn.original_max_position_embeddings) == ("yarn", 4, 16)


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({"general.architecture": "mamba"}, "general.architecture is 'mamba'; supported are llama"),
        ({"llama.block_count": None}, "llama.block_count is missing"),
        ({"llama.attention.head_count": 0}, "llama.attention.head_count is 0"),
        ({"llama.attention.head_count": "many"}, "llama.attention.head_count is 'many'"),
        ({"llama.attention.head_count": [4, 2]}, r"llama.attention.head_count is \[4, 2\]"),
        ({"llama.rope.scaling.type": "longrope"}, "supported are none, linear, yarn"),
        ({"llama.expert_count": 8}, "mixtures of experts"),
        ({"split.count": 3}, "split model"),
    ],
)
def test_metadata_faults_name_the_key(
    metadata: dict[str, object], said: str, tmp_path: Path
) -> None:
    config, tensors = sample("llama")
    path = write_gguf(tmp_path / "m.gguf", config, tensors, metadata=metadata)
    with pytest.raises(ModelLoadError, match=rf"m\.gguf.*{said}"):
        open_checkpoint(str(path))


def test_unknown_tensors_are_all_named(tmp_path: Path) -> None:
    config, tensors = sample("qwen3")
    extra = {"blk.0.ssm_a.weight": np.ones(4, np.float32), "mystery": np.ones(4, np.float32)}
    path = write_gguf(tmp_path / "m.gguf", config, tensors, extra=extra)
    with pytest.raises(ModelLoadError, match=r"2 tensors .*blk\.0\.ssm_a\.weight, mystery"):
        open_checkpoint(str(path))


def test_head_rows_that_do_not_divide(tmp_path: Path) -> None:
    config, tensors = sample("llama")
    path = write_gguf(
        tmp_path / "m.gguf", config, tensors, metadata={"llama.attention.head_count": 3}
    )
    with pytest.raises(ModelLoadError, match=r"q_proj.*64 rows"):
        dict(open_checkpoint(str(path)).tensors())


def test_one_value_for_all_layers_may_be_an_array(tmp_path: Path) -> None:
    config, tensors = sample("llama")
    path = write_gguf(
        tmp_path / "m.gguf", config, tensors, metadata={"llama.attention.head_count_kv": [2, 2]}
    )
    assert open_checkpoint(str(path)).hf_config["num_key_value_heads"] == 2
