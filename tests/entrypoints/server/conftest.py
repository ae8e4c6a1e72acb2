"""A server over a fake engine: the real one, with uvicorn in a thread."""

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from jpaged.engine.async_llm_engine import AsyncLLMEngine
from jpaged.entrypoints.cli_args import ServerArgs
from jpaged.entrypoints.server.launch import Server, bind
from tests.entrypoints.server.fake_engine import FakeEngine


class Served:
    """A running server, its fake engine and clients for it."""

    def __init__(self, fake: Any, engine: AsyncLLMEngine, server: Server, port: int) -> None:
        self.fake = fake
        self.engine = engine
        self.server = server
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.http = httpx.Client(base_url=self.url, timeout=20)
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def idle(self, seconds: float = 5.0) -> None:
        """Waits until nothing runs; fails after `seconds`."""
        self.until(
            lambda: not self.engine.loop.active_ids() and not self.fake.has_unfinished_requests(),
            seconds,
        )

    def until(self, condition, seconds: float = 5.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "did not happen"
            time.sleep(0.002)


@contextlib.contextmanager
def serving(fake: Any, **options: object) -> Iterator[Served]:
    """Serves `fake`, or a real LLMEngine, until the end of the block."""
    engine = AsyncLLMEngine(fake)
    listener = bind("127.0.0.1", 0)
    port = listener.getsockname()[1]
    arguments = {"port": port, "shutdown_timeout": 0.2, "access_log": False, **options}
    server = Server(engine, ServerArgs(**arguments), listener)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    served = Served(fake, engine, server, port)
    try:
        served.until(lambda: server.started)
        yield served
    finally:
        if isinstance(fake, FakeEngine):
            fake.gate.set()
        server.should_exit = True
        thread.join()
        served.http.close()
        served.client.close()
        engine.close()


@pytest.fixture(scope="module")
def shared():
    """One server for tests that leave it as it was."""
    with serving(FakeEngine()) as served:
        yield served


@pytest.fixture
def served(shared):
    """The module's server, idle before and after."""
    shared.fake.queued.clear()
    shared.fake.aborted.clear()
    yield shared
    shared.fake.gate.set()
    shared.fake.step_seconds = 0.0
    shared.idle()
