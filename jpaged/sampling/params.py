"""SamplingParams: what a request may ask of the sampler, checked when it is made.

Imports no jax. Names and meanings follow vLLM's SamplingParams and the OpenAI API.
"""

import dataclasses
import enum
import math
import numbers
from collections.abc import Sequence

from jpaged.errors import RequestError

MAX_N = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 1024
MAX_STOP_TOKEN_IDS = 1024


class RequestOutputKind(enum.Enum):
    """What each streamed RequestOutput holds: all text so far, only what is new, or only the end."""

    CUMULATIVE = "cumulative"
    DELTA = "delta"
    FINAL_ONLY = "final_only"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose the tokens of one request.

    Every field is checked at construction; a wrong one raises `RequestError` naming the field and
    what is allowed.

    Attributes:
        n: number of samples, 1 to 128.
        temperature: 0 is greedy; otherwise logits are divided by it. Finite, >= 0.
        top_k: keep the k most likely tokens, ties broken by lower id; 0 or -1 keeps all.
        top_p: keep the smallest set of tokens whose probability is at least top_p; in (0, 1].
        seed: None draws a fresh one; the tokens of sample i are a function of (seed, i, position).
        max_tokens: at most this many new tokens; None is as many as fit in the context. It is
            clipped to what fits.
        stop: strings that end the sample; the text ends before the match.
        stop_token_ids: token ids that end the sample, beside the model's end-of-sequence ids.
        ignore_eos: go on past the model's end-of-sequence ids.
        include_stop_str_in_output: keep the matched stop string in the text.
        logprobs: None, or how many of the most likely tokens to report per position, 0 to 20; the
            sampled token is always reported. Values are log-softmax of the model's own logits.
        skip_special_tokens: leave special tokens out of the text.
        skip_reading_prefix_cache: compute the whole prompt, though earlier requests have left pages of
            its beginning; its own pages are kept for later ones all the same.
        output_kind: what each streamed output holds.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    max_tokens: int | None = 16
    stop: Sequence[str] | str | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    skip_special_tokens: bool = True
    skip_reading_prefix_cache: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        self._set("n", _integer("n", self.n, 1, MAX_N))
        self._set("temperature", _real("temperature", self.temperature))
        if not self.temperature >= 0:
            raise RequestError(
                f"temperature must be at least 0, got {self.temperature}", field="temperature"
            )
        self._set("top_k", max(0, _integer("top_k", self.top_k, -1, 2**31 - 1)))
        self._set("top_p", _real("top_p", self.top_p))
        if not 0 < self.top_p <= 1:
            raise RequestError(f"top_p must be in (0, 1], got {self.top_p}", field="top_p")
        if self.seed is not None:
            self._set("seed", _integer("seed", self.seed, -(2**63), 2**64 - 1))
        if self.max_tokens is not None:
            self._set("max_tokens", _integer("max_tokens", self.max_tokens, 1, 2**31 - 1))
        if self.logprobs is not None:
            self._set("logprobs", _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS))
        self._set("stop", _stop_strings(self.stop))
        self._set("stop_token_ids", _stop_token_ids(self.stop_token_ids))
        for name in (
            "ignore_eos",
            "include_stop_str_in_output",
            "skip_special_tokens",
            "skip_reading_prefix_cache",
        ):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(
                    f"{name} must be a bool, got {type(getattr(self, name)).__name__}", field=name
                )
        if not isinstance(self.output_kind, RequestOutputKind):
            raise RequestError("output_kind must be a RequestOutputKind", field="output_kind")

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as the checked tuple."""
        return self.stop  # type: ignore[return-value]  # __post_init__ made it a tuple of str

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """`stop_token_ids` as the checked tuple."""
        return self.stop_token_ids  # type: ignore[return-value]  # made a tuple in __post_init__

    def replace(self, **changes: object) -> "SamplingParams":
        """A copy with some fields changed, checked again."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]


def _integer(name: str, value: object, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise RequestError(f"{name} must be an integer, got {type(value).__name__}", field=name)
    if not low <= int(value) <= high:
        raise RequestError(f"{name} must be {low} to {high}, got {int(value)}", field=name)
    return int(value)


def _real(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise RequestError(f"{name} must be a number, got {type(value).__name__}", field=name)
    if not math.isfinite(value):
        raise RequestError(f"{name} must be finite, got {value}", field=name)
    return float(value)


def _stop_strings(stop: object) -> tuple[str, ...]:
    if stop is None:
        return ()
    strings = (stop,) if isinstance(stop, str) else stop
    if not isinstance(strings, Sequence) or not all(isinstance(s, str) for s in strings):
        raise RequestError("stop must be a string or a list of strings", field="stop")
    if len(strings) > MAX_STOP_STRINGS:
        raise RequestError(
            f"stop must hold at most {MAX_STOP_STRINGS} strings, got {len(strings)}", field="stop"
        )
    for s in strings:
        if not 1 <= len(s) <= MAX_STOP_STRING_CHARS:
            raise RequestError(
                f"each stop string must have 1 to {MAX_STOP_STRING_CHARS} characters, got {len(s)}",
                field="stop",
            )
    return tuple(strings)


def _stop_token_ids(ids: object) -> tuple[int, ...]:
    if ids is None:
        return ()
    if isinstance(ids, str) or not isinstance(ids, Sequence):
        raise RequestError("stop_token_ids must be a list of integers", field="stop_token_ids")
    if len(ids) > MAX_STOP_TOKEN_IDS:
        raise RequestError(
            f"stop_token_ids must hold at most {MAX_STOP_TOKEN_IDS} ids, got {len(ids)}",
            field="stop_token_ids",
        )
    return tuple(_integer("stop_token_ids", i, 0, 2**31 - 1) for i in ids)
