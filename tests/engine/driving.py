"""Driving an LLMEngine by hand: a clock that a test holds, engines that judge by it, steps to the end."""

import threading
import time
from typing import Any

from jpaged import RequestOutput
from jpaged.engine.engine_args import EngineArgs
from jpaged.engine.llm_engine import LLMEngine
from jpaged.engine.model_source import resolve_model
from jpaged.worker.worker import Worker
from tests.engine import tiny

# Far beyond what any test takes, so that only a clock that is put forward ends a request.
LATER = 1e6


class Clock:
    """`time.monotonic()`, which a test puts forward by `ahead` seconds.

    Engines look at it once a step: with `hold_at` the engine's thread waits in that look of its own, until
    `release`, so that a test in another thread need not be faster than the engine.
    """

    def __init__(self) -> None:
        self.ahead = 0.0
        self.hold_at: int | None = None
        self._looks = 0
        self._released = threading.Event()

    def __call__(self) -> float:
        self._looks += 1
        if self.hold_at is not None and self._looks >= self.hold_at:
            assert self._released.wait(20), "nobody released the clock"
        return time.monotonic() + self.ahead

    def release(self) -> None:
        """Lets the engine go on."""
        self.hold_at = None
        self._released.set()


def engine(clock: Clock | None = None, **engine_args: Any) -> LLMEngine:
    """An engine over the tiny model, small as those of `tiny.llm`, with a clock of the test's own."""
    defaults: dict[str, Any] = {
        "params": tiny.model(),
        "config": tiny.HF_CONFIG,
        "tokenizer": tiny.tokenizer(),
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "page_size": 4,
        "use_tqdm": False,
    }
    args = EngineArgs(**defaults | engine_args)
    model = resolve_model(args)
    worker = Worker(model.config, model.weights, model.worker_args(args))
    return LLMEngine(args, model, worker, clock=clock or Clock())


def drain(driven: LLMEngine) -> dict[str, RequestOutput]:
    """Steps until nothing is left; the last outputs, in the order of the requests' ends."""
    done = {}
    while driven.has_unfinished_requests():
        done |= {output.request_id: output for output in driven.step() if output.finished}
    check_idle(driven)
    return done


def check_idle(driven: LLMEngine) -> None:
    """The books balance, and nobody holds a page."""
    driven.check()
    stats = driven.stats()
    assert stats.num_running == stats.num_waiting == stats.pages_used == 0


def ids(prompt: list[int]) -> dict[str, Any]:
    """Token ids as `add_request` takes them."""
    return {"prompt_token_ids": prompt}
