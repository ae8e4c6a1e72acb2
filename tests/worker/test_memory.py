"""From bytes to pages: what fits is used, what does not is refused with the largest that does."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jpaged import ConfigError
from jpaged.core.kv_cache_manager import KVCacheManager, peak_pages
from jpaged.worker import memory
from jpaged.worker.memory import (
    Budget,
    GroupSize,
    PoolPlan,
    PoolSizer,
    available_host_bytes,
    plan_pools,
    pool_budget,
)

GIB = 2**30


def plan(groups: list[GroupSize], budget: int, **changes: Any) -> PoolPlan:
    limits: dict[str, Any] = {
        "page_size": 16,
        "model_max_len": 4096,
        "max_model_len": None,
        "max_num_seqs": 8,
        "max_step_tokens": 64,
    }
    return plan_pools(groups, budget=Budget(budget, "a test"), **limits | changes)


@given(
    st.lists(
        st.tuples(st.integers(100, 10_000), st.none() | st.integers(1, 500)),
        min_size=1,
        max_size=3,
    ),
    st.integers(10_000, 10_000_000),
    st.sampled_from([1, 16, 64]),
)
def test_a_plan_fits_its_budget_and_one_longest_sequence(
    sizes: list[tuple[int, int | None]], budget: int, page_size: int
) -> None:
    groups = [GroupSize(bytes_per_page=b, window=w) for b, w in sizes]
    try:
        made = plan(groups, budget, page_size=page_size)
    except ConfigError:
        assert sum(2 * b for b, _ in sizes) > budget  # not even one token
        return
    assert made.num_bytes <= budget
    assert made.num_bytes == sum(
        spec.num_pages * group.bytes_per_page
        for spec, group in zip(made.specs, groups, strict=True)
    )
    assert 1 <= made.max_model_len <= 4096
    for spec, group in zip(made.specs, groups, strict=True):
        need = peak_pages(made.max_model_len, page_size, group.window, 64)
        assert need <= spec.num_pages - 1 <= need * 8
    manager = KVCacheManager(made.specs, page_size, max_step_tokens=64)
    manager.open(0)
    assert manager.can_hold(made.max_model_len)
    if made.max_model_len < 4096:
        with pytest.raises(ConfigError) as error:
            plan(groups, budget, page_size=page_size, max_model_len=made.max_model_len + 1)
        assert f"largest that fits is {made.max_model_len}" in str(error.value)
        assert error.value.field == "max_model_len"


def test_a_length_is_lowered_to_what_fits() -> None:
    assert plan([GroupSize(1000, None)], 50_000).max_model_len == 49 * 16


def test_a_length_beyond_the_models_is_refused() -> None:
    with pytest.raises(ConfigError, match="at most 4096"):
        plan([GroupSize(1000, None)], GIB, max_model_len=4097)


def test_bytes_that_were_asked_for_are_taken() -> None:
    device: Any = SimpleNamespace(platform="cpu")
    args = {"memory_utilization": 0.9, "needed_bytes": 0}
    assert pool_budget(device, kv_cache_memory_bytes=12345, **args).num_bytes == 12345
    assert pool_budget(device, kv_cache_memory_bytes=None, **args).num_bytes <= 2 * GIB


@pytest.mark.parametrize(
    ("available", "needed", "expected"),
    [(20, 1, 2 * GIB), (5, 1, GIB), (3, 1, GIB // 2), (1.5, 1, GIB // 8)],
)
def test_a_cpu_gives_a_quarter_of_what_is_left(
    monkeypatch: pytest.MonkeyPatch, available: float, needed: int, expected: int
) -> None:
    monkeypatch.setattr(memory, "available_host_bytes", lambda: int(available * GIB))
    budget = cpu_budget(needed * GIB)
    assert budget.num_bytes == expected


def test_a_cpu_with_nothing_left_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_host_bytes", lambda: 3 * GIB)
    with pytest.raises(ConfigError, match="3072 MiB available, 4096 for params") as error:
        cpu_budget(4 * GIB)
    assert error.value.field == "kv_cache_memory_bytes"


def cpu_budget(needed_bytes: int) -> Budget:
    device: Any = SimpleNamespace(platform="cpu")
    return pool_budget(
        device, memory_utilization=0.9, kv_cache_memory_bytes=None, needed_bytes=needed_bytes
    )


def accelerator(limit: int | None, used: int) -> Any:
    stats = None if limit is None else {"bytes_limit": limit, "bytes_in_use": used}
    return SimpleNamespace(platform="gpu", memory_stats=lambda: stats)


def test_an_accelerator_gives_its_share_less_what_is_in_use_and_needed() -> None:
    budget = pool_budget(
        accelerator(40 * GIB, 3 * GIB),
        memory_utilization=0.5,
        kv_cache_memory_bytes=None,
        needed_bytes=7 * GIB,
    )
    assert budget.num_bytes == 10 * GIB
    assert "3072 in use, 7168 for params and steps" in budget.why


@pytest.mark.parametrize(
    ("limit", "field"), [(8 * GIB, "memory_utilization"), (None, "kv_cache_memory_bytes")]
)
def test_an_accelerator_with_nothing_left_says_so(limit: int | None, field: str) -> None:
    with pytest.raises(ConfigError) as error:
        pool_budget(
            accelerator(limit, 3 * GIB),
            memory_utilization=0.5,
            kv_cache_memory_bytes=None,
            needed_bytes=7 * GIB,
        )
    assert error.value.field == field


def test_available_memory_is_the_least_of_kernel_and_cgroup(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9 kB\nMemAvailable:   4194304 kB\n")
    assert available_host_bytes(tmp_path) == 4 * GIB
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("5\n")
    assert available_host_bytes(tmp_path) == 4 * GIB
    (group / "memory.max").write_text(f"{3 * GIB}\n")
    (group / "memory.current").write_text(f"{GIB}\n")
    assert available_host_bytes(tmp_path) == 2 * GIB


MIB = 2**20
TOTAL = 1000 * MIB


def sizer(guess: int, params: int = 100 * MIB) -> PoolSizer:
    """Pages of a MiB in what params and steps leave of a thousand."""

    def plan_for(needed: int) -> PoolPlan:
        if needed >= TOTAL - 2 * MIB:
            raise ConfigError("nothing left", field="memory_utilization")
        return plan([GroupSize(MIB, None)], TOTAL - needed, max_num_seqs=2)

    return PoolSizer(plan_for, params_bytes=params, guess_bytes=guess)


def test_the_largest_steps_peak_is_left_free() -> None:
    asked = []

    def peak(max_model_len: int) -> int:
        asked.append(max_model_len)
        return 600 * MIB

    pools = sizer(500 * MIB).first(peak)
    assert pools.num_bytes == 300 * MIB
    assert asked == [4096]


def test_a_guess_that_is_too_high_refuses_nobody() -> None:
    assert sizer(10 * TOTAL).first(lambda _: 600 * MIB).num_bytes == 300 * MIB


def test_steps_too_large_are_refused() -> None:
    with pytest.raises(ConfigError, match="nothing left"):
        sizer(500 * MIB).first(lambda _: 900 * MIB)


def test_nothing_is_compiled_for_pools_that_something_else_limits() -> None:
    """Two sequences of 4,096 tokens are 512 pages and page 0."""

    def peak(max_model_len: int) -> int:
        raise AssertionError("the peak was asked for")

    assert sizer(300 * MIB).first(peak).num_bytes == 513 * MIB


def test_a_guess_stands_in_where_nobody_says() -> None:
    assert sizer(500 * MIB).first(lambda _: None).num_bytes == 400 * MIB


def test_what_was_foreseen_is_not_corrected() -> None:
    sized = sizer(500 * MIB)
    pools = sized.first(lambda _: 600 * MIB)
    for peak in (None, 500 * MIB, 600 * MIB, 610 * MIB):
        assert sized.corrected(pools, peak) is None


@pytest.mark.parametrize("copies", [0.25, 0.5, 1.0, 2.0])
def test_steps_that_copy_the_pool_have_room_for_the_copy(copies: float) -> None:
    sized = sizer(500 * MIB)
    pools = sized.first(lambda _: 400 * MIB)

    def peak(of: PoolPlan) -> int:
        return 400 * MIB + int(copies * of.num_bytes)

    smaller = sized.corrected(pools, peak(pools))
    assert smaller is not None
    used = 100 * MIB + smaller.num_bytes + peak(smaller)
    assert TOTAL - (2 + copies) * MIB <= used <= TOTAL


def test_pools_with_room_to_spare_are_not_corrected() -> None:
    sized = sizer(1 * MIB)
    pools = sized.first(lambda _: None)
    assert sized.corrected(pools, 300 * MIB) is None
