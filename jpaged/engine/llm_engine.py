"""LLMEngine: requests in, outputs out, one step at a time.

Only wires: the scheduler decides, the worker computes, the output processor writes text. One thread
drives it; `process_inputs` and `apply_chat_template` may be called from others.
"""

import itertools
import time
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from jpaged.core.kv_cache_manager import KVCacheManager
from jpaged.core.request import FinishReason, Request
from jpaged.core.scheduler import Scheduler, SchedulerConfig
from jpaged.core.step_plan import TokenEvent
from jpaged.engine.chat_template import render_chat
from jpaged.engine.engine_args import EngineArgs
from jpaged.engine.input_processor import EngineRequest, InputProcessor, Prompt
from jpaged.engine.model_source import ModelSource, resolve_model
from jpaged.engine.output_processor import BackendDecoder, RequestState
from jpaged.engine.outputs import RequestOutput
from jpaged.engine.stats import EngineStats
from jpaged.errors import EngineDeadError, RequestError
from jpaged.sampling.params import SamplingParams
from jpaged.sampling.row_params import SequenceSampling
from jpaged.worker.worker import Worker


class LLMEngine:
    """A model, its pages and its queue.

    Attributes:
        tokenizer: the model's transformers tokenizer, None if it has none.
        model_name: the name it is served under.
        model_source: where the weights came from, in words.
        max_model_len: most tokens of a prompt and its output together.
        weights_version: 0 at start, one more with each `update_params`.
    """

    def __init__(self, args: EngineArgs, model: ModelSource, worker: Worker) -> None:
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
        )
        self._kv = KVCacheManager(
            worker.pools.specs, args.page_size, max_step_tokens=worker.max_num_batched_tokens
        )
        self._scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=worker.max_num_seqs,
                max_num_batched_tokens=worker.max_num_batched_tokens,
                max_model_len=self.max_model_len,
            ),
            self._kv,
        )
        self._seeds = np.random.default_rng(args.seed % 2**64)
        self._numbers = itertools.count()
        self._requests: dict[str, RequestState] = {}
        # The request of each sequence, and which of its samples it is.
        self._owners: dict[int, tuple[RequestState, int]] = {}
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._dead: str | None = None

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> "LLMEngine":
        """Loads the model, sizes the page pool and compiles the steps.

        Raises ConfigError or ModelLoadError, naming what is wrong.
        """
        model = resolve_model(args)
        return cls(args, model, Worker(model.config, model.weights, model.worker_args(args)))

    def process_inputs(
        self, request_id: str, prompt: Prompt, params: SamplingParams
    ) -> EngineRequest:
        """Checks and tokenises a request. Thread-safe. Raises RequestError naming the field."""
        return self._inputs.process(request_id, prompt, params)

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
        self, request_id: str, prompt: Prompt, params: SamplingParams | None = None
    ) -> None:
        """Puts a request into the queue. Raises RequestError, and queues nothing, if it is invalid."""
        self.add_processed(self.process_inputs(request_id, prompt, params or SamplingParams()))

    def add_processed(self, request: EngineRequest) -> None:
        """Puts a checked request into the queue."""
        self._check_alive()
        if request.request_id in self._requests:
            raise RequestError(
                f"request_id {request.request_id!r} is in use by an unfinished request",
                field="request_id",
            )
        params = request.params
        assert params.max_tokens is not None, "process_inputs sets max_tokens"
        seed = params.seed
        if seed is None:
            seed = int(self._seeds.integers(2**63))
        sequences = [next(self._numbers) for _ in range(params.n)]
        state = RequestState.create(request, sequences, self._decoder)
        self._requests[request.request_id] = state
        self._prompt_tokens += len(request.prompt_token_ids)
        for index, sequence in enumerate(sequences):
            self._owners[sequence] = (state, index)
            self._scheduler.add(
                Request(
                    sequence=sequence,
                    prompt_token_ids=request.prompt_token_ids,
                    max_tokens=params.max_tokens,
                    stop_token_ids=frozenset(params.stop_ids),
                    eos_token_ids=frozenset() if params.ignore_eos else self._eos_token_ids,
                    sampling=SequenceSampling(params=params, seed=seed, sample=index),
                )
            )

    def step(self) -> list[RequestOutput]:
        """Runs one step; what there is to tell of the requests that got on.

        Raises EngineDeadError if the device fails: what it held is lost, and every request with it.
        """
        self._check_alive()
        plan = self._scheduler.schedule()
        if not plan.entries:
            return []
        try:
            sampled = self._worker.run(plan, self._kv)
        except Exception as error:
            self._dead = f"the step failed: {error}"
            raise EngineDeadError(self._dead) from error
        for entry in plan.entries:
            metrics = self._owners[entry.request.sequence][0].metrics
            if metrics.first_scheduled_time is None:
                metrics.first_scheduled_time = time.monotonic()
        events = self._scheduler.update(plan, sampled)
        self._generation_tokens += len(events)
        touched = {id(state): state for state in map(self._take_in, events)}
        return self._outputs(touched.values())

    def has_unfinished_requests(self) -> bool:
        """Whether a step would do anything."""
        return self._scheduler.has_unfinished()

    def abort_request(self, request_id: str | Iterable[str]) -> list[RequestOutput]:
        """Ends requests at once: their last outputs, "abort" their reason. Passes over unknown ids."""
        ids = [request_id] if isinstance(request_id, str) else list(request_id)
        states = [self._requests[i] for i in ids if i in self._requests]
        for state in states:
            for sequence, sample in zip(state.sequences, state.samples, strict=True):
                if sample.finish_reason is None:
                    self._scheduler.finish(sequence, FinishReason.ABORT)
                    sample.finish(FinishReason.ABORT.value, None)
        return self._outputs(states)

    def update_params(self, tree: object) -> None:
        """Puts new weights (public names and shapes, as a tree or an nnx module) in place.

        Everything is checked first: ModelLoadError names every path, shape and dtype at fault, and
        nothing has changed. Sequences that are running keep their tokens and are computed anew
        under the new weights, so that no later token depends on the old ones. Compiles nothing.
        """
        self._check_alive()
        self._worker.update_params(tree)
        self._scheduler.recompute_all()
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

    def _take_in(self, event: TokenEvent) -> RequestState:
        """One new token of a sequence to its request."""
        sequence = event.request.sequence
        state, index = self._owners[sequence]
        sample = state.samples[index]
        reason = event.finish_reason
        if state.metrics.first_token_time is None:
            state.metrics.first_token_time = time.monotonic()
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
        return state

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
