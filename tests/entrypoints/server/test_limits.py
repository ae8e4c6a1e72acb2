"""What a request may ask of the queue and of others' pages, and what it and /metrics are told of them."""

import concurrent.futures
import contextlib
import itertools
import json
import re

import pytest

from tests.engine import driving, tiny
from tests.engine.driving import LATER, Clock
from tests.entrypoints.server.conftest import serving
from tests.entrypoints.server.test_bad_input import ENDPOINTS, check_error
from tests.entrypoints.server.test_generate import events

PAGE = 4
SHORT = tiny.prompts(*[3] * 4)
GREEDY = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
WAYS = list(itertools.product(ENDPOINTS, [False, True]))


@pytest.fixture(scope="module")
def module_real():
    tokenizer = tiny.tokenizer.__wrapped__()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    engine = driving.engine(
        tokenizer=tokenizer,
        max_num_seqs=2,
        max_model_len=44,
        kv_cache_memory_bytes=13 * PAGE * tiny.BYTES_PER_TOKEN,
        admission_policy="all",
        max_num_queued_reqs=3,
        max_num_queued_tokens=40,
    )
    with serving(engine) as served:
        yield served


@pytest.fixture
def real(module_real):
    """Two rows, pages for one sequence and a little, a queue of 3 sequences and 40 tokens; idle at last."""
    yield module_real
    module_real.idle()
    driving.check_idle(module_real.fake)


@pytest.fixture
def threads():
    with concurrent.futures.ThreadPoolExecutor(8) as made:
        yield made


@contextlib.contextmanager
def held(served, at=1):
    """A new clock for an idle engine, which stands in step number `at` until the clock is released."""
    clock = served.fake._clock = Clock()
    clock.hold_at = at
    try:
        yield clock
    finally:
        clock.release()


def body(path, prompt, **more):
    """What asks an endpoint for a greedy answer."""
    if path == "/generate":
        params = {name: more.pop(name) for name in ("n", "max_tokens") if name in more}
        return {"prompt": prompt, "sampling_params": GREEDY | params, **more}
    if path == "/v1/chat/completions":
        return GREEDY | {"messages": [{"role": "user", "content": prompt}]} | more
    return GREEDY | {"prompt": prompt} | more


def send(served, threads, data, path="/generate", count=1):
    """A request of so many prompts on its way, which the engine will see behind those sent before."""
    active = len(served.engine.loop.active_ids()) + count
    answer = threads.submit(served.http.post, path, json=data)
    served.until(lambda: len(served.engine.loop.active_ids()) == active)
    return answer


# Takes both rows with its first step.
TWO_ROWS = body("/generate", SHORT[0], n=2, max_tokens=30)


def check_served(answer, prompt):
    assert answer.result().status_code == 200
    for output in answer.result().json()["outputs"]:
        wanted = tiny.greedy(prompt, len(output["token_ids"]))
        assert (output["finish_reason"], output["token_ids"]) == ("length", wanted)


def check_full(answer, limit):
    assert answer.result().status_code == 429
    assert int(answer.result().headers["retry-after"]) >= 1
    error = answer.result().json()["error"]
    assert limit in error.pop("message")
    assert error == {"type": "rate_limit_error", "param": None, "code": "queue_full"}


@pytest.mark.parametrize(("path", "stream"), WAYS)
def test_one_too_many_is_told_to_come_again_and_the_others_are_served(real, threads, path, stream):
    late = body(path, "one too many", stream=stream)
    with held(real):
        sent = [send(real, threads, TWO_ROWS)]
        sent += [send(real, threads, body("/generate", prompt)) for prompt in SHORT[1:4]]
        refused = send(real, threads, late, path)
    check_full(refused, "max_num_queued_reqs is 3")
    for answer, prompt in zip(sent, SHORT, strict=True):
        check_served(answer, prompt)
    assert real.http.post(path, json=late).status_code == 200


def test_samples_and_tokens_count_one_by_one(real, threads):
    (long,) = tiny.prompts(38)
    with held(real):
        send(real, threads, TWO_ROWS)
        first = send(real, threads, body("/generate", SHORT[1], n=2))
        two = send(real, threads, body("/generate", SHORT[2], n=2))
        tokens = send(real, threads, body("/generate", long, max_tokens=1))
        last = send(real, threads, body("/generate", SHORT[3]))
    check_full(two, "max_num_queued_reqs is 3")
    check_full(tokens, "max_num_queued_tokens 40")
    check_served(first, SHORT[1])
    check_served(last, SHORT[3])


@pytest.mark.parametrize("stream", [False, True])
def test_prompts_of_one_request_are_refused_together(real, threads, stream):
    with held(real):
        send(real, threads, TWO_ROWS)
        many = body("/v1/completions", [*SHORT], stream=stream)
        refused = send(real, threads, many, "/v1/completions", count=len(SHORT))
    check_full(refused, "max_num_queued_reqs is 3")


@pytest.mark.parametrize(("path", "stream"), WAYS)
def test_a_timeout_before_the_first_token_is_504(real, threads, path, stream):
    with held(real) as clock:
        late = send(real, threads, body(path, "late", timeout=1000, stream=stream), path)
        other = send(real, threads, TWO_ROWS)
        clock.ahead = LATER
    check_error(late.result(), 504, param="timeout", code="timeout", contains="timeout")
    check_served(other, SHORT[0])


