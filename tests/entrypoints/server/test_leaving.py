"""Clients that leave or read slowly, an engine that dies, a server that stops: all ends are clean."""

import asyncio
import json
import socket
import threading
import time

import pytest

from jpaged import AsyncLLMEngine, SamplingParams
from jpaged.entrypoints.server.app import build_app
from tests.entrypoints.server.conftest import serving
from tests.entrypoints.server.fake_engine import FakeEngine
from tests.entrypoints.server.test_bad_input import check_error

ENDLESS = {"prompt": "hi", "max_tokens": 200, "ignore_eos": True}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "ignore_eos": True}


def send(served, path, body):
    """A connection on which the request has been sent."""
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    )
    connection = socket.create_connection(("127.0.0.1", served.port), timeout=10)
    connection.sendall(head.encode() + data)
    return connection


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", ENDLESS),
        ("/v1/completions", ENDLESS | {"prompt": ["a", "b", "c"], "n": 2}),
        ("/v1/chat/completions", CHAT),
        (
            "/generate",
            {"prompt": "hi", "sampling_params": {"max_tokens": 200, "ignore_eos": True}},
        ),
    ],
)
def test_a_client_that_leaves_ends_its_requests(served, path, body, stream, reset):
    served.fake.step_seconds = 0.01
    connection = send(served, path, body | {"stream": stream})
    prompts = body["prompt"] if isinstance(body.get("prompt"), list) else [0]
    served.until(lambda: len(served.fake.queued) == len(prompts))
    if stream:
        connection.recv(100)
    if reset:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    connection.close()
    served.until(lambda: len(served.fake.aborted) == len(prompts), seconds=1)
    assert not served.fake.has_unfinished_requests()


def test_a_client_that_leaves_before_its_prompt_is_tokenised(served):
    encode = served.fake.tokenizer.encode
    begun, go_on = threading.Event(), threading.Event()

    def slow(text, **options):
        begun.set()
        go_on.wait(5)
        return encode(text, **options)

    served.fake.tokenizer.encode = slow
    try:
        send(served, "/v1/completions", ENDLESS).close()
        begun.wait(5)
        time.sleep(0.05)
        go_on.set()
        served.http.post("/generate", json={"prompt": "next"})
    finally:
        del served.fake.tokenizer.encode
    assert [request.prompt for request in served.fake.queued] == ["next"]


def test_a_client_that_leaves_does_not_disturb_others(served):
    served.fake.step_seconds = 0.005
    leaving = [send(served, "/v1/completions", ENDLESS | {"stream": True}) for _ in range(4)]
    threads, texts = [], []
    for _ in range(4):
        threads.append(
            threading.Thread(
                target=lambda: texts.append(
                    served.http.post("/v1/completions", json={"prompt": "x"}).json()
                )
            )
        )
        threads[-1].start()
    for connection in leaving:
        connection.close()
    for thread in threads:
        thread.join()
    assert [t["choices"][0]["text"] for t in texts] == ["Hello from the f"] * 4


def test_a_client_that_does_not_read_holds_nobody_up():
    """As ASGI: a send that waits is what a client looks like whose buffers are full."""
    fake = FakeEngine("x" * 200)
    engine = AsyncLLMEngine(fake)
    params = {"max_tokens": 250, "n": 8}
    body = {"prompt": "hi", "sampling_params": params, "stream": True}
    requests = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
    scope = {"type": "http", "method": "POST", "path": "/generate", "headers": []}
    scope |= {"query_string": b"", "http_version": "1.1"}
    sent = []

    async def main():
        reads = asyncio.Event()

        async def receive():
            if not requests:
                await asyncio.get_running_loop().create_future()
            return requests.pop()

        async def send(message):
            sent.append(message)
            if len(sent) == 2:
                await reads.wait()

        slow = asyncio.ensure_future(build_app(engine)(scope, receive, send))
        other = await engine.generate("x", SamplingParams(max_tokens=3))
        assert other.outputs[0].text == "xxx"
        while len(fake.queued) < 2 or engine.loop.active_ids():
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.01)
        reads.set()
        await slow

    asyncio.run(asyncio.wait_for(main(), 20))
    engine.close()
    data = b"".join(message.get("body", b"") for message in sent)
    lines = [line[6:] for line in data.split(b"\n") if line.startswith(b"data: {")]
    parts = [part for line in lines for part in json.loads(line)["outputs"]]
    for index in range(8):
        assert "".join(p["text"] for p in parts if p["index"] == index) == "x" * 200
    # What came meanwhile was put together: head, first event, all the rest, and the end.
    assert len(sent) <= 5


