"""Measures jpaged on a workload: `python scripts/bench.py offline --workload scripts/workloads/mixed.json`.

offline  all requests at once, in this process
single   one request after the other, in this process
serve    all requests at once over HTTP, to a scripts/serve.py that is started for it

Prints text, and one line of JSON (also to --json FILE). Flags of the engine (--help) are passed on. A
workload is {"name", "requests": [{"prompt": [token ids], "out": tokens}]}; requests are greedy and ignore the
end of sequence. Prefix caching is off unless asked for: a repetition would find its prompts computed. Beside
the figures stand the CPU's flags and the rate of a product in the same sitting.
"""

import argparse
import asyncio
import dataclasses
import itertools
import json
import pathlib
import platform
import resource
import statistics
import time
from typing import Any

from jpaged.engine.engine_args import EngineArgs
from jpaged.entrypoints.cli_args import add_engine_arguments, engine_args

FLAGS = ("avx2", "fma", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_tile")
PRODUCT = (256, 576, 1536)


@dataclasses.dataclass(frozen=True)
class Timing:
    """One request, in seconds since the run began."""

    first_token: float
    finished: float
    tokens: int


def load_workload(path: pathlib.Path) -> dict[str, Any]:
    workload: dict[str, Any] = json.loads(path.read_text())
    return workload


def warm_up_requests(requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A few requests whose tokens are not those that are measured."""
    longest = max(len(r["prompt"]) for r in requests)
    highest = max(max(r["prompt"]) for r in requests)
    sizes = sorted({1, longest // 4 + 1, longest})
    return [{"prompt": [(7 * i + n) % highest for i in range(n)], "out": 4} for n in sizes]


class InProcess:
    """An LLMEngine that requests are run through."""

    def __init__(self, args: EngineArgs) -> None:
        from jpaged import LLMEngine

        self.engine = LLMEngine.from_engine_args(args)
        self._ids = itertools.count()

    def run(self, requests: list[dict[str, Any]]) -> list[Timing]:
        """All of them at once."""
        from jpaged import SamplingParams
        from jpaged.sampling.params import RequestOutputKind

        begin = time.monotonic()
        ids = []
        for request in requests:
            ids.append(str(next(self._ids)))
            params = SamplingParams(
                temperature=0,
                max_tokens=request["out"],
                ignore_eos=True,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            self.engine.add_request(ids[-1], {"prompt_token_ids": request["prompt"]}, params)
        done = {}
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                done[output.request_id] = output
        timings = []
        for output in (done[i] for i in ids):
            first, last = output.metrics.first_token_time, output.metrics.finished_time
            assert first is not None and last is not None, "a finished request has its times"
            tokens = len(output.outputs[0].token_ids)
            timings.append(Timing(first - begin, last - begin, tokens))
        return timings


def measure_in_process(
    mode: str, args: EngineArgs, requests: list[dict[str, Any]], reps: int
) -> list[dict[str, Any]]:
    """Figures of each repetition."""
    begin = time.monotonic()
    bench = InProcess(args)
    load_seconds = time.monotonic() - begin
    bench.run(warm_up_requests(requests))
    runs = []
    for _ in range(reps):
        before, start = bench.engine.stats(), time.monotonic()
        if mode == "offline":
            timings = bench.run(requests)
        else:
            timings = [timing for request in requests for timing in bench.run([request])]
        wall = time.monotonic() - start
        after = bench.engine.stats()
        padded = after.padded_tokens - before.padded_tokens
        scheduled = after.scheduled_tokens - before.scheduled_tokens
        figures = summary(requests, timings, wall) | {
            "steps": after.num_steps - before.num_steps,
            "padding_share": round(padded / (padded + scheduled), 4),
            "preemptions": after.num_preemptions - before.num_preemptions,
            "load_s": round(load_seconds, 2),
            "peak_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        }
        runs.append(figures)
    bench.engine.close()
    return runs


def summary(requests: list[dict[str, Any]], timings: list[Timing], wall: float) -> dict[str, Any]:
    """Rates and latencies of one run."""
    out = sum(timing.tokens for timing in timings)
    if out != sum(request["out"] for request in requests):
        raise SystemExit("a request did not get all the tokens it asked for")
    prompt = sum(len(request["prompt"]) for request in requests)
    per_token = [(t.finished - t.first_token) / (t.tokens - 1) for t in timings if t.tokens > 1]
    return {
        "wall_s": round(wall, 5),
        "output_tok_s": round(out / wall, 2),
        "total_tok_s": round((out + prompt) / wall, 2),
        "ttft_mean_s": round(statistics.mean(t.first_token for t in timings), 4),
        "ttft_p50_s": round(statistics.median(t.first_token for t in timings), 4),
        "time_per_token_ms": round(1e3 * statistics.mean(per_token), 3),
    }


def product_rates() -> dict[str, float]:
    """GFLOP/s of a [256, 576] x [576, 1536] product, as the machine is now."""
    import jax
    import jax.numpy as jnp

    rows, inner, columns = PRODUCT
    rates = {}
    for dtype in ("float32", "bfloat16"):
        x, w = jnp.ones((rows, inner), dtype), jnp.ones((inner, columns), dtype)
        product = jax.jit(lambda x, w: jnp.dot(x, w, preferred_element_type=jnp.float32))
        product(x, w).block_until_ready()
        times = []
        for _ in range(30):
            start = time.perf_counter()
            product(x, w).block_until_ready()
            times.append(time.perf_counter() - start)
        rates[f"product_{dtype}_gflops"] = round(2 * rows * inner * columns / min(times) / 1e9, 1)
    return rates


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    import jax

    try:
        flags = set(pathlib.Path("/proc/cpuinfo").read_text().split())
    except OSError:
        flags = set()
    return {
        "device": str(jax.devices()[0].device_kind),
        "jax": jax.__version__,
        "python": platform.python_version(),
        "cpu_flags": [flag for flag in FLAGS if flag in flags],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("mode", choices=("offline", "single", "serve"))
    parser.add_argument("--workload", type=pathlib.Path, required=True)
    parser.add_argument(
        "--reps", type=int, default=3, help="runs; all are reported, best in the text"
    )
    parser.add_argument("--json", type=pathlib.Path, help="append the JSON line to this file")
    add_engine_arguments(parser)
    parser.set_defaults(enable_prefix_caching=False)
    parsed = parser.parse_args()
    args = engine_args(parsed)
    workload = load_workload(parsed.workload)
    requests = workload["requests"]
    rates = product_rates()
    if parsed.mode == "serve":
        from bench_serve import serve_requests

        warm_up = warm_up_requests(requests)
        results = asyncio.run(serve_requests(args, requests, warm_up, parsed.reps))
        runs = [
            summary(requests, [Timing(*t) for t in r["timings"]], r["wall_s"]) | r["figures"]
            for r in results
        ]
    else:
        runs = measure_in_process(parsed.mode, args, requests, parsed.reps)
    best = min(runs, key=lambda run: run["wall_s"])
    report = {"mode": parsed.mode, "workload": workload["name"], "dtype": args.dtype} | best
    report |= {"wall_all_s": [run["wall_s"] for run in runs]} | rates | machine()
    for key, value in report.items():
        print(f"{key:>24}  {value}")
    line = json.dumps(report)
    print(line)
    if parsed.json:
        with parsed.json.open("a") as out:
            out.write(line + "\n")


if __name__ == "__main__":
    main()
