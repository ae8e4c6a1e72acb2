"""Scheduler: which tokens of which requests the next step computes.

There is no prefill phase and no decode phase: a request has `num_computed` tokens that catch up with its
total, so that prefix hits, chunked prefill, decode and recompute after preemption are one case. Owns all
request state; asks the KVCacheManager for pages. Reads no clock and draws no randomness.

A plan counts as carried out as soon as it is made: the next one may be made before the tokens of the last
are known. A token that is sampled by a step in flight is pending; its value is on the device alone. The
device runs steps in the order of their plans, so that pages given back while a step uses them may be
given to a later step at once.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from jpaged.core.admission import ADMISSIONS, Demand
from jpaged.core.forecast import Forecast
from jpaged.core.kv_cache_manager import KVCacheManager
from jpaged.core.policy import POLICIES
from jpaged.core.prefix_reuse import PrefixReuse
from jpaged.core.request import FinishReason, Request, RequestStatus
from jpaged.core.roster import Roster
from jpaged.core.scheduler_config import SchedulerConfig
from jpaged.core.step_plan import PlanEntry, SampledToken, StepPlan, TokenEvent

# Of the tokens of a step, the part that a long prefill leaves to those behind it: one in so many.
_SHARE = 4
# How many requests behind one that does not fit are tried in a step.
_LOOK_AHEAD = 8


@dataclasses.dataclass(slots=True)
class _Planning:
    """A step that is being planned: the tokens left of it, and what has been decided."""

    budget: int
    entries: dict[int, PlanEntry] = dataclasses.field(default_factory=dict)
    preempted: list[Request] = dataclasses.field(default_factory=list)
    failed: list[tuple[Request, Exception]] = dataclasses.field(default_factory=list)


class _Fit(NamedTuple):
    """What a waiting request will hold, and the keys of the pages that it begins with."""

    demand: Demand
    hit: list[bytes]


class Scheduler:
    """schedule() -> StepPlan, then update(plan, tokens) -> events; add and finish between them."""

    def __init__(self, config: SchedulerConfig, kv: KVCacheManager) -> None:
        if kv.max_tokens() < config.max_model_len:
            raise ValueError(
                f"the page pool holds {kv.max_tokens()} tokens, max_model_len is {config.max_model_len}"
            )
        self.config = config
        self.kv = kv
        self._roster = Roster(kv, num_rows=config.max_num_seqs, rank=POLICIES[config.policy])
        self._reuse = PrefixReuse(kv)
        self._forecast = Forecast(kv, ADMISSIONS[config.admission], reserve=config.reserve)
        self._step = 0
        self.num_preemptions = 0
        # Prompt tokens that might have been found in pages, and those that were.
        self.prefix_queries = 0
        self.prefix_hits = 0

    @property
    def num_running(self) -> int:
        return len(self._roster.running)

    @property
    def num_waiting(self) -> int:
        return len(self._roster.waiting)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens of the requests that wait."""
        return self._roster.num_waiting_tokens

    def has_unfinished(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self._roster.by_sequence)

    def add(self, request: Request) -> None:
        """Puts a request into the queue. Its length has been checked; else ValueError."""
        if not request.prompt_token_ids:
            raise ValueError("a request needs at least one prompt token")
        if request.max_num_tokens > self.config.max_model_len:
            raise ValueError("prompt and max_tokens exceed max_model_len")
        self._roster.add(request)
        self._reuse.prepare(request)

    def finish(
        self, sequence: int, reason: FinishReason, stop_reason: int | str | None = None
    ) -> bool:
        """Ends a sequence from outside, in any state; False if it has ended already.

        For aborts and for stop strings, which only the detokeniser sees. Pages and row return at once.
        """
        request = self._roster.by_sequence.get(sequence)
        if request is None:
            return False
        if reason is FinishReason.STOP:
            self._forecast.learn(request)
        self._end(request, reason, stop_reason)
        return True

    def expire(self, now: float) -> list[Request]:
        """Ends the requests whose deadline has come, in whatever state they are."""
        expired = self._roster.overdue(now)
        for request in expired:
            self._end(request, FinishReason.ABORT, "deadline")
        return expired

    def schedule(self) -> StepPlan:
        """The next step. Empty if no request is unfinished, or all wait for a step in flight."""
        self._step += 1
        planning = _Planning(self.config.max_num_batched_tokens)
        decodes: list[Request] = []
        prefills: list[Request] = []
        for request in self._roster.running:
            missing = request.num_missing
            if missing:
                (decodes if missing == 1 else prefills).append(request)
        # Rows that decode go first, so that a long prefill never takes their share of the budget.
        for request in decodes:
            self._continue(request, planning, 1)
        self._prefill(prefills, planning)
        if not planning.preempted:
            self._admit(planning)
        entries = list(planning.entries.values())
        for entry in entries:
            # At the end: nobody reads what the same step writes.
            self._reuse.register(entry.request)
        entries.sort(key=lambda entry: entry.num_tokens > 1)
        return StepPlan(entries=entries, preempted=planning.preempted, failed=planning.failed)

    def update(self, plan: StepPlan, sampled: Mapping[int, SampledToken]) -> list[TokenEvent]:
        """Takes in what a step yielded (sequence -> token, for each entry that samples).

        Requests that have ended since the plan was made are passed over; one that was preempted
        since keeps its token.
        """
        events = []
        for entry in plan.entries:
            request = entry.request
            if not entry.samples or request.status is RequestStatus.FINISHED:
                continue
            token = sampled[request.sequence]
            self._roster.append(request, token.token)
            reason, stop_reason = request.ending()
            if reason is not None:
                self._forecast.learn(request)
                self._end(request, reason, stop_reason)
            events.append(TokenEvent(request=request, sampled=token, finish_reason=reason))
        return events

    def weights_changed(self) -> None:
        """Takes their pages from all running requests, which keep their tokens; no step is in flight.

        Nothing that the old weights computed is found again.
        """
        self._reuse.forget()
        for request in self._roster.by_sequence.values():
            self._reuse.drop_keys(request)
        for request in list(reversed(self._roster.running)):
            self._roster.put_back(request)

    def steps_lost(self, *plans: StepPlan) -> None:
        """Steps did not run, and what pages hold is unknown: all that run are computed anew.

        `plans` are all steps in flight: what they would have sampled does not come.
        """
        for plan in plans:
            for entry in plan.entries:
                _unplan(entry)
        self.weights_changed()

    def check(self) -> None:
        """Raises AssertionError unless queues, rows, tables and pools agree."""
        self._roster.check()

    def _prefill(self, prefills: list[Request], planning: _Planning) -> None:
        """Chunks for running requests that have more than one token to compute, by rank.

        One that would take all tokens of the step leaves a part to the next that wants some, be it
        running or waiting. Parts of parts come to nothing; who has gone without for as long as
        patience lasts has its part first.
        """
        share = max(1, self.config.max_num_batched_tokens // _SHARE)
        starved = [r for r in prefills if self._has_starved(r.last_planned)]
        for request in starved:
            self._continue(request, planning, share)
        others = [r for r in prefills if r not in starved]
        for request in others:
            most = request.num_missing
            if most >= planning.budget > 1 and (
                request is not others[-1] or self._one_could_start()
            ):
                most = planning.budget - max(1, planning.budget // _SHARE)
            self._continue(request, planning, most)

    def _one_could_start(self) -> bool:
        """Whether a waiting request lacks nothing but tokens of the step."""
        head = next(self._ready(), None) if self._roster.num_free_rows else None
        if head is None:
            return False
        return self._fit(head, self._forecast.demands(self._roster.running)) is not None

    def _has_starved(self, since: int) -> bool:
        return self._step - since >= self.config.patience

    def _continue(self, request: Request, planning: _Planning, most: int) -> None:
        """Plans up to `most` tokens of a running request, preempting others if pages lack."""
        count = min(request.num_missing, most, planning.budget)
        if request.status is not RequestStatus.RUNNING or count <= 0:
            return  # it was preempted a moment ago for one that goes before it
        try:
            self.kv.pass_window(request.sequence, request.num_computed)
            while not self.kv.grow(request.sequence, request.num_computed + count):
                victim = self._roster.running[-1]
                self._preempt(victim, planning)
                if victim is request:
                    return
            self._forecast.renew(request)
        except Exception as error:  # this request's fault alone
            self._fail(request, error, planning)
            return
        self._plan(request, count, planning, is_new=False)

    def _admit(self, planning: _Planning) -> None:
        """Starts waiting requests while rows, tokens and pages last."""
        roster = self._roster
        if not roster.waiting or not roster.num_free_rows or planning.budget <= 0:
            return
        demands = self._forecast.demands(roster.running)
        num_blocked = 0
        # No more can be started than there are rows, and few that do not fit are passed.
        for request in list(itertools.islice(self._ready(), roster.num_free_rows + _LOOK_AHEAD)):
            if not roster.num_free_rows or planning.budget <= 0:
                break
            try:
                fit = self._fit(request, demands)
            except Exception as error:  # this request's fault alone
                self._fail(request, error, planning)
                continue
            if fit is None:
                request.blocked_since = request.blocked_since or self._step
                num_blocked += 1
                # Who passes a preempted one takes the pages that it waits for.
                if (
                    request.status is RequestStatus.PREEMPTED
                    or self._has_starved(request.blocked_since)
                    or num_blocked > _LOOK_AHEAD
                ):
                    break
            else:
                self._start(request, fit.hit, planning)
                demands.append(fit.demand)

    def _ready(self) -> Iterator[Request]:
        """Waiting requests that could be planned, by rank."""
        for request in self._roster.waiting:
            if request.num_pending:
                continue  # its last token is still on its way
            if request.is_follower:
                leader = self._roster.by_sequence.get(request.leader or 0)
                if leader is not None and leader.num_registered < self._reuse.most_pages(request):
                    continue
            yield request

    def _fit(self, request: Request, demands: list[Demand]) -> _Fit | None:
        """How it fits, if there are pages for its tokens, the next one, and what is to come.

        Though only a chunk is taken now: one admitted on less would soon be preempted again.
        """
        hit = self._reuse.hit(request)
        length = min(request.num_tokens + 1, self.config.max_model_len)
        if not self.kv.can_hold(length, hit):
            return None
        running = self._roster.running
        demand = self._forecast.demand(request, len(hit))
        if running and not self._forecast.allows([*demands, demand], running, hit):
            return None
        return _Fit(demand, hit)

    def _start(self, request: Request, hit: list[bytes], planning: _Planning) -> None:
        """Moves a waiting request that fits into a row, and plans its first chunk."""
        self._roster.start(request)
        try:
            self.kv.open(request.sequence, hit)
            request.num_computed = len(hit) * self.kv.page_size
            request.num_registered = request.num_hit = len(hit)
            count = min(request.num_tokens - request.num_computed, planning.budget)
            if not self.kv.grow(request.sequence, request.num_computed + count):
                raise AssertionError("can_hold promised pages that grow did not find")
            request.expected_tokens = 0
            self._forecast.renew(request)
        except Exception as error:  # this request's fault alone
            self._fail(request, error, planning)
            return
        if request.num_cached is None:
            request.num_cached = request.num_computed
            if request.reads_cache and not request.is_follower and self.kv.prefix_caching:
                self.prefix_queries += len(request.prompt_token_ids)
                self.prefix_hits += request.num_computed
        self._plan(request, count, planning, is_new=True)

    def _plan(self, request: Request, count: int, planning: _Planning, *, is_new: bool) -> None:
        """Enters tokens that have pages into the step."""
        first = request.num_computed
        samples = first + count == request.num_tokens + request.num_pending
        planning.entries[request.sequence] = PlanEntry(
            request=request,
            first=first,
            num_tokens=count,
            samples=samples,
            row=request.row,
            is_new=is_new,
            on_device=request.row_has_sampled,
        )
        planning.budget -= count
        request.num_computed = first + count
        request.last_planned = self._step
        if samples:
            request.num_pending += 1
            request.row_has_sampled = True

    def _preempt(self, request: Request, planning: _Planning) -> None:
        """Takes pages and row from a running request, for others."""
        entry = planning.entries.pop(request.sequence, None)
        if entry is not None:
            planning.budget += entry.num_tokens
            _unplan(entry)
        self._roster.put_back(request)
        request.num_preemptions += 1
        self.num_preemptions += 1
        planning.preempted.append(request)

    def _end(self, request: Request, reason: FinishReason, stop_reason: int | str | None) -> None:
        """Ends a request; what it has computed is there for the next turn of its conversation."""
        self._reuse.register(request)
        self._roster.end(request, reason, stop_reason)

    def _fail(self, request: Request, error: Exception, planning: _Planning) -> None:
        self._roster.end(request, FinishReason.ERROR, None)
        planning.failed.append((request, error))


def _unplan(entry: PlanEntry) -> None:
    if entry.samples:
        entry.request.num_pending -= 1
