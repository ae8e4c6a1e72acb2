"""ModelRunner: the device's state (params, kv, rows) and the compiled steps over it.

Runs one plan at a time. Knows no queue and no text.
"""

import dataclasses
from collections.abc import Mapping, Sequence
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
from jpaged.worker.step_input import StepPacker, StepShape, bucket_for, pack_nothing
from jpaged.worker.step_program import KV, empty_rows, make_step

# XLA compiles one program on little more than one core.
_COMPILE_THREADS = 2


class ModelRunner:
    """Owns params, kv, rows and one compiled step a token bucket."""

    def __init__(
        self,
        layout: RunLayout,
        params: tuple[Array, ...],
        kv: KV,
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
        self._kv = kv
        self._device = device
        self._platform = platform
        self._attention = attention
        widths = tuple(pages_for(max_model_len, group.page_size) for group in kv)
        self._shapes = {
            tokens: StepShape(tokens, min(tokens, max_num_seqs), max_num_seqs, widths)
            for tokens in buckets
        }
        self._buckets = tuple(buckets)
        self._packer = StepPacker(max_num_seqs, widths)
        self._rows = jax.device_put(empty_rows(max_num_seqs), device)
        self._steps: dict[int, Compiled] = {}

    def compile(self, cache: Path | None, *, progress: bool) -> None:
        """Compiles every step and runs each once on no tokens, which leaves the state as it was.

        `cache` is a folder for compiled programs, None for none.
        """
        with (
            compilation_cache_at(cache),
            ThreadPoolExecutor(_COMPILE_THREADS) as pool,
            tqdm(total=len(self._shapes), desc="Compiling steps", disable=not progress) as bar,
        ):
            # The largest first: it takes longest.
            lowered = {tokens: self._lower(tokens) for tokens in sorted(self._shapes, reverse=True)}
            futures = {tokens: pool.submit(low.compile) for tokens, low in lowered.items()}
            for tokens, future in futures.items():
                self._steps[tokens] = future.result()
                self.num_compilations += 1
                bar.update()
        for tokens, shape in self._shapes.items():
            self._fetch(self._call(tokens, pack_nothing(shape)), top=True)

    def _lower(self, tokens: int) -> jax.stages.Lowered:
        step = make_step(
            self._layout,
            self._shapes[tokens],
            attention=self._attention,
            platform=self._platform,
        )
        sharding = jax.sharding.SingleDeviceSharding(self._device)
        vector = jax.ShapeDtypeStruct((self._shapes[tokens].size,), np.int32, sharding=sharding)
        jitted = jax.jit(step, donate_argnums=(1, 2))
        return jitted.lower(self.params, self._kv, self._rows, vector)

    def run(self, plan: StepPlan, kv: KVCacheManager) -> Mapping[int, SampledToken]:
        """Runs a plan; the tokens by sequence, for each entry that samples."""
        # Entries that sample first, decodes before the rest: the program samples a prefix.
        entries = sorted(plan.entries, key=lambda entry: (not entry.samples, entry.count > 1))
        num_tokens = plan.num_tokens
        tokens = bucket_for(num_tokens, self._buckets)
        sampled = self._call(tokens, self._packer.pack(entries, kv, self._shapes[tokens]))
        self.num_steps += 1
        self.scheduled_tokens += num_tokens
        self.padded_tokens += tokens - num_tokens
        samplers = [entry for entry in entries if entry.samples]
        if not samplers:
            return {}
        top = any(_num_top(entry) is not None for entry in samplers)
        return _by_sequence(samplers, self._fetch(sampled, top=top))

    def close(self) -> None:
        """Lets go of every array and program."""
        self.params, self._kv, self._rows = (), (), None
        self._steps.clear()

    def _call(self, tokens: int, vector: np.ndarray) -> Sampled:
        packed = jax.device_put(vector, self._device)
        result = self._steps[tokens](self.params, self._kv, self._rows, packed)
        self._kv, self._rows = result.kv, result.rows
        sampled: Sampled = result.sampled
        return sampled

    @staticmethod
    def _fetch(sampled: Sampled, *, top: bool) -> "_HostSampled":
        """Host copies of what was sampled, as Python values."""
        basic = [sampled.tokens, sampled.logprobs]
        more = [sampled.ranks, sampled.top_ids, sampled.top_logprobs] if top else []
        return _HostSampled(*(array.tolist() for array in jax.device_get(basic + more)))


@dataclasses.dataclass(frozen=True)
class _HostSampled:
    """`Sampled` as lists; the last three are empty where nobody asked for log-probabilities."""

    tokens: list[int]
    logprobs: list[float]
    ranks: list[int] = dataclasses.field(default_factory=list)
    top_ids: list[list[int]] = dataclasses.field(default_factory=list)
    top_logprobs: list[list[float]] = dataclasses.field(default_factory=list)


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
