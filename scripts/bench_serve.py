"""The HTTP side of scripts/bench.py: starts scripts/serve.py on a free port and streams from it.

Client and server share the machine's cores, so that what the client spends is missing in the figures. It
therefore reads bare bytes while the server works, and parses each answer, with the standard library, when it
has ended.
"""

import asyncio
import dataclasses
import http.client
import io
import json
import pathlib
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from typing import Any

from jpaged.engine.engine_args import EngineArgs

SERVE = pathlib.Path(__file__).resolve().parent / "serve.py"
READY_SECONDS = 600


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def flags_of(args: EngineArgs) -> list[str]:
    """The command line that gives the same engine."""
    flags = []
    for field in dataclasses.fields(EngineArgs):
        value = getattr(args, field.name)
        if not field.metadata["cli"] or value == field.default:
            continue
        name = "--" + field.name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(name if value else "--no-" + name[2:])
        else:
            flags += [name, str(value)]
    return flags


def peak_mib(pid: int) -> int | None:
    """Most memory a process has had, where the system tells."""
    try:
        status = pathlib.Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    return int(status.split("VmHWM:")[1].split()[0]) // 1024


async def serve_requests(
    args: EngineArgs,
    requests: list[dict[str, Any]],
    warm_up: list[dict[str, Any]],
    reps: int,
) -> list[dict[str, Any]]:
    """Per repetition: the wall time, (first token, finished, tokens) of each request, other figures."""
    port, start = free_port(), time.monotonic()
    command = [sys.executable, str(SERVE), "--port", str(port), "--no-access-log", *flags_of(args)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        await _ready(port, server)
        load_seconds = time.monotonic() - start
        models = await asyncio.to_thread(_get, port, "/v1/models")
        model = json.loads(models)["data"][0]["id"]
        await _all_at_once(port, model, warm_up)
        runs = []
        for _ in range(reps):
            begin = time.monotonic()
            timings = await _all_at_once(port, model, requests)
            wall = time.monotonic() - begin
            figures = {"load_s": round(load_seconds, 2), "peak_mib": peak_mib(server.pid)}
            runs.append({"wall_s": wall, "timings": timings, "figures": figures})
        return runs
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(timeout=60)


def _get(port: int, path: str) -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as response:
        body: bytes = response.read()
        return body


async def _ready(port: int, server: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise SystemExit(f"scripts/serve.py ended with status {server.returncode}")
        try:
            await asyncio.to_thread(_get, port, "/health")
            return
        except (urllib.error.URLError, ConnectionError):
            await asyncio.sleep(0.2)
    raise SystemExit(f"scripts/serve.py was not ready within {READY_SECONDS} s")


async def _all_at_once(
    port: int, model: str, requests: list[dict[str, Any]]
) -> list[tuple[float, float, int]]:
    begin = time.monotonic()
    return await asyncio.gather(*(_stream(port, model, r, begin) for r in requests))


async def _stream(
    port: int, model: str, request: dict[str, Any], begin: float
) -> tuple[float, float, int]:
    """One streamed completion: when its first token came, when its last, and how many they were."""
    body = json.dumps(
        {
            "model": model,
            "prompt": request["prompt"],
            "max_tokens": request["out"],
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(head.encode() + body)
        await writer.drain()
        answer, first = bytearray(), 0.0
        while part := await reader.read(1 << 16):
            answer += part
            if not first and b"data: " in answer:
                first = time.monotonic() - begin
        finished = time.monotonic() - begin
    finally:
        writer.close()
    return first, finished, completion_tokens(bytes(answer))


class _Received:
    """Bytes in the place of a socket, which is what http.client reads from."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer

    def makefile(self, mode: str) -> io.BytesIO:
        return io.BytesIO(self._answer)


def completion_tokens(answer: bytes) -> int:
    """The number of tokens that a streamed answer's usage tells.

    Raises:
        SystemExit: it is an error, it was cut off, or it tells no usage.
    """
    response = http.client.HTTPResponse(_Received(answer))
    try:
        response.begin()
        text = response.read().decode()
    except http.client.HTTPException as error:
        raise SystemExit(f"the server's answer ended early: {error!r}") from error
    if response.status != 200:
        raise SystemExit(f"the server answered {response.status}: {text}")
    events = [line[len("data: ") :] for line in text.splitlines() if line.startswith("data: ")]
    if events[-1:] != ["[DONE]"]:
        raise SystemExit(f"the server's stream ended in {events[-1:]} instead of [DONE]")
    usage = json.loads(events[-2]).get("usage") if len(events) > 1 else None
    if usage is None:
        raise SystemExit("the server's stream tells no usage")
    tokens: int = usage["completion_tokens"]
    return tokens
