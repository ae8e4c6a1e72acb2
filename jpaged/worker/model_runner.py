"""ModelRunner: the device's state (params, kv, rows) and the compiled steps over it.

Steps are sent one behind another, and run in that order. Knows no queue and no text.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np
from jaxtyping import Array

from jpaged.core.kv_cache_manager import KVCacheManager
from jpaged.core.step_plan import PlanEntry, SampledToken, StepPlan
from jpaged.sampling.row_params import SequenceSampling
from jpaged.sampling.sampler import Sampled
from jpaged.worker.step_compiler import StepPrograms
from jpaged.worker.step_input import StepPacker, bucket_for, pack_nothing
from jpaged.worker.step_program import KV, empty_rows


class ModelRunner:
    """Owns params, kv, rows and the programs over them. `make_kv` makes empty pages."""

    def __init__(
        self,
        params: tuple[Array, ...],
        make_kv: Callable[[], KV],
        programs: StepPrograms,
        *,
        device: jax.Device,
        max_num_seqs: int,
    ) -> None:
        """Runs each program once on no tokens, which leaves the state as it was."""
        self.params = params
        self.num_steps = 0
        self.scheduled_tokens = 0
        self.padded_tokens = 0
        self.num_compilations = programs.num_compilations
        self._programs = programs
        self._make_kv = make_kv
        self._kv = make_kv()
        self._max_num_seqs = max_num_seqs
        self._device = device
        self._buckets = sorted(programs.shapes)
        self._sample_buckets = sorted(programs.samples)
        widths = programs.shapes[self._buckets[0]].table_widths
        self._packer = StepPacker(max_num_seqs, widths)
        self._rows = jax.device_put(empty_rows(max_num_seqs), device)
        for size in self._buckets:
            hidden = self._forward(size, pack_nothing(programs.shapes[size]))
        for size in self._sample_buckets:
            _fetch(_arrays(self._sample(hidden, [], size), top=True))

    def dispatch(self, plan: StepPlan, kv: KVCacheManager) -> "StepInFlight":
        """Sends a plan to the device, behind those sent before; returns before it has run."""
        # Entries that sample first, decodes before the rest: sample takes a prefix.
        entries = sorted(plan.entries, key=lambda e: (not e.samples, e.num_tokens > 1))
        num_tokens = plan.num_tokens
        tokens = bucket_for(num_tokens, self._buckets)
        shape = self._programs.shapes[tokens]
        hidden = self._forward(tokens, self._packer.pack(entries, kv, shape))
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
        self._programs.forwards.clear()
        self._programs.samples.clear()

    def _forward(self, tokens: int, vector: np.ndarray) -> Array:
        """Runs the forward of a bucket; the hidden states to sample from."""
        packed = jax.device_put(vector, self._device)
        result = self._programs.forwards[tokens](self.params, self._kv, self._rows, packed)
        self._kv, self._rows = result.kv, result.rows
        return result.hidden

    def _sample(self, hidden: Array, rows: Sequence[int], size: int) -> Sampled:
        """Samples the first entries of a step, which are in `rows`."""
        row_ids = np.full(size, self._max_num_seqs, np.int32)
        row_ids[: len(rows)] = rows
        row_ids = jax.device_put(row_ids, self._device)
        self._rows, sampled = self._programs.samples[size](self.params, self._rows, hidden, row_ids)
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
