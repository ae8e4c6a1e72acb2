"""scripts/serve.py as a process: what it prints, how it ends, what it refuses before loading."""

import contextlib
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from jpaged import ConfigError
from jpaged.entrypoints.server.launch import bind

ROOT = Path(__file__).parents[3]
ENDLESS = {"prompt": "hi", "max_tokens": 200, "ignore_eos": True, "stream": True}


@contextlib.contextmanager
def process(*flags):
    """serve.py over a fake engine; killed at the end of the block if it still runs."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("XLA_", "JAX_"))}
    running = subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "tests.entrypoints.server.serve_fake", *flags],
        cwd=ROOT,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    # Several tests wait for output; none may wait for ever.
    guard = threading.Timer(60, running.kill)
    guard.start()
    try:
        yield running
    finally:
        guard.cancel()
        running.kill()
        running.stdout.close()
        running.stderr.close()
        running.wait()


def ready(running):
    """The curl command that is printed when the server is ready."""
    while line := running.stdout.readline():
        if line.strip().startswith("curl "):
            return shlex.split(line)
    raise AssertionError(f"it ended: {running.stderr.read()}")


def ended(running, within=10.0):
    """Exit status and what was written to stderr."""
    begin = time.monotonic()
    _, errors = running.communicate(timeout=30)
    assert time.monotonic() - begin < within
    assert "Traceback" not in errors, errors
    return running.returncode, errors


def test_the_printed_line_works_and_ctrl_c_ends_it():
    with process("--port", "0", "--memory-utilization", "0.5") as running:
        name, url, header, kind, data, body = ready(running)
        assert (name, header, data) == ("curl", "-H", "-d")
        key, _, value = kind.partition(": ")
        answer = httpx.post(url, headers={key: value}, content=body)
        assert answer.json()["choices"][0]["message"]["content"] == "Hello from the fake."
        running.send_signal(signal.SIGINT)
        status, errors = ended(running)
    assert status == 0
    # Set before the engine is loaded, since jax reads it when it is imported.
    assert "loading on None with 0.500" in errors
    assert re.search(r"POST /v1/chat/completions HTTP/1.1. 200", errors)


@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_running_requests_within_the_time(sig):
    with process("--port", "0", "--model", "busy", "--shutdown-timeout", "0.5") as running:
        url = ready(running)[1]
        base = url.partition("/v1")[0]
        with httpx.stream("POST", f"{base}/v1/completions", json=ENDLESS, timeout=20) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            running.send_signal(sig)
            rest = "".join(lines)
        assert "request_aborted" in rest
        assert "[DONE]" not in rest
        assert ended(running)[0] == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{base}/health")


def test_the_second_ctrl_c_ends_it_at_once():
    with process("--port", "0", "--model", "hangs") as running:
        base = ready(running)[1].partition("/v1")[0]
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{base}/v1/completions", json=ENDLESS, timeout=0.5)
        running.send_signal(signal.SIGINT)
        while "stopping" not in running.stderr.readline():
            pass
        running.send_signal(signal.SIGINT)
        assert ended(running, within=2)[0] == 130


@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_loading(sig):
    with process("--port", "0", "--model", "loading", "--device", "cpu") as running:
        assert running.stderr.readline() == "loading on cpu with None\n"
        running.send_signal(sig)
        status, errors = ended(running)
    assert (status, errors) == (128 + sig, "serve.py: interrupted\n")


def test_a_port_in_use_is_said_before_loading():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with process("--port", str(port)) as running:
            status, errors = ended(running)
    assert status == 2
    assert errors.startswith(f"serve.py: error: --port {port} on 127.0.0.1 cannot be used")
    assert "loading" not in errors


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model", "no-config"], "--max-model-len must be at most 100, got 200"),
        (["--model", "no-model"], "model 'no-model' was not found"),
    ],
)
def test_what_a_user_can_mend_is_one_line(flags, message):
    with process("--port", "0", *flags) as running:
        status, errors = ended(running)
    assert status == 2
    last = errors.splitlines()[-1]
    assert last.startswith("serve.py: error: ")
    assert message in last


def test_a_host_that_is_none():
    with pytest.raises(ConfigError, match="--host 'no such host' is no address"):
        bind("no such host", 0)


def test_help_answers_without_the_libraries():
    """Within 1 s by design; here with five times the room, since others use the machine, too."""
    program = (
        "import runpy, sys\n"
        "for name in ('jax', 'jaxlib', 'flax', 'transformers', 'fastapi', 'pydantic', 'uvicorn',"
        " 'numpy', 'numba'):\n"
        "    sys.modules[name] = None\n"
        "sys.argv = ['serve.py', '--help']\n"
        "runpy.run_path('scripts/serve.py', run_name='__main__')\n"
    )
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert time.monotonic() - begin < 5
    for flag in ("--model", "--max-model-len", "--port", "--no-compilation-cache"):
        assert flag in done.stdout
    assert done.stderr == ""
