"""Forecast: how far requests are expected to grow, and what follows for pages.

Decides nothing about order or rows: it answers whether one more request may run beside others, and sets
pages aside for those that do.
"""

from collections.abc import Iterable, Sequence

from jpaged.core.admission import Admission, Demand, Room
from jpaged.core.kv_cache_manager import KVCacheManager
from jpaged.core.output_lengths import OutputLengths
from jpaged.core.request import Request


class Forecast:
    """Expected lengths of requests, learned from those that have ended."""

    def __init__(self, kv: KVCacheManager, admits: Admission, *, reserve: bool) -> None:
        self._kv = kv
        self._admits = admits
        self._reserve = reserve
        self._lengths = OutputLengths()

    def learn(self, request: Request) -> None:
        """Takes in a request that has ended by itself."""
        self._lengths.add(len(request.output_token_ids))

    def renew(self, request: Request) -> None:
        """Sets pages aside for a running request, if it has come further than was expected of it."""
        if request.num_computed >= request.expected_tokens:
            request.expected_tokens = self.expected_tokens(request)
            if self._reserve:
                self._kv.set_aside(request.sequence, request.expected_tokens)

    def expected_tokens(self, request: Request) -> int:
        """Prompt and output tokens that a request will have at its end, as far as can be said."""
        if request.ends_by_length:
            return request.max_num_tokens
        so_far = len(request.output_token_ids) + request.num_pending
        length = self._lengths.expected(request.arrival, so_far, request.max_tokens)
        return len(request.prompt_token_ids) + length

    def demands(self, running: Iterable[Request]) -> list[Demand]:
        """What each running request holds and is expected to hold beside the pages it began with."""
        return [self._demand(r, r.expected_tokens, r.num_hit) for r in running]

    def demand(self, request: Request, num_hit: int) -> Demand:
        """What a waiting request that begins with `num_hit` pages of others would hold."""
        return self._demand(request, self.expected_tokens(request), num_hit)

    def allows(
        self, demands: Sequence[Demand], running: Iterable[Request], hit: Sequence[bytes]
    ) -> bool:
        """Whether all may run, the last of `demands` beside `running`, beginning with pages `hit`."""
        return all(self._admits(demands, room) for room in self._rooms(running, hit))

    def _rooms(self, running: Iterable[Request], hit: Sequence[bytes]) -> list[Room]:
        rooms, size = [], self._kv.page_size
        for group, (pool, spec) in enumerate(zip(self._kv.pools, self._kv.specs, strict=True)):
            if spec.window is not None:
                most = self._kv.peak(self._kv.max_tokens(), group)
                rooms.append(Room(pool.num_usable, size, most))
                continue
            # Pages that some began with and that are in no demand, and those this one brings to life.
            own = sum(len(self._kv.table(r.sequence, group)) - r.num_hit for r in running)
            shared = max(0, pool.num_held - own) + self._kv.num_unheld(hit, group)
            rooms.append(Room(pool.num_usable - shared, size, None))
        return rooms

    def _demand(self, request: Request, expected_tokens: int, num_hit: int) -> Demand:
        tokens = request.num_tokens + request.num_pending
        return Demand(
            tokens=tokens - num_hit * self._kv.page_size,
            expected=max(1, expected_tokens - tokens),
            most=max(1, request.max_num_tokens - tokens),
        )
