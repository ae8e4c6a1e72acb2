"""What soaks are made of: engines short of everything, random requests, faults, a count of what is left."""

import contextlib
import functools
import gc
import random
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import psutil

from jpaged import RequestOutput, SamplingParams
from jpaged.engine.llm_engine import LLMEngine
from jpaged.sampling.params import RequestOutputKind
from tests.engine import driving, tiny
from tests.engine.driving import Clock
from tests.engine.faults import REQUEST_FAULTS, STEP_FAULTS, failing

PAGES, PAGE_SIZE, LONGEST = 12, 4, 44
EOS = range(64, 80)
STOPS = [chr(c) for c in range(97, 113)]


def census() -> dict[str, object]:
    """All of this process that requests may leave something of."""
    while gc.collect():
        pass
    arrays = jax.live_arrays()
    objects = Counter(
        f"{kind.__module__}.{kind.__qualname__}"
        for kind in map(type, gc.get_objects())
        if str(kind.__module__).startswith("jpaged.")
    )
    return {
        "arrays": (len(arrays), sum(array.nbytes for array in arrays)),
        "objects": dict(objects),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "files": psutil.Process().num_fds(),
    }


def make_engine(clock: Clock, *, overlap: bool = True) -> LLMEngine:
    """A pool that does not hold all four rows to their ends, and a short queue."""
    return driving.engine(
        clock,
        config=tiny.HF_CONFIG | {"eos_token_id": list(EOS)},
        max_model_len=LONGEST,
        kv_cache_memory_bytes=(PAGES + 1) * PAGE_SIZE * tiny.BYTES_PER_TOKEN,
        admission_policy="all",
        async_scheduling=overlap,
        max_num_queued_reqs=9,
    )


def draw(rng: random.Random) -> tuple[list[int], SamplingParams]:
    """A prompt, often with a known beginning, and one of the ends that tokens lead to."""
    prompt = [rng.randrange(256) for _ in range(rng.choice([1, 3, 7, 12, 30]))]
    known = rng.choice([0, 0, len(prompt)])
    prompt[:known] = range(8, 8 + known)
    end: dict[str, Any] = rng.choice(
        [
            {"ignore_eos": True},
            {},
            {"stop_token_ids": list(range(128, 160)), "ignore_eos": True},
            {"stop": STOPS, "ignore_eos": True},
        ]
    )
    return prompt, SamplingParams(
        n=rng.choice([1, 1, 1, 3]),
        temperature=rng.choice([0.0, 1.5]),
        seed=rng.choice([None, rng.randrange(100)]),
        max_tokens=rng.choice([1, 5, 12, None]),
        logprobs=rng.choice([None, None, 2]),
        output_kind=rng.choice(list(RequestOutputKind)),
        **end,
    )


def ends_of(output: RequestOutput) -> list[str]:
    """How the samples of a last output have ended."""
    ends = []
    for sample in output.outputs:
        end = sample.finish_reason or "unfinished"
        if end == "stop":
            kinds = {int: "stop token", str: "stop string"}
            end = kinds.get(type(sample.stop_reason), "eos")
        ends.append("deadline" if sample.stop_reason == "deadline" else end)
    return ends


@contextlib.contextmanager
def faults() -> Iterator[None]:
    """Some calls fail: those that cost a request, and those that cost a step, never three in a row."""
    places = {**REQUEST_FAULTS, **STEP_FAULTS}
    every = {"allocate": 83, "push": 149, "decode": 499, "run and donate": 211, "collect": 103}
    with contextlib.ExitStack() as stack:
        for name, period in every.items():
            fails = functools.partial(_is_nth, period)
            stack.enter_context(failing(places[name], fails))
        yield


def _is_nth(period: int, call: int) -> bool:
    return call % period == 0
