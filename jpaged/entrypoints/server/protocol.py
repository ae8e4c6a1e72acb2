"""Bodies of requests: their fields, and the SamplingParams they mean.

Types are checked here, values by SamplingParams, so that there is one owner of each limit.
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Self, TypedDict

import pydantic

from jpaged.engine.input_processor import Prompt
from jpaged.entrypoints.server.fields import (
    CHAT_NEUTRAL,
    COMPLETION_NEUTRAL,
    supported_fields,
)
from jpaged.errors import RequestError
from jpaged.sampling.params import MAX_LOGPROBS, RequestOutputKind, SamplingParams

# Prompts times samples of one HTTP request.
MAX_CHOICES = 2048

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")

# Where pydantic would list each alternative's own complaint.
_EXPECTED = {
    "prompt": "a string, a list of strings, a list of token ids or a list of lists of token ids",
    "stop": "a string or a list of strings",
    "messages": "a list of messages, each with a role and a content",
    "sampling_params": "an object",
}


class _First(pydantic.FailFast):
    """One complaint is enough: a million wrong items would yield a million."""

    __hash__ = object.__hash__  # unions of types want it


TokenIds = Annotated[list[int], _First()]
Texts = Annotated[list[str], _First()]


class Scheduling(TypedDict):
    """How a request is scheduled."""

    priority: int
    timeout: float | None


class Body(pydantic.BaseModel):
    """A JSON body: strict types; null means the default."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True)
    # None: any other field is refused.
    neutral: ClassVar[Mapping[str, tuple[object, ...]] | None] = None

    @classmethod
    def parse(cls, body: Mapping[str, object]) -> Self:
        """The checked body. RequestError naming the first field at fault."""
        known = frozenset(cls.model_fields)
        try:
            return cls.model_validate(supported_fields(body, known, cls.neutral))
        except pydantic.ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            location = first["loc"]
            field = str(location[0]) if location else "body"
            if first["type"] == "missing" and len(location) == 1:
                raise RequestError(f"{field} is missing", field=field) from None
            if field in _EXPECTED:
                message = f"{field} must be {_EXPECTED[field]}"
            else:
                path = ".".join(str(part) for part in location)
                message = f"{path}: {first['msg'][:200]}"
            raise RequestError(message, field=field) from None


class RequestBody(Body):
    """What every request to generate may say of its scheduling.

    `timeout` is in seconds, time in the queue included. Requests with different `cache_salt` share no
    pages. `priority` is lowest first, and needs an engine with that policy.
    """

    priority: int | None = None
    timeout: float | None = None
    cache_salt: str | None = None

    def salted(self, prompt: Prompt) -> Prompt:
        """The prompt with the body's salt."""
        if self.cache_salt is None:
            return prompt
        key = "prompt" if isinstance(prompt, str) else "prompt_token_ids"
        return {key: prompt, "cache_salt": self.cache_salt}

    def scheduling(self) -> Scheduling:
        """Arguments of `AsyncLLMEngine.generate`."""
        return {"priority": self.priority or 0, "timeout": self.timeout}


class StreamOptions(pydantic.BaseModel):
    """`include_usage` asks for one more chunk with the usage."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True)
    include_usage: bool | None = None
    # OpenAI pads chunks against eavesdroppers; there is nothing to pad here.
    include_obfuscation: bool | None = None


class OpenAIBody(RequestBody):
    """What both OpenAI endpoints take, and the vLLM extras."""

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stop: str | Texts | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    skip_reading_prefix_cache: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def includes_usage(self) -> bool:
        """Whether the stream ends with a chunk of usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def _params(self, **special: object) -> SamplingParams:
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options goes with stream=true", field="stream_options")
        names = (
            "n",
            "temperature",
            "top_p",
            "top_k",
            "seed",
            "max_tokens",
            "stop",
            "stop_token_ids",
            "ignore_eos",
            "include_stop_str_in_output",
            "skip_special_tokens",
            "skip_reading_prefix_cache",
        )
        given = {n: getattr(self, n) for n in names if getattr(self, n) is not None}
        return SamplingParams(**{**given, **special})


