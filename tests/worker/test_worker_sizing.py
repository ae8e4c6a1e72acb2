"""A worker's pool: what params and its steps leave, by what XLA says that the steps take."""

from collections.abc import Iterable
from typing import Any

import jax
import pytest
from jax.stages import Compiled

from jpaged import LLM
from jpaged.worker import memory, step_compiler
from jpaged.worker.worker import Worker
from tests.engine import tiny

# More than the tiny model's few rows can use would be no limit.
MANY: dict[str, Any] = {"max_num_seqs": 64, "page_size": 16, "max_num_batched_tokens": 256}


def worker_of(llm: LLM) -> Worker:
    return llm.engine._worker


def pool_bytes(llm: LLM) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(worker_of(llm).runner._kv))


def peak_bytes(llm: LLM) -> int:
    peak = worker_of(llm).runner._programs.peak_bytes
    assert peak is not None and peak > 0
    return peak


def params_bytes(llm: LLM) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(worker_of(llm).runner.params))


def test_pages_are_what_params_and_the_largest_step_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    with tiny.llm(**MANY) as llm:
        most, needed = pool_bytes(llm), params_bytes(llm) + peak_bytes(llm)
    available = needed + 4 * most // 3
    monkeypatch.setattr(memory, "available_host_bytes", lambda: available)
    with tiny.llm(**MANY) as llm:
        page = tiny.BYTES_PER_TOKEN * 16
        assert pool_bytes(llm) % page == 0
        left = (available - needed) // 4
        assert left - page < pool_bytes(llm) <= left
        assert llm.engine.stats().pages_total == pool_bytes(llm) // page - 1
        tokens = llm.generate(tiny.as_dicts(tiny.prompts(9)), use_tqdm=False)[0].outputs[0]
        assert tokens.token_ids


def test_pages_of_an_exact_size_are_asked_of_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_host_bytes", lambda: 1)
    with tiny.llm(**MANY, kv_cache_memory_bytes=100 * 16 * tiny.BYTES_PER_TOKEN) as llm:
        assert llm.engine.stats().pages_total == 99


def test_steps_that_copy_the_pool_get_a_smaller_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """XLA is made to say that a forward takes twice its pool more, which none here does."""
    with tiny.llm(**MANY) as llm:
        most, needed = pool_bytes(llm), params_bytes(llm) + peak_bytes(llm)
    real, pools = step_compiler._peak_bytes, []

    def copying(programs: Iterable[Compiled]) -> int | None:
        programs = list(programs)
        kvs = [program.in_avals[0][1] for program in programs]
        pools.append(max(sum(4 * leaf.size for leaf in jax.tree.leaves(kv)) for kv in kvs))
        peak = real(programs)
        return None if peak is None else peak + 2 * pools[-1]

    available = needed + 4 * most // 3
    monkeypatch.setattr(memory, "available_host_bytes", lambda: available)
    monkeypatch.setattr(memory, "_TOLERANCE_BYTES", 0)
    monkeypatch.setattr(step_compiler, "_peak_bytes", copying)
    with tiny.llm(**MANY) as llm:
        small, first, last = pools
        assert small < pool_bytes(llm) == last < first
        assert params_bytes(llm) + 3 * last + needed <= available
    assert "take more memory than there is" in caplog.text
