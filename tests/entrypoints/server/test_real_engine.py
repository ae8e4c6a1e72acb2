"""The server over a real engine with a tiny model: what comes out of HTTP is what the model says."""

import asyncio
import concurrent.futures
import contextlib
import json
import random
import socket

import pytest

from tests.engine import tiny
from tests.entrypoints.server.conftest import serving

PROMPTS = tiny.prompts(3, 5, 9, 17, 30, 2, 12, 6)


@pytest.fixture(scope="module")
def real():
    with tiny.llm() as llm, serving(llm.engine) as served:
        yield served
        served.engine.close()


@pytest.fixture
def served(real):
    """The module's server; its engine is idle and its books balance afterwards."""
    yield real
    real.idle()
    real.fake.check()
    assert real.fake.stats().pages_used == 0


def generate(served, prompt, *, stream, **params):
    """Text and token ids of each sample from /generate."""
    body = {"prompt": prompt, "sampling_params": params, "stream": stream}
    response = served.http.post("/generate", json=body)
    assert response.status_code == 200, response.text
    if not stream:
        events = [response.json()]
    else:
        lines = [line[6:] for line in response.text.splitlines() if line]
        assert lines.pop() == "[DONE]"
        events = [json.loads(line) for line in lines]
    samples = {}
    for part in (part for event in events for part in event["outputs"]):
        text, ids = samples.get(part["index"], ("", []))
        samples[part["index"]] = (text + part["text"], ids + part["token_ids"])
    return [samples[i] for i in sorted(samples)]


@pytest.mark.parametrize("stream", [False, True])
def test_greedy_tokens_of_many_clients(served, stream):
    def ask(prompt):
        return generate(
            served, prompt, stream=stream, temperature=0, max_tokens=12, ignore_eos=True
        )

    with concurrent.futures.ThreadPoolExecutor(len(PROMPTS)) as threads:
        answers = list(threads.map(ask, PROMPTS))
    for prompt, ((_, ids),) in zip(PROMPTS, answers, strict=True):
        assert ids == tiny.greedy(prompt, 12)


def test_a_stream_is_the_whole_answer_in_pieces(served):
    """Sampled bytes: most are no UTF-8, so that pieces of characters are held back and let go."""
    for seed in range(6):
        options = {"seed": seed, "n": 2, "max_tokens": 40, "temperature": 1.5, "logprobs": 1}
        whole = generate(served, PROMPTS[0], stream=False, **options)
        assert generate(served, PROMPTS[0], stream=True, **options) == whole
        assert whole[0] != whole[1]


def test_clients_that_leave_leave_nothing(served):
    rng = random.Random(3)
    before = served.fake.stats().num_steps
    for i in range(24):
        body = {"prompt": rng.choice(PROMPTS), "max_tokens": 150, "ignore_eos": True}
        body |= {"n": rng.randint(1, 3), "stream": rng.random() < 0.5}
        data = json.dumps(body).encode()
        connection = socket.create_connection(("127.0.0.1", served.port))
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
        connection.sendall(head.encode() + data)
        connection.settimeout(rng.random() * 0.05)
        with contextlib.suppress(TimeoutError):
            connection.recv(rng.randint(1, 2000))
        connection.close()
        if i % 8 == 7:
            ((_, ids),) = generate(
                served, PROMPTS[1], stream=False, temperature=0, max_tokens=5, ignore_eos=True
            )
            assert ids == tiny.greedy(PROMPTS[1], 5)
    served.idle()
    assert served.fake.stats().num_steps > before


def test_weights_are_swapped_under_running_requests(served):
    async def swap(seed):
        await served.engine.update_params(tiny.model(seed))

    options = {"temperature": 0, "max_tokens": 10, "ignore_eos": True}
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        running = [
            threads.submit(generate, served, prompt, stream=True, **options | {"max_tokens": 100})
            for prompt in PROMPTS[:4]
        ]
        served.until(lambda: served.fake.stats().num_running > 0)
        asyncio.run(swap(1))
        assert [len(r.result()[0][1]) for r in running] == [100] * 4
    ((_, ids),) = generate(served, PROMPTS[2], stream=False, **options)
    assert ids == tiny.greedy(PROMPTS[2], 10, seed=1)
    asyncio.run(swap(0))
    ((_, ids),) = generate(served, PROMPTS[2], stream=False, **options)
    assert ids == tiny.greedy(PROMPTS[2], 10)


def test_metrics_balance(served):
    stats = served.fake.stats()
    text = served.http.get("/metrics").text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")
    name = f'{{model_name="{served.engine.model_name}"}}'
    assert float(values[f"jpaged:generation_tokens_total{name}"]) == stats.generation_tokens
    assert float(values[f"jpaged:kv_cache_usage_perc{name}"]) == 0
