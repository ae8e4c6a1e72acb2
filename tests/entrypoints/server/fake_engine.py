"""FakeEngine: the interface of LLMEngine with scripted tokens in place of a model.

Tokens are bytes, so that any text can be said and any prefix of a character be cut off. Checking of
requests, stop strings and outputs are the real ones.
"""

import threading
import time
from collections.abc import Callable, Iterable, Sequence

import jinja2

from jpaged.core.step_plan import SampledToken
from jpaged.engine.chat_template import render_chat
from jpaged.engine.input_processor import EngineRequest, InputProcessor
from jpaged.engine.output_processor import BackendDecoder, RequestState
from jpaged.engine.outputs import RequestOutput
from jpaged.engine.stats import EngineStats
from jpaged.errors import EngineDeadError, RequestError
from jpaged.sampling.params import SamplingParams

EOS = 256
TURN = 257
VOCAB_SIZE = 300


class ByteTokenizer:
    """Token i < 256 is byte i; 256 ends a sequence; 257 begins a turn."""

    def __init__(self, chat_template: str | None = "turns") -> None:
        self.chat_template = chat_template

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids = []
        for i, piece in enumerate(text.split("<turn>")):
            ids += ([TURN] if i else []) + list(piece.encode())
        return ids

    def decode(
        self,
        ids: Sequence[int],
        *,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool = False,
    ) -> str:
        special = {} if skip_special_tokens else {EOS: b"<eos>", TURN: b"<turn>"}
        data = b"".join(bytes([i]) if i < 256 else special.get(i, b"") for i in ids)
        return data.decode(errors="replace")

    def apply_chat_template(self, conversation: list, **options: object) -> str:
        """<turn>role: content; refuses the role "tool" as some templates do."""
        if any(message["role"] == "tool" for message in conversation):
            raise jinja2.TemplateError("this template knows no tools")
        text = "".join(f"<turn>{m['role']}: {m['content']}" for m in conversation)
        return text + ("<turn>assistant: " if options.get("add_generation_prompt") else "")


class FakeEngine:
    """Every request says `reply(prompt_token_ids)`, a byte a step, then EOS.

    Attributes:
        gate: while cleared, steps wait.
        step_seconds: how long a step takes.
        fail_at_step: the step that raises, counted from 1.
        fail_when_added: the error `add_processed` raises.
        aborted: ids that were aborted.
        max_tokens_seen: `params` of every request that was queued.
    """

    model_name = "fake-model"
    model_source = "wheel fake 1.0"
    max_model_len = 256
    weights_version = 0

    def __init__(self, reply: str | Callable[[list[int]], str] = "Hello from the fake.") -> None:
        self.tokenizer: ByteTokenizer | None = ByteTokenizer()
        self.reply = reply if callable(reply) else lambda ids: reply
        self.gate = threading.Event()
        self.gate.set()
        self.step_seconds = 0.0
        self.fail_at_step: int | None = None
        self.fail_when_added: Exception | None = None
        self.aborted: list[str] = []
        self.queued: list[EngineRequest] = []
        self.closed = False
        self.num_steps = 0
        self.num_idle_polls = 0
        self.update_threads: list[str] = []
        self._states: dict[str, RequestState] = {}
        self._generation_tokens = 0
        self._prompt_tokens = 0

    @classmethod
    def from_engine_args(cls, args: object) -> "FakeEngine":
        return cls()

    def process_inputs(
        self, request_id: str, prompt: object, params: SamplingParams, **scheduling: object
    ) -> EngineRequest:
        inputs = InputProcessor(
            self.tokenizer,
            vocab_size=VOCAB_SIZE,
            max_model_len=self.max_model_len,
            has_priorities=True,
        )
        return inputs.process(request_id, prompt, params, **scheduling)

    def apply_chat_template(self, messages: Sequence[dict], **options: object) -> list[int]:
        return render_chat(self.tokenizer, messages, **options)

    def add_processed(self, request: EngineRequest) -> None:
        if self.fail_when_added is not None:
            raise self.fail_when_added
        if request.request_id in self._states:
            raise RequestError("request_id is in use", field="request_id")
        self.queued.append(request)
        self._prompt_tokens += len(request.prompt_token_ids)
        decoder = None if self.tokenizer is None else BackendDecoder(self.tokenizer)
        samples = list(range(request.params.n))
        self._states[request.request_id] = RequestState.create(request, samples, decoder)

    def has_unfinished_requests(self) -> bool:
        self.num_idle_polls += not self._states
        return bool(self._states)

    def step(self) -> list[RequestOutput]:
        self.gate.wait()
        time.sleep(self.step_seconds)
        self.num_steps += 1
        if self.fail_at_step is not None and self.num_steps >= self.fail_at_step:
            raise RuntimeError("out of memory on the device")
        states = list(self._states.values())
        for state in states:
            for sample in state.samples:
                if sample.finish_reason is None:
                    self._advance(state, sample)
        return self._outputs(states)

    def _advance(self, state: RequestState, sample: object) -> None:
        params = state.request.params
        script = [*self.reply(state.request.prompt_token_ids).encode(), EOS]
        if params.ignore_eos:
            script = script[:-1]
        token = script[len(sample.token_ids) % len(script)]
        top = params.logprobs or 0
        sampled = SampledToken(
            token=token,
            logprob=-0.5,
            rank=1,
            top_ids=tuple((token + i) % 256 for i in range(top)),
            top_logprobs=tuple(-0.5 - i for i in range(top)),
        )
        self._generation_tokens += 1
        if state.metrics.first_token_time is None:
            state.metrics.first_token_time = time.monotonic()
        ends = token == EOS or token in params.stop_ids
        stop = sample.push(sampled, self.weights_version, is_stop=ends)
        if stop is not None:
            sample.finish("stop", stop)
        elif ends:
            sample.finish("stop", token if token in params.stop_ids else None)
        elif len(sample.token_ids) == params.max_tokens:
            sample.finish("length", None)

    def abort_request(self, request_id: str | Iterable[str]) -> list[RequestOutput]:
        ids = [request_id] if isinstance(request_id, str) else list(request_id)
        self.aborted += ids
        states = [self._states[i] for i in ids if i in self._states]
        for state in states:
            for sample in state.samples:
                if sample.finish_reason is None:
                    sample.finish("abort", None)
        return self._outputs(states)

    def _outputs(self, states: Iterable[RequestState]) -> list[RequestOutput]:
        outputs = []
        for state in states:
            output = state.output()
            if state.finished:
                del self._states[state.request.request_id]
            if output is not None:
                outputs.append(output)
        return outputs

    def update_params(self, tree: object) -> None:
        if tree == "wrong":
            raise ValueError("a shape differs")
        self.update_threads.append(threading.current_thread().name)
        self.weights_version += 1

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self._states),
            num_waiting=0,
            num_preemptions=0,
            pages_total=100,
            pages_used=25,
            pages_cached=10,
            prefix_cache_queries=40,
            prefix_cache_hits=8,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            num_steps=self.num_steps,
            scheduled_tokens=0,
            padded_tokens=0,
            num_compilations=0,
        )

    def close(self) -> None:
        if self._states:
            raise EngineDeadError("closed while requests are running")
        self.closed = True
