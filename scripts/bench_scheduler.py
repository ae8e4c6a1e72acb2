"""Measures what planning a step costs the host, and what planning ahead of the device hides of it.

Planning: 256 requests run and 1,000 wait; the time of schedule() and update() for each step, again after
many requests have ended. Overlap: a device that takes 5 ms a step, and the share of time it is idle.
"""

import argparse
import queue
import statistics
import threading
import time
from collections.abc import Mapping
from typing import Any

from jpaged.core.kv_cache_manager import KVCacheManager, KVGroupSpec
from jpaged.core.request import Request
from jpaged.core.scheduler import Scheduler
from jpaged.core.scheduler_config import SchedulerConfig
from jpaged.core.step_plan import SampledToken, StepPlan
from jpaged.engine.step_runner import StepRunner

TOKEN = SampledToken(token=1, logprob=0.0)


class FakeWorker:
    """A device that takes the same time for each step, in the order in which they come."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._steps: queue.SimpleQueue[threading.Event] = queue.SimpleQueue()
        self.busy = 0.0
        threading.Thread(target=self._run, daemon=True).start()

    def dispatch(self, plan: StepPlan, kv: KVCacheManager) -> Any:
        """Sends a step."""
        done = threading.Event()
        self._steps.put(done)
        return plan, done

    def collect(self, step: Any) -> Mapping[int, SampledToken]:
        """Waits for a step."""
        plan, done = step
        done.wait()
        return {entry.request.sequence: TOKEN for entry in plan.entries if entry.samples}

    def recover(self) -> None:
        """Nothing is ever lost."""

    def _run(self) -> None:
        while True:
            done = self._steps.get()
            start = time.perf_counter()
            time.sleep(self._seconds)
            self.busy += time.perf_counter() - start
            done.set()


class Load:
    """A scheduler with so many rows that run and so many requests that wait, always."""

    def __init__(self, rows: int, waiting: int) -> None:
        self.kv = KVCacheManager([KVGroupSpec(rows * 80)], 16, max_step_tokens=2048)
        config = SchedulerConfig(max_num_seqs=rows, max_num_batched_tokens=2048, max_model_len=1024)
        self.scheduler = Scheduler(config, self.kv)
        self._waiting = waiting
        self._next = 0
        self.fill()

    def fill(self) -> None:
        """Requests in the place of those that have begun to run."""
        while self.scheduler.num_waiting < self._waiting:
            self._next += 1
            number = self._next
            request = Request(
                sequence=number,
                prompt_token_ids=[number % 1000 + 1, *range(100 + number * 7 % 200)],
                max_tokens=100 + number * 13 % 300,
            )
            self.scheduler.add(request)


def planning(rows: int, waiting: int, steps: int) -> None:
    """Prints the time of planning, early and late."""
    load = Load(rows, waiting)
    for name in ("at first", "later on", "last"):
        times = []
        for _ in range(steps):
            start = time.perf_counter()
            plan = load.scheduler.schedule()
            times.append((time.perf_counter() - start) * 1e3)
            sampled = {e.request.sequence: TOKEN for e in plan.entries if e.samples}
            load.scheduler.update(plan, sampled)
            load.fill()
        times.sort()
        ended = load._next - load.scheduler.num_running - load.scheduler.num_waiting
        print(
            f"planning {name:9} ({ended:6} ended): median {statistics.median(times):.3f} ms, "
            f"p99 {times[int(len(times) * 0.99)]:.3f} ms"
        )


def idle_share(overlap: bool, rows: int, steps: int, seconds: float) -> float:
    """The part of the time for which the device has nothing to do."""
    load, worker = Load(rows, 4 * rows), FakeWorker(seconds)
    runner = StepRunner(worker, load.kv, overlap=overlap)
    for step in range(steps + 50):
        if step == 50:
            start, busy = time.perf_counter(), worker.busy
        collected = runner.run(load.scheduler.schedule())
        if collected is not None:
            load.scheduler.update(*collected)
        load.fill()
    return 1 - (worker.busy - busy) / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=256, help="requests that run")
    parser.add_argument("--waiting", type=int, default=1000, help="requests that wait")
    parser.add_argument("--steps", type=int, default=2000, help="steps in each part")
    parser.add_argument("--step-ms", type=float, default=5.0, help="what the device takes a step")
    args = parser.parse_args()
    planning(args.rows, args.waiting, args.steps)
    for overlap in (True, False):
        share = idle_share(overlap, args.rows, max(100, args.steps // 4), args.step_ms / 1e3)
        print(
            f"the device is idle {share:.1%} of the time, {'over' if overlap else 'not over'}lapped"
        )


if __name__ == "__main__":
    main()
