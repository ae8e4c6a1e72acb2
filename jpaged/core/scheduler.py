"""Scheduler: which tokens of which requests the next step computes.

There is no prefill phase and no decode phase: a request has `num_computed` tokens that catch up with its
total, so that chunked prefill, decode and recompute after preemption are one case. Owns all request state;
asks the KVCacheManager for pages. Reads no clock and draws no randomness.
"""

import dataclasses
import heapq
from collections import deque
from collections.abc import Mapping

from jpaged.core.kv_cache_manager import KVCacheManager
from jpaged.core.request import FinishReason, Request, RequestStatus
from jpaged.core.step_plan import PlanEntry, SampledToken, StepPlan, TokenEvent


@dataclasses.dataclass(frozen=True)
class SchedulerConfig:
    """Limits of one step: rows, tokens, and the longest sequence (prompt and output)."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int


class Scheduler:
    """schedule() -> StepPlan, then update(plan, tokens) -> events; add and finish between steps."""

    def __init__(self, config: SchedulerConfig, kv: KVCacheManager) -> None:
        if kv.max_tokens() < config.max_model_len:
            raise ValueError(
                f"the page pool holds {kv.max_tokens()} tokens, max_model_len is {config.max_model_len}"
            )
        self.config = config
        self.kv = kv
        self._waiting: deque[Request] = deque()
        # In order of admission: the last one is the first to be preempted.
        self._running: list[Request] = []
        self._free_rows = list(range(config.max_num_seqs))
        self._requests: dict[int, Request] = {}
        self.num_preemptions = 0

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def has_unfinished(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self._requests)

    def add(self, request: Request) -> None:
        """Puts a request at the end of the queue. Its length has been checked; else ValueError."""
        if request.sequence in self._requests:
            raise ValueError(f"sequence {request.sequence} was added already")
        if not request.prompt_token_ids:
            raise ValueError("a request needs at least one prompt token")
        if len(request.prompt_token_ids) + request.max_tokens > self.config.max_model_len:
            raise ValueError("prompt and max_tokens exceed max_model_len")
        self._requests[request.sequence] = request
        self._waiting.append(request)

    def finish(
        self, sequence: int, reason: FinishReason, stop_reason: int | str | None = None
    ) -> bool:
        """Ends a sequence from outside, in any state; False if it has ended already.

        For aborts and for stop strings, which only the detokeniser sees. Pages and row return at once.
        """
        request = self._requests.get(sequence)
        if request is None:
            return False
        if request.status is not RequestStatus.RUNNING:
            self._waiting.remove(request)
        self._end(request, reason, stop_reason)
        return True

    def schedule(self) -> StepPlan:
        """The next step. Empty only when no request is unfinished."""
        budget = self.config.max_num_batched_tokens
        planned: dict[int, PlanEntry] = {}
        preempted: list[Request] = []
        # Rows that decode go first, so that a long prefill never takes their share of the budget.
        order = sorted(self._running, key=lambda r: r.num_tokens - r.num_computed > 1)
        for request in order:
            if request.status is not RequestStatus.RUNNING:
                continue  # preempted for the sake of an older one, a moment ago
            count = min(request.num_tokens - request.num_computed, budget)
            if count == 0:
                continue
            self.kv.pass_window(request.sequence, request.num_computed)
            while not self.kv.grow(request.sequence, request.num_computed + count):
                victim = self._running[-1]
                freed = planned.pop(victim.sequence, None)
                budget += freed.count if freed else 0
                self._preempt(victim)
                preempted.append(victim)
                if victim is request:
                    break
            else:
                planned[request.sequence] = self._entry(request, count)
                budget -= count
        if not preempted:
            budget = self._admit(planned, budget)
        entries = list(planned.values())
        entries.sort(key=lambda entry: entry.count > 1)
        return StepPlan(entries=entries, preempted=preempted)

    def update(self, plan: StepPlan, sampled: Mapping[int, SampledToken]) -> list[TokenEvent]:
        """Takes in what a step yielded (sequence -> token, for each entry that samples).

        Requests that were finished from outside since the plan was made are passed over.
        """
        events = []
        for entry in plan.entries:
            request = entry.request
            if request.status is not RequestStatus.RUNNING:
                continue
            request.num_computed = entry.first + entry.count
            request.row_is_new = False
            if not entry.samples:
                continue
            token = sampled[request.sequence]
            request.output_token_ids.append(token.token)
            request.last_token_on_device = True
            reason, stop_reason = self._ending(request, token.token)
            if reason is not None:
                self._end(request, reason, stop_reason)
            events.append(TokenEvent(request=request, sampled=token, finish_reason=reason))
        return events

    def recompute_all(self) -> None:
        """Takes their pages from all running requests, which keep their tokens: the weights have changed."""
        for request in reversed(list(self._running)):
            self._preempt(request)

    def check(self) -> None:
        """Raises AssertionError unless queues, rows, tables and pools agree."""
        for request in self._waiting:
            assert request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
            assert request.row == -1 and request.num_computed == 0
        for request in self._running:
            assert request.status is RequestStatus.RUNNING
            assert request.num_computed <= request.num_tokens
        rows = [request.row for request in self._running]
        assert sorted(rows + self._free_rows) == list(range(self.config.max_num_seqs)), "rows leak"
        members = {r.sequence for r in self._waiting} | {r.sequence for r in self._running}
        assert members == self._requests.keys()
        assert len(self._waiting) + len(self._running) == len(members), "a request is queued twice"
        self.kv.check()

    def _admit(self, planned: dict[int, PlanEntry], budget: int) -> int:
        """Starts waiting requests, first come first served, while rows, budget and pages last."""
        while self._waiting and self._free_rows and budget > 0:
            request = self._waiting[0]
            # Room for all its tokens and the next one, though only a chunk is taken now: a request
            # admitted on less would soon be preempted again.
            if not self.kv.can_hold(min(request.num_tokens + 1, self.config.max_model_len)):
                break
            self._waiting.popleft()
            count = min(request.num_tokens, budget)
            self.kv.open(request.sequence)
            if not self.kv.grow(request.sequence, count):
                raise AssertionError("can_hold promised pages that grow did not find")
            request.status = RequestStatus.RUNNING
            request.row = heapq.heappop(self._free_rows)
            request.row_is_new = True
            self._running.append(request)
            planned[request.sequence] = self._entry(request, count)
            budget -= count
        return budget

    @staticmethod
    def _entry(request: Request, count: int) -> PlanEntry:
        return PlanEntry(
            request=request,
            first=request.num_computed,
            count=count,
            samples=request.num_computed + count == request.num_tokens,
        )

    def _preempt(self, request: Request) -> None:
        """Takes pages and row from a running request; it keeps its tokens and goes to the queue's head."""
        self._leave(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._waiting.appendleft(request)

    def _leave(self, request: Request) -> None:
        self.kv.release(request.sequence)
        self._running.remove(request)
        heapq.heappush(self._free_rows, request.row)
        request.row = -1
        request.last_token_on_device = False

    def _end(self, request: Request, reason: FinishReason, stop_reason: int | str | None) -> None:
        if request.status is RequestStatus.RUNNING:
            self._leave(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        request.stop_reason = stop_reason
        del self._requests[request.sequence]

    @staticmethod
    def _ending(request: Request, token: int) -> tuple[FinishReason | None, int | None]:
        if token in request.stop_token_ids:
            return FinishReason.STOP, token
        if token in request.eos_token_ids:
            return FinishReason.STOP, None
        if len(request.output_token_ids) >= request.max_tokens:
            return FinishReason.LENGTH, None
        return None, None
