"""Measures the CPU kernels of this machine: decode bandwidth, chunks, table width, products.

Everything is measured in one sitting, in rounds that alternate between the things compared, and the best
round counts, so that a ratio holds on a machine that does other work too. Prints text, and JSON with
`--json FILE`.
"""

import argparse
import dataclasses
import json
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.pallas_kernels import AttentionMetadata, KVGroup, allocate_kv, matmul
from jpaged.pallas_kernels import paged_attention as attend

HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE = 9, 3, 64, 16
SECONDS = 0.6  # least time spent on each group of things compared

Run = Callable[[], object]


def best_ms(runs: Mapping[str, Run], rounds: int = 12) -> dict[str, float]:
    """The best time of each run in milliseconds, measured in alternation."""
    for run in runs.values():
        jax.block_until_ready(run())
    best = dict.fromkeys(runs, float("inf"))
    started = time.perf_counter()
    done = 0
    while done < rounds or time.perf_counter() - started < SECONDS:
        for name, run in runs.items():
            start = time.perf_counter()
            jax.block_until_ready(run())
            best[name] = min(best[name], (time.perf_counter() - start) * 1e3)
        done += 1
    return best


@dataclasses.dataclass(frozen=True)
class Step:
    """One layer's attention over rows of given lengths, the last `count` tokens of each new."""

    lengths: Sequence[int]
    count: int
    dtype: str
    max_len: int = 8192

    def arrays(self) -> tuple[jax.Array, KVGroup, AttentionMetadata]:
        """Queries, pool and metadata, pages in random order."""
        rng = np.random.default_rng(0)
        needed = [-(-length // PAGE_SIZE) for length in self.lengths]
        order = 1 + rng.permutation(sum(needed)).astype(np.int32)
        table = np.zeros((len(self.lengths), self.max_len // PAGE_SIZE), np.int32)
        for row, (end, number) in enumerate(zip(np.cumsum(needed), needed, strict=True)):
            table[row, :number] = order[end - number : end]
        kv = allocate_kv(1, sum(needed) + 1, PAGE_SIZE, KV_HEADS, HEAD_DIM, dtype=self.dtype)
        values = jnp.asarray(rng.standard_normal(kv.pages.shape, np.float32)).astype(self.dtype)
        if kv.pages.dtype != values.dtype:
            values = jax.lax.bitcast_convert_type(values, kv.pages.dtype)
        tokens = self.count * len(self.lengths)
        metadata = AttentionMetadata(
            page_table=jnp.asarray(table),
            kv_lens=jnp.asarray(self.lengths, jnp.int32),
            cu_q_lens=jnp.arange(0, tokens + 1, self.count, dtype=jnp.int32),
            slots=jnp.arange(PAGE_SIZE, PAGE_SIZE + tokens, dtype=jnp.int32),
        )
        q = jnp.asarray(rng.standard_normal((tokens, HEADS, HEAD_DIM), np.float32))
        return q.astype(self.dtype), dataclasses.replace(kv, pages=values), metadata

    @property
    def page_bytes(self) -> int:
        """Bytes of K and V that one reading of all rows takes."""
        size = jnp.dtype(self.dtype).itemsize
        return sum(self.lengths) * 2 * KV_HEADS * HEAD_DIM * size

    @property
    def flops(self) -> float:
        """Arithmetic of both products, causal."""
        keys = sum(self.count * (n - (self.count - 1) / 2) for n in self.lengths)
        return 4 * HEADS * HEAD_DIM * keys

    def run(self, implementation: str) -> Run:
        """A call of one implementation."""
        q, kv, metadata = self.arrays()
        call = jax.jit(
            lambda q, kv, metadata: attend(
                q, kv, 0, metadata, scale=0.125, implementation=implementation
            )
        )
        return lambda: call(q, kv, metadata)


def copy_run() -> tuple[Run, int]:
    """Reading and writing memory far larger than the caches once, and the bytes that takes.

    In place, so that no time goes into new pages of the process.
    """
    arrays = [jnp.ones(32 << 20, jnp.float32)]
    call = jax.jit(lambda x: x + 1, donate_argnums=0)

    def run() -> object:
        arrays[0] = call(arrays[0])
        return arrays[0]

    return run, 2 * arrays[0].nbytes


def matmul_run(implementation: str, x: jax.Array, w: jax.Array) -> Run:
    """A product of one implementation."""
    call = jax.jit(lambda x, w: matmul(x, w, implementation=implementation, out_dtype="float32"))
    return lambda: call(x, w)


def bench_attention(dtype: str, *, with_xla: bool) -> dict[str, object]:
    """Decode bandwidth against that of a copy, chunk rates, and the price of a wide table."""
    copy, copy_bytes = copy_run()
    far = Step([8000] * 12, 1, dtype)
    steps = {
        "decode 12 x 8000 (from memory)": far,
        "decode 64 x 300": Step([300] * 64, 1, dtype),
        "decode 1 x 1000": Step([1000], 1, dtype),
        "chunk 256 of 500": Step([500], 256, dtype),
        "chunk 512 of 2048": Step([2048], 512, dtype),
    }
    report: dict[str, object] = {}
    names = ("numba", "xla") if with_xla else ("numba",)
    for label, step in steps.items():
        runs: dict[str, Run] = {name: step.run(name) for name in names}
        times = best_ms({**runs, "copy": copy} if step is far else runs)
        for name in names:
            entry = {
                "ms": times[name],
                "GB/s": step.page_bytes / times[name] / 1e6,
                "GF/s": step.flops / times[name] / 1e6,
            }
            if step is far:
                entry["copy GB/s"] = copy_bytes / times["copy"] / 1e6
                entry["of copy"] = entry["GB/s"] / entry["copy GB/s"]
            report[f"{name}, {label}"] = entry
    for name in names:
        wide = Step([128] * 64, 1, dtype).run(name)
        narrow = Step([128] * 64, 1, dtype, max_len=512).run(name)
        times = best_ms({"wide": wide, "narrow": narrow}, rounds=40)
        report[f"{name}, table for 8192 against 512"] = {
            "ms": times["wide"],
            "narrow ms": times["narrow"],
            "ratio": times["wide"] / times["narrow"],
        }
    return report


def bench_matmul(dtype: str) -> dict[str, object]:
    """Products of few rows with weights of SmolLM2-135M's shapes."""
    rng = np.random.default_rng(0)
    report: dict[str, object] = {}
    for outputs, inputs in ((1536, 576), (576, 1536), (49152, 576)):
        w = jnp.asarray(rng.standard_normal((outputs, inputs), np.float32)).astype(dtype)
        for rows in (1, 2, 4, 8, 16, 64):
            x = jnp.asarray(rng.standard_normal((rows, inputs), np.float32)).astype(dtype)
            runs = {name: matmul_run(name, x, w) for name in ("numba", "xla")}
            for name, ms in best_ms(runs, rounds=5).items():
                report[f"{name}, {rows} x {inputs} x {outputs}"] = {
                    "ms": ms,
                    "GF/s": 2 * rows * inputs * outputs / ms / 1e6,
                    "weight GB/s": w.nbytes / ms / 1e6,
                }
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--only", nargs="+", default=["attention", "matmul"])
    parser.add_argument("--no-xla", action="store_true", help="skip XLA's attention, which is slow")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    report: dict[str, object] = {
        "machine": platform.processor() or platform.machine(),
        "jax": jax.__version__,
    }
    benches: dict[str, Callable[[str], dict[str, object]]] = {
        "attention": lambda dtype: bench_attention(dtype, with_xla=not given.no_xla),
        "matmul": bench_matmul,
    }
    for dtype in given.dtype:
        for name in given.only:
            entries = benches[name](dtype)
            report[f"{name} {dtype}"] = entries
            for label, entry in entries.items():
                assert isinstance(entry, dict)
                figures = "  ".join(f"{key} {value:.3g}" for key, value in entry.items())
                print(f"{dtype}  {label:48s} {figures}", flush=True)
    if given.json:
        given.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
