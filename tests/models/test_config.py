"""ModelConfig: transformers' defaults, both dialects of rope, windows, and what is refused."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers

from jpaged.errors import ModelLoadError
from jpaged.models.config import LayerGroup, ModelConfig
from jpaged.models.hf_fields import ARCHITECTURES
from jpaged.models.rope import Rope
from jpaged.models.weights import RunLayout
from tests.models import families

FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.mark.parametrize("model_type", sorted(ARCHITECTURES))
def test_defaults_are_those_of_transformers(model_type: str) -> None:
    theirs = transformers.AutoConfig.for_model(model_type).to_dict()
    assert ModelConfig.from_hf({"model_type": model_type}) == ModelConfig.from_hf(theirs)


@pytest.mark.parametrize("case", tuple(families.CASES))
def test_both_dialects_mean_the_same(case: str) -> None:
    old, new = families.CASES[case], families.saved_config(case)
    assert "rope_parameters" in new and "rope_scaling" not in new and "rope_theta" not in new
    assert ModelConfig.from_hf(old) == ModelConfig.from_hf(new)


@pytest.mark.parametrize("case", ["llama3", "gemma3"])
def test_both_dialects_give_identical_logits(case: str) -> None:
    logits = []
    for hf in (families.CASES[case], families.saved_config(case)):
        config = ModelConfig.from_hf(hf)
        layout = RunLayout.create(config, dtype=jnp.float32, platform=jax.default_backend())
        params = layout.to_run(
            {
                name: families.weight(name, spec.shape, one_plus_norm=case == "gemma3")
                for name, spec in layout.public.items()
            }
        )
        tokens = jnp.asarray(families.tokens(case))[None]
        run = jax.jit(lambda p, layout=layout, t=tokens: layout.merge(p).dense_logits(t))
        logits.append(np.asarray(run(params)))
    assert np.array_equal(*logits)


def test_type_and_rope_type_are_the_same_key() -> None:
    scaling = {"factor": 2.0}
    read = [
        ModelConfig.from_hf({"model_type": "llama", "rope_scaling": {**scaling, key: "linear"}})
        for key in ("type", "rope_type")
    ]
    assert read[0] == read[1]
    assert read[0].ropes[0] == Rope(kind="linear", factor=2.0)


def test_gemma_scales_only_its_full_layers() -> None:
    config = ModelConfig.from_hf(
        {
            "model_type": "gemma3_text",
            "num_hidden_layers": 7,
            "rope_scaling": {"type": "linear", "factor": 8.0},
        }
    )
    assert set(config.ropes[:5]) == {Rope(theta=10_000.0)}
    assert config.ropes[5] == Rope(kind="linear", theta=1e6, factor=8.0)
    assert config.ropes[6] == Rope(theta=10_000.0)
    assert config.kv_groups == (
        LayerGroup(None, (5,)),
        LayerGroup(4096, (0, 1, 2, 3, 4, 6)),
    )


def test_multimodal_gemma_is_its_text_model() -> None:
    text = families.CASES["gemma3"]
    whole = {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": text,
        "vision_config": {"hidden_size": 8},
        "torch_dtype": "bfloat16",
    }
    config = ModelConfig.from_hf(whole)
    assert config.dtype == "bfloat16"
    assert config == ModelConfig.from_hf({**text, "torch_dtype": "bfloat16"})


@pytest.mark.parametrize(
    ("edit", "windows"),
    [
        ({"use_sliding_window": False}, (None, None, None)),
        ({}, (None, None, None)),
        ({"use_sliding_window": True, "max_window_layers": 2}, (None, None, 9)),
        ({"use_sliding_window": True, "max_window_layers": 28}, (None, None, None)),
        ({"use_sliding_window": True, "sliding_window": None}, (None, None, None)),
        ({"use_sliding_window": True, "layer_types": [SLIDING, FULL, SLIDING]}, (9, None, 9)),
    ],
)
def test_qwen_windows(edit: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    hf = {"model_type": "qwen2", "num_hidden_layers": 3, "sliding_window": 9, **edit}
    assert ModelConfig.from_hf(hf).windows == windows


def test_mistral_window_is_4096_unless_it_is_null() -> None:
    base = {"model_type": "mistral", "num_hidden_layers": 1}
    assert ModelConfig.from_hf(base).windows == (4096,)
    assert ModelConfig.from_hf({**base, "sliding_window": None}).windows == (None,)


@pytest.mark.parametrize(
    ("edit", "field"),
    [
        ({"model_type": "mamba"}, "model_type"),
        ({"model_type": None}, "model_type"),
        ({"model_type": "gemma3"}, "text_config"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"hidden_act": "relu"}, "hidden_act"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 7}, "head_dim"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"torch_dtype": "float64"}, "dtype"),
        ({"sliding_window": 8}, "sliding_window"),
        ({"layer_types": [SLIDING, FULL]}, "layer_types"),
        ({"layer_types": [FULL]}, "layer_types"),
        ({"layer_types": 2}, "layer_types"),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": None},
            "max_window_layers",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_interleaved": True}, "rope_interleaved"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "longrope"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "alpha": 1.0}}, "alpha"),
        ({"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2.0}}, "rope_type"),
        ({"rope_scaling": {"type": "llama3", "factor": 2.0}}, "low_freq_factor"),
        ({"rope_parameters": {"rope_type": "spiral"}}, "spiral"),
        ({"rope_parameters": {FULL: {"rope_type": "default"}}}, FULL),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"model_type": "gemma3_text", "rope_parameters": {"rope_theta": 1e4}}, "rope_parameters"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "bidirectional"),
        ({"model_type": "gemma3_text", "sliding_window_pattern": 0}, "sliding_window_pattern"),
        ({"model_type": "gemma3_text", "sliding_window": None}, "sliding_window"),
        ({"model_type": "qwen2", "layer_types": [SLIDING, FULL]}, "sliding_window"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(edit: dict[str, Any], field: str) -> None:
    hf = {"model_type": "llama", "num_hidden_layers": 2, **edit}
    with pytest.raises(ModelLoadError, match=field):
        ModelConfig.from_hf(hf)


def test_gemma_says_that_it_ignores_the_attention_soft_cap(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ModelConfig.from_hf({"model_type": "gemma3_text", "attn_logit_softcapping": 50.0})
    assert "attn_logit_softcapping" in caplog.text
