"""Worker: the device's owner. Loads the params, sizes the pool, compiles, runs plans.

Everything about an engine that is decided once at start is resolved here, into values that are
logged.
"""

import dataclasses
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.core.kv_cache_manager import KVCacheManager
from jpaged.core.step_plan import SampledToken, StepPlan
from jpaged.models.config import ModelConfig
from jpaged.models.weights import (
    RunLayout,
    check_public,
    flatten_public,
    public_names,
    public_shapes,
)
from jpaged.pallas_kernels import allocate_kv, bytes_per_page
from jpaged.worker.compile_cache import default_cache_dir
from jpaged.worker.device import choose_device, choose_dtype, platform_of
from jpaged.worker.memory import GroupSize, PoolPlan, plan_pools, pool_budget
from jpaged.worker.model_runner import ModelRunner, StepInFlight
from jpaged.worker.step_input import token_buckets
from jpaged.worker.step_program import KV

logger = logging.getLogger(__name__)

# A CPU step of so many tokens takes a few tenths of a second: more would only delay the others' tokens.
_DEFAULT_LIMITS = {"cpu": (64, 256), "gpu": (256, 2048), "tpu": (256, 2048)}
_ACCELERATOR_MARGIN_BYTES = 256 * 2**20


class WeightSource(Protocol):
    """Where tensors in the checkpoint's names come from."""

    def shapes(self) -> Mapping[str, jax.ShapeDtypeStruct]:
        """Shape and dtype of each tensor, known without reading it."""
        ...

    def tensors(self, *, progress: bool) -> Iterable[tuple[str, np.ndarray | jax.Array]]:
        """The tensors, one at a time."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerArgs:
    """What a Worker is told; see EngineArgs for the meanings. None where the worker decides."""

    dtype: str
    checkpoint_dtype: str | None
    max_model_len: int | None
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    page_size: int
    memory_utilization: float
    kv_cache_memory_bytes: int | None
    device: str | None
    devices: Sequence[jax.Device] | None
    attention: str | None
    compilation_cache: bool
    progress: bool


class Worker:
    """One device, the model on it, its page pool and compiled steps."""

    def __init__(self, config: ModelConfig, source: WeightSource, args: WorkerArgs) -> None:
        self.config = config
        self.device = choose_device(args.device, args.devices)
        platform = platform_of(self.device)
        self.dtype = choose_dtype(args.dtype, args.checkpoint_dtype, self.device)
        self.max_num_seqs, self.max_num_batched_tokens = _step_limits(
            platform, args.max_num_seqs, args.max_num_batched_tokens
        )
        self._layout = RunLayout.create(config, dtype=self.dtype, platform=platform)
        wanted, given = public_shapes(config, self.dtype), public_names(source.shapes())
        check_public(wanted, self._cast(given))
        # Without what a checkpoint may bring in excess: an update need not.
        self._public = {name: spec for name, spec in given.items() if name in wanted}
        # The pool is planned before the weights are read, so that a wrong length costs no wait.
        self.pools = self._plan_pools(args, platform)
        self.max_model_len = self.pools.max_model_len
        params = self._layout.to_run(source.tensors(progress=args.progress), device=self.device)
        self.runner = ModelRunner(
            self._layout,
            params,
            lambda: self._make_kv(args.page_size, platform),
            device=self.device,
            platform=platform,
            attention=args.attention,
            max_num_seqs=self.max_num_seqs,
            max_model_len=self.max_model_len,
            buckets=token_buckets(self.max_num_batched_tokens, self.max_num_seqs),
        )
        cache = default_cache_dir() if args.compilation_cache else None
        self.runner.compile(cache, progress=args.progress)
        logger.info(
            "%s on %s: %s, max_model_len %d, %d rows, %d tokens a step, %d MiB of pages",
            config.model_type,
            self.device,
            self.dtype,
            self.max_model_len,
            self.max_num_seqs,
            self.max_num_batched_tokens,
            self.pools.num_bytes // 2**20,
        )

    def dispatch(self, plan: StepPlan, kv: KVCacheManager) -> StepInFlight:
        """Sends a step to the device, behind those sent before; returns before it has run."""
        return self.runner.dispatch(plan, kv)

    def collect(self, step: StepInFlight) -> Mapping[int, SampledToken]:
        """Waits for a step; the sampled tokens by sequence."""
        return self.runner.collect(step)

    def recover(self) -> None:
        """Makes the device's state usable after a step has failed; pages hold nothing any more."""
        self.runner.recover()

    def update_params(self, tree: object) -> None:
        """Puts other weights in place. Raises ModelLoadError, and changes nothing, if they do not fit."""
        public = flatten_public(tree)
        given = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in public.items()}
        # What the step computes in is welcome beside what the engine was started with.
        same = {
            name: self._public[name]
            if name in self._public
            and spec.shape == self._public[name].shape
            and spec.dtype == self.dtype
            else spec
            for name, spec in given.items()
        }
        check_public(self._public, same)
        self.runner.params = self._layout.to_run(public, device=self.device)

    def _cast(self, shapes: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes with every float in the dtype of the step: weights are cast when they are read."""
        return {
            name: jax.ShapeDtypeStruct(spec.shape, self.dtype)
            if jnp.issubdtype(spec.dtype, jnp.floating)
            else jax.ShapeDtypeStruct(spec.shape, spec.dtype)
            for name, spec in shapes.items()
        }

    def close(self) -> None:
        """Lets go of params, kv and compiled steps."""
        self.runner.close()

    def _make_kv(self, page_size: int, platform: str) -> KV:
        config = self.config
        return tuple(
            allocate_kv(
                len(group.layers),
                spec.num_pages,
                page_size,
                config.num_kv_heads,
                config.head_dim,
                dtype=self.dtype,
                device=self.device,
                platform=platform,
            )
            for group, spec in zip(config.kv_groups, self.pools.specs, strict=True)
        )

    def _plan_pools(self, args: WorkerArgs, platform: str) -> PoolPlan:
        config = self.config
        groups = [
            GroupSize(
                bytes_per_page=bytes_per_page(
                    len(group.layers),
                    args.page_size,
                    config.num_kv_heads,
                    config.head_dim,
                    self.dtype,
                ),
                window=group.window,
            )
            for group in config.kv_groups
        ]
        needed = _ACCELERATOR_MARGIN_BYTES + sum(
            math.prod(spec.shape) * spec.dtype.itemsize for spec in self._layout.specs
        )
        # Logits in float32 with copies for the sampler, and the widest activations of a layer.
        needed += 16 * self.max_num_seqs * config.vocab_size
        needed += 32 * self.max_num_batched_tokens * config.hidden_size
        budget = pool_budget(
            self.device,
            memory_utilization=args.memory_utilization,
            kv_cache_memory_bytes=args.kv_cache_memory_bytes,
            needed_bytes=needed,
        )
        return plan_pools(
            groups,
            budget_bytes=budget,
            page_size=args.page_size,
            model_max_len=config.max_position_embeddings,
            max_model_len=args.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_step_tokens=self.max_num_batched_tokens,
        )


def _step_limits(platform: str, rows: int | None, tokens: int | None) -> tuple[int, int]:
    """Most rows and tokens of a step, the platform's defaults where nothing was said."""
    default_rows, default_tokens = _DEFAULT_LIMITS.get(platform, _DEFAULT_LIMITS["gpu"])
    if rows is None:
        rows = min(default_rows, tokens or default_rows)
    if tokens is None:
        tokens = max(default_tokens, rows)
    return rows, tokens
