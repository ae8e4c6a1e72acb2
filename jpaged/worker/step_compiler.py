"""StepCompiler: the programs of an engine's steps, for a page pool of any size, and what memory they take.

Nothing here is on the device: shapes go in, compiled programs come out.
"""

import dataclasses
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
from jax.stages import Compiled
from tqdm import tqdm

from jpaged.core.kv_cache_manager import pages_for
from jpaged.models.weights import RunLayout
from jpaged.worker.compile_cache import compilation_cache_at
from jpaged.worker.step_input import StepShape, sample_buckets, token_buckets
from jpaged.worker.step_program import KV, empty_rows, make_forward, make_sample

# XLA compiles one program on little more than one core.
_COMPILE_THREADS = 2


@dataclasses.dataclass(frozen=True)
class StepPrograms:
    """Compiled programs: a forward for each token bucket, a sample for each bucket of rows.

    Attributes:
        shapes: what each forward takes, by its tokens.
        forwards: by the same.
        samples: by the most rows that they sample.
    """

    shapes: dict[int, StepShape]
    forwards: dict[int, Compiled]
    samples: dict[int, Compiled]

    @property
    def num_compilations(self) -> int:
        return len(self.forwards) + len(self.samples)

    @property
    def peak_bytes(self) -> int | None:
        """The most memory that one program takes beside params, kv and rows; None if XLA does not say."""
        return _peak_bytes([*self.forwards.values(), *self.samples.values()])


class StepCompiler:
    """Compiles for one layout on one device, up to so many rows and tokens a step."""

    def __init__(
        self,
        layout: RunLayout,
        *,
        device: jax.Device,
        platform: str,
        attention: str | None,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        cache: Path | None,
    ) -> None:
        """`attention` names an implementation, None takes the platform's.

        `cache` is a folder for compiled programs, None for none.
        """
        self._layout = layout
        self._sharding = jax.sharding.SingleDeviceSharding(device)
        self._platform = platform
        self._attention = attention
        self._max_num_seqs = max_num_seqs
        self._buckets = token_buckets(max_num_batched_tokens, max_num_seqs)
        self._sample_buckets = sample_buckets(max_num_seqs)
        self._cache = cache

    def compile(self, kv: KV, max_model_len: int, *, progress: bool) -> StepPrograms:
        """All programs, for pages of the shapes of `kv`."""
        shapes = {tokens: self._shape(tokens, kv, max_model_len) for tokens in self._buckets}
        forwards: dict[int, Compiled] = {}
        samples: dict[int, Compiled] = {}
        with (
            compilation_cache_at(self._cache),
            ThreadPoolExecutor(_COMPILE_THREADS) as pool,
            tqdm(
                total=len(shapes) + len(self._sample_buckets),
                desc="Compiling steps",
                disable=not progress,
            ) as bar,
        ):
            # Lowering holds the interpreter; programs that are lowered compile meanwhile. Samples go
            # first, because lowering the first forward is where the CPU's kernels are compiled.
            sampling = {
                size: pool.submit(self._lower_sample(size).compile) for size in self._sample_buckets
            }
            forwarding = {
                size: pool.submit(self._lower_forward(shapes[size], kv).compile)
                for size in sorted(shapes, reverse=True)
            }
            for futures, programs in ((sampling, samples), (forwarding, forwards)):
                for size, future in futures.items():
                    programs[size] = future.result()
                    bar.update()
        return StepPrograms(shapes, forwards, samples)

    def peak_bytes(self, kv: KV, max_model_len: int) -> int | None:
        """`peak_bytes` of the programs for the most tokens and the most rows."""
        shape = self._shape(self._buckets[-1], kv, max_model_len)
        with compilation_cache_at(self._cache):
            sample = self._lower_sample(self._sample_buckets[-1]).compile()
            return _peak_bytes([sample, self._lower_forward(shape, kv).compile()])

    def _shape(self, tokens: int, kv: KV, max_model_len: int) -> StepShape:
        widths = tuple(pages_for(max_model_len, group.page_size) for group in kv)
        return StepShape(tokens, min(tokens, self._max_num_seqs), self._max_num_seqs, widths)

    def _lower_forward(self, shape: StepShape, kv: KV) -> jax.stages.Lowered:
        forward = make_forward(
            self._layout, shape, attention=self._attention, platform=self._platform
        )
        vector = jax.ShapeDtypeStruct((shape.size,), np.int32)
        jitted = jax.jit(forward, donate_argnums=(1, 2))
        return jitted.lower(*self._placed((self._layout.specs, kv, self._rows(), vector)))

    def _lower_sample(self, count: int) -> jax.stages.Lowered:
        hidden = jax.ShapeDtypeStruct(
            (self._max_num_seqs, self._layout.config.hidden_size), self._layout.specs[0].dtype
        )
        row_ids = jax.ShapeDtypeStruct((count,), np.int32)
        jitted = jax.jit(make_sample(self._layout, platform=self._platform), donate_argnums=1)
        return jitted.lower(*self._placed((self._layout.specs, self._rows(), hidden, row_ids)))

    def _rows(self) -> object:
        return jax.eval_shape(lambda: empty_rows(self._max_num_seqs))

    def _placed(self, shapes: tuple[object, ...]) -> tuple[object, ...]:
        """The same shapes, on the device."""
        placed: tuple[object, ...] = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._sharding), shapes
        )
        return placed


def _peak_bytes(programs: Iterable[Compiled]) -> int | None:
    peaks = []
    for program in programs:
        memory = program.memory_analysis()
        if memory is None:
            return None
        # What is aliased are kv and rows, which are there anyway.
        outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
        code = memory.generated_code_size_in_bytes
        peaks.append(memory.temp_size_in_bytes + outputs + code)
    return max(peaks)
