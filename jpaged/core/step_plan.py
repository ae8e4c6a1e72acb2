"""StepPlan: what the scheduler decided for one step; TokenEvent: what came of it for one sequence."""

import dataclasses

from jpaged.core.request import FinishReason, Request


@dataclasses.dataclass(frozen=True, slots=True)
class PlanEntry:
    """Tokens [first, first + count) of `request` are computed in this step.

    `samples` says that these are the last known tokens, so that the step yields the next one.
    """

    request: Request
    first: int
    count: int
    samples: bool


@dataclasses.dataclass(frozen=True, slots=True)
class StepPlan:
    """The entries of a step, decodes before prefill chunks, and what was preempted to make room."""

    entries: list[PlanEntry]
    preempted: list[Request]

    @property
    def num_tokens(self) -> int:
        return sum(entry.count for entry in self.entries)


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
