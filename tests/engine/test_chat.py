"""Chat templates: what they render is tokenised as it stands, and what they refuse is the caller's error."""

import copy

import pytest
from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from jpaged import RequestError, SamplingParams
from jpaged.engine.chat_template import render_chat
from tests.engine import tiny

HELLO = [{"role": "user", "content": "hello"}]
WITH_BOS = "<bos>{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
WITHOUT_BOS = WITH_BOS.removeprefix("<bos>")
ALTERNATING = (
    "{% if messages[0].role != 'user' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}" + WITH_BOS
)


def tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    """A tokenizer that puts a <bos> before each text."""
    backend = copy.deepcopy(tiny.tokenizer().backend_tokenizer)
    backend.add_special_tokens([AddedToken("<bos>", special=True)])
    bos = backend.token_to_id("<bos>")
    backend.post_processor = TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", bos)]
    )
    made = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<bos>")
    made.chat_template = template
    return made


@pytest.mark.parametrize(("template", "count"), [(WITH_BOS, 1), (WITHOUT_BOS, 0)])
def test_a_template_says_itself_whether_there_is_a_bos(template: str, count: int) -> None:
    """A template that writes <bos>, and a tokenizer that adds another: still one; and none without."""
    made = tokenizer(template)
    ids = render_chat(made, HELLO)
    assert ids.count(made.bos_token_id) == count
    assert made.decode(ids, skip_special_tokens=True) == "[user]hello"
    # A raw completion keeps what the tokenizer does by default.
    assert made.encode("hello").count(made.bos_token_id) == 1


@pytest.mark.parametrize(
    ("messages", "template", "options", "field", "match"),
    [
        ([{"role": "system", "content": "x"}], ALTERNATING, {}, "messages", "System role"),
        (HELLO, None, {}, "messages", "no chat template|none"),
        (HELLO, "{{ messages[5].content.x.y }}", {}, "messages", "template"),
        (HELLO, "{% if %}", {}, "messages", "template"),
        ([], WITH_BOS, {}, "messages", "at least one"),
        ("hello", WITH_BOS, {}, "messages", "list"),
        ([{"content": "x"}], WITH_BOS, {}, "messages", r"messages\[0\]"),
        (HELLO, WITH_BOS, {"continue_final_message": True}, "continue_final_message", "exclude"),
        (
            HELLO,
            WITH_BOS,
            {"chat_template_kwargs": {"tokenize": True}},
            "chat_template_kwargs",
            "tokenize",
        ),
    ],
)
def test_what_cannot_be_rendered_is_a_request_error(
    messages: object, template: str | None, options: dict[str, object], field: str, match: str
) -> None:
    with pytest.raises(RequestError, match=match) as error:
        render_chat(tokenizer(template), messages, **options)  # type: ignore[arg-type]
    assert error.value.field == field


def test_without_a_tokenizer_there_is_no_chat() -> None:
    with pytest.raises(RequestError, match="tokenizer"):
        render_chat(None, HELLO)


def test_llm_chat_answers_one_conversation_or_several() -> None:
    made = tokenizer(WITHOUT_BOS)
    with tiny.llm(tokenizer=made) as llm:
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        (single,) = llm.chat(HELLO, params, use_tqdm=False)
        both = llm.chat([HELLO, [{"role": "user", "content": "bye"}]], params, use_tqdm=False)
        assert single.prompt_token_ids == render_chat(made, HELLO)
        assert single.outputs[0].token_ids == tiny.greedy(single.prompt_token_ids, 4)
        assert both[0].outputs == single.outputs
        assert len(both) == 2
        with pytest.raises(RequestError):
            llm.chat([], params)
        tiny.check_idle(llm)
