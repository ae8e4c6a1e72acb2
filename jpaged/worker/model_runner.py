"""ModelRunner: the device's state (params, kv, rows) and the compiled steps over it.

Steps are sent one behind another, and run in that order. Knows no queue and no text.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
from jax.stages import Compiled
from jaxtyping import Array
from tqdm import tqdm

from jpaged.core.kv_cache_manager import KVCacheManager, pages_for
from jpaged.core.step_plan import PlanEntry, SampledToken, StepPlan
from jpaged.models.weights import RunLayout
from jpaged.sampling.row_params import SequenceSampling
from jpaged.sampling.sampler import Sampled
from jpaged.worker.compile_cache import compilation_cache_at
from jpaged.worker.step_input import (
    StepPacker,
    StepShape,
    bucket_for,
    pack_nothing,
    sample_buckets,
)
from jpaged.worker.step_program import KV, empty_rows, make_forward, make_sample

# XLA compiles one program on little more than one core.
_COMPILE_THREADS = 2


class ModelRunner:
    """Owns params, kv, rows and one compiled step a token bucket. `make_kv` makes empty pages."""

    def __init__(
        self,
        layout: RunLayout,
        params: tuple[Array, ...],
        make_kv: Callable[[], KV],
        *,
        device: jax.Device,
        platform: str,
        attention: str | None,
        max_num_seqs: int,
        max_model_len: int,
        buckets: Sequence[int],
    ) -> None:
        self.params = params
        self.num_steps = 0
        self.scheduled_tokens = 0
        self.padded_tokens = 0
        self.num_compilations = 0
        self._layout = layout
        self._make_kv = make_kv
        self._kv = make_kv()
        self._max_num_seqs = max_num_seqs
        self._device = device
        self._sharding = jax.sharding.SingleDeviceSharding(device)
        self._platform = platform
        self._attention = attention
        widths = tuple(pages_for(max_model_len, group.page_size) for group in self._kv)
        self._shapes = {
            tokens: StepShape(tokens, min(tokens, max_num_seqs), max_num_seqs, widths)
            for tokens in buckets
        }
        self._buckets = tuple(buckets)
        self._packer = StepPacker(max_num_seqs, widths)
        self._rows = jax.device_put(empty_rows(max_num_seqs), device)
        self._sample_buckets = sample_buckets(max_num_seqs)
        self._forwards: dict[int, Compiled] = {}
        self._samples: dict[int, Compiled] = {}

    def compile(self, cache: Path | None, *, progress: bool) -> None:
        """Compiles every step and runs each once on no tokens, which leaves the state as it was.

        `cache` is a folder for compiled programs, None for none.
        """
        buckets = sorted(self._shapes, reverse=True)
        with (
            compilation_cache_at(cache),
            ThreadPoolExecutor(_COMPILE_THREADS) as pool,
            tqdm(
                total=len(buckets) + len(self._sample_buckets),
                desc="Compiling steps",
                disable=not progress,
            ) as bar,
        ):
            # Lowering holds the interpreter; programs that are lowered compile meanwhile. Samples go
            # first, because lowering the first forward is where the CPU's kernels are compiled.
            samples = {
                size: pool.submit(self._lower_sample(size).compile) for size in self._sample_buckets
            }
            forwards = {size: pool.submit(self._lower_forward(size).compile) for size in buckets}
            for futures, programs in ((samples, self._samples), (forwards, self._forwards)):
                for size, future in futures.items():
                    programs[size] = future.result()
                    self.num_compilations += 1
                    bar.update()
        for size, shape in self._shapes.items():
            hidden = self._forward(size, pack_nothing(shape))
        for size in self._sample_buckets:
            _fetch(_arrays(self._sample(hidden, [], size), top=True))

    def _lower_forward(self, tokens: int) -> jax.stages.Lowered:
        shape = self._shapes[tokens]
        forward = make_forward(
            self._layout, shape, attention=self._attention, platform=self._platform
        )
        vector = jax.ShapeDtypeStruct((shape.size,), np.int32, sharding=self._sharding)
        jitted = jax.jit(forward, donate_argnums=(1, 2))
        return jitted.lower(self.params, self._kv, self._rows, vector)

    def _lower_sample(self, count: int) -> jax.stages.Lowered:
        hidden = jax.ShapeDtypeStruct(
            (self._max_num_seqs, self._layout.config.hidden_size),
            self._layout.specs[0].dtype,
            sharding=self._sharding,
        )
        row_ids = jax.ShapeDtypeStruct((count,), np.int32, sharding=self._sharding)
        jitted = jax.jit(make_sample(self._layout, platform=self._platform), donate_argnums=1)
        return jitted.lower(self.params, self._rows, hidden, row_ids)

    def dispatch(self, plan: StepPlan, kv: KVCacheManager) -> "StepInFlight":
        """Sends a plan to the device, behind those sent before; returns before it has run."""
        # Entries that sample first, decodes before the rest: sample takes a prefix.
        entries = sorted(plan.entries, key=lambda e: (not e.samples, e.num_tokens > 1))
        num_tokens = plan.num_tokens
        tokens = bucket_for(num_tokens, self._buckets)
        hidden = self._forward(tokens, self._packer.pack(entries, kv, self._shapes[tokens]))
        self.num_steps += 1
        self.scheduled_tokens += num_tokens
        self.padded_tokens += tokens - num_tokens
        samplers = [entry for entry in entries if entry.samples]
        if not samplers:
            return StepInFlight([], [])
        rows = [entry.row for entry in samplers]
        sampled = self._sample(hidden, rows, bucket_for(len(rows), self._sample_buckets))
        top = any(_num_top(entry) is not None for entry in samplers)
        arrays = _arrays(sampled, top=top)
        for array in arrays:
            array.copy_to_host_async()
        return StepInFlight(samplers, arrays)

    @staticmethod
    def collect(step: "StepInFlight") -> Mapping[int, SampledToken]:
        """Waits for a step; the tokens by sequence, for each entry that samples."""
        return _by_sequence(step.samplers, _fetch(step.arrays)) if step.samplers else {}

    def recover(self) -> None:
        """After a step has failed: what it took with it is made anew. Pages hold nothing any more."""
        # Steps behind it have failed with it, or must have ended before their memory is given back.
        for group in self._kv:
            with contextlib.suppress(Exception):
                jax.block_until_ready(group.pages)
        self._kv, self._rows = (), None
        self._kv = self._make_kv()
        self._rows = jax.device_put(empty_rows(self._max_num_seqs), self._device)

    def close(self) -> None:
        """Lets go of every array and program."""
        self.params, self._kv, self._rows = (), (), None
        self._forwards.clear()
        self._samples.clear()

    def _forward(self, tokens: int, vector: np.ndarray) -> Array:
        """Runs the forward of a bucket; the hidden states to sample from."""
        packed = jax.device_put(vector, self._device)
        result = self._forwards[tokens](self.params, self._kv, self._rows, packed)
        self._kv, self._rows = result.kv, result.rows
        return result.hidden

    def _sample(self, hidden: Array, rows: Sequence[int], size: int) -> Sampled:
        """Samples the first entries of a step, which are in `rows`."""
        row_ids = np.full(size, self._max_num_seqs, np.int32)
        row_ids[: len(rows)] = rows
        row_ids = jax.device_put(row_ids, self._device)
        self._rows, sampled = self._samples[size](self.params, self._rows, hidden, row_ids)
        return sampled


@dataclasses.dataclass(frozen=True, slots=True)
class StepInFlight:
    """A step on its way: the entries that sample, and the arrays in which their tokens will be."""

    samplers: list[PlanEntry]
    arrays: list[Array]


@dataclasses.dataclass(frozen=True)
class _HostSampled:
    """`Sampled` as lists; the last three are empty where nobody asked for log-probabilities."""

    tokens: list[int]
    logprobs: list[float]
    ranks: list[int] = dataclasses.field(default_factory=list)
    top_ids: list[list[int]] = dataclasses.field(default_factory=list)
    top_logprobs: list[list[float]] = dataclasses.field(default_factory=list)


def _arrays(sampled: Sampled, *, top: bool) -> list[Array]:
    """What the host reads of a sampled step."""
    more = [sampled.ranks, sampled.top_ids, sampled.top_logprobs] if top else []
    return [sampled.tokens, sampled.logprobs, *more]


def _fetch(arrays: Sequence[Array]) -> _HostSampled:
    """Host copies of what was sampled, as Python values."""
    return _HostSampled(*(array.tolist() for array in jax.device_get(list(arrays))))


def _num_top(entry: PlanEntry) -> int | None:
    """How many of the most likely tokens the entry's request wants reported."""
    sampling = entry.request.sampling
    assert isinstance(sampling, SequenceSampling)
    return sampling.params.logprobs


def _by_sequence(entries: Sequence[PlanEntry], host: _HostSampled) -> dict[int, SampledToken]:
    """The first entries of a step with what they sampled."""
    tokens = {}
    for i, entry in enumerate(entries):
        token, logprob = host.tokens[i], host.logprobs[i]
        count = _num_top(entry)
        if count is None:
            sampled = SampledToken(token=token, logprob=logprob)
        else:
            sampled = SampledToken(
                token=token,
                logprob=logprob,
                rank=host.ranks[i],
                top_ids=tuple(host.top_ids[i][:count]),
                top_logprobs=tuple(host.top_logprobs[i][:count]),
            )
        tokens[entry.request.sequence] = sampled
    return tokens
