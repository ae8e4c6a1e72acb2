"""Prompts and parameters of a request, checked and tokenised: all that can be refused is refused here.

Touches no engine state, so that it may run in any thread.
"""

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from typing import Protocol, TypeAlias

import numpy as np

from jpaged.core.request import Request
from jpaged.errors import RequestError
from jpaged.sampling.params import SamplingParams
from jpaged.sampling.row_params import SequenceSampling

Prompt: TypeAlias = str | Sequence[int] | Mapping[str, object]


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that is used here."""

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]: ...


@dataclasses.dataclass(frozen=True, slots=True)
class EngineRequest:
    """A request that can be served: `params.max_tokens` is set and fits, ids are in the vocabulary.

    Times are of `time.monotonic()`. Requests with different salts share no pages.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival_time: float
    priority: int = 0
    deadline: float | None = None
    cache_salt: str | None = None

    def samples(
        self, sequences: Sequence[int], *, seed: int, eos_token_ids: frozenset[int]
    ) -> list[Request]:
        """The request as the scheduler sees it: one for each of its n samples, numbered `sequences`."""
        params = self.params
        assert params.max_tokens is not None, "InputProcessor sets max_tokens"
        eos = frozenset() if params.ignore_eos else eos_token_ids
        salt = self.cache_salt
        return [
            Request(
                sequence=sequence,
                prompt_token_ids=self.prompt_token_ids,
                max_tokens=params.max_tokens,
                stop_token_ids=frozenset(params.stop_ids),
                eos_token_ids=eos,
                ends_by_length=not (eos or params.stop_ids or params.stop_strings),
                sampling=SequenceSampling(params=params, seed=seed, sample=index),
                priority=self.priority,
                deadline=self.deadline,
                extras=() if salt is None else (("cache_salt", salt.encode()),),
                reads_cache=not params.skip_reading_prefix_cache,
                leader=sequences[0] if params.n > 1 else None,
            )
            for index, sequence in enumerate(sequences)
        ]


class InputProcessor:
    """Checks requests against one model."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        vocab_size: int,
        max_model_len: int,
        has_priorities: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._has_priorities = has_priorities
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len

    def process(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        priority: int = 0,
        timeout: float | None = None,
    ) -> EngineRequest:
        """The request, ready to be queued. Raises RequestError naming the field at fault."""
        if not isinstance(request_id, str) or not request_id:
            raise RequestError("request_id must be a non-empty string", field="request_id")
        if not isinstance(params, SamplingParams):
            raise RequestError(
                f"sampling_params must be SamplingParams, got {type(params).__name__}",
                field="sampling_params",
            )
        self._check_priority(priority)
        _check_timeout(timeout)
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
        now = time.monotonic()
        return EngineRequest(
            request_id=request_id,
            prompt=text,
            prompt_token_ids=ids,
            params=params.replace(max_tokens=max_tokens),
            arrival_time=now,
            priority=priority,
            deadline=None if timeout is None else now + timeout,
            cache_salt=_cache_salt(prompt),
        )

    def _check_priority(self, priority: object) -> None:
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise RequestError(
                f"priority must be an integer, got {type(priority).__name__}", field="priority"
            )
        if priority and not self._has_priorities:
            raise RequestError(
                f"priority {priority} needs an engine with scheduling_policy='priority'; this one "
                "serves first come, first served",
                field="priority",
            )

    def _prompt_ids(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """Text, where it was given, and ids of a prompt in any of its forms."""
        if isinstance(prompt, Mapping):
            given = [key for key in ("prompt", "prompt_token_ids") if prompt.get(key) is not None]
            unknown = prompt.keys() - {"prompt", "prompt_token_ids", "cache_salt"}
            if unknown or not given:
                raise RequestError(
                    "a prompt given as a dict must have the key prompt or prompt_token_ids, and may "
                    "have cache_salt; got "
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
            _check_text(prompt, "prompt")
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


def _check_timeout(timeout: object) -> None:
    if timeout is None:
        return
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float, np.number)):
        raise RequestError(
            f"timeout must be a number of seconds, got {type(timeout).__name__}", field="timeout"
        )
    try:
        is_finite = 0 < float(timeout) < math.inf
    except OverflowError:
        is_finite = False
    if not is_finite:
        raise RequestError(
            f"timeout must be above 0 seconds and finite, got {timeout!r:.20}", field="timeout"
        )


def _cache_salt(prompt: Prompt) -> str | None:
    """The salt of a prompt given as a dict."""
    salt = prompt.get("cache_salt") if isinstance(prompt, Mapping) else None
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise RequestError(
            f"cache_salt must be a non-empty string, got {salt!r}", field="cache_salt"
        )
    if salt is not None:
        _check_text(salt, "cache_salt")
    return salt


def _check_text(text: str, field: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{field} holds half of a surrogate pair, which is no character, at {error.start}",
            field=field,
        ) from error
