"""RankedList: requests in the order of their ranks."""

import bisect
from collections.abc import Callable, Iterator

from jpaged.core.policy import Rank
from jpaged.core.request import Request


class RankedList:
    """Requests sorted by rank, which must not change while they are in here."""

    def __init__(self, rank: Callable[[Request], Rank]) -> None:
        self._rank = rank
        self._ranks: list[Rank] = []
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __getitem__(self, index: int) -> Request:
        return self._requests[index]

    def __reversed__(self) -> Iterator[Request]:
        return reversed(self._requests)

    def add(self, request: Request) -> None:
        """Puts a request in its place."""
        rank = self._rank(request)
        index = bisect.bisect_left(self._ranks, rank)
        self._ranks.insert(index, rank)
        self._requests.insert(index, request)

    def remove(self, request: Request) -> None:
        """Takes a request out. ValueError if it is not in here."""
        index = bisect.bisect_left(self._ranks, self._rank(request))
        if index == len(self._requests) or self._requests[index] is not request:
            raise ValueError(f"sequence {request.sequence} is not in the list")
        del self._ranks[index], self._requests[index]
