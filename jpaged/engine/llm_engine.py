"""LLMEngine: requests in, outputs out, one step at a time.

Only wires: the scheduler decides, the worker computes, the output processor writes text. One thread
drives it; `process_inputs` and `apply_chat_template` may be called from others.
"""

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from jpaged.core.kv_cache_manager import KVCacheManager
from jpaged.core.request import FinishReason
from jpaged.core.scheduler import Scheduler
from jpaged.core.scheduler_config import SchedulerConfig
from jpaged.core.step_plan import StepPlan, TokenEvent
from jpaged.engine.chat_template import render_chat
from jpaged.engine.engine_args import EngineArgs
from jpaged.engine.input_processor import EngineRequest, InputProcessor, Prompt
from jpaged.engine.model_source import ModelSource, resolve_model
from jpaged.engine.output_processor import BackendDecoder, RequestState
from jpaged.engine.outputs import RequestOutput
from jpaged.engine.queue_limit import QueueLimit
from jpaged.engine.stats import EngineStats
from jpaged.engine.step_runner import Collected, StepRunner, StepsLost
from jpaged.errors import EngineDeadError, RequestError
from jpaged.sampling.params import SamplingParams
from jpaged.worker.worker import Worker

logger = logging.getLogger("jpaged")


class LLMEngine:
    """A model, its pages and its queue.

    Attributes:
        tokenizer: the model's transformers tokenizer, None if it has none.
        model_name: the name it is served under.
        model_source: where the weights came from, in words.
        max_model_len: most tokens of a prompt and its output together.
        weights_version: 0 at start, one more with each `update_params`.
    """

    def __init__(
        self,
        args: EngineArgs,
        model: ModelSource,
        worker: Worker,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock` gives the time in seconds by which requests' deadlines are judged."""
        self.args = args
        self.tokenizer = model.tokenizer
        self.model_name = args.served_model_name or model.name
        self.model_source = model.source
        self.max_model_len = worker.max_model_len
        self.weights_version = 0
        self._worker = worker
        self._decoder = None if model.tokenizer is None else BackendDecoder(model.tokenizer)
        self._eos_token_ids = frozenset(model.eos_token_ids)
        self._inputs = InputProcessor(
            model.tokenizer,
            vocab_size=worker.config.vocab_size,
            max_model_len=self.max_model_len,
            has_priorities=args.scheduling_policy == "priority",
        )
        self._kv = KVCacheManager(
            worker.pools.specs,
            args.page_size,
            max_step_tokens=worker.max_num_batched_tokens,
            prefix_caching=args.enable_prefix_caching,
        )
        self._scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=worker.max_num_seqs,
                max_num_batched_tokens=worker.max_num_batched_tokens,
                max_model_len=self.max_model_len,
                policy=args.scheduling_policy,
                admission=args.admission_policy,
            ),
            self._kv,
        )
        self._queue_limit = QueueLimit(args.max_num_queued_reqs, args.max_num_queued_tokens)
        self._clock = clock
        self._seeds = np.random.default_rng(args.seed % 2**64)
        self._numbers = itertools.count()
        self._requests: dict[str, RequestState] = {}
        # The request of each sequence, and which of its samples it is.
        self._owners: dict[int, tuple[RequestState, int]] = {}
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._dead: str | None = None
        self._steps = StepRunner(worker, self._kv, overlap=args.async_scheduling)
        # Requests that have got on since the last outputs.
        self._touched: dict[str, RequestState] = {}

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> "LLMEngine":
        """Loads the model, sizes the page pool and compiles the steps.

        Raises ConfigError or ModelLoadError, naming what is wrong.
        """
        model = resolve_model(args)
        return cls(args, model, Worker(model.config, model.weights, model.worker_args(args)))

    def process_inputs(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        priority: int = 0,
        timeout: float | None = None,
    ) -> EngineRequest:
        """Checks and tokenises a request. Thread-safe. Raises RequestError naming the field."""
        return self._inputs.process(request_id, prompt, params, priority=priority, timeout=timeout)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> list[int]:
        """Token ids of a conversation. Thread-safe. Raises RequestError."""
        return render_chat(
            self.tokenizer,
            messages,
            chat_template=chat_template,
            chat_template_kwargs=chat_template_kwargs,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        timeout: float | None = None,
    ) -> None:
        """Puts a request into the queue.

        Args:
            request_id: unique among the unfinished requests.
            prompt: text, token ids, or a dict with one of them and, if wanted, a cache_salt.
            params: how to sample; None is `SamplingParams()`.
            priority: lower goes first; needs `scheduling_policy="priority"`.
            timeout: seconds, time in the queue included, after which the request ends with
                finish_reason "abort" and stop_reason "deadline".

        Raises RequestError if it is invalid, QueueFullError if there are too many; nothing is queued.
        """
        params = params or SamplingParams()
        self.add_processed(
            self.process_inputs(request_id, prompt, params, priority=priority, timeout=timeout)
        )

    def add_processed(self, request: EngineRequest) -> None:
        """Puts a checked request into the queue. QueueFullError, and nothing is queued, if it is full."""
        self._check_alive()
        if request.request_id in self._requests:
            raise RequestError(
                f"request_id {request.request_id!r} is in use by an unfinished request",
                field="request_id",
            )
        self._queue_limit.check(
            self._scheduler, n=request.params.n, num_tokens=len(request.prompt_token_ids)
        )
        seed = request.params.seed
        if seed is None:
            seed = int(self._seeds.integers(2**63))
        sequences = [next(self._numbers) for _ in range(request.params.n)]
        state = RequestState.create(request, sequences, self._decoder)
        self._requests[request.request_id] = state
        self._prompt_tokens += len(request.prompt_token_ids)
        samples = request.samples(sequences, seed=seed, eos_token_ids=self._eos_token_ids)
        for index, sample in enumerate(samples):
            self._owners[sample.sequence] = (state, index)
            self._scheduler.add(sample)

    def step(self) -> list[RequestOutput]:
        """Runs one step; what there is to tell of the requests that got on.

        With `async_scheduling` the step that is sent to the device now is told of by the next call.
        A step that fails is run again, and loses nothing but time. Raises EngineDeadError if the
        device goes on failing: what it held is lost, and every request with it.
        """
        self._check_alive()
        self._expire()
        plan = self._scheduler.schedule()
        for request, error in plan.failed:
            logger.error("a request failed: it could not be scheduled", exc_info=error)
            self._finish(request.sequence, FinishReason.ERROR, None)
        self._note_first_steps(plan)
        self._advance(lambda: self._steps.run(plan))
        touched, self._touched = self._touched, {}
        return self._outputs(touched.values())

    def has_unfinished_requests(self) -> bool:
        """Whether a step would do anything."""
        return self._scheduler.has_unfinished() or bool(self._touched)

    def abort_request(self, request_id: str | Iterable[str]) -> list[RequestOutput]:
        """Ends requests at once: their last outputs, "abort" their reason. Passes over unknown ids."""
        ids = [request_id] if isinstance(request_id, str) else list(request_id)
        states = [self._requests[i] for i in ids if i in self._requests]
        for state in states:
            for sequence, sample in zip(state.sequences, state.samples, strict=True):
                if sample.finish_reason is None:
                    self._scheduler.finish(sequence, FinishReason.ABORT)
                    sample.finish(FinishReason.ABORT.value, None)
            self._touched.pop(state.request.request_id, None)
        return self._outputs(states)

    def update_params(self, tree: object) -> None:
        """Puts new weights (public names and shapes, as a tree or an nnx module) in place.

        Everything is checked first: ModelLoadError names every path, shape and dtype at fault, and
        nothing has changed. Sequences that are running keep their tokens and are computed anew
        under the new weights, so that no later token depends on the old ones. Compiles nothing.
        """
        self._check_alive()
        self._worker.update_params(tree)
        self._advance(self._steps.settle)  # the step in flight has the old ones still
        self._scheduler.weights_changed()
        self.weights_version += 1

    def stats(self) -> EngineStats:
        """Counts since start."""
        runner = self._worker.runner
        return EngineStats(
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            num_preemptions=self._scheduler.num_preemptions,
            pages_total=self._kv.num_usable,
            pages_used=self._kv.num_held,
            pages_cached=self._kv.num_cached,
            prefix_cache_queries=self._scheduler.prefix_queries,
            prefix_cache_hits=self._scheduler.prefix_hits,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            num_steps=runner.num_steps,
            scheduled_tokens=runner.scheduled_tokens,
            padded_tokens=runner.padded_tokens,
            num_compilations=runner.num_compilations,
        )

    def check(self) -> None:
        """Raises AssertionError unless the books of queues, rows and pages balance."""
        self._scheduler.check()

    def close(self) -> None:
        """Frees the device's memory; the engine serves nothing any more."""
        if self._dead is None:
            self._dead = "the engine was closed"
        self._worker.close()

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise EngineDeadError(self._dead)

    def _expire(self) -> None:
        """Ends the requests whose deadline has come."""
        for request in self._scheduler.expire(self._clock()):
            self._finish(request.sequence, FinishReason.ABORT, request.stop_reason)

    def _advance(self, run: Callable[[], Collected | None]) -> None:
        """Lets the device get on, and takes in what came of it."""
        try:
            collected = run()
        except StepsLost as lost:
            self._scheduler.steps_lost(*lost.plans)
        except EngineDeadError as error:
            self._dead = str(error)
            raise
        else:
            if collected is not None:
                self._update(collected)

    def _note_first_steps(self, plan: StepPlan) -> None:
        for entry in plan.entries:
            metrics = self._owners[entry.request.sequence][0].metrics
            if metrics.first_scheduled_time is None:
                metrics.first_scheduled_time = time.monotonic()

    def _update(self, step: Collected) -> None:
        """The tokens of a step to the requests that wanted them."""
        events = self._scheduler.update(step.plan, step.sampled)
        self._generation_tokens += len(events)
        for event in events:
            sequence = event.request.sequence
            try:
                self._take_in(event)
            except Exception as error:  # this request's fault alone
                logger.error("a request failed: its text could not be made", exc_info=error)
                self._scheduler.finish(sequence, FinishReason.ERROR)
                self._finish(sequence, FinishReason.ERROR, None)

    def _finish(self, sequence: int, reason: FinishReason, stop_reason: int | str | None) -> None:
        """Tells of the end of a sequence that did not end with a token."""
        state, index = self._owners[sequence]
        state.samples[index].finish(reason.value, stop_reason)
        self._touched[state.request.request_id] = state

    def _take_in(self, event: TokenEvent) -> None:
        """One new token of a sequence to its request."""
        sequence = event.request.sequence
        state, index = self._owners[sequence]
        self._touched[state.request.request_id] = state
        sample = state.samples[index]
        reason = event.finish_reason
        if state.metrics.first_token_time is None:
            state.metrics.first_token_time = time.monotonic()
        if state.num_cached_tokens is None:
            # Of the first sample that has got so far: the others share its pages.
            state.num_cached_tokens = event.request.num_cached
        state.metrics.num_preemptions = max(
            state.metrics.num_preemptions, event.request.num_preemptions
        )
        stop = sample.push(event.sampled, self.weights_version, is_stop=reason is FinishReason.STOP)
        if stop is not None:
            # A stop string outranks the length limit that the same token may have reached.
            self._scheduler.finish(sequence, FinishReason.STOP, stop)
            sample.finish(FinishReason.STOP.value, stop)
        elif reason is not None:
            sample.finish(reason.value, event.request.stop_reason)

    def _outputs(self, states: Iterable[RequestState]) -> list[RequestOutput]:
        outputs = []
        for state in states:
            output = state.output()
            if state.finished:
                del self._requests[state.request.request_id]
                for sequence in state.sequences:
                    del self._owners[sequence]
            if output is not None:
                outputs.append(output)
        return outputs
