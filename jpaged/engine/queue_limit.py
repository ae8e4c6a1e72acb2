"""QueueLimit: how much may wait before more is refused."""

import dataclasses

from jpaged.core.scheduler import Scheduler
from jpaged.errors import QueueFullError


@dataclasses.dataclass(frozen=True)
class QueueLimit:
    """Most sequences and prompt tokens in the queue; None for no limit."""

    num_sequences: int | None
    num_tokens: int | None

    def check(self, scheduler: Scheduler, *, n: int, num_tokens: int) -> None:
        """QueueFullError unless n more sequences of so many tokens may wait; an empty queue takes any."""
        waiting, waiting_tokens = scheduler.num_waiting, scheduler.num_waiting_tokens
        if not waiting:
            return
        if self.num_sequences is not None and waiting + n > self.num_sequences:
            raise QueueFullError(
                f"the queue is full: {waiting} sequences wait, max_num_queued_reqs is "
                f"{self.num_sequences}"
            )
        if self.num_tokens is not None and waiting_tokens + n * num_tokens > self.num_tokens:
            raise QueueFullError(
                f"the queue is full: {waiting_tokens} tokens wait, with {n * num_tokens} more they "
                f"are beyond max_num_queued_tokens {self.num_tokens}"
            )
