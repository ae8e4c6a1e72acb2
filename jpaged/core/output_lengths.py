"""OutputLengths: how long outputs become, learned from those that have ended.

A request's expected length is a quantile of the lengths seen that are longer than what it has already.
Each request has its own quantile, evenly spread, so that the requests of a batch together are expected to
be as long as such a batch is, long tail included; the mean for each would miss the tail, and a high
quantile for each would leave memory unused.
"""

import bisect
import math
from collections import deque

# The fractional parts of its multiples are spread evenly, however many are taken.
_GOLDEN = (math.sqrt(5) - 1) / 2


class OutputLengths:
    """A window of the lengths of the last outputs that ended by themselves."""

    def __init__(
        self, *, history: int = 512, prior_mean: float = 256, prior_count: int = 16
    ) -> None:
        """Before `prior_count` outputs have ended, exponentially distributed ones stand in for them."""
        self._history = history
        # Quantiles of the exponential distribution.
        prior = [
            max(1, round(-prior_mean * math.log(1 - (i + 0.5) / prior_count)))
            for i in range(prior_count)
        ]
        self._num_prior = prior_count
        # In an order without a trend, since each output that ends takes the place of one.
        self._recent = deque(
            prior[i] for i in sorted(range(prior_count), key=lambda i: i * _GOLDEN % 1)
        )
        self._sorted = sorted(prior)

    def add(self, length: int) -> None:
        """Takes in the length of an output that has ended by itself."""
        if self._num_prior or len(self._recent) >= self._history:
            self._num_prior = max(0, self._num_prior - 1)
            del self._sorted[bisect.bisect_left(self._sorted, self._recent.popleft())]
        self._recent.append(length)
        bisect.insort(self._sorted, length)

    def expected(self, number: int, so_far: int, at_most: int) -> int:
        """The expected final length of output `number`, which has `so_far` tokens and has not ended.

        In (so_far, at_most]. Beyond everything seen, half as much again.
        """
        first = bisect.bisect_right(self._sorted, so_far)
        longer = len(self._sorted) - first
        if longer:
            length = self._sorted[first + int(number * _GOLDEN % 1 * longer)]
        else:
            length = so_far + so_far // 2
        return max(so_far + 1, min(length, at_most))
