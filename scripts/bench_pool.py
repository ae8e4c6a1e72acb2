"""Measures the page pool: how long runs of neighbouring pages stay under churn, and what allocation costs.

Churn: sequences of 16 to 1,024 tokens come and go at random in a pool that is kept at 90 % occupancy; the
same sequence of moves is made with the free pages of lowest number for comparison. Prints text.
"""

import argparse
import heapq
import random
import time
from collections.abc import Callable

from jpaged.core.page_pool import PagePool

Take = Callable[[int], list[int]]
Give = Callable[[list[int]], None]
OCCUPANCY = 0.9


def mean_run(tables: list[list[int]]) -> float:
    """Pages in a run of neighbours, on average; nan without tables."""
    pages = sum(map(len, tables))
    runs = sum(1 + sum(b != a + 1 for a, b in zip(t, t[1:], strict=False)) for t in tables)
    return pages / runs if runs else float("nan")


def first_free(num_pages: int) -> tuple[Take, Give]:
    """A pool that gives the free pages of lowest number."""
    free = list(range(1, num_pages))

    def take(count: int) -> list[int]:
        return [heapq.heappop(free) for _ in range(count)]

    def give(pages: list[int]) -> None:
        for page in pages:
            heapq.heappush(free, page)

    return take, give


def churn(take: Take, give: Give, num_pages: int, steps: int, size: int) -> tuple[float, float]:
    """Mean run of all sequences, and of those of 256 tokens, after so many moves."""
    rng = random.Random(0)
    live: list[list[int]] = []
    held = 0
    for _ in range(steps):
        pages = -(-rng.choice([16, 64, 256, 256, 512, 1024]) // size)
        while held + pages > OCCUPANCY * (num_pages - 1):
            index = rng.randrange(len(live))
            live[index], live[-1] = live[-1], live[index]
            gone = live.pop()
            held -= len(gone)
            give(gone)
        live.append(take(pages))
        held += pages
    return mean_run(live), mean_run([t for t in live if len(t) == -(-256 // size)])


def cost(num_pages: int, count: int) -> float:
    """Microseconds that an allocation and its return take in a pool whose pages are much scattered."""
    pool, rng = PagePool(num_pages), random.Random(0)
    pages = pool.allocate(num_pages - 1)
    pool.release([page for page in pages if rng.random() < 0.5])
    best = float("inf")
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(20):
            pool.release(pool.allocate(count))
        best = min(best, (time.perf_counter() - start) / 20)
    return best * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pages", type=int, default=8192, help="pages of the pool under churn")
    parser.add_argument("--page-size", type=int, default=16, help="tokens in a page")
    parser.add_argument("--steps", type=int, default=100_000, help="sequences that come")
    parser.add_argument("--largest", type=int, default=1_000_000, help="pages of the largest pool")
    args = parser.parse_args()
    if args.pages * args.page_size < 2048:
        parser.error("--pages times --page-size must be at least 2048 tokens")
    pool = PagePool(args.pages)
    ways: dict[str, tuple[Take, Give]] = {
        "jpaged": (pool.allocate, pool.release),
        "first free": first_free(args.pages),
    }
    print(f"{args.steps} sequences through {args.pages} pages, {OCCUPANCY:.0%} held")
    means = {}
    for name, (take, give) in ways.items():
        means[name], of_256 = churn(take, give, args.pages, args.steps, args.page_size)
        print(f"{name:12} mean run {means[name]:6.2f} pages, of 256 tokens {of_256:6.2f}")
    print(f"ratio {means['jpaged'] / means['first free']:.2f}")
    num_pages = 1000
    while num_pages <= args.largest:
        cells = [f"{count}: {cost(num_pages, count):7.1f} us" for count in (1, 16, 256)]
        print(f"{num_pages:>8} pages, allocate and return " + "  ".join(cells))
        num_pages *= 10


if __name__ == "__main__":
    main()