@pytest.mark.parametrize("path", ENDPOINTS)
def test_a_timeout_within_a_stream_is_its_last_event(real, path):
    timed = body(path, "a stream", max_tokens=30, timeout=1000, stream=True)
    with held(real, at=9) as clock, real.http.stream("POST", path, json=timed) as response:
        assert response.status_code == 200
        lines = (line.removeprefix("data: ") for line in response.iter_lines() if line)
        told = [next(lines)]
        clock.ahead = LATER
        clock.release()
        *rest, last = lines
    assert "[DONE]" not in rest
    error = json.loads(last)["error"]
    assert "timeout" in error.pop("message")
    assert error == {"type": "server_error", "param": "timeout", "code": "timeout"}
    if path == "/generate":
        ids = [t for event in [*told, *rest] for t in json.loads(event)["outputs"][0]["token_ids"]]
        assert 0 < len(ids) < 9
        assert ids == tiny.greedy(tiny.tokenizer().encode("a stream"), len(ids))


BAD = [
    *[("priority", value) for value in (1.5, "1", True, [1])],
    *[("timeout", value) for value in (0, -1, float("nan"), float("inf"), "5", True)],
    *[("cache_salt", value) for value in ("", 5, ["a"], "\ud800")],
    *[("skip_reading_prefix_cache", value) for value in (1, "yes")],
]


@pytest.mark.parametrize(("path", "stream"), WAYS)
def test_a_bad_value_is_refused_by_name(served, path, stream):
    for field, value in BAD:
        sent, param = {field: value}, field
        if path == "/generate" and field == "skip_reading_prefix_cache":
            sent, param = {"sampling_params": sent}, f"sampling_params.{field}"
        sent |= ENDPOINTS[path] | {"stream": stream}
        check_error(served.http.post(path, content=json.dumps(sent)), param=param)
    assert served.fake.queued == []


@pytest.mark.parametrize("path", ENDPOINTS)
def test_a_priority_goes_to_an_engine_that_has_them_alone(served, real, path):
    asked = body(path, "x", priority=-7, timeout=None, cache_salt=None)
    assert served.http.post(path, json=asked).status_code == 200
    assert served.fake.queued[-1].priority == -7
    check_error(real.http.post(path, json=asked), param="priority", contains="scheduling_policy")


def usage(served, path, data):
    """The usage that an answer ends with."""
    if not data.get("stream"):
        return served.http.post(path, json=data).json()["usage"]
    if path != "/generate":
        data = data | {"stream_options": {"include_usage": True}}
    *others, last = events(served.http.post(path, json=data))
    assert not any(event.get("usage") for event in others)
    return last["usage"]


@pytest.mark.parametrize(("path", "stream"), WAYS)
def test_usage_says_what_was_cached(real, path, stream):
    text = f"{stream:d}{path} is new"

    def cached(**more):
        said = usage(real, path, body(path, text, stream=stream, **more))
        assert said["prompt_tokens"] == len(text)
        return said["prompt_tokens_details"]["cached_tokens"]

    shared = (len(text) - 1) // PAGE * PAGE
    assert [cached(), cached(), cached(n=2)] == [0, shared, shared]
    assert [cached(cache_salt="a"), cached(cache_salt="a")] == [0, shared]
    if path != "/generate":
        assert cached(skip_reading_prefix_cache=True) == 0
    if path == "/v1/completions":
        several = body(path, [text, text[:9], "other"], stream=stream)
        assert usage(real, path, several)["prompt_tokens_details"]["cached_tokens"] == shared + 8


def metric(served, name):
    """A number of /metrics."""
    text = served.http.get("/metrics").text
    (value,) = re.findall(rf"^jpaged:{name}{{model_name=.*}} (\S+)$", text, re.MULTILINE)
    return float(value)


def test_metrics_count_shared_pages_preemptions_and_the_queue(real, threads):
    names = ["prefix_cache_queries_total", "prefix_cache_hits_total", "num_preemptions_total"]
    names += ["request_queue_time_seconds_count"]
    before = {name: metric(real, name) for name in names}
    (prompt,) = tiny.prompts(13, seed=5)
    with held(real) as first:
        sent = [send(real, threads, TWO_ROWS)]
        real.until(lambda: first._looks)
        sent += [send(real, threads, body("/generate", prompt)) for _ in range(3)]
        with held(real) as second:
            first.release()
            real.until(lambda: second._looks)
            assert [metric(real, f"num_requests_{s}") for s in ("running", "waiting")] == [2, 3]
            assert 0 < metric(real, "kv_cache_usage_perc") <= 1
    for answer, asked in zip(sent, [SHORT[0], prompt, prompt, prompt], strict=True):
        check_served(answer, asked)
    queries, hits, preemptions, queued = (metric(real, name) - before[name] for name in before)
    assert (queries, hits, queued, preemptions > 0) == (3 + 3 * 13, 2 * 12, 4, True)
    assert metric(real, "num_requests_waiting") == metric(real, "kv_cache_usage_perc") == 0
