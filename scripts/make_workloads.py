"""Writes scripts/workloads: requests of fixed token ids, the same on every machine.

    python scripts/make_workloads.py

Ids are drawn at random from those below 49,000 (a model does the same work for any text); lengths are
log-normal, as those of chats are.
"""

import json
import math
import pathlib
import random

HERE = pathlib.Path(__file__).resolve().parent / "workloads"
VOCAB = range(100, 49_000)


def lengths(rng: random.Random, count: int, *, median: int, spread: float, most: int) -> list[int]:
    """Log-normal whole numbers from 16 to `most`."""
    drawn = (round(median * math.exp(rng.gauss(0, spread))) for _ in range(count))
    return [min(most, max(16, length)) for length in drawn]


def write(name: str, prompts: list[list[int]], outs: list[int], note: str) -> None:
    requests = [
        {"id": i, "prompt": prompt, "out": out}
        for i, (prompt, out) in enumerate(zip(prompts, outs, strict=True))
    ]
    workload = {
        "name": name,
        "note": note,
        "n": len(requests),
        "prompt_tokens": sum(map(len, prompts)),
        "output_tokens": sum(outs),
        "requests": requests,
    }
    (HERE / f"{name}.json").write_text(json.dumps(workload, separators=(",", ":")) + "\n")


def main() -> None:
    rng = random.Random(64)
    ins = lengths(rng, 64, median=120, spread=0.95, most=512)
    outs = lengths(rng, 64, median=96, spread=0.75, most=256)
    prompts = [rng.choices(VOCAB, k=n) for n in ins]
    write("mixed", prompts, outs, "64 requests, all at once; greedy, end of sequence ignored")
    write("single", [rng.choices(VOCAB, k=128)], [128], "one request of 128 tokens, 128 new ones")
    # A handful for tests of the benchmark itself.
    write("tiny", [rng.choices(range(100, 250), k=n) for n in (5, 17, 40)], [4, 9, 6], "for tests")


if __name__ == "__main__":
    main()
