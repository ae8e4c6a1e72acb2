"""StepPlan: what the scheduler decided for one step; TokenEvent: what came of it for one sequence."""

import dataclasses
from typing import NamedTuple

from jpaged.core.request import FinishReason, Request


class PlanEntry(NamedTuple):
    """Tokens [first, first + num_tokens) of `request` are computed in this step, in row `row`.

    `samples` says that these are the last tokens, so that the step yields the next one. `is_new` says
    that the row held another sequence before. `on_device` says that the one token is what the row
    sampled last, which the host may not know yet.
    """

    request: Request
    first: int
    num_tokens: int
    samples: bool
    row: int
    is_new: bool
    on_device: bool


@dataclasses.dataclass(frozen=True, slots=True)
class StepPlan:
    """The entries of a step, decodes before prefill chunks, and what was preempted to make room.

    `failed` are requests that could not be planned, with what was raised; they have ended.
    """

    entries: list[PlanEntry]
    preempted: list[Request]
    failed: list[tuple[Request, Exception]] = dataclasses.field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(entry.num_tokens for entry in self.entries)


@dataclasses.dataclass(frozen=True, slots=True)
class SampledToken:
    """What the device yielded for one entry: log-softmax values in nats.

    `top_ids` and `top_logprobs` are the most likely tokens, best first, empty unless asked for; `rank` is
    1 for the most likely token, 0 when not asked for.
    """

    token: int
    logprob: float
    rank: int = 0
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class TokenEvent:
    """One new token of a sequence; `finish_reason` is set with its last."""

    request: Request
    sampled: SampledToken
    finish_reason: FinishReason | None
