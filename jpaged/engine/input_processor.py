"""Prompts and parameters of a request, checked and tokenised: all that can be refused is refused here.

Touches no engine state, so that it may run in any thread.
"""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Protocol, TypeAlias

import numpy as np

from jpaged.errors import RequestError
from jpaged.sampling.params import SamplingParams

Prompt: TypeAlias = str | Sequence[int] | Mapping[str, object]


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that is used here."""

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]: ...


@dataclasses.dataclass(frozen=True, slots=True)
class EngineRequest:
    """A request that can be served: `params.max_tokens` is set and fits, ids are in the vocabulary."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival_time: float


class InputProcessor:
    """Checks requests against one model."""

    def __init__(self, tokenizer: Tokenizer | None, *, vocab_size: int, max_model_len: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len

    def process(self, request_id: str, prompt: Prompt, params: SamplingParams) -> EngineRequest:
        """The request, ready to be queued. Raises RequestError naming the field at fault."""
        if not isinstance(request_id, str) or not request_id:
            raise RequestError("request_id must be a non-empty string", field="request_id")
        if not isinstance(params, SamplingParams):
            raise RequestError(
                f"sampling_params must be SamplingParams, got {type(params).__name__}",
                field="sampling_params",
            )
        text, ids = self._prompt_ids(prompt)
        if not ids:
            raise RequestError("prompt must have at least one token", field="prompt")
        room = self._max_model_len - len(ids)
        if room < 1:
            raise RequestError(
                f"prompt has {len(ids)} tokens; with at least one token of output it must fit "
                f"max_model_len {self._max_model_len}",
                field="prompt",
                code="context_length_exceeded",
            )
        for token in params.stop_ids:
            if token >= self._vocab_size:
                raise RequestError(
                    f"stop_token_ids must be below the vocabulary's size {self._vocab_size}, "
                    f"got {token}",
                    field="stop_token_ids",
                )
        if params.stop_strings and self._tokenizer is None:
            raise RequestError("stop needs a tokenizer, and this engine has none", field="stop")
        if params.logprobs is not None and params.logprobs > self._vocab_size:
            raise RequestError(
                f"logprobs must be at most the vocabulary's size {self._vocab_size}",
                field="logprobs",
            )
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        return EngineRequest(
            request_id=request_id,
            prompt=text,
            prompt_token_ids=ids,
            params=params.replace(max_tokens=max_tokens),
            arrival_time=time.monotonic(),
        )

    def _prompt_ids(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """Text, where it was given, and ids of a prompt in any of its forms."""
        if isinstance(prompt, Mapping):
            given = [key for key in ("prompt", "prompt_token_ids") if prompt.get(key) is not None]
            unknown = prompt.keys() - {"prompt", "prompt_token_ids"}
            if unknown or not given:
                raise RequestError(
                    "a prompt given as a dict must have the key prompt or prompt_token_ids, got "
                    f"{', '.join(map(repr, prompt)) or 'no key'}",
                    field="prompt",
                )
            if "prompt_token_ids" in given:
                text = prompt.get("prompt")
                ids = self._check_ids(prompt["prompt_token_ids"])
                return (text if isinstance(text, str) else None), ids
            return self._prompt_ids(prompt["prompt"])  # type: ignore[arg-type]  # checked there
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise RequestError(
                    "prompt is text, and this engine has no tokenizer: give prompt_token_ids",
                    field="prompt",
                )
            return prompt, list(self._tokenizer.encode(prompt))
        return None, self._check_ids(prompt)

    def _check_ids(self, ids: object) -> list[int]:
        """Token ids as Python integers, each in the vocabulary."""
        try:
            array = np.asarray(ids)
        except (TypeError, ValueError) as error:
            raise RequestError(
                "prompt_token_ids must be one list of integers", field="prompt_token_ids"
            ) from error
        if array.size == 0:
            return []
        if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
            raise RequestError(
                "prompt_token_ids must be one list of integers, got "
                f"{type(ids).__name__} of shape {array.shape}, {array.dtype}",
                field="prompt_token_ids",
            )
        out_of_range = array[(array < 0) | (array >= self._vocab_size)]
        if out_of_range.size:
            raise RequestError(
                f"prompt_token_ids must be 0 to {self._vocab_size - 1}, got {out_of_range[0]}",
                field="prompt_token_ids",
            )
        result: list[int] = array.tolist()
        return result
