"""How many pages the pool gets: the only place that turns bytes into pages.

On an accelerator the pool takes what memory_utilization leaves after the params and the peak of the
largest step; on a CPU, whose memory others use too, the least of 2 GiB, a quarter of what these leave of
the memory available, and what the rows can use.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax

from jpaged.core.kv_cache_manager import KVGroupSpec, peak_pages
from jpaged.errors import ConfigError

_CPU_POOL_BYTES = 2 * 2**30
_CPU_SHARE = 4
_MIB = 2**20
# What XLA says of a step is believed to within this; a device has as much to spare.
_TOLERANCE_BYTES = 64 * _MIB


@dataclasses.dataclass(frozen=True)
class GroupSize:
    """What a page of one KV group costs, and how long its pages live."""

    bytes_per_page: int
    window: int | None


class Budget(NamedTuple):
    """Bytes that the page pool may take, and what they come from, in words."""

    num_bytes: int
    why: str


@dataclasses.dataclass(frozen=True)
class PoolPlan:
    """The pools of all groups, and the longest sequence that they and the model allow."""

    specs: tuple[KVGroupSpec, ...]
    max_model_len: int
    num_bytes: int
    budget: Budget = dataclasses.field(compare=False)


def plan_pools(
    groups: Sequence[GroupSize],
    *,
    budget: Budget,
    page_size: int,
    model_max_len: int,
    max_model_len: int | None,
    max_num_seqs: int,
    max_step_tokens: int,
) -> PoolPlan:
    """Splits a budget over the groups in proportion to what a longest sequence needs of each.

    `max_model_len` None is lowered from `model_max_len` until one sequence fits; a given one that
    does not fit, or is beyond the model's, is a ConfigError that names the largest that does.
    """

    budget_bytes = budget.num_bytes

    def pages(tokens: int) -> list[int]:
        return [peak_pages(tokens, page_size, g.window, max_step_tokens) for g in groups]

    def num_bytes(counts: Sequence[int], extra: int) -> int:
        return sum((n + extra) * g.bytes_per_page for n, g in zip(counts, groups, strict=True))

    if max_model_len is not None and max_model_len > model_max_len:
        raise ConfigError(
            f"max_model_len {max_model_len} is beyond the model's own limit; "
            f"at most {model_max_len}",
            field="max_model_len",
        )
    # Page 0 of each group is in the pool, too.
    largest = _largest(lambda tokens: num_bytes(pages(tokens), 1) <= budget_bytes, model_max_len)
    if largest < 1:
        raise ConfigError(
            f"the page pool has {budget_bytes} bytes, and one token needs "
            f"{num_bytes(pages(1), 1)}: raise kv_cache_memory_bytes or lower page_size",
            field="kv_cache_memory_bytes",
        )
    length = largest if max_model_len is None else max_model_len
    if length > largest:
        raise ConfigError(
            f"max_model_len {length} needs {num_bytes(pages(length), 1)} bytes of pages, the pool "
            f"has {budget_bytes}: the largest that fits is {largest}",
            field="max_model_len",
        )
    per_sequence = pages(length)
    # Page 0 aside, so many sequences of full length fit; more than max_num_seqs would never be used.
    spare = budget_bytes - num_bytes([0] * len(groups), 1)
    one = num_bytes(per_sequence, 0)
    counts = [min(n * spare // one, n * max_num_seqs) + 1 for n in per_sequence]
    specs = tuple(
        KVGroupSpec(num_pages=n, window=g.window) for n, g in zip(counts, groups, strict=True)
    )
    return PoolPlan(specs, length, num_bytes(counts, 0), budget)


def _largest(fits: Callable[[int], bool], high: int) -> int:
    """The largest n in [0, high] that fits, where fitting only ends as n grows."""
    low = 0
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low


class PoolSizer:
    """Finds the plan whose pools, beside params and the largest step, fill what there is."""

    def __init__(
        self, plan: Callable[[int], PoolPlan], *, params_bytes: int, guess_bytes: int
    ) -> None:
        """`plan` gives the pools that so many needed bytes leave room for; `guess_bytes` stands for a
        step's peak where nobody says what it is."""
        self._plan = plan
        self._params_bytes = params_bytes
        self._assumed = guess_bytes

    def first(self, peak_bytes: Callable[[int], int | None]) -> PoolPlan:
        """The plan by the peak of steps over a small pool, which `peak_bytes` gives for a max_model_len.

        It is not asked where something else limits the pools.
        """
        most = self._plan(self._params_bytes)
        if self._leaves(self._assumed, most):
            return most
        peak = peak_bytes(most.max_model_len)
        if peak is not None:
            self._assumed = peak
        return self._plan(self._params_bytes + self._assumed)

    def corrected(self, pools: PoolPlan, peak_bytes: int | None) -> PoolPlan | None:
        """Smaller pools, if steps over `pools` turn out to take more than there is; else None.

        What they take more than steps over a small pool is taken to grow with the pool, as it does where
        a program copies it.
        """
        if peak_bytes is None or peak_bytes <= self._assumed + _TOLERANCE_BYTES:
            return None
        if self._leaves(peak_bytes, pools):
            return None
        share = (peak_bytes - self._assumed) / pools.num_bytes
        more = math.ceil(share * pools.num_bytes / (1 + share))
        return self._plan(self._params_bytes + self._assumed + more)

    def _leaves(self, peak_bytes: int, pools: PoolPlan) -> bool:
        """Whether steps of such a peak leave room for `pools`."""
        try:
            return self._plan(self._params_bytes + peak_bytes) == pools
        except ConfigError:
            return False


