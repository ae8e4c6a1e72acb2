"""A runner without a device: pages hold digests of what was written, and the model is a hash of the tokens.

A slot holds a digest of everything up to its token, so that a page that is shared wrongly, lost, or returned
too early is found when it is read. Steps are carried out when they are collected, as late as can be, from
page tables as they were when the step was sent: just what a device does that runs behind its host.
"""

import dataclasses
import random
import zlib
from collections.abc import Sequence
from typing import Any

from jpaged.core.kv_cache_manager import KVCacheManager, KVGroupSpec
from jpaged.core.request import FinishReason, Request, RequestStatus
from jpaged.core.scheduler import Scheduler
from jpaged.core.scheduler_config import SchedulerConfig
from jpaged.core.step_plan import PlanEntry, SampledToken, StepPlan, TokenEvent

VOCAB = 50


def next_token(tokens: Sequence[int], windows: Sequence[int | None]) -> int:
    """The model: a function of all tokens, each group of layers seeing its window of them."""
    seen = [tokens if window is None else tokens[-window:] for window in windows]
    return zlib.crc32(repr([list(part) for part in seen]).encode()) % VOCAB


def expected_output(request: Request, windows: Sequence[int | None]) -> list[int]:
    """What a request yields when it is alone and has all the pages it wants."""
    tokens, prompt = list(request.prompt_token_ids), len(request.prompt_token_ids)
    ends = request.stop_token_ids | request.eos_token_ids
    while len(tokens) - prompt < request.max_tokens:
        tokens.append(next_token(tokens, windows))
        if tokens[-1] in ends:
            break
    return tokens[prompt:]


class Truth:
    """The tokens of a sequence as the device has sampled them, and digests of its prefixes."""

    def __init__(self, request: Request) -> None:
        self.tokens = list(request.prompt_token_ids)
        self.extras = repr(sorted(request.extras))
        self._digests: dict[int, list[int]] = {}

    def forget(self, length: int) -> None:
        """Tokens behind the first `length` have not been sampled after all."""
        del self.tokens[length:]
        self._digests.clear()

    def digests(self, weights: int, length: int) -> list[int]:
        """Digest i stands for tokens [0, i] under these weights."""
        chain = self._digests.setdefault(weights, [])
        for index in range(len(chain), length):
            before = chain[-1] if chain else zlib.crc32(f"{weights} {self.extras}".encode())
            chain.append(zlib.crc32(f"{before} {self.tokens[index]}".encode()))
        return chain


@dataclasses.dataclass
class SentEntry:
    """What the device was told of one entry: nothing that changes afterwards."""

    entry: PlanEntry
    tokens: list[int] | None
    tables: list[list[int]]


