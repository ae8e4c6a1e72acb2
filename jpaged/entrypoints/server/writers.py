"""Writers: RequestOutputs as the bytes of one API's answer, streamed or whole.

The way of every streamed token, so chunks are put together from pieces made once per request.
"""

import abc
import collections
import json
import time
from collections.abc import Callable, Sequence

from jpaged.engine.outputs import CompletionOutput, RequestOutput
from jpaged.entrypoints.server.logprobs import CompletionLogprobs, chat_logprobs

DONE = b"data: [DONE]\n\n"

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode
# Some clients end a line, and with it an event, at these too.
_LINE_ENDS = {ord(c): f"\\u{ord(c):04x}" for c in "\x85\u2028\u2029"}


def encode(value: object) -> str:
    """JSON in one line, whatever a client takes for a line's end."""
    text = _encode(value)
    return text if text.isascii() else text.translate(_LINE_ENDS)


class Writer(abc.ABC):
    """Writes the answer to one HTTP request, whose prompts are `n` samples each.

    Streamed: `events` for each output, then `last_events`. Whole: `body` alone.
    """

    def __init__(self, request_id: str, n: int) -> None:
        self.request_id = request_id
        self._n = n
        self._prompt_tokens: dict[int, int] = {}
        self._cached_tokens = 0
        # Of each choice, as far as told.
        self._tokens: collections.Counter[int] = collections.Counter()

    def events(self, prompt_index: int, output: RequestOutput) -> bytes:
        """The chunks for what a DELTA output says of prompt number `prompt_index`; may be empty."""
        if prompt_index not in self._prompt_tokens:
            self._begin(prompt_index, output)
        chunks = []
        for part in output.outputs:
            index = prompt_index * self._n + part.index
            self._tokens[index] += len(part.token_ids)
            chunks.append(self._chunk(index, part))
        return "".join(chunks).encode()

    def last_events(self) -> bytes:
        """What ends the stream."""
        return DONE

    def param(self, field: str | None) -> str | None:
        """The name that the client knows for a field of the engine's request."""
        return "prompt" if field == "prompt_token_ids" else field

    @abc.abstractmethod
    def body(self, outputs: Sequence[RequestOutput]) -> dict[str, object]:
        """The whole answer from the final output of each prompt."""

    @abc.abstractmethod
    def _chunk(self, index: int, part: CompletionOutput) -> str:
        """The events for one sample's new text; "" if there is nothing to tell."""

    def longest(self, prompt_index: int) -> int:
        """Tokens told so far of the longest sample of a prompt."""
        first = prompt_index * self._n
        return max(self._tokens[index] for index in range(first, first + self._n))

    def _begin(self, prompt_index: int, output: RequestOutput) -> None:
        """Sees the first output of each prompt."""
        self._prompt_tokens[prompt_index] = len(output.prompt_token_ids)
        self._cached_tokens += output.num_cached_tokens or 0

    def _take_in(self, outputs: Sequence[RequestOutput]) -> None:
        """Sees the final output of each prompt, for a whole answer."""
        for i, output in enumerate(outputs):
            self._begin(i, output)
            for part in output.outputs:
                self._tokens[i * self._n + part.index] = len(part.token_ids)

    def _usage(self) -> dict[str, object]:
        prompt, completion = sum(self._prompt_tokens.values()), self._tokens.total()
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": self._cached_tokens},
        }


class OpenAIWriter(Writer):
    """What the two OpenAI forms share: the head of each chunk and the usage at the end."""

    object_name = ""
    chunk_name = ""

    def __init__(self, request_id: str, n: int, *, model: str, include_usage: bool) -> None:
        super().__init__(request_id, n)
        self._model = model
        self._created = int(time.time())
        self._include_usage = include_usage
        head = encode(self._head(self.chunk_name))[:-1]
        self._before = f'data: {head},"choices":[{{"index":'
        self._after = '}],"usage":null}\n\n' if include_usage else "}]}\n\n"

    def _head(self, name: str) -> dict[str, object]:
        return {
            "id": self.request_id,
            "object": name,
            "created": self._created,
            "model": self._model,
        }

    def body(self, outputs: Sequence[RequestOutput]) -> dict[str, object]:
        self._take_in(outputs)
        choices = [
            {
                **self._choice(i * self._n + part.index, part),
                "finish_reason": part.finish_reason,
                "stop_reason": part.stop_reason,
            }
            for i, output in enumerate(outputs)
            for part in output.outputs
        ]
        return {
            **self._head(self.object_name),
            "choices": choices,
            "usage": self._usage(),
        }

    def last_events(self) -> bytes:
        if not self._include_usage:
            return DONE
        chunk = {**self._head(self.chunk_name), "choices": [], "usage": self._usage()}
        return f"data: {encode(chunk)}\n\n".encode() + DONE

    @abc.abstractmethod
    def _choice(self, index: int, part: CompletionOutput) -> dict[str, object]:
        """One choice of a whole answer, without how it ended."""

    def _event(self, index: int, content: str, logprobs: str, part: CompletionOutput) -> str:
        """One chunk: `content` and `logprobs` are JSON."""
        if part.finish_reason is None:
            end = '"finish_reason":null'
        else:
            stop = encode(part.stop_reason)
            end = f'"finish_reason":"{part.finish_reason}","stop_reason":{stop}'
        return f'{self._before}{index},{content},"logprobs":{logprobs},{end}{self._after}'


