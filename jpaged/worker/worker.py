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

from jpaged.core.kv_cache_manager import KVCacheManager, KVGroupSpec
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
from jpaged.worker.memory import GroupSize, PoolPlan, PoolSizer, plan_pools, pool_budget
from jpaged.worker.model_runner import ModelRunner, StepInFlight
from jpaged.worker.step_compiler import StepCompiler, StepPrograms
from jpaged.worker.step_program import KV

logger = logging.getLogger(__name__)

# A CPU step of so many tokens takes a few tenths of a second: more would only delay the others' tokens.
_DEFAULT_LIMITS = {"cpu": (64, 256), "gpu": (256, 2048), "tpu": (256, 2048)}
# What libraries and the allocator take beside params and steps.
_ACCELERATOR_MARGIN_BYTES = 256 * 2**20
# Pages of the pool over which a step's own memory is found.
_SMALL_POOL = 64


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
        compiler = StepCompiler(
            self._layout,
            device=self.device,
            platform=platform,
            attention=args.attention,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            cache=default_cache_dir() if args.compilation_cache else None,
        )
        sizer = PoolSizer(
            lambda needed: self._plan_pools(args, needed),
            params_bytes=self._params_bytes(),
            # Logits in float32 with copies for the sampler, and the widest activations of a layer.
            guess_bytes=16 * self.max_num_seqs * config.vocab_size
            + 32 * self.max_num_batched_tokens * config.hidden_size,
        )

        def make_kv(specs: Iterable[KVGroupSpec], device: jax.Device | None) -> KV:
            return self._make_kv(specs, args.page_size, platform, device)

        def abstract_kv(specs: Iterable[KVGroupSpec]) -> KV:
            shapes: KV = jax.eval_shape(lambda: make_kv(specs, None))
            return shapes

        small = [KVGroupSpec(_SMALL_POOL, group.window) for group in config.kv_groups]
        self.pools = sizer.first(
            lambda max_model_len: compiler.peak_bytes(abstract_kv(small), max_model_len)
        )
        params = self._layout.to_run(source.tensors(progress=args.progress), device=self.device)

        def compile_steps() -> StepPrograms:
            return compiler.compile(
                abstract_kv(self.pools.specs), self.pools.max_model_len, progress=args.progress
            )

        programs = compile_steps()
        smaller = sizer.corrected(self.pools, programs.peak_bytes)
        if smaller is not None:
            logger.warning("steps over so many pages take more memory than there is: fewer")
            self.pools = smaller
            programs = compile_steps()
        self.max_model_len = self.pools.max_model_len
        self.runner = ModelRunner(
            params,
            lambda: make_kv(self.pools.specs, self.device),
            programs,
            device=self.device,
            max_num_seqs=self.max_num_seqs,
        )
        self._log(args, programs.peak_bytes)

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

    def _make_kv(
        self,
        specs: Iterable[KVGroupSpec],
        page_size: int,
        platform: str,
        device: jax.Device | None,
    ) -> KV:
        config = self.config
        return tuple(
            allocate_kv(
                len(group.layers),
                spec.num_pages,
                page_size,
                config.num_kv_heads,
                config.head_dim,
                dtype=self.dtype,
                device=device,
                platform=platform,
            )
            for group, spec in zip(config.kv_groups, specs, strict=True)
        )

    def _params_bytes(self) -> int:
        margin = 0 if platform_of(self.device) == "cpu" else _ACCELERATOR_MARGIN_BYTES
        return margin + sum(
            math.prod(spec.shape) * spec.dtype.itemsize for spec in self._layout.specs
        )

    def _plan_pools(self, args: WorkerArgs, needed_bytes: int) -> PoolPlan:
        """The pools that `needed_bytes` for params and steps leave room for."""
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
        budget = pool_budget(
            self.device,
            memory_utilization=args.memory_utilization,
            kv_cache_memory_bytes=args.kv_cache_memory_bytes,
            needed_bytes=needed_bytes,
        )
        return plan_pools(
            groups,
            budget=budget,
            page_size=args.page_size,
            model_max_len=config.max_position_embeddings,
            max_model_len=args.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_step_tokens=self.max_num_batched_tokens,
        )

    def _log(self, args: WorkerArgs, peak_bytes: int | None) -> None:
        """What was decided."""
        longest = self.config.max_position_embeddings
        if args.max_model_len is None and self.max_model_len < longest:
            logger.warning(
                "max_model_len lowered from %d to %d, the longest that %d MiB of pages hold",
                longest,
                self.max_model_len,
                self.pools.num_bytes // 2**20,
            )
        logger.info(
            "%s on %s: %s, max_model_len %d, %d rows, %d tokens a step, %d MiB of pages (at most %s), "
            "%s MiB for the largest step",
            self.config.model_type,
            self.device,
            self.dtype,
            self.max_model_len,
            self.max_num_seqs,
            self.max_num_batched_tokens,
            self.pools.num_bytes // 2**20,
            self.pools.budget.why,
            "unknown" if peak_bytes is None else peak_bytes // 2**20,
        )


def _step_limits(platform: str, rows: int | None, tokens: int | None) -> tuple[int, int]:
    """Most rows and tokens of a step, the platform's defaults where nothing was said."""
    default_rows, default_tokens = _DEFAULT_LIMITS.get(platform, _DEFAULT_LIMITS["gpu"])
    if rows is None:
        rows = min(default_rows, tokens or default_rows)
    if tokens is None:
        tokens = max(default_tokens, rows)
    return rows, tokens
