"""The HTTP side of scripts/bench.py: starts scripts/serve.py on a free port and streams from it."""

import asyncio
import dataclasses
import json
import pathlib
import signal
import socket
import subprocess
import sys
import time
from typing import Any

import httpx

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
        limits = httpx.Limits(max_connections=None)
        url = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits) as client:
            await _ready(client, server)
            load_seconds = time.monotonic() - start
            model = (await client.get("/v1/models")).json()["data"][0]["id"]
            await _all_at_once(client, model, warm_up)
            runs = []
            for _ in range(reps):
                begin = time.monotonic()
                timings = await _all_at_once(client, model, requests)
                wall = time.monotonic() - begin
                figures = {"load_s": round(load_seconds, 2), "peak_mib": peak_mib(server.pid)}
                runs.append({"wall_s": wall, "timings": timings, "figures": figures})
            return runs
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(timeout=60)


async def _ready(client: httpx.AsyncClient, server: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise SystemExit(f"scripts/serve.py ended with status {server.returncode}")
        try:
            if (await client.get("/health")).status_code == 200:
                return
        except httpx.TransportError:
            pass
        await asyncio.sleep(0.2)
    raise SystemExit(f"scripts/serve.py was not ready within {READY_SECONDS} s")


async def _all_at_once(
    client: httpx.AsyncClient, model: str, requests: list[dict[str, Any]]
) -> list[tuple[float, float, int]]:
    begin = time.monotonic()
    return await asyncio.gather(*(_stream(client, model, r, begin) for r in requests))


async def _stream(
    client: httpx.AsyncClient, model: str, request: dict[str, Any], begin: float
) -> tuple[float, float, int]:
    """One streamed completion: when its first token came, when its last, and how many they were."""
    body = {
        "model": model,
        "prompt": request["prompt"],
        "max_tokens": request["out"],
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    first, tokens = 0.0, 0
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise SystemExit((await response.aread()).decode())
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            first = first or time.monotonic() - begin
            # Parsing all would cost the client more than the server needs; the last one has the usage.
            if '"usage":{' in line.replace(" ", ""):
                tokens = json.loads(line[6:])["usage"]["completion_tokens"]
    return first, time.monotonic() - begin, tokens
