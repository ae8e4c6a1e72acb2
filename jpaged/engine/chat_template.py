"""Chat messages to token ids, through the tokenizer's template.

A rendered template holds its own special tokens, so it is tokenised without adding any.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import jinja2

from jpaged.errors import RequestError


class ChatTokenizer(Protocol):
    """The part of a transformers tokenizer that is used here."""

    chat_template: str | None

    def apply_chat_template(self, conversation: object, **kwargs: object) -> str: ...

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]: ...


def render_chat(
    tokenizer: ChatTokenizer | None,
    messages: Sequence[Mapping[str, object]],
    *,
    chat_template: str | None = None,
    chat_template_kwargs: Mapping[str, object] | None = None,
    tools: Sequence[Mapping[str, object]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
) -> list[int]:
    """Token ids of a conversation. Raises RequestError for messages that the template refuses."""
    _check_messages(messages)
    if tokenizer is None:
        raise RequestError("messages need a tokenizer, and this engine has none", field="messages")
    if chat_template is None and not tokenizer.chat_template:
        raise RequestError(
            "messages need a chat template, and this model's tokenizer has none: "
            "send a prompt, or give chat_template",
            field="messages",
        )
    if add_generation_prompt and continue_final_message:
        raise RequestError(
            "add_generation_prompt and continue_final_message exclude each other",
            field="continue_final_message",
        )
    reserved = {"tokenize", "conversation", "tools", "return_tensors", "return_dict"}
    extra = dict(chat_template_kwargs or {})
    if reserved & extra.keys():
        raise RequestError(
            f"chat_template_kwargs must not hold {', '.join(sorted(reserved & extra.keys()))}",
            field="chat_template_kwargs",
        )
    options: dict[str, object] = {
        "chat_template": chat_template,
        "tools": list(tools) if tools else None,
        "add_generation_prompt": add_generation_prompt,
        "continue_final_message": continue_final_message,
        **extra,
    }
    try:
        text = tokenizer.apply_chat_template(list(messages), tokenize=False, **options)
    except jinja2.TemplateError as error:
        raise RequestError(
            f"the chat template refuses these messages: {error}", field="messages"
        ) from error
    except (TypeError, ValueError, KeyError) as error:
        raise RequestError(
            f"the chat template cannot be applied to these messages: {error}", field="messages"
        ) from error
    return list(tokenizer.encode(text, add_special_tokens=False))


def _check_messages(messages: object) -> None:
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise RequestError("messages must be a list of at least one message", field="messages")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(
                f"messages[{i}] must be an object with a role, a string", field="messages"
            )
