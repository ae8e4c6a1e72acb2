"""What the tests of AsyncLLMEngine share."""

import asyncio
import time

from jpaged import SamplingParams

REPLY = "Hello from the fake."
LONG = SamplingParams(max_tokens=200, ignore_eos=True)


async def settled(condition, seconds=5.0):
    """Waits until `condition()`; fails after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen"
        await asyncio.sleep(0.002)


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 20))
