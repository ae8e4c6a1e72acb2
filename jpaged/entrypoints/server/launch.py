"""launch(): the life of a server process, from the port to the last request's end.

The order matters: what can fail quickly is tried before the model is loaded, and the environment that jax
reads is set before anything imports it. Owns the process: signals, exit codes, what is printed.
"""

import asyncio
import contextlib
import dataclasses
import json
import logging
import math
import os
import signal
import socket
import sys
import threading
from collections.abc import Generator
from types import FrameType
from typing import Any

import uvicorn

from jpaged.engine.async_llm_engine import AsyncLLMEngine
from jpaged.engine.engine_args import AsyncEngineArgs
from jpaged.entrypoints.cli_args import ServerArgs, flagged
from jpaged.entrypoints.device_check import choose_platform, look_at_machine
from jpaged.entrypoints.server.app import build_app
from jpaged.errors import ConfigError, JpagedError

logger = logging.getLogger("jpaged")

SIGNALS = (signal.SIGINT, signal.SIGTERM)
# Longer than clients keep idle connections, so that it is they who close them.
KEEP_ALIVE_SECONDS = 75
# Between the end of the last request and the cancelling of a task that hangs.
HANGING_SECONDS = 3


def launch(server_args: ServerArgs, engine_args: AsyncEngineArgs) -> int:
    """Serves until a signal; the exit status. What a user can mend is one message, no traceback."""
    _log_to_stderr()
    engine = None
    try:
        with _ended_by_signals():
            platform = choose_platform(engine_args.device, look_at_machine(), os.environ)
            engine_args = dataclasses.replace(engine_args, device=platform)
            with bind(server_args.host, server_args.port) as listener:
                _prepare_environment(engine_args)
                engine = AsyncLLMEngine.from_engine_args(engine_args)
                Server(engine, server_args, listener).run(sockets=[listener])
    except JpagedError as error:
        told = flagged(error) if isinstance(error, ConfigError) else error
        sys.stderr.write(f"serve.py: error: {told}\n")
        return 2
    finally:
        if engine is not None and not engine.close():
            # The interpreter's own end would pull the ground from under the running step.
            os._exit(1)
    return 0


@contextlib.contextmanager
def _ended_by_signals() -> Generator[None, None, None]:
    """Until the server takes signals over: the first one ends the process tidily, a second at once.

    Tidily means that files being written are removed, which may wait for a compilation to end.
    """
    came: list[int] = []

    def on_signal(sig: int, frame: FrameType | None) -> None:
        came.append(sig)
        if len(came) > 1:
            os._exit(128 + sig)
        raise KeyboardInterrupt

    before = {sig: signal.signal(sig, on_signal) for sig in SIGNALS}
    try:
        yield
    except KeyboardInterrupt:
        sys.stderr.write("serve.py: interrupted\n")
        sys.stderr.flush()
        # Not through the interpreter's end, which would wait for threads that compile.
        os._exit(128 + came[0] if came else 130)
    finally:
        for sig, handler in before.items():
            signal.signal(sig, handler)


def bind(host: str, port: int) -> socket.socket:
    """A socket that holds the address and does not listen yet. ConfigError if it is not to be had."""
    try:
        found = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--host {host!r} is no address: {error}", field="host") from error
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"--port {port} on {host} cannot be used: {error.strerror}. "
            "Stop the process that has it, or choose another with --port (0: any free one)",
            field="port",
        ) from error
    return listener


class Server(uvicorn.Server):
    """uvicorn with this project's way to begin (a line that works) and to end (within a time)."""

    def __init__(self, engine: AsyncLLMEngine, args: ServerArgs, listener: socket.socket) -> None:
        super().__init__(
            uvicorn.Config(
                build_app(engine),
                log_config=None,
                access_log=args.access_log,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=math.ceil(args.shutdown_timeout) + HANGING_SECONDS,
                server_header=False,
                lifespan="off",
                ws="none",
            )
        )
        self._engine = engine
        self._shutdown_timeout = args.shutdown_timeout
        self._url = _url(args.host, listener)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        except OSError as error:
            raise ConfigError(f"cannot listen on {self._url}: {error}", field="port") from error
        sys.stdout.write(_greeting(self._engine, self._url))
        sys.stdout.flush()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        logger.info("stopping; running requests have %g s to finish", self._shutdown_timeout)
        # Requests that are not done by then get an error, rather than a closed connection.
        timer = asyncio.get_running_loop().call_later(
            self._shutdown_timeout, self._engine.abort_all
        )
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()
        # Here, where a second signal is still heard: a step may take long, or hang.
        await asyncio.to_thread(self._engine.close)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Unlike uvicorn's own, does not die of the signal after a clean end."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {sig: signal.signal(sig, self.handle_exit) for sig in SIGNALS}
        try:
            yield
        finally:
            for sig, handler in before.items():
                signal.signal(sig, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            # The second one means now, whatever the device is doing.
            os._exit(128 + sig)
        self.should_exit = True


def _url(host: str, listener: socket.socket) -> str:
    port = listener.getsockname()[1]
    reachable = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"


def _greeting(engine: AsyncLLMEngine, url: str) -> str:
    """What a person at a terminal does next."""
    body: dict[str, Any] = {"prompt": "The capital of France is", "max_tokens": 16}
    path = "/v1/completions"
    if getattr(engine.tokenizer, "chat_template", None):
        message = {"role": "user", "content": "What is the capital of France?"}
        path, body = "/v1/chat/completions", {"messages": [message], "max_tokens": 64}
    elif engine.tokenizer is None:
        body["prompt"] = [1, 2, 3]
    # A small model's most likely answer is its best.
    body["temperature"] = 0
    return (
        f"\nServing {engine.model_name} ({engine.model_source}) at {url}\n"
        f"Try it:\n\n  curl {url}{path} -H 'Content-Type: application/json' "
        f"-d '{json.dumps(body)}'\n\n"
    )


def _prepare_environment(args: AsyncEngineArgs) -> None:
    """Sets what libraries read when they are imported, where the user has not set it."""
    # transformers advises to install PyTorch, which is of no use here.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    if args.device == "cpu":
        # Else jax takes a GPU's memory too, if there is one.
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        return
    # jax takes this share of the device's memory at once, so that nobody else has it later.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "true")
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{args.memory_utilization:.3f}")


def _log_to_stderr() -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
    logging.getLogger().addHandler(handler)
    for name, level in (
        ("jpaged", logging.INFO),
        ("uvicorn.access", logging.INFO),
        ("uvicorn.error", logging.WARNING),
    ):
        logging.getLogger(name).setLevel(level)
