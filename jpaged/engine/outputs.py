"""What a caller gets back: RequestOutput and its parts. Plain data; imports no jax."""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of one token at one position.

    `rank` is 1 for the most likely token; `decoded_token` is the token's text by itself.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclasses.dataclass(slots=True)
class CompletionOutput:
    """One sample of a request.

    `finish_reason` is None while running, then "stop" (end of sequence, stop string or stop id),
    "length", "abort" or "error". `stop_reason` is the stop string or stop id that matched, "deadline"
    where the request's timeout ended it, None for the model's own end of sequence.
    `token_ids` includes the end-of-sequence or stop token.
    `logprobs[i]` maps token id to Logprob for `token_ids[i]`.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    weights_version: int = 0

    def finished(self) -> bool:
        """Whether this sample has ended."""
        return self.finish_reason is not None


@dataclasses.dataclass(slots=True)
class RequestMetrics:
    """Times of one request in seconds of `time.monotonic()`, None until they happen."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0


@dataclasses.dataclass(slots=True)
class RequestOutput:
    """The state of one request: `outputs[i]` is sample i.

    `num_cached_tokens` are the tokens of the prompt that were in pages when the request first ran, None
    before its first token.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    num_cached_tokens: int | None = None