class CompletionWriter(OpenAIWriter):
    """POST /v1/completions. `decode` makes text of a prompt that is to be said first."""

    object_name = chunk_name = "text_completion"

    def __init__(
        self,
        request_id: str,
        n: int,
        *,
        model: str,
        include_usage: bool,
        decode: Callable[[list[int]], str] | None = None,
    ) -> None:
        super().__init__(request_id, n, model=model, include_usage=include_usage)
        self._decode = decode
        # What each choice has yet to say before its own text.
        self._echoes: dict[int, str] = {}
        self._logprobs: dict[int, CompletionLogprobs] = {}

    def _begin(self, prompt_index: int, output: RequestOutput) -> None:
        super()._begin(prompt_index, output)
        if self._decode is not None:
            echo = output.prompt
            if echo is None:
                echo = self._decode(output.prompt_token_ids)
            first = prompt_index * self._n
            self._echoes.update(dict.fromkeys(range(first, first + self._n), echo))

    def _choice(self, index: int, part: CompletionOutput) -> dict[str, object]:
        text = self._echoes.pop(index, "") + part.text
        return {"index": index, "text": text, "logprobs": self._logprobs_of(index, part)}

    def _chunk(self, index: int, part: CompletionOutput) -> str:
        text = part.text
        if self._echoes:
            text = self._echoes.pop(index, "") + text
        if not text and part.finish_reason is None and not part.logprobs:
            return ""
        logprobs = "null" if part.logprobs is None else encode(self._logprobs_of(index, part))
        return self._event(index, f'"text":{encode(text)}', logprobs, part)

    def _logprobs_of(self, index: int, part: CompletionOutput) -> dict[str, object] | None:
        if part.logprobs is None:
            return None
        form = self._logprobs.setdefault(index, CompletionLogprobs())
        return form.take(part.token_ids, part.logprobs)


class ChatWriter(OpenAIWriter):
    """POST /v1/chat/completions. `num_top` log-probabilities are told beside each token's own."""

    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def __init__(
        self, request_id: str, n: int, *, model: str, include_usage: bool, num_top: int
    ) -> None:
        super().__init__(request_id, n, model=model, include_usage=include_usage)
        self._num_top = num_top
        self._begun: set[int] = set()

    def param(self, field: str | None) -> str | None:
        return "messages" if field in ("prompt", "prompt_token_ids") else field

    def _choice(self, index: int, part: CompletionOutput) -> dict[str, object]:
        logprobs = None
        if part.logprobs is not None:
            logprobs = chat_logprobs(part.token_ids, part.logprobs, self._num_top)
        message = {"role": "assistant", "content": part.text, "refusal": None}
        return {"index": index, "message": message, "logprobs": logprobs}

    def _chunk(self, index: int, part: CompletionOutput) -> str:
        first = ""
        if index not in self._begun:
            self._begun.add(index)
            role = '"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null'
            first = f"{self._before}{index},{role}{self._after}"
        if not part.text and part.finish_reason is None and not part.logprobs:
            return first
        logprobs = "null"
        if part.logprobs:
            logprobs = encode(chat_logprobs(part.token_ids, part.logprobs, self._num_top))
        delta = f'"delta":{{"content":{encode(part.text)}}}' if part.text else '"delta":{}'
        return first + self._event(index, delta, logprobs, part)


class GenerateWriter(Writer):
    """POST /generate. `prompt` is what was sent."""

    def __init__(self, request_id: str, n: int, *, prompt: str | list[int]) -> None:
        super().__init__(request_id, n)
        self._prompt = prompt
        self._before = f'data: {{"request_id":{encode(request_id)},"outputs":['

    def param(self, field: str | None) -> str | None:
        known = super().param(field)
        beside = (None, "prompt", "priority", "timeout", "cache_salt")
        return known if known in beside else f"sampling_params.{known}"

    def body(self, outputs: Sequence[RequestOutput]) -> dict[str, object]:
        self._take_in(outputs)
        return {
            "request_id": self.request_id,
            "prompt": self._prompt,
            "outputs": [_generated(part) for part in outputs[0].outputs],
            "usage": self._usage(),
        }

    def last_events(self) -> bytes:
        last = {
            "request_id": self.request_id,
            "prompt": self._prompt,
            "outputs": [],
            "usage": self._usage(),
        }
        return f"data: {encode(last)}\n\n".encode() + DONE

    def _chunk(self, index: int, part: CompletionOutput) -> str:
        return f"{self._before}{encode(_generated(part))}]}}\n\n"


def _generated(part: CompletionOutput) -> dict[str, object]:
    result: dict[str, object] = {
        "index": part.index,
        "text": part.text,
        "token_ids": part.token_ids,
        "finish_reason": part.finish_reason,
    }
    if part.logprobs is not None:
        form = CompletionLogprobs()
        result["logprobs"] = form.take(part.token_ids, part.logprobs)
    return result
