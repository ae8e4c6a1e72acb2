"""An engine inside a JAX program: live weights, swapped between steps, and nothing changed around it."""

import itertools
import os
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jpaged import LLM, ConfigError, EngineDeadError, ModelLoadError, SamplingParams
from jpaged.models.config import ModelConfig
from jpaged.models.weights import flatten_public
from jpaged.worker.compile_cache import CompilationCounter
from tests.engine import tiny

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPT = {"prompt_token_ids": [10, 20, 30, 40, 50, 60]}
IDS: list[int] = PROMPT["prompt_token_ids"]


def tree(seed: int) -> dict[str, jax.Array]:
    """The public weights, as arrays of one's own."""
    return {name: jnp.array(x) for name, x in flatten_public(tiny.model(seed)).items()}


def tokens(llm: LLM) -> list[int]:
    return llm.generate([PROMPT], GREEDY, use_tqdm=False)[0].outputs[0].token_ids


def nested(flat: dict[str, jax.Array]) -> dict[str, Any]:
    """Dotted names as nested dicts."""
    result: dict[str, Any] = {}
    for name, value in flat.items():
        *parents, last = name.split(".")
        place = result
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value
    return result


@pytest.mark.parametrize("form", ["module", "state", "flat", "nested"])
def test_weights_may_have_any_form(form: str) -> None:
    params = {
        "module": lambda: tiny.model(),
        "state": lambda: nnx.state(tiny.model(), nnx.Param),
        "flat": lambda: tree(0),
        "nested": lambda: nested(tree(0)),
    }[form]()
    config: Any = ModelConfig.from_hf(tiny.HF_CONFIG) if form == "flat" else tiny.HF_CONFIG
    with tiny.llm(params=params, config=config) as llm:
        assert tokens(llm) == tiny.greedy(IDS, 8)


def test_a_module_brings_its_own_config() -> None:
    with tiny.llm(config=None) as llm:
        assert tokens(llm) == tiny.greedy(IDS, 8)


def test_new_weights_give_what_a_new_engine_gives_and_compile_nothing() -> None:
    """Twice, with tied embeddings: each array is donated by none and aliased by none."""
    with tiny.llm(params=tree(0)) as llm, warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tokens(llm) == tiny.greedy(IDS, 8, seed=0)
        for version, seed in enumerate((1, 0, 1), start=1):
            given = tree(seed)
            with CompilationCounter() as compilations:
                llm.update_params(given)
                seen = tokens(llm)
            assert compilations.count == 0
            for array in given.values():
                array.delete()  # as a trainer does that donates its params
            assert seen == tiny.greedy(IDS, 8, seed=seed)
            assert tokens(llm) == seen
            assert llm.engine.weights_version == version
        tiny.check_idle(llm)


def test_running_requests_go_on_under_the_new_weights_alone() -> None:
    with tiny.llm(params=tree(0)) as llm:
        engine = llm.engine
        engine.add_request("r", PROMPT, GREEDY)
        for _ in range(4):
            engine.step()
        llm.update_params(tree(1))
        while engine.has_unfinished_requests():
            outputs = engine.step()
        first = tiny.greedy(IDS, 4, seed=0)
        assert outputs[0].outputs[0].token_ids == first + tiny.greedy(IDS + first, 4, seed=1)
        assert outputs[0].outputs[0].weights_version == 1
        tiny.check_idle(llm)


def test_weights_that_do_not_fit_are_all_named_and_change_nothing() -> None:
    with tiny.llm(params=tree(0)) as llm:
        wrong = tree(1)
        del wrong["model.layers.1.mlp.up_proj.weight"]
        wrong["model.layers.2.mlp.up_proj.weight"] = jnp.zeros(3)
        wrong["model.norm.weight"] = jnp.zeros((1, 32))
        wrong["model.layers.0.self_attn.q_proj.weight"] = wrong[
            "model.layers.0.self_attn.q_proj.weight"
        ].astype(jnp.int32)
        with pytest.raises(ModelLoadError) as error:
            llm.update_params(wrong)
        for part in ("layers.1.mlp.up_proj", "layers.2.mlp", "model.norm", "int32"):
            assert part in str(error.value)
        assert tokens(llm) == tiny.greedy(IDS, 8, seed=0)
        assert llm.engine.weights_version == 0