def test_an_engine_that_dies_answers_everybody():
    fake = FakeEngine()
    with serving(fake) as served:
        fake.gate.clear()
        whole = send(served, "/v1/completions", ENDLESS)
        unborn = send(served, "/v1/completions", ENDLESS | {"stream": True})
        served.until(lambda: len(served.engine.loop.active_ids()) == 2)
        fake.fail_at_step = 1
        fake.gate.set()
        for connection in (whole, unborn):
            answer = connection.recv(10_000)
            assert answer.startswith(b"HTTP/1.1 503"), answer
            assert b"out of memory on the device" in answer
            connection.close()
        check_error(served.http.get("/health"), 503, code="engine_dead")
        for path, body in (("/v1/completions", ENDLESS), ("/v1/chat/completions", CHAT)):
            check_error(served.http.post(path, json=body), 503, code="engine_dead")
        assert served.http.get("/v1/models").status_code == 200
        assert served.http.get("/metrics").status_code == 200
        fake._states.clear()


def stream_end(served):
    """The last event of an endless stream, and that nothing comes after it."""
    with served.http.stream("POST", "/v1/completions", json=ENDLESS | {"stream": True}) as response:
        assert response.status_code == 200
        lines = [line for line in response.iter_lines() if line]
    assert "[DONE]" not in "".join(lines)
    return json.loads(lines[-1].removeprefix("data: "))


def test_an_engine_that_dies_in_a_stream_ends_it_with_an_error():
    fake = FakeEngine()
    fake.fail_at_step = 5
    with serving(fake) as served:
        error = stream_end(served)["error"]
        fake._states.clear()
    assert error["type"] == "server_error"
    assert "out of memory on the device" in error["message"]


@pytest.mark.parametrize("prompt", ["a", ["a", "b"]])
def test_an_abort_from_outside_is_no_success(prompt):
    fake = FakeEngine()
    fake.step_seconds = 0.01
    with serving(fake) as served:
        threading.Timer(0.3, served.engine.abort_all).start()
        response = served.http.post("/v1/completions", json=ENDLESS | {"prompt": prompt})
        check_error(response, 503, code="request_aborted")
        threading.Timer(0.3, served.engine.abort_all).start()
        assert stream_end(served)["error"]["code"] == "request_aborted"


def test_stopping_lets_short_requests_finish():
    fake = FakeEngine()
    fake.step_seconds = 0.01
    with serving(fake, shutdown_timeout=10) as served:
        threading.Timer(0.1, setattr, (served.server, "should_exit", True)).start()
        body = {"prompt": "x", "max_tokens": 50}
        answer = served.http.post("/v1/completions", json=body).json()
        assert answer["choices"][0]["finish_reason"] == "stop"


def test_stopping_ends_long_requests_with_an_error():
    fake = FakeEngine()
    fake.step_seconds = 0.05
    with serving(fake, shutdown_timeout=0.2) as served:
        threading.Timer(0.1, setattr, (served.server, "should_exit", True)).start()
        begin = time.monotonic()
        assert stream_end(served)["error"]["code"] == "request_aborted"
        assert time.monotonic() - begin < 5


def test_an_error_of_ours_is_a_500_without_details(caplog):
    fake = FakeEngine()
    fake.fail_when_added = KeyError("secret")
    with serving(fake) as served:
        response = served.http.post("/v1/completions", json=ENDLESS)
        check_error(response, 500, code="internal_error")
        assert "secret" not in response.text
        response = served.http.post("/v1/completions", json=ENDLESS | {"stream": True})
        check_error(response, 500, code="internal_error")
        fake.fail_when_added = None
        assert served.http.post("/v1/completions", json=ENDLESS).status_code == 200
    assert "secret" in caplog.text