class CompletionBody(OpenAIBody):
    """POST /v1/completions."""

    neutral: ClassVar[Mapping[str, tuple[object, ...]] | None] = COMPLETION_NEUTRAL
    prompt: str | Texts | TokenIds | Annotated[list[TokenIds], _First()]
    logprobs: int | None = None
    echo: bool | None = None

    def params(self) -> SamplingParams:
        """What it asks of the sampler. RequestError naming the field at fault."""
        if self.echo and self.logprobs is not None:
            raise RequestError(
                "echo with logprobs needs the prompt's log-probabilities, which this server does "
                "not compute; send one of them",
                field="echo",
            )
        return self._params(logprobs=self.logprobs)

    def prompts(self) -> list[str | TokenIds]:
        """The prompts, one or several. RequestError if there are none or too many."""
        prompt = self.prompt
        prompts: list[str | TokenIds]
        if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
            prompts = [prompt]
        else:
            prompts = list(prompt)  # type: ignore[arg-type]  # strings or lists of ids
        if not prompts or not all(prompts):
            raise RequestError("prompt must not be empty", field="prompt")
        if len(prompts) * (self.n or 1) > MAX_CHOICES:
            raise RequestError(
                f"prompt: {len(prompts)} prompts with n={self.n or 1} are more than "
                f"{MAX_CHOICES} answers in one request",
                field="prompt",
            )
        return prompts


class Message(pydantic.BaseModel):
    """One message; what a template may also want (`name`, `tool_calls`, ...) is passed on to it."""

    model_config = pydantic.ConfigDict(extra="allow", strict=True)
    role: str
    content: str | list[dict[str, object]] | None = None

    def for_template(self, index: int) -> dict[str, object]:
        """The message as chat templates take it: content a string."""
        where = f"messages[{index}]"
        if self.role not in _ROLES:
            raise RequestError(
                f"{where}.role must be one of {', '.join(_ROLES)}; got {self.role[:64]!r}",
                field="messages",
            )
        extra = {k: v for k, v in (self.model_extra or {}).items() if v is not None}
        content = self.content
        if content is None:
            if self.role != "assistant" or not extra.get("tool_calls"):
                raise RequestError(f"{where}.content is missing", field="messages")
            content = ""
        if not isinstance(content, str):
            content = "\n".join(_part_text(part, where) for part in content)
        return {"role": self.role, "content": content, **extra}


def _part_text(part: Mapping[str, object], where: str) -> str:
    text = part.get("text")
    if part.get("type") != "text" or not isinstance(text, str):
        raise RequestError(
            f"{where}.content may hold parts of type text only; got {str(part.get('type'))[:64]!r}",
            field="messages",
        )
    return text


class ChatBody(OpenAIBody):
    """POST /v1/chat/completions."""

    neutral: ClassVar[Mapping[str, tuple[object, ...]] | None] = CHAT_NEUTRAL
    messages: Annotated[list[Message], _First()]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, object] | None = None

    def params(self) -> SamplingParams:
        """What it asks of the sampler. RequestError naming the field at fault."""
        top = self.top_logprobs
        if top is not None and not 0 <= top <= MAX_LOGPROBS:
            raise RequestError(
                f"top_logprobs must be 0 to {MAX_LOGPROBS}, got {top}", field="top_logprobs"
            )
        if top and not self.logprobs:
            raise RequestError("top_logprobs goes with logprobs=true", field="top_logprobs")
        most, name = self.max_tokens, "max_tokens"
        if self.max_completion_tokens is not None:
            most, name = self.max_completion_tokens, "max_completion_tokens"
        if most is not None and most < 1:
            raise RequestError(f"{name} must be at least 1, got {most}", field=name)
        return self._params(max_tokens=most, logprobs=(top or 0) if self.logprobs else None)

    def template_messages(self) -> list[dict[str, object]]:
        """The messages as chat templates take them."""
        if not self.messages:
            raise RequestError("messages must not be empty", field="messages")
        return [message.for_template(i) for i, message in enumerate(self.messages)]


class GenerateBody(RequestBody):
    """POST /generate."""

    prompt: str | TokenIds
    sampling_params: dict[str, object] | None = None
    stream: bool | None = None

    def params(self) -> SamplingParams:
        """The given SamplingParams; RequestError also for a field it does not have."""
        given = self.sampling_params or {}
        allowed = [f for f in SamplingParams.__dataclass_fields__ if f != "output_kind"]
        for name in given:
            if name not in allowed:
                raise RequestError(
                    f"{name[:64]!r} is not a sampling parameter; there are {', '.join(allowed)}",
                    field=f"sampling_params.{name[:64]}",
                )
        try:
            return SamplingParams(**given)  # type: ignore[arg-type]  # checked there
        except RequestError as error:
            field = f"sampling_params.{error.field}"
            raise RequestError(str(error), field=field, code=error.code) from None


def streamed(params: SamplingParams) -> SamplingParams:
    """The same, told piece by piece."""
    return params.replace(output_kind=RequestOutputKind.DELTA)
