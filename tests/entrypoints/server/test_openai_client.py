"""The official openai client against the server: both endpoints, whole and streamed."""

import openai
import pytest

from tests.entrypoints.server.conftest import serving
from tests.entrypoints.server.fake_engine import EOS, TURN, FakeEngine

REPLY = "Hello from the fake."
MESSAGES = [{"role": "user", "content": "hi"}]
PROMPT_TOKENS = len("user: hi") + len("assistant: ") + 2


def test_chat(served):
    answer = served.client.chat.completions.create(model="fake-model", messages=MESSAGES, n=2)
    assert answer.object == "chat.completion"
    assert answer.model == "fake-model"
    assert [c.index for c in answer.choices] == [0, 1]
    for choice in answer.choices:
        assert choice.message.role == "assistant"
        assert choice.message.content == REPLY
        assert choice.finish_reason == "stop"
        assert choice.logprobs is None
    tokens = len(REPLY) + 1
    assert answer.usage.prompt_tokens == PROMPT_TOKENS
    assert answer.usage.completion_tokens == 2 * tokens
    assert answer.usage.total_tokens == PROMPT_TOKENS + 2 * tokens


def test_chat_stream_says_the_same(served):
    chunks = list(
        served.client.chat.completions.create(
            model="fake-model",
            messages=MESSAGES,
            n=2,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert len({c.id for c in chunks}) == 1
    usage = chunks.pop()
    assert usage.choices == []
    assert usage.usage.completion_tokens == 2 * (len(REPLY) + 1)
    assert all(c.usage is None for c in chunks)
    for index in range(2):
        mine = [c.choices[0] for c in chunks if c.choices[0].index == index]
        assert mine[0].delta.role == "assistant"
        assert "".join(c.delta.content or "" for c in mine) == REPLY
        assert [c.finish_reason for c in mine] == [None] * (len(mine) - 1) + ["stop"]


def test_a_stream_comes_piece_by_piece(served):
    served.fake.step_seconds = 0.005
    chunks = served.client.completions.create(model="", prompt="x", stream=True, max_tokens=9)
    texts = [chunk.choices[0].text for chunk in chunks]
    assert "".join(texts) == REPLY[:9]
    assert len(texts) > 4


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_chat_has_no_limit_but_the_one_given(served, name):
    create = served.client.chat.completions.create
    short = create(model="fake-model", messages=MESSAGES, **{name: 3})
    assert short.choices[0].message.content == REPLY[:3]
    assert short.choices[0].finish_reason == "length"
    rest = create(model="fake-model", messages=MESSAGES, extra_body={"ignore_eos": True})
    assert rest.usage.total_tokens == served.fake.max_model_len
    both = create(model="fake-model", messages=MESSAGES, max_tokens=9, max_completion_tokens=2)
    assert both.usage.completion_tokens == 2


def test_one_token_streams_its_text(served):
    chunks = list(
        served.client.chat.completions.create(
            model="fake-model", messages=MESSAGES, max_tokens=1, stream=True
        )
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "H"
    assert chunks[-1].choices[0].finish_reason == "length"


def test_completion_defaults_to_sixteen_tokens(served):
    answer = served.client.completions.create(model="fake-model", prompt="hi")
    assert answer.object == "text_completion"
    assert answer.choices[0].text == REPLY[:16]
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.model_dump(exclude_unset=True) == {
        "prompt_tokens": 2,
        "completion_tokens": 16,
        "total_tokens": 18,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("prompt", "replies"),
    [
        ("ab", ["ab"]),
        (["ab", "c"], ["ab", "c"]),
        ([97, 98], ["ab"]),
        ([[97], [98, 99]], ["a", "bc"]),
    ],
)
def test_every_kind_of_prompt(prompt, replies, stream):
    fake = FakeEngine(lambda ids: bytes(ids).decode() * 2)
    with serving(fake) as served:
        answer = served.client.completions.create(
            model="fake-model", prompt=prompt, n=2, stream=stream, max_tokens=50
        )
        texts = dict.fromkeys(range(2 * len(replies)), "")
        for part in answer if stream else [answer]:
            for choice in part.choices:
                texts[choice.index] += choice.text
        # Choice i * n + j is sample j of prompt i.
        assert list(texts.values()) == [reply * 2 for reply in replies for _ in range(2)]
        if not stream:
            assert answer.usage.prompt_tokens == sum(map(len, replies))


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_and_stop_ids(served, stream):
    def text_and_end(**arguments):
        answer = served.client.completions.create(
            model="fake-model", prompt="x", max_tokens=50, stream=stream, **arguments
        )
        choices = [c for part in (answer if stream else [answer]) for c in part.choices]
        return "".join(c.text for c in choices), choices[-1]

    text, end = text_and_end(stop="from")
    assert (text, end.finish_reason, end.stop_reason) == ("Hello ", "stop", "from")
    text, end = text_and_end(stop=["zz", "lo"], extra_body={"include_stop_str_in_output": True})
    assert (text, end.stop_reason) == ("Hello", "lo")
    text, end = text_and_end(extra_body={"stop_token_ids": [ord("o")]})
    assert (text, end.finish_reason, end.stop_reason) == ("Hell", "stop", ord("o"))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["hé", [104, 195, 169]])
def test_echo(served, stream, prompt):
    answer = served.client.completions.create(
        model="fake-model", prompt=prompt, max_tokens=2, echo=True, n=2, stream=stream
    )
    texts = {0: "", 1: ""}
    for part in answer if stream else [answer]:
        for choice in part.choices:
            texts[choice.index] += choice.text
    assert texts == {0: "héHe", 1: "héHe"}


def test_completion_logprobs(served):
    def entries(stream):
        answer = served.client.completions.create(
            model="fake-model", prompt="x", max_tokens=4, logprobs=2, stream=stream
        )
        return [c.logprobs for part in (answer if stream else [answer]) for c in part.choices]

    (whole,) = entries(False)
    assert whole.tokens == list("Hell")
    assert whole.token_logprobs == [-0.5] * 4
    assert whole.text_offset == [0, 1, 2, 3]
    assert whole.top_logprobs[0] == {"H": -0.5, "I": -1.5}
    parts = entries(True)
    for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
        assert [x for part in parts for x in getattr(part, name)] == getattr(whole, name)


def test_chat_logprobs(served):
    def entries(stream, **arguments):
        answer = served.client.chat.completions.create(
            model="fake-model",
            messages=MESSAGES,
            max_tokens=4,
            logprobs=True,
            stream=stream,
            **arguments,
        )
        choices = [c for part in (answer if stream else [answer]) for c in part.choices]
        return [entry for c in choices if c.logprobs for entry in c.logprobs.content]

    whole = entries(False, top_logprobs=2)
    assert [e.token for e in whole] == list("Hell")
    assert [e.bytes for e in whole] == [[ord(c)] for c in "Hell"]
    assert [(t.token, t.logprob) for t in whole[0].top_logprobs] == [("H", -0.5), ("I", -1.5)]
    assert entries(True, top_logprobs=2) == whole
    alone = entries(False)
    assert [(e.token, e.logprob, e.top_logprobs) for e in alone] == [
        (token, -0.5, []) for token in "Hell"
    ]


def test_what_does_not_change_the_answer_is_accepted(served):
    answer = served.client.chat.completions.create(
        model="fake-model",
        messages=MESSAGES,
        user="somebody",
        metadata={"a": "b"},
        store=False,
        presence_penalty=0,
        frequency_penalty=0.0,
        logit_bias={},
        response_format={"type": "text"},
        tools=[],
        seed=7,
        temperature=0.5,
        top_p=0.9,
        stop=None,
        extra_body={"top_k": 5, "min_p": 0.0, "repetition_penalty": 1.0},
    )
    assert answer.choices[0].message.content == REPLY
    params = served.fake.queued[0].params
    assert (params.seed, params.temperature, params.top_p, params.top_k) == (7, 0.5, 0.9, 5)


def test_messages_with_parts_and_earlier_turns(served):
    served.client.chat.completions.create(
        model="fake-model",
        messages=[
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
            {"role": "user", "content": "b", "name": "me"},
        ],
    )
    ids = served.fake.queued[0].prompt_token_ids
    assert ids.count(TURN) == 5
    assert bytes(i for i in ids if i < 256) == b"system: suser: aassistant: user: bassistant: "
    assert EOS not in ids


def test_models(served):
    (model,) = served.client.models.list()
    assert (model.id, model.owned_by) == ("fake-model", "jpaged")
    assert model.source == "wheel fake 1.0"
    assert model.max_model_len == 256
    assert served.client.models.retrieve("fake-model") == model
    with pytest.raises(openai.NotFoundError):
        served.client.models.retrieve("other/model")


def test_errors_are_the_clients_own(served):
    with pytest.raises(openai.NotFoundError) as missing:
        served.client.chat.completions.create(model="gpt-4", messages=MESSAGES)
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as long:
        served.client.completions.create(model="fake-model", prompt="x" * 300)
    assert (long.value.code, long.value.param) == ("context_length_exceeded", "prompt")
    with pytest.raises(openai.BadRequestError) as refused:
        served.client.chat.completions.create(
            model="fake-model", messages=MESSAGES, presence_penalty=1.5
        )
    assert refused.value.param == "presence_penalty"
    assert served.fake.queued == []
