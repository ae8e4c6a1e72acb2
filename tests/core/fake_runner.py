"""A runner without a device: pages are lists of tokens, and the model is a hash of what it reads back.

A token is sampled only from what the page tables give back, so a page that is shared, lost or returned too
early changes the output.
"""

import random
import zlib
from collections.abc import Sequence

from jpaged.core.kv_cache_manager import KVCacheManager, KVGroupSpec
from jpaged.core.request import Request, RequestStatus
from jpaged.core.scheduler import Scheduler, SchedulerConfig
from jpaged.core.step_plan import SampledToken, StepPlan, TokenEvent

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
    ) -> None:
        self.windows = [spec.window for spec in groups]
        self.kv = KVCacheManager(groups, page_size, max_step_tokens=max_num_batched_tokens)
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                max_model_len=max_model_len,
            ),
            self.kv,
        )
        self.slots = [[-1] * (spec.num_pages * page_size) for spec in groups]
        self.num_steps = 0
        self.num_tokens = 0

    def step(self) -> list[TokenEvent]:
        """schedule, run, update."""
        return self.finish_step(self.begin_step())

    def begin_step(self) -> StepPlan:
        """schedule and check the plan."""
        scheduler, config = self.scheduler, self.scheduler.config
        unfinished = scheduler.has_unfinished()
        plan = scheduler.schedule()
        scheduler.check()
        assert bool(plan.entries) == unfinished, "a step without work, or work without a step"
        assert plan.num_tokens <= config.max_num_batched_tokens
        assert len(plan.entries) <= config.max_num_seqs
        counts = [entry.count for entry in plan.entries]
        assert counts == sorted(counts, key=lambda count: count > 1), "decodes come first"
        for request in plan.preempted:
            assert request.status is not RequestStatus.RUNNING and request.row == -1
        assert len({entry.request.row for entry in plan.entries}) == len(plan.entries)
        for entry in plan.entries:
            request = entry.request
            assert request.status is RequestStatus.RUNNING and request.row >= 0
            assert entry.first == request.num_computed and entry.count >= 1
            assert entry.first + entry.count <= request.num_tokens
            assert entry.samples == (entry.first + entry.count == request.num_tokens)
        return plan

    def finish_step(self, plan: StepPlan) -> list[TokenEvent]:
        """Runs a plan that was scheduled; requests may have been finished from outside meanwhile."""
        sampled: dict[int, SampledToken] = {}
        live = [e for e in plan.entries if e.request.status is RequestStatus.RUNNING]
        for entry in live:
            stop = entry.first + entry.count
            tokens = entry.request.tokens(entry.first, stop)
            assert len(tokens) == entry.count
            for position, token in zip(range(entry.first, stop), tokens, strict=True):
                for group in range(len(self.windows)):
                    self.slots[group][self._slot(entry.request, group, position)] = token
        # All writes come before all reads, as in a device step that reads what others wrote.
        for entry in live:
            read = self._read(entry.request, entry.first, entry.first + entry.count)
            if entry.samples:
                token = next_token(read, self.windows)
                sampled[entry.request.sequence] = SampledToken(token=token, logprob=0.0)
        events = self.scheduler.update(plan, sampled)
        self.scheduler.check()
        self.num_steps += 1
        self.num_tokens += plan.num_tokens
        return events

    def _slot(self, request: Request, group: int, position: int) -> int:
        page = self.kv.table(request.sequence, group)[position // self.kv.page_size]
        assert page > 0, "a token of the step has no page"
        return page * self.kv.page_size + position % self.kv.page_size

    def _read(self, request: Request, first: int, stop: int) -> list[int]:
        """All tokens, after checking that each group gives back what its windows can see."""
        tokens = request.tokens(0, stop)
        for group, window in enumerate(self.windows):
            oldest = 0 if window is None else max(0, first - window + 1)
            read = [
                self.slots[group][self._slot(request, group, position)]
                for position in range(oldest, stop)
            ]
            assert read == tokens[oldest:], f"sequence {request.sequence} reads foreign tokens"
        return tokens

    def assert_empty(self) -> None:
        """Every page and row is free again."""
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0
        self.kv.check({})
        assert self.kv.num_held == 0


def random_request(rng: random.Random, sequence: int, max_model_len: int, **kw: object) -> Request:
    """A request of random lengths, sometimes with ids that end it."""
    prompt = rng.randint(1, max_model_len - 1)
    if rng.random() < 0.7:
        prompt = rng.randint(1, min(12, max_model_len - 1))
    ends = frozenset(rng.sample(range(VOCAB), 2)) if rng.random() < 0.3 else frozenset()
    return Request(
        sequence=sequence,
        prompt_token_ids=[rng.randrange(VOCAB) for _ in range(prompt)],
        max_tokens=rng.randint(1, max_model_len - prompt),
        **{rng.choice(["stop_token_ids", "eos_token_ids"]): ends, **kw},  # type: ignore[arg-type]
    )