def test_an_update_may_leave_out_what_the_first_weights_had_in_excess() -> None:
    """Checkpoints of tied models may bring the head a second time; the module that trains has one."""
    first = tree(0)
    first["lm_head.weight"] = jnp.array(first["model.embed_tokens.weight"])
    with tiny.llm(params=first) as llm:
        llm.update_params(tree(1))
        assert tokens(llm) == tiny.greedy(IDS, 8, seed=1)


def test_two_engines_live_in_one_process() -> None:
    with tiny.llm(params=tree(0)) as first, tiny.llm(params=tree(1), page_size=8) as second:
        assert tokens(first) == tiny.greedy(IDS, 8, seed=0)
        assert tokens(second) == tiny.greedy(IDS, 8, seed=1)
        first.update_params(tree(1))
        assert tokens(first) == tokens(second)


def test_params_need_a_config_and_one_dtype() -> None:
    with pytest.raises(ConfigError) as error:
        tiny.llm(params=tree(0), config=None)
    assert error.value.field == "config"
    mixed = tree(0)
    mixed["model.norm.weight"] = mixed["model.norm.weight"].astype(jnp.bfloat16)
    with pytest.raises(ConfigError, match="bfloat16, float32") as error:
        tiny.llm(params=mixed)
    assert error.value.field == "dtype"


def test_a_step_compiles_nothing_and_donates_without_a_warning(llm: LLM) -> None:
    with warnings.catch_warnings(), CompilationCounter() as compilations:
        warnings.simplefilter("error")
        mixed = [
            GREEDY,
            SamplingParams(temperature=1.0, top_k=3, max_tokens=5, logprobs=2),
            SamplingParams(temperature=0.5, top_p=0.5, n=3, max_tokens=7, stop=["zz"]),
        ]
        prompts = tiny.as_dicts(tiny.prompts(3, 50, 17))
        for count in (1, 2, 3):
            llm.generate(prompts[:count], mixed[:count], use_tqdm=False)
    assert compilations.count == 0
    assert llm.engine.stats().num_compilations <= 16


@pytest.mark.parametrize("where", ["dispatch", "collect"])
def test_a_step_that_fails_is_run_again_and_loses_nothing(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    worker = llm.engine._worker
    real, calls = getattr(worker, where), itertools.count(1)

    def failing(*args: Any) -> Any:
        if next(calls) in (2, 5, 6):
            raise RuntimeError("a passing trouble")
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(worker, where, failing)
        assert tokens(llm) == tiny.greedy(IDS, 8)
    assert next(calls) > 8


def test_a_device_that_goes_on_failing_is_given_up() -> None:
    with tiny.llm() as llm:
        llm.engine._worker.runner._packer = None  # type: ignore[assignment]
        llm.engine.add_request("r", PROMPT, GREEDY)
        with pytest.raises(EngineDeadError, match="step failed"):
            for _ in range(3):
                assert llm.engine.step() == []
        with pytest.raises(EngineDeadError):
            llm.engine.add_request("r2", PROMPT, GREEDY)
        with pytest.raises(EngineDeadError):
            llm.engine.step()


def test_no_global_setting_differs_afterwards() -> None:
    def settings() -> tuple[dict[str, object], dict[str, str]]:
        return dict(jax.config.values), dict(os.environ)

    before = settings()
    with tiny.llm() as llm:
        assert settings() == before
        tokens(llm)
    assert settings() == before


def test_a_closed_engine_says_so() -> None:
    llm = tiny.llm()
    llm.close()
    with pytest.raises(EngineDeadError, match="closed"):
        tokens(llm)
