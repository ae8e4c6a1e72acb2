"""Runs the scheduler without a device over conversations of real lengths, and compares ways of admission.

Requests stand in the queue from the start, and the end of each is known to nobody before it comes. For
each way: steps, preemptions, how much of the pool was held while requests waited, searches for free
pages per generated token, how long runs of neighbouring pages are, and what other ways to keep K and V
would leave unused. Prints text, and JSON with `--json FILE`.
"""

import argparse
import dataclasses
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path

from jpaged.core.kv_cache_manager import KVCacheManager, KVGroupSpec, pages_for
from jpaged.core.request import Request
from jpaged.core.scheduler import Scheduler
from jpaged.core.scheduler_config import SchedulerConfig
from jpaged.core.step_plan import SampledToken

LENGTHS = Path(__file__).resolve().parent / "workloads" / "conversation_lengths.json"
END, TOKEN = SampledToken(token=0, logprob=0.0), SampledToken(token=1, logprob=0.0)
# Tables are looked at each so many steps.
LOOK_EVERY = 16


@dataclasses.dataclass
class Totals:
    """Sums over the steps of a run, or over those at which tables were looked at."""

    steps: int = 0
    generated: int = 0
    computed: int = 0
    waiting_steps: int = 0
    held: int = 0
    sequences: int = 0
    tokens: int = 0
    pages: int = 0
    runs: int = 0
    power_of_two: int = 0
    reserved: int = 0


def requests(count: int, max_tokens: int, seed: int) -> Iterator[tuple[Request, int]]:
    """Requests drawn from the trace, and the lengths at which their outputs end."""
    lengths = json.loads(LENGTHS.read_text())["lengths"]
    rng = random.Random(seed)
    for sequence in range(count):
        prompt, out = rng.choice(lengths)
        request = Request(
            sequence=sequence,
            prompt_token_ids=[1] * prompt,
            max_tokens=max_tokens,
            eos_token_ids=frozenset([0]),
        )
        yield request, min(out, max_tokens)


def look(totals: Totals, kv: KVCacheManager, running: list[Request]) -> None:
    """Adds up what the tables of running requests hold, and what other layouts would take."""
    for request in running:
        table, tokens = kv.table(request.sequence, 0), request.num_computed
        if not table:
            continue
        totals.sequences += 1
        totals.tokens += tokens
        totals.pages += len(table)
        totals.runs += 1 + sum(b != a + 1 for a, b in zip(table, table[1:], strict=False))
        totals.power_of_two += 1 << (tokens - 1).bit_length()
        totals.reserved += request.max_num_tokens


def simulate(args: argparse.Namespace, admission: str, reserve: bool) -> dict[str, float | str]:
    """One run to the end of all requests."""
    work = list(requests(args.requests, args.max_tokens, args.seed))
    ends = {request.sequence: end for request, end in work}
    length = max(request.max_num_tokens for request, _ in work)
    kv = KVCacheManager(
        [KVGroupSpec(1 + pages_for(args.tokens, args.page_size))],
        args.page_size,
        max_step_tokens=args.budget,
        prefix_caching=False,
    )
    config = SchedulerConfig(
        max_num_seqs=args.rows,
        max_num_batched_tokens=args.budget,
        max_model_len=length,
        admission=admission,
        reserve=reserve,
    )
    scheduler = Scheduler(config, kv)
    for request, _ in work:
        scheduler.add(request)
    totals, running, started = Totals(), dict[int, Request](), time.perf_counter()
    while scheduler.has_unfinished():
        plan = scheduler.schedule()
        totals.steps += 1
        totals.computed += plan.num_tokens
        for request in plan.preempted:
            running.pop(request.sequence, None)
        for entry in plan.entries:
            running[entry.request.sequence] = entry.request
        if scheduler.num_waiting:
            totals.waiting_steps += 1
            totals.held += kv.num_held
            if totals.steps % LOOK_EVERY == 0:
                look(totals, kv, list(running.values()))
        sampled = {}
        for entry in plan.entries:
            if entry.samples:
                made = len(entry.request.output_token_ids) + 1
                last = made >= ends[entry.request.sequence]
                sampled[entry.request.sequence] = END if last else TOKEN
        for event in scheduler.update(plan, sampled):
            totals.generated += 1
            if event.finish_reason:
                del running[event.request.sequence]
    slots = totals.pages * args.page_size
    return {
        "admission": admission,
        "reservation": "yes" if reserve else "no",
        "steps": totals.steps,
        "preemptions": scheduler.num_preemptions,
        "occupancy": totals.held / max(1, totals.waiting_steps) / kv.num_usable,
        "computed_per_needed": totals.computed
        / sum(len(r.prompt_token_ids) + ends[r.sequence] - 1 for r, _ in work),
        "searches_per_token": kv.num_searches / totals.generated,
        "mean_run_pages": totals.pages / max(1, totals.runs),
        "wasted_paged": 1 - totals.tokens / max(1, slots),
        "wasted_paged_pages_per_sequence": (slots - totals.tokens)
        / args.page_size
        / max(1, totals.sequences),
        "wasted_power_of_two": 1 - totals.tokens / max(1, totals.power_of_two),
        "wasted_reserve_to_max": 1 - totals.tokens / max(1, totals.reserved),
        "seconds": time.perf_counter() - started,
    }


def show(rows: list[dict[str, float | str]]) -> None:
    """A table with one column a run, and the ratios that matter."""
    for key in rows[0]:
        cells = [row[key] for row in rows]
        print(
            f"{key:34}"
            + "".join(f"{c:>12}" if isinstance(c, (str, int)) else f"{c:12.3f}" for c in cells)
        )
    by = {(row["admission"], row["reservation"]): row for row in rows}
    mine, every, most = by["expected", "yes"], by["all", "yes"], by["max", "yes"]

    def ratio(key: str, other: dict[str, float | str]) -> float:
        return float(mine[key]) / max(1e-9, float(other[key]))

    print(f"preemptions, expected to all: {ratio('preemptions', every):.3f}")
    print(f"occupancy, expected to all: {ratio('occupancy', every):.3f}")
    print(f"occupancy, expected to max: {ratio('occupancy', most):.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=2000, help="how many requests")
    parser.add_argument("--tokens", type=int, default=65536, help="tokens that the pool holds")
    parser.add_argument("--page-size", type=int, default=16, help="tokens in a page")
    parser.add_argument("--rows", type=int, default=256, help="most requests side by side")
    parser.add_argument("--budget", type=int, default=2048, help="most tokens in a step")
    parser.add_argument("--max-tokens", type=int, default=1024, help="limit of each output")
    parser.add_argument("--seed", type=int, default=0, help="which requests are drawn")
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    args = parser.parse_args()
    ways = [("expected", True), ("expected", False), ("all", True), ("all", False), ("max", True)]
    rows = [simulate(args, admission, reserve) for admission, reserve in ways]
    show(rows)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