def pool_budget(
    device: jax.Device,
    *,
    memory_utilization: float,
    kv_cache_memory_bytes: int | None,
    needed_bytes: int,
) -> Budget:
    """What the page pool may take on `device`. Raises ConfigError if that is nothing.

    `needed_bytes` is what params and the largest step will need beside what is in use now.
    """
    if kv_cache_memory_bytes is not None:
        return Budget(kv_cache_memory_bytes, "kv_cache_memory_bytes")
    needed = needed_bytes // _MIB
    if device.platform == "cpu":
        available = available_host_bytes()
        left = available - needed_bytes
        why = f"{available // _MIB} MiB available, {needed} for params and steps"
        if left <= 0:
            raise ConfigError(
                f"nothing is left for pages: {why}; kv_cache_memory_bytes takes them nevertheless",
                field="kv_cache_memory_bytes",
            )
        if left // _CPU_SHARE > _CPU_POOL_BYTES:
            return Budget(_CPU_POOL_BYTES, "the CPU's default")
        return Budget(left // _CPU_SHARE, f"a quarter of what is left: {why}")
    stats = device.memory_stats() or {}
    limit = stats.get("bytes_limit")
    if not limit:
        raise ConfigError(
            f"{device} does not tell how much memory it has: set kv_cache_memory_bytes",
            field="kv_cache_memory_bytes",
        )
    used = stats.get("bytes_in_use", 0)
    budget = int(limit * memory_utilization) - used - needed_bytes
    if budget <= 0:
        raise ConfigError(
            f"memory_utilization {memory_utilization} of {limit // _MIB} MiB leaves nothing for "
            f"pages: {used // _MIB} MiB are in use, params and steps need {needed}",
            field="memory_utilization",
        )
    why = f"memory_utilization {memory_utilization} of {limit // _MIB} MiB"
    return Budget(budget, f"{why}, {used // _MIB} in use, {needed} for params and steps")


def available_host_bytes(root: Path = Path("/")) -> int:
    """Memory that can be had without swapping: the kernel's figure, or what the cgroup leaves of it.

    `root` is where /proc and /sys are looked for.
    """
    available = _CPU_POOL_BYTES * _CPU_SHARE
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        lines = []  # not Linux: take the default
    for line in lines:
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    for limit, used in (
        ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current"),
        (
            "sys/fs/cgroup/memory/memory.limit_in_bytes",
            "sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ):
        try:
            bound = (root / limit).read_text().strip()
            taken = int((root / used).read_text())
        except (OSError, ValueError):
            continue
        if bound.isdigit():
            available = min(available, max(0, int(bound) - taken))
    return available
