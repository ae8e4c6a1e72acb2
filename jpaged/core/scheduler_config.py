"""SchedulerConfig: what a scheduler is told at start."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class SchedulerConfig:
    """Limits of one step: rows, tokens, and the longest sequence (prompt and output); and the policies.

    Attributes:
        policy: who goes first, a name in `POLICIES`.
        admission: how many run side by side, a name in `ADMISSIONS`.
        patience: steps for which a request that does not fit may be passed by others.
        reserve: whether pages are set aside for the tokens a request is expected to make.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    policy: str = "fcfs"
    admission: str = "expected"
    patience: int = 8
    reserve: bool = True
