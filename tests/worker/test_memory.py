"""From bytes to pages: what fits is used, what does not is refused with the largest that does."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jpaged import ConfigError
from jpaged.core.kv_cache_manager import KVCacheManager, peak_pages
from jpaged.worker.memory import GroupSize, PoolPlan, available_host_bytes, plan_pools, pool_budget

GIB = 2**30


def plan(groups: list[GroupSize], budget: int, **changes: Any) -> PoolPlan:
    limits: dict[str, Any] = {
        "page_size": 16,
        "model_max_len": 4096,
        "max_model_len": None,
        "max_num_seqs": 8,
        "max_step_tokens": 64,
    }
    return plan_pools(groups, budget_bytes=budget, **limits | changes)


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


def test_a_lowered_length_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    made = plan([GroupSize(1000, None)], 50_000)
    assert made.max_model_len == 49 * 16
    assert "lowered from 4096 to 784" in caplog.text


def test_a_length_beyond_the_models_is_refused() -> None:
    with pytest.raises(ConfigError, match="at most 4096"):
        plan([GroupSize(1000, None)], GIB, max_model_len=4097)


def test_bytes_that_were_asked_for_are_taken() -> None:
    device: Any = SimpleNamespace(platform="cpu")
    args = {"memory_utilization": 0.9, "needed_bytes": 0}
    assert pool_budget(device, kv_cache_memory_bytes=12345, **args) == 12345
    assert pool_budget(device, kv_cache_memory_bytes=None, **args) <= 2 * GIB


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
    assert budget == 10 * GIB


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
