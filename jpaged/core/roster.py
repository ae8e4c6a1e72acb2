"""Roster: which requests there are, in which state, and who has which row.

The only place where a request's status changes. Gives pages back when a request stops running; takes none.
"""

import heapq
from collections.abc import Callable

from jpaged.core.kv_cache_manager import KVCacheManager
from jpaged.core.policy import Rank
from jpaged.core.ranked_list import RankedList
from jpaged.core.request import FinishReason, Request, RequestStatus


class Roster:
    """Requests that have not ended: waiting (for the first time, or again) or running in a row.

    Attributes:
        waiting: by rank, without rows and pages.
        running: by rank; the last one is the first to be preempted.
        by_sequence: all of them.
        num_waiting_tokens: tokens of those that wait.
    """

    def __init__(
        self, kv: KVCacheManager, *, num_rows: int, rank: Callable[[Request], Rank]
    ) -> None:
        self._kv = kv
        self._num_rows = num_rows
        self._free_rows = list(range(num_rows))
        self._deadlines: list[tuple[float, int]] = []
        self._num_arrived = 0
        self.waiting = RankedList(rank)
        self.running = RankedList(rank)
        self.by_sequence: dict[int, Request] = {}
        self.num_waiting_tokens = 0

    @property
    def num_free_rows(self) -> int:
        """How many more requests can run."""
        return len(self._free_rows)

    def add(self, request: Request) -> None:
        """A new request, which waits. ValueError if there is one of its number."""
        if request.sequence in self.by_sequence:
            raise ValueError(f"sequence {request.sequence} was added already")
        request.arrival = self._num_arrived
        self._num_arrived += 1
        self.by_sequence[request.sequence] = request
        if request.deadline is not None:
            heapq.heappush(self._deadlines, (request.deadline, request.sequence))
        self._enqueue(request)

    def start(self, request: Request) -> None:
        """A waiting request gets a row."""
        self._dequeue(request)
        request.status = RequestStatus.RUNNING
        request.row = heapq.heappop(self._free_rows)
        request.row_has_sampled = False
        request.blocked_since = None
        self.running.add(request)

    def put_back(self, request: Request) -> None:
        """A running request loses row and pages, keeps tokens and seeds, and waits in its old place."""
        self._leave(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed = request.num_registered = request.num_hit = 0
        self._enqueue(request)

    def append(self, request: Request, token: int) -> None:
        """A pending token has become known."""
        request.num_pending -= 1
        request.output_token_ids.append(token)
        if request.status is not RequestStatus.RUNNING:
            self.num_waiting_tokens += 1

    def end(self, request: Request, reason: FinishReason, stop_reason: int | str | None) -> None:
        """A request ends, in whatever state it is."""
        if request.status is RequestStatus.RUNNING:
            self._leave(request)
        else:
            self._dequeue(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        request.stop_reason = stop_reason
        del self.by_sequence[request.sequence]
        # Deadlines of requests that have ended go once they are most of those kept.
        if len(self._deadlines) > 2 * len(self.by_sequence) + 64:
            self._deadlines = [d for d in self._deadlines if d[1] in self.by_sequence]
            heapq.heapify(self._deadlines)

    def overdue(self, now: float) -> list[Request]:
        """Requests whose deadline has come; each is named once."""
        requests = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, sequence = heapq.heappop(self._deadlines)
            if sequence in self.by_sequence:
                requests.append(self.by_sequence[sequence])
        return requests

    def check(self) -> None:
        """Raises AssertionError unless lists, rows, tables and pools agree."""
        waiting, running = list(self.waiting), list(self.running)
        for request in waiting:
            assert request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
            assert request.row == -1 and request.num_computed == 0
        for request in running:
            assert request.status is RequestStatus.RUNNING
            assert request.num_computed <= request.num_tokens + request.num_pending
        rows = [request.row for request in running]
        assert sorted(rows + self._free_rows) == list(range(self._num_rows)), "rows leak"
        members = {r.sequence for r in waiting} | {r.sequence for r in running}
        assert members == self.by_sequence.keys()
        assert len(waiting) + len(running) == len(members), "a request is in two lists"
        assert self.num_waiting_tokens == sum(r.num_tokens for r in waiting)
        assert all(0 <= r.num_pending <= 2 for r in self.by_sequence.values())
        self._kv.check({r.sequence: r.num_computed for r in running})

    def _enqueue(self, request: Request) -> None:
        self.waiting.add(request)
        self.num_waiting_tokens += request.num_tokens

    def _dequeue(self, request: Request) -> None:
        self.waiting.remove(request)
        self.num_waiting_tokens -= request.num_tokens

    def _leave(self, request: Request) -> None:
        self._kv.release(request.sequence)
        self.running.remove(request)
        heapq.heappush(self._free_rows, request.row)
        request.row = -1
        request.row_has_sampled = False
