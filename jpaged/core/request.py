"""Request: one sequence of tokens on its way through the engine, and the states it can be in.

Plain state; only the scheduler changes it. Sampling parameters beyond those that end a sequence are an
opaque value here, carried for the worker.
"""

import dataclasses
import enum


class RequestStatus(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class FinishReason(enum.Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclasses.dataclass(eq=False, slots=True)
class Request:
    """One sequence (one of a request's n samples).

    Attributes:
        sequence: unique number of this sequence.
        prompt_token_ids: at least one id.
        max_tokens: most tokens to generate, at least 1, with prompt it fits max_model_len.
        stop_token_ids: ids that end the sequence and are named as its stop_reason.
        eos_token_ids: ids that end the sequence without a stop_reason; empty to ignore them.
        sampling: what the worker's sampler needs; not looked at here.
        num_computed: tokens whose K and V are in pages.
        row: place in the step's batch while running, else -1.
        last_token_on_device: the row's device state holds the last token of the sequence.
    """

    sequence: int
    prompt_token_ids: list[int]
    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    eos_token_ids: frozenset[int] = frozenset()
    sampling: object = None
    output_token_ids: list[int] = dataclasses.field(default_factory=list)
    status: RequestStatus = RequestStatus.WAITING
    num_computed: int = 0
    row: int = -1
    row_is_new: bool = False
    last_token_on_device: bool = False
    num_preemptions: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens known so far."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    def tokens(self, start: int, stop: int) -> list[int]:
        """Token ids of positions [start, stop)."""
        prompt = len(self.prompt_token_ids)
        if stop <= prompt:
            return self.prompt_token_ids[start:stop]
        if start >= prompt:
            return self.output_token_ids[start - prompt : stop - prompt]
        return self.prompt_token_ids[start:] + self.output_token_ids[: stop - prompt]
