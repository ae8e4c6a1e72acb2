"""New tokens to RequestOutputs: text, stop strings, log-probabilities and how much of each a caller wants.

Knows nothing of pages or steps. Stop strings are found here, since only here is text; the engine
tells the scheduler.
"""

import dataclasses
import logging
import time

from jpaged.core.step_plan import SampledToken
from jpaged.engine.input_processor import EngineRequest
from jpaged.engine.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from jpaged.sampling.detokenizer import Decoder, Detokenizer
from jpaged.sampling.params import RequestOutputKind
from jpaged.sampling.stops import StopStrings

logger = logging.getLogger("jpaged")


class SampleState:
    """One sample of a request, as far as it has come."""

    def __init__(self, request: EngineRequest, index: int, decoder: Decoder | None) -> None:
        params = request.params
        self.index = index
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.token_ids: list[int] = []
        self.cumulative_logprob = 0.0
        self.weights_version = 0
        self.changed = False
        self._decoder = decoder
        self._keep_stop = params.include_stop_str_in_output
        self._logprobs: list[dict[int, Logprob]] | None = (
            [] if params.logprobs is not None else None
        )
        self._stops = StopStrings(params.stop_strings, include=params.include_stop_str_in_output)
        # Text is made a token at a time only where somebody looks at it before the end.
        self._eager = bool(params.stop_strings) or (
            params.output_kind is not RequestOutputKind.FINAL_ONLY
        )
        self._detokenizer = (
            Detokenizer(
                decoder,
                request.prompt_token_ids,
                skip_special_tokens=params.skip_special_tokens,
            )
            if decoder is not None
            else None
        )
        self._text = ""
        # What a DELTA output has told already.
        self._sent_chars = 0
        self._sent_tokens = 0

    def push(self, sampled: SampledToken, weights_version: int, *, is_stop: bool) -> str | None:
        """Takes in a token; the stop string that it completes, if any.

        `is_stop` says that the token itself ends the sample; such a token has no part in the text,
        unless stop strings are to be included.
        """
        self.changed = True
        self.token_ids.append(sampled.token)
        self.cumulative_logprob += sampled.logprob
        self.weights_version = weights_version
        if self._logprobs is not None:
            self._logprobs.append(self._token_logprobs(sampled))
        if self._detokenizer is None or (is_stop and not self._keep_stop):
            return None
        if not self._eager:
            self._detokenizer.hold(sampled.token)
            return None
        return self._append(self._detokenizer.push(sampled.token))

    def finish(self, reason: str, stop_reason: int | str | None) -> None:
        """Ends the sample; text that was held back is let go, unless a stop string is in it.

        Where that text cannot be made, the reason is "error".
        """
        self.changed = True
        self.finish_reason = reason
        self.stop_reason = stop_reason
        if self._detokenizer is None or (reason == "stop" and isinstance(stop_reason, str)):
            return
        try:
            stop = self._append(self._detokenizer.flush())
        except Exception as error:  # this request's fault alone
            logger.error("a request failed: the end of its text could not be made", exc_info=error)
            self.finish_reason, self.stop_reason = "error", None
            return
        if stop is not None:
            self.finish_reason, self.stop_reason = "stop", stop

    def output(self, kind: RequestOutputKind) -> CompletionOutput:
        """The sample so far, or what is new of it."""
        self.changed = False
        chars = len(self._text)
        if self.finish_reason is None:
            chars = self._stops.num_certain(self._text)
        first_char = first_token = 0
        if kind is RequestOutputKind.DELTA:
            first_char, first_token = self._sent_chars, self._sent_tokens
            self._sent_chars, self._sent_tokens = chars, len(self.token_ids)
        return CompletionOutput(
            index=self.index,
            text=self._text[first_char:chars],
            token_ids=self.token_ids[first_token:],
            cumulative_logprob=self.cumulative_logprob,
            logprobs=None if self._logprobs is None else self._logprobs[first_token:],
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            weights_version=self.weights_version,
        )

    def _append(self, delta: str) -> str | None:
        """Adds text; cuts it at a stop string, and names it."""
        if not delta:
            return None
        self._text += delta
        match = self._stops.find(self._text, len(delta))
        if match is None:
            return None
        self._text = self._text[: match.length]
        return match.stop

    def _token_logprobs(self, sampled: SampledToken) -> dict[int, Logprob]:
        """The sampled token first, then the most likely ones."""
        entries = {sampled.token: self._logprob(sampled.token, sampled.logprob, sampled.rank)}
        for rank, (token, logprob) in enumerate(
            zip(sampled.top_ids, sampled.top_logprobs, strict=True), start=1
        ):
            entries.setdefault(token, self._logprob(token, logprob, rank))
        return entries

    def _logprob(self, token: int, logprob: float, rank: int) -> Logprob:
        text = None
        if self._decoder is not None:
            text = self._decoder.decode([token], skip_special_tokens=False)
        return Logprob(logprob=logprob, rank=rank, decoded_token=text)


@dataclasses.dataclass(eq=False)
class RequestState:
    """A request and its samples; `sequences[i]` is the scheduler's number of sample i."""

    request: EngineRequest
    sequences: list[int]
    samples: list[SampleState]
    metrics: RequestMetrics
    num_cached_tokens: int | None = None

    @classmethod
    def create(
        cls, request: EngineRequest, sequences: list[int], decoder: Decoder | None
    ) -> "RequestState":
        """The state of a request none of whose tokens are made."""
        return cls(
            request=request,
            sequences=sequences,
            samples=[SampleState(request, i, decoder) for i in range(len(sequences))],
            metrics=RequestMetrics(arrival_time=request.arrival_time),
        )

    @property
    def finished(self) -> bool:
        """Whether every sample has ended."""
        return all(sample.finish_reason is not None for sample in self.samples)

    def output(self) -> RequestOutput | None:
        """What the caller is to be told now; None where it wants to hear of the end only."""
        kind = self.request.params.output_kind
        finished = self.finished
        if finished:
            self.metrics.finished_time = time.monotonic()
        elif kind is RequestOutputKind.FINAL_ONLY:
            return None
        samples = self.samples
        if kind is RequestOutputKind.DELTA:
            samples = [sample for sample in samples if sample.changed]
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=self.request.prompt,
            prompt_token_ids=self.request.prompt_token_ids,
            outputs=[sample.output(kind) for sample in samples],
            finished=finished,
            metrics=self.metrics,
            num_cached_tokens=self.num_cached_tokens,
        )


class BackendDecoder:
    """A fast tokenizer's own decoder, without transformers' work around each call."""

    def __init__(self, tokenizer: object) -> None:
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self._tokenizer = tokenizer

    def decode(
        self,
        token_ids: list[int],
        *,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool = False,
    ) -> str:
        """The text of `token_ids`, never cleaned up."""
        if self._backend is not None:
            text = self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        else:
            text = self._tokenizer.decode(  # type: ignore[attr-defined]  # any tokenizer has it
                token_ids,
                skip_special_tokens=skip_special_tokens,
                clean_up_tokenization_spaces=clean_up_tokenization_spaces,
            )
        return str(text)
