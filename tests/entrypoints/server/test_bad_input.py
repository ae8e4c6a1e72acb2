"""Every bad request is a clear error in the OpenAI form; nothing is queued and the server goes on."""

import json
import random
import socket

import pytest

from jpaged.entrypoints.server.body import MAX_BODY_BYTES

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"prompt": "hi"}
GENERATE = {"prompt": "hi"}
ENDPOINTS = {"/v1/chat/completions": CHAT, "/v1/completions": COMPLETION, "/generate": GENERATE}


def check_error(response, status=400, param=None, code=None, contains=""):
    """The OpenAI form, with these values."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert list(body) == ["error"]
    error = body["error"]
    assert sorted(error) == ["code", "message", "param", "type"]
    assert error["type"] == ("invalid_request_error" if status < 500 else "server_error")
    assert (error["param"], error["code"]) == (param, code), error
    assert contains in error["message"], error
    assert error["message"] and "Traceback" not in error["message"]


@pytest.fixture(autouse=True)
def goes_on(served):
    yield
    assert served.fake.queued == []
    response = served.http.post("/generate", json=GENERATE)
    assert response.json()["outputs"][0]["text"] == "Hello from the f"


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize(
    ("data", "contains"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"hello", "not JSON"),
        (b"\xff\xfe\xfa", "not JSON"),
        (b'{"prompt": "\xff"}', "not JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b"[]", "must be a JSON object"),
        (b'"text"', "must be a JSON object"),
        (b"null", "must be a JSON object"),
    ],
)
def test_bodies_that_are_no_json_object(served, path, data, contains):
    response = served.http.post(path, content=data)
    check_error(response, code="invalid_json", contains=contains)


def test_half_a_surrogate_pair(served):
    for path, field in (("/v1/completions", "prompt"), ("/v1/chat/completions", "messages")):
        text = '"\\ud83d"' if field == "prompt" else '[{"role": "user", "content": "\\ud83d"}]'
        data = f'{{"{field}": {text}}}'
        check_error(served.http.post(path, content=data), param=field, contains="surrogate")
    check_error(served.http.post("/generate", content='{"\\ud83d": 1}'), contains="surrogate")


def test_bodies_that_are_too_large_or_packed(served):
    big = {"prompt": "x" * MAX_BODY_BYTES}
    response = served.http.post("/v1/completions", json=big)
    check_error(response, 413, code="request_too_large")
    chunks = (b"x" * 2**20 for _ in range(MAX_BODY_BYTES // 2**20 + 1))
    response = served.http.post("/v1/completions", content=chunks)
    check_error(response, 413, code="request_too_large")
    response = served.http.post(
        "/v1/completions", content=b"\x1f\x8b", headers={"content-encoding": "gzip"}
    )
    check_error(response, 415, contains="gzip")


def test_a_body_without_content_type_is_read(served):
    response = served.http.post("/v1/completions", content=b'{"prompt": ""}')
    check_error(response, param="prompt", contains="empty")


def test_paths_and_methods(served):
    check_error(served.http.get("/nothing"), 404, code="not_found", contains="/nothing")
    check_error(served.http.post("/v1/chat"), 404, code="not_found")
    for path in ENDPOINTS:
        response = served.http.get(path)
        check_error(response, 405, code="method_not_allowed", contains="GET")
        assert "POST" in response.headers["allow"]
    check_error(served.http.post("/health"), 405, code="method_not_allowed")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", list(ENDPOINTS)[:2])
def test_a_model_that_is_not_served(served, path, stream):
    body = ENDPOINTS[path] | {"model": "gpt-4", "stream": stream}
    response = served.http.post(path, json=body)
    check_error(response, 404, param="model", code="model_not_found", contains="fake-model")


COMMON_CASES = [
    ("temperature", -1, "at least 0"),
    ("temperature", float("nan"), "finite"),
    ("temperature", float("inf"), "finite"),
    ("temperature", "hot", "number"),
    ("temperature", True, "number"),
    ("top_p", 0, "(0, 1]"),
    ("top_p", 1.5, "(0, 1]"),
    ("top_k", -2, "-1"),
    ("top_k", 1.5, "integer"),
    ("max_tokens", -1, "1"),
    ("max_tokens", 0, "1"),
    ("max_tokens", 1.5, "integer"),
    ("max_tokens", "5", "integer"),
    ("n", 0, "128"),
    ("n", 129, "128"),
    ("n", 2**63, "128"),
    ("seed", 2**70, "seed"),
    ("seed", "x", "integer"),
    ("stop", 5, "a string or a list of strings"),
    ("stop", ["a", 5], "a string or a list of strings"),
    ("stop", [""], "1 to 1024"),
    ("stop", ["x"] * 17, "16"),
    ("stop", {"a": 1}, "a string or a list of strings"),
    ("stop_token_ids", [10**6], "300"),
    ("stop_token_ids", [-1], "stop_token_ids"),
    ("stop_token_ids", "1", "list"),
    ("ignore_eos", 1, "bool"),
    ("stream", "yes", "bool"),
    ("max_token", 1, "did you mean max_tokens?"),
    ("Temperature", 1, "did you mean temperature?"),
    ("presence_penalty", 0.5, "not supported"),
    ("logit_bias", {"5": 1}, "not supported"),
    ("response_format", {"type": "json_object"}, "not supported"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", list(ENDPOINTS)[:2])
@pytest.mark.parametrize(("field", "value", "contains"), COMMON_CASES)
def test_openai_fields(served, path, field, value, contains, stream):
    body = {"stream": stream, **ENDPOINTS[path], field: value}
    response = served.http.post(path, content=json.dumps(body))
    check_error(response, param=field, contains=contains)


@pytest.mark.parametrize(
    ("field", "value", "code", "contains"),
    [
        ("prompt", "", None, "empty"),
        ("prompt", [], None, "empty"),
        ("prompt", [""], None, "empty"),
        ("prompt", ["a", ""], None, "empty"),
        ("prompt", [[]], None, "empty"),
        ("prompt", None, None, "a string"),
        ("prompt", 5, None, "a string"),
        ("prompt", ["a", 5], None, "a string"),
        ("prompt", [1, [2]], None, "a string"),
        ("prompt", [1.5], None, "a string"),
        ("prompt", [True], None, "a string"),
        ("prompt", {"text": "a"}, None, "a string"),
        ("prompt", [{}] * 100_000, None, "a string"),
        ("prompt", "x" * 256, "context_length_exceeded", "256"),
        ("prompt", ["a", "x" * 300], "context_length_exceeded", "300"),
        ("prompt", ["a"] * 2049, None, "2048"),
        ("logprobs", 21, None, "20"),
        ("logprobs", -1, None, "0"),
        ("logprobs", True, None, "integer"),
        ("suffix", "x", None, "not supported"),
        ("best_of", 3, None, "not supported"),
        ("stream_options", {"include_usage": True}, None, "stream=true"),
        ("stream_options", {"include_stuff": True}, None, "include_stuff"),
    ],
)
def test_completion_fields(served, field, value, code, contains):
    response = served.http.post("/v1/completions", json=COMPLETION | {field: value})
    check_error(response, param=field, code=code, contains=contains)


@pytest.mark.parametrize("ids", [[300], [-1], [2**40]])
def test_prompt_ids_out_of_the_vocabulary(served, ids):
    response = served.http.post("/v1/completions", json={"prompt": ids})
    check_error(response, param="prompt", contains="299")


def test_missing_fields(served):
    check_error(served.http.post("/v1/completions", json={}), param="prompt", contains="missing")
    response = served.http.post("/v1/chat/completions", json={})
    check_error(response, param="messages", contains="missing")
    check_error(served.http.post("/generate", json={}), param="prompt", contains="missing")


def test_echo_with_logprobs_is_refused(served):
    body = COMPLETION | {"echo": True, "logprobs": 1}
    check_error(served.http.post("/v1/completions", json=body), param="echo")


@pytest.mark.parametrize(
    ("messages", "contains"),
    [
        ([], "empty"),
        ("hi", "list of messages"),
        ([5], "list of messages"),
        ([{"content": "x"}], "list of messages"),
        ([{"role": "user"}], "content is missing"),
        ([{"role": "user", "content": None}], "content is missing"),
        ([{"role": "assistant", "content": None}], "content is missing"),
        ([{"role": "robot", "content": "x"}], "robot"),
        ([{"role": "user", "content": 5}], "list of messages"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "image_url"),
        ([{"role": "user", "content": [{"type": "text", "text": 5}]}], "text"),
        ([{"role": "tool", "content": "x"}], "this template knows no tools"),
    ],
)
def test_messages(served, messages, contains):
    response = served.http.post("/v1/chat/completions", json={"messages": messages})
    check_error(response, param="messages", contains=contains)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": -1, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": 2}, "logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_completion_tokens": -5, "max_tokens": 5}, "max_completion_tokens"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"chat_template": "{{ x }}"}, "chat_template"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": 5}, "chat_template_kwargs"),
    ],
)
def test_chat_fields(served, body, param):
    check_error(served.http.post("/v1/chat/completions", json=CHAT | body), param=param)


def test_a_conversation_that_is_too_long(served):
    body = {"messages": [{"role": "user", "content": "x" * 300}]}
    response = served.http.post("/v1/chat/completions", json=body)
    check_error(response, param="messages", code="context_length_exceeded", contains="256")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("params", "param", "contains"),
    [
        ({"max_token": 5}, "sampling_params.max_token", "max_tokens"),
        ({"output_kind": "delta"}, "sampling_params.output_kind", "not a sampling parameter"),
        ({"temperature": -1}, "sampling_params.temperature", "at least 0"),
        ({"temperature": "x"}, "sampling_params.temperature", "number"),
        ({"max_tokens": -1}, "sampling_params.max_tokens", "1"),
        ({"n": 10**6}, "sampling_params.n", "128"),
        ({"stop": 5}, "sampling_params.stop", "string"),
        ({"stop": {}}, "sampling_params.stop", "string"),
        ({"stop_token_ids": [1.5]}, "sampling_params.stop_token_ids", "integer"),
        ({"stop_token_ids": [300]}, "sampling_params.stop_token_ids", "300"),
        ({"ignore_eos": None}, "sampling_params.ignore_eos", "bool"),
        ([], "sampling_params", "an object"),
        ("x", "sampling_params", "an object"),
    ],
)
def test_generate_params(served, params, param, contains, stream):
    body = {"prompt": "hi", "sampling_params": params, "stream": stream}
    check_error(served.http.post("/generate", json=body), param=param, contains=contains)


def test_generate_prompts(served):
    for prompt in ("", [], [[1]], ["a"], 5, None):
        check_error(served.http.post("/generate", json={"prompt": prompt}), param="prompt")
    check_error(served.http.post("/generate", json=GENERATE | {"model": "x"}), param="model")


def test_raw_garbage_closes_the_connection_only(served):
    for data in (b"\x00\xff\n\n", b"GET / HTTP/9.9\r\n\r\n", b"POST /generate HTTP/1.1\r\n" * 3):
        with socket.create_connection(("127.0.0.1", served.port), timeout=5) as connection:
            connection.sendall(data + b"\r\n\r\n")
            answer = connection.recv(100)
        assert not answer or answer.split()[1].startswith(b"4")


def test_mutated_bodies_never_fail_inside(served):
    """Random values in random fields: always an answer in form, never a 5xx."""
    rng = random.Random(5)
    values = [None, True, 0, -1, 2**63, 1e308, 1.5, "", "x", "\u2028\r\n\x1b", [], {}, [[]], [{}]]
    values += [{"a": [1]}, ["a"] * 20, [1, "a"], float("nan")]
    names = [
        *["prompt", "messages", "model", "n", "stop", "seed", "top_p", "top_k", "logprobs"],
        *["top_logprobs", "stream", "echo", "max_tokens", "stream_options", "temperature"],
        *["stop_token_ids", "tools", "user", "best_of", "sampling_params"],
        *["chat_template_kwargs", "add_generation_prompt", "\x00", "a\r\nb"],
    ]
    statuses = set()
    for _ in range(300):
        path = rng.choice(list(ENDPOINTS))
        body = dict(ENDPOINTS[path])
        for _ in range(rng.randint(1, 3)):
            body[rng.choice(names)] = rng.choice(values)
        body.setdefault("max_tokens", 2)
        response = served.http.post(path, content=json.dumps(body))
        statuses.add(response.status_code)
        assert response.status_code in (200, 400, 404), (body, response.text)
        if response.status_code != 200:
            param = response.json()["error"]["param"]
            check_error(response, response.status_code, param, response.json()["error"]["code"])
    assert {200, 400} <= statuses
    served.fake.queued.clear()
