"""POST /generate and the small routes: health, metrics, version, docs."""

import json

import pytest
from prometheus_client.parser import text_string_to_metric_families

import jpaged
from tests.entrypoints.server.conftest import serving
from tests.entrypoints.server.fake_engine import EOS, FakeEngine

REPLY = "Hello from the fake."


def events(response):
    """The data of each event; the last must be [DONE]."""
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def test_generate(served):
    body = {"prompt": "hi", "sampling_params": {"max_tokens": 50, "n": 2}}
    answer = served.http.post("/generate", json=body).json()
    request_id = answer.pop("request_id")
    assert request_id == served.fake.queued[0].request_id
    output = {"text": REPLY, "token_ids": [*REPLY.encode(), EOS], "finish_reason": "stop"}
    assert answer == {
        "prompt": "hi",
        "outputs": [{"index": 0, **output}, {"index": 1, **output}],
        "usage": {
            "prompt_tokens": 2,
            "completion_tokens": 42,
            "total_tokens": 44,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


def test_generate_from_token_ids(served):
    answer = served.http.post("/generate", json={"prompt": [104, 105]}).json()
    assert answer["prompt"] == [104, 105]
    assert answer["usage"]["prompt_tokens"] == 2


def test_generate_stream_says_the_same(served):
    params = {"max_tokens": 50, "n": 2, "logprobs": 1}
    body = {"prompt": "hi", "sampling_params": params}
    whole = served.http.post("/generate", json=body).json()
    with served.http.stream("POST", "/generate", json=body | {"stream": True}) as response:
        *parts, last = events(response)
    assert last["usage"] == whole["usage"]
    assert (last["prompt"], last["outputs"]) == ("hi", [])
    assert {part["request_id"] for part in [*parts, last]} == {last["request_id"]}
    for expected in whole["outputs"]:
        mine = [o for part in parts for o in part["outputs"] if o["index"] == expected["index"]]
        assert "".join(o["text"] for o in mine) == expected["text"]
        assert [t for o in mine for t in o["token_ids"]] == expected["token_ids"]
        assert [x for o in mine for x in o["logprobs"]["tokens"]] == expected["logprobs"]["tokens"]
        assert mine[-1]["finish_reason"] == expected["finish_reason"]


def test_text_is_sent_as_utf8_in_lines_for_every_client():
    reply = "naïve 日本 🙂 \x0b\x0c\x1c\x85\u2028\u2029\r\n"
    with serving(FakeEngine(reply)) as served:
        body = {"prompt": "é", "sampling_params": {"max_tokens": 100}}
        response = served.http.post("/generate", json=body)
        assert response.json()["outputs"][0]["text"] == reply
        assert "日本".encode() in response.content
        # This client ends lines where str.splitlines does.
        with served.http.stream("POST", "/generate", json=body | {"stream": True}) as streamed:
            parts = [part for event in events(streamed) for part in event["outputs"]]
        assert "".join(part["text"] for part in parts) == reply
        chunks = served.client.completions.create(
            model="fake-model", prompt="é", max_tokens=100, stream=True
        )
        assert "".join(c.choices[0].text for c in chunks) == reply


def test_without_a_tokenizer_ids_go_in_and_out():
    fake = FakeEngine()
    fake.tokenizer = None
    with serving(fake) as served:
        answer = served.http.post("/generate", json={"prompt": [1, 2, 3]}).json()
        assert answer["outputs"][0]["token_ids"] == list(REPLY.encode()[:16])
        assert answer["outputs"][0]["text"] == ""
        for path, body in (
            ("/generate", {"prompt": "text"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ):
            response = served.http.post(path, json=body)
            assert response.status_code == 400
            assert "tokenizer" in response.json()["error"]["message"]
        body = {"prompt": [1], "echo": True, "logprobs": None, "max_tokens": 1}
        assert served.http.post("/v1/completions", json=body).status_code == 200
        body = {"prompt": [1], "logprobs": 1, "max_tokens": 1}
        answer = served.http.post("/v1/completions", json=body).json()
        assert answer["choices"][0]["logprobs"]["tokens"] == [f"token_id:{ord('H')}"]


def test_health_and_version(served):
    response = served.http.get("/health")
    assert (response.status_code, response.content) == (200, b"")
    assert served.http.get("/version").json() == {"version": jpaged.__version__}


def test_the_openapi_schema_describes_the_bodies(served):
    schema = served.http.get("/openapi.json").json()

    def resolve(node):
        if isinstance(node, dict):
            if "$ref" in node:
                target = schema
                for key in node["$ref"].removeprefix("#/").split("/"):
                    target = target[key.replace("~1", "/")]
            for value in node.values():
                resolve(value)
        elif isinstance(node, list):
            for value in node:
                resolve(value)

    resolve(schema)
    body = schema["paths"]["/v1/chat/completions"]["post"]["requestBody"]
    assert "messages" in body["content"]["application/json"]["schema"]["properties"]
    assert served.http.get("/docs").status_code == 200


def samples(served):
    text = served.http.get("/metrics").text
    return {
        (sample.name, sample.labels.get("finished_reason") or sample.labels.get("le")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.labels["model_name"] == "fake-model"
    }


@pytest.mark.parametrize("stream", [False, True])
def test_metrics(stream):
    fake = FakeEngine()
    fake.step_seconds = 0.002
    with serving(fake) as served:
        body = {"prompt": "hi", "max_tokens": 5, "n": 2, "stream": stream}
        served.http.post("/v1/completions", json=body)
        served.http.post("/v1/completions", json=body | {"n": 1, "max_tokens": 50})
        served.http.post("/v1/completions", json=body | {"temperature": -1})
        now = samples(served)
    assert now["jpaged:num_requests_running", None] == 0
    assert now["jpaged:num_requests_waiting", None] == 0
    assert now["jpaged:kv_cache_usage_perc", None] == 0.25
    assert now["jpaged:prompt_tokens_total", None] == 4
    assert now["jpaged:generation_tokens_total", None] == 10 + len(REPLY) + 1
    assert now["jpaged:request_success_total", "length"] == 2
    assert now["jpaged:request_success_total", "stop"] == 1
    for name in (
        "time_to_first_token_seconds",
        "request_time_per_output_token_seconds",
        "e2e_request_latency_seconds",
    ):
        assert now[f"jpaged:{name}_count", None] == 2
    # The fake's steps take 2 ms, so that a token does, too.
    mean = now["jpaged:request_time_per_output_token_seconds_sum", None] / 2
    assert 0.002 <= mean < 0.1
    first = now["jpaged:time_to_first_token_seconds_sum", None] / 2
    assert 0.002 <= first < now["jpaged:e2e_request_latency_seconds_sum", None] / 2
    assert now["jpaged:request_generation_tokens_sum", None] == 5 + len(REPLY) + 1