class FakeRunner:
    """Runs plans of one scheduler and checks its books after every move."""

    def __init__(
        self,
        *,
        groups: Sequence[KVGroupSpec],
        page_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        overlap: bool = False,
        prefix_caching: bool = True,
        **config: Any,
    ) -> None:
        self.windows = [spec.window for spec in groups]
        self.overlap = overlap
        self.kv = KVCacheManager(
            groups,
            page_size,
            max_step_tokens=max_num_batched_tokens,
            prefix_caching=prefix_caching,
        )
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                max_model_len=max_model_len,
                **config,
            ),
            self.kv,
        )
        self.slots = [[-1] * (spec.num_pages * page_size) for spec in groups]
        self.rows = [(-1, -1)] * max_num_seqs  # last token, length
        self.weights = 0
        self.num_steps = 0
        self.num_tokens = 0
        self.in_flight: tuple[StepPlan, list[SentEntry]] | None = None
        self._truths: dict[int, Truth] = {}

    def step(self) -> list[TokenEvent]:
        """One turn of the engine's loop."""
        plan = self.begin_step()
        if not self.overlap:
            return self.finish_step(plan) if plan.entries else []
        before = self.in_flight
        self.in_flight = (plan, self.send(plan)) if plan.entries else None
        return self.collect(*before) if before is not None else []

    def settle(self) -> list[TokenEvent]:
        """Collects the step in flight."""
        before, self.in_flight = self.in_flight, None
        return self.collect(*before) if before is not None else []

    def change_weights(self) -> None:
        """Between two steps, the model changes."""
        self.settle()
        self.weights += 1
        self.scheduler.weights_changed()
        self.scheduler.check()

    def lose_steps(self) -> None:
        """The step that is sent now fails, and the one in flight with it; what pages hold is gone."""
        plan = self.begin_step()
        plans = [plan] if self.in_flight is None else [self.in_flight[0], plan]
        self.in_flight = None
        for request in {e.request for p in plans for e in p.entries}:
            if request.sequence in self._truths:
                self._truths[request.sequence].forget(request.num_tokens)
        for slots in self.slots:
            slots[:] = [-1] * len(slots)
        self.scheduler.steps_lost(*plans)
        self.scheduler.check()

    def begin_step(self) -> StepPlan:
        """schedule and check the plan."""
        scheduler, config = self.scheduler, self.scheduler.config
        unfinished = scheduler.has_unfinished()
        plan = scheduler.schedule()
        scheduler.check()
        assert not plan.failed
        if self.in_flight is None:
            assert bool(plan.entries) == unfinished, "a step without work, or work without a step"
        assert plan.num_tokens <= config.max_num_batched_tokens
        assert len(plan.entries) <= config.max_num_seqs
        counts = [entry.num_tokens for entry in plan.entries]
        assert counts == sorted(counts, key=lambda count: count > 1), "decodes come first"
        for request in plan.preempted:
            assert request.status is not RequestStatus.RUNNING and request.row == -1
        assert len({entry.row for entry in plan.entries}) == len(plan.entries)
        for entry in plan.entries:
            request = entry.request
            assert request.status is RequestStatus.RUNNING and request.row == entry.row >= 0
            assert entry.num_tokens >= 1
            total = request.num_tokens + request.num_pending - entry.samples
            assert request.num_computed == entry.first + entry.num_tokens <= total
            assert entry.samples == (request.num_computed == total)
            self._check_not_shared(entry)
        return plan

    def finish_step(self, plan: StepPlan) -> list[TokenEvent]:
        """Runs a plan that was scheduled; requests may have been finished from outside meanwhile."""
        live = [e for e in plan.entries if e.request.status is RequestStatus.RUNNING]
        return self.collect(plan, self.send(StepPlan(entries=live, preempted=[])))

    def send(self, plan: StepPlan) -> list[SentEntry]:
        """What the device is told."""
        sent = []
        for entry in plan.entries:
            request, stop = entry.request, entry.first + entry.num_tokens
            self._truths.setdefault(request.sequence, Truth(request))
            tokens = None if entry.on_device else request.tokens(entry.first, stop)
            assert tokens is None or len(tokens) == entry.num_tokens
            tables = [
                list(self.kv.table(request.sequence, group)) for group in range(len(self.windows))
            ]
            sent.append(SentEntry(entry, tokens, tables))
        return sent

    def collect(self, plan: StepPlan, sent: list[SentEntry]) -> list[TokenEvent]:
        """Carries a step out, and tells the scheduler."""
        for one in sent:
            self._write(one)
        # All writes come before all reads, as in a device step that reads what others wrote.
        sampled = {}
        for one in sent:
            token = self._read(one)
            if token is not None:
                sampled[one.entry.request.sequence] = SampledToken(token=token, logprob=0.0)
        events = self.scheduler.update(plan, sampled)
        self.scheduler.check()
        self.num_steps += 1
        self.num_tokens += plan.num_tokens
        return events

    def _write(self, one: SentEntry) -> None:
        entry, truth = one.entry, self._truths[one.entry.request.sequence]
        stop = entry.first + entry.num_tokens
        last, length = self.rows[entry.row]
        if not entry.is_new:
            assert length == entry.first, "the row is elsewhere on the device"
        self.rows[entry.row] = (last, stop)
        tokens = [last] if one.tokens is None else one.tokens
        assert tokens == truth.tokens[entry.first : stop], "other tokens than were sampled"
        digests = truth.digests(self.weights, stop)
        for group in range(len(self.windows)):
            for position in range(entry.first, stop):
                self.slots[group][self._slot(one, group, position)] = digests[position]

    def _read(self, one: SentEntry) -> int | None:
        """The token that is sampled, after checking that each group gives back what it can see."""
        entry, truth = one.entry, self._truths[one.entry.request.sequence]
        stop = entry.first + entry.num_tokens
        digests = truth.digests(self.weights, stop)
        for group, window in enumerate(self.windows):
            oldest = 0 if window is None else max(0, entry.first - window + 1)
            for position in range(oldest, stop):
                assert self.slots[group][self._slot(one, group, position)] == digests[position], (
                    f"sequence {entry.request.sequence} reads foreign tokens at {position}"
                )
        if not entry.samples:
            return None
        token = next_token(truth.tokens, self.windows)
        truth.tokens.append(token)
        self.rows[entry.row] = (token, stop)
        return token

    def _slot(self, one: SentEntry, group: int, position: int) -> int:
        page = one.tables[group][position // self.kv.page_size]
        assert page > 0, "a token of the step has no page"
        return page * self.kv.page_size + position % self.kv.page_size

    def _check_not_shared(self, entry: PlanEntry) -> None:
        size, stop = self.kv.page_size, entry.first + entry.num_tokens
        for group, pool in enumerate(self.kv.pools):
            table = self.kv.table(entry.request.sequence, group)
            for index in range(entry.first // size, -(-stop // size)):
                assert pool.num_owners(table[index]) == 1, "a shared page is written"

    def abort(self, sequence: int) -> bool:
        """Ends a sequence from outside."""
        done = self.scheduler.finish(sequence, FinishReason.ABORT)
        self.scheduler.check()
        return done

    def assert_empty(self) -> None:
        """Every page and row is free again, but for pages that are kept for their content."""
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0
        assert self.scheduler.num_waiting_tokens == 0
        self.kv.check({})
        assert self.kv.num_held == 0
        assert all(pool.num_set_aside == 0 for pool in self.kv.pools)


def random_request(rng: random.Random, sequence: int, max_model_len: int, **kw: Any) -> Request:
    """A request of random lengths, sometimes with ids that end it, often with a known beginning."""
    prompt = rng.randint(1, max_model_len - 1)
    if rng.random() < 0.7:
        prompt = rng.randint(1, min(12, max_model_len - 1))
    ends = frozenset(rng.sample(range(VOCAB), 2)) if rng.random() < 0.3 else frozenset()
    ids = [rng.randrange(VOCAB) for _ in range(prompt)]
    known = rng.choice([0, 0, rng.randint(0, prompt)])
    ids[:known] = [(7 * i) % VOCAB for i in range(known)]
    options: dict[str, Any] = {
        rng.choice(["stop_token_ids", "eos_token_ids"]): ends,
        "max_tokens": rng.randint(1, max_model_len - prompt),
        "priority": rng.choice([0, 0, 1, -1]),
        "extras": rng.choice([(), (), (), (("cache_salt", b"a"),)]),
        "reads_cache": rng.random() < 0.9,
        "ends_by_length": not ends and rng.random() < 0.5,
    }
    return Request(sequence=sequence, prompt_token_ids=ids, **options | kw)
