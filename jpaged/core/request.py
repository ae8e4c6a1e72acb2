"""Request: one sequence of tokens on its way through the engine, and the states it can be in.

Plain state; only the scheduler changes it. Sampling parameters beyond those that end a sequence are an
opaque value here, carried for the worker.
"""

import dataclasses
import enum

from jpaged.core.page_keys import Extras


class RequestStatus(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class FinishReason(enum.Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclasses.dataclass(eq=False, slots=True)
class Request:
    """One sequence (one of a request's n samples).

    Attributes:
        sequence: unique number of this sequence.
        prompt_token_ids: at least one id.
        max_tokens: most tokens to generate, at least 1, with prompt it fits max_model_len.
        stop_token_ids: ids that end the sequence and are named as its stop_reason.
        eos_token_ids: ids that end the sequence without a stop_reason; empty to ignore them.
        ends_by_length: nothing can end the sequence before max_tokens.
        sampling: what the worker's sampler needs; not looked at here.
        priority: lower goes first under the priority policy.
        deadline: time, on the clock of whoever calls `Scheduler.expire`, at which it is given up.
        extras: what shapes its K and V beside tokens and weights, by kind.
        reads_cache: may begin with pages of earlier requests.
        leader: the first of several samples of a prompt, which computes the pages that they share;
            None where there is one sample.
        num_computed: tokens whose K and V are in pages once every planned step has run.
        num_pending: tokens that planned steps sample and nobody on the host knows yet.
        row: place in the step's batch while running, else -1.
        row_has_sampled: the row's device state holds, or will hold, the last token of the sequence.
        num_cached: prompt tokens that were in pages when it first ran, None before.
        page_keys: keys of its first pages, as far as they have been needed.
        num_hit: pages of others that it began to run with.
        num_registered: pages that others may find by their keys.
        arrival: place in the order of arrival.
        expected_tokens: prompt and output tokens it is expected to end with.
        last_planned: the step that last computed tokens of it.
        blocked_since: the step in which it first did not fit while it was its turn.
    """

    sequence: int
    prompt_token_ids: list[int]
    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    eos_token_ids: frozenset[int] = frozenset()
    ends_by_length: bool = False
    sampling: object = None
    priority: int = 0
    deadline: float | None = None
    extras: Extras = ()
    reads_cache: bool = True
    leader: int | None = None
    output_token_ids: list[int] = dataclasses.field(default_factory=list)
    status: RequestStatus = RequestStatus.WAITING
    num_computed: int = 0
    num_pending: int = 0
    row: int = -1
    row_has_sampled: bool = False
    num_preemptions: int = 0
    num_cached: int | None = None
    page_keys: list[bytes] = dataclasses.field(default_factory=list)
    num_hit: int = 0
    num_registered: int = 0
    arrival: int = -1
    expected_tokens: int = 0
    last_planned: int = 0
    blocked_since: int | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens known so far."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def is_follower(self) -> bool:
        """Whether another sample computes the pages of the prompt."""
        return self.leader is not None and self.leader != self.sequence

    @property
    def max_num_tokens(self) -> int:
        """Prompt and output tokens if nothing ends it early."""
        return len(self.prompt_token_ids) + self.max_tokens

    @property
    def num_missing(self) -> int:
        """Tokens, known or pending, whose K and V no planned step computes yet."""
        if len(self.output_token_ids) + self.num_pending >= self.max_tokens:
            return 0  # the last token is on its way, and nothing comes after it
        return self.num_tokens + self.num_pending - self.num_computed

    def tokens(self, start: int, stop: int) -> list[int]:
        """Token ids of positions [start, stop)."""
        prompt = len(self.prompt_token_ids)
        if stop <= prompt:
            return self.prompt_token_ids[start:stop]
        if start >= prompt:
            return self.output_token_ids[start - prompt : stop - prompt]
        return self.prompt_token_ids[start:] + self.output_token_ids[: stop - prompt]

    def ending(self) -> tuple[FinishReason | None, int | None]:
        """Whether the last token ends the sequence, and which stop id it is."""
        token = self.output_token_ids[-1]
        if token in self.stop_token_ids:
            return FinishReason.STOP, token
        if token in self.eos_token_ids:
            return FinishReason.STOP, None
        if len(self.output_token_ids) >= self.max_tokens:
            return FinishReason.LENGTH, None
        return None, None
