"""AsyncLLMEngine: an LLMEngine for asyncio programs.

One call, `generate`, gives something that can be awaited (the final output) or iterated (the output as it
grows). Prompts are checked and tokenised in a small pool of threads, the engine steps in a thread of its
own (EngineLoop), and an event loop only ever picks up finished outputs. Knows nothing of HTTP.
"""

import asyncio
import concurrent.futures
import logging
import uuid
import weakref
from collections.abc import AsyncIterator, Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from jpaged.engine.engine_args import EngineArgs
from jpaged.engine.engine_loop import EngineLoop
from jpaged.engine.input_processor import EngineRequest, Prompt
from jpaged.engine.mailbox import Mailbox, Outbox
from jpaged.engine.outputs import RequestOutput
from jpaged.engine.stats import EngineStats
from jpaged.errors import EngineDeadError
from jpaged.sampling.params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from jpaged.engine.llm_engine import LLMEngine

_P = ParamSpec("_P")
_T = TypeVar("_T")

# Tokenising a long prompt takes long; a second thread lets a short one pass it.
TOKENIZER_THREADS = 2
# How long close() waits for the step that is running.
STEP_SECONDS = 30.0

logger = logging.getLogger("jpaged")


class RequestStream(AsyncIterator[RequestOutput]):
    """One request, not sent before it is first used.

    `await stream` gives the final RequestOutput; `async for output in stream` gives what
    `params.output_kind` asks for, step by step. A reader slower than the engine gets several steps in
    one output. A wrong request raises RequestError, a dead engine EngineDeadError. The request is
    aborted when the task that reads it is cancelled, on `aclose()`, and when the stream is dropped
    (as after `break`).
    """

    def __init__(
        self,
        engine: "AsyncLLMEngine",
        prompt: Prompt,
        params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        timeout: float | None = None,
    ) -> None:
        self.request_id = request_id
        self._priority = priority
        self._timeout = timeout
        self._engine = engine
        self._prompt = prompt
        self._params = params
        self._request: EngineRequest | None = None
        self._mailbox: Mailbox | None = None
        self._closed = False
        self._last: RequestOutput | None = None

    async def prepare(self) -> None:
        """Checks and tokenises without sending anything, so that several can be sent or none."""
        if self._request is None:
            self._engine.check_health()
            self._request = await self._engine.run_in_thread(
                self._engine.engine.process_inputs,
                self.request_id,
                self._prompt,
                self._params,
                priority=self._priority,
                timeout=self._timeout,
            )

    async def __anext__(self) -> RequestOutput:
        if self._closed or (self._last is not None and self._last.finished):
            raise StopAsyncIteration
        try:
            if self._mailbox is None:
                await self.prepare()
                self._send()
            assert self._mailbox is not None
            output = await self._mailbox.get()
        except BaseException:
            self.abort()
            raise
        if output is None:
            raise StopAsyncIteration
        self._last = output
        return output

    def __await__(self) -> Generator[object, None, RequestOutput]:
        return self._final().__await__()

    async def _final(self) -> RequestOutput:
        if self._request is None:
            self._params = self._params.replace(output_kind=RequestOutputKind.FINAL_ONLY)
        async for _ in self:
            pass
        if self._last is None or not self._last.finished:
            raise asyncio.CancelledError("the request was closed before it ended")
        return self._last

    def _send(self) -> None:
        assert self._request is not None
        if self._closed:
            raise asyncio.CancelledError("the request was closed before it was sent")
        mailbox = Mailbox(self.request_id, self._engine.outbox(), self._params.output_kind)
        self._engine.loop.submit(mailbox, self._request)
        self._mailbox = mailbox

    def abort(self) -> None:
        """Ends the request at once; whoever reads the stream sees its end. On its event loop only."""
        self._closed = True
        if self._mailbox is not None:
            self._engine.loop.abandon(self._mailbox)
            self._mailbox.wake()

    async def aclose(self) -> None:
        """Ends the request at once."""
        self.abort()

    def __del__(self) -> None:
        mailbox = getattr(self, "_mailbox", None)
        if mailbox is not None:
            self._engine.loop.abandon(mailbox)


class AsyncLLMEngine:
    """Serves requests of asyncio tasks, on one or several event loops, with one LLMEngine."""

    def __init__(self, engine: "LLMEngine") -> None:
        """Takes over `engine`: from now on only the engine thread may touch its state."""
        self.engine = engine
        self.loop = EngineLoop(engine)
        self._threads = concurrent.futures.ThreadPoolExecutor(
            TOKENIZER_THREADS, thread_name_prefix="jpaged-tokenize"
        )
        self._outboxes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Outbox] = (
            weakref.WeakKeyDictionary()
        )
        # Also at interpreter exit, before threads are torn down under a running step.
        self._finalizer = weakref.finalize(self, _close, self.loop, self._threads, engine)

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> "AsyncLLMEngine":
        """Loads the model and compiles; blocks until the engine is ready."""
        from jpaged.engine.llm_engine import LLMEngine  # imports jax

        return cls(LLMEngine.from_engine_args(args))

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        timeout: float | None = None,
    ) -> RequestStream:
        """A request to await for its final output, or to iterate for its outputs as they come.

        Args:
            prompt: text, token ids, {"prompt": text} or {"prompt_token_ids": ids}; a dict may also
                have a cache_salt: requests with different ones share no pages.
            sampling_params: None means the defaults of SamplingParams.
            request_id: unique among the running requests; None makes one.
            priority: lower goes first; needs `scheduling_policy="priority"`.
            timeout: seconds from being sent, time in the queue included, after which it ends with
                finish_reason "abort" and stop_reason "deadline".

        Reading it raises RequestError if it is invalid, QueueFullError if too many wait already.
        """
        params = SamplingParams() if sampling_params is None else sampling_params
        return RequestStream(
            self,
            prompt,
            params,
            request_id or uuid.uuid4().hex,
            priority=priority,
            timeout=timeout,
        )

    def abort(self, request_id: str) -> None:
        """Ends a request; its reader gets a last output with finish_reason "abort"."""
        self.loop.abort(request_id)

    async def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> list[int]:
        """Token ids of a conversation. RequestError(field="messages") if the template refuses it."""
        return await self.run_in_thread(
            self.engine.apply_chat_template,
            messages,
            chat_template=chat_template,
            chat_template_kwargs=chat_template_kwargs,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )

    async def update_params(self, tree: object) -> None:
        """Swaps the weights between two steps; raises if a path, shape or dtype differs."""
        await asyncio.wrap_future(self.loop.call(lambda: self.engine.update_params(tree)))

    @property
    def is_running(self) -> bool:
        """Whether requests are served: not closed, and no step has failed."""
        return self.loop.is_running

    def check_health(self) -> None:
        """Raises EngineDeadError unless requests are served."""
        self.loop.check()

    def get_stats(self) -> EngineStats:
        """Counters of the engine as of its last step."""
        return self.engine.stats()

    @property
    def tokenizer(self) -> object:
        """The model's tokenizer, None if it has none."""
        return self.engine.tokenizer

    @property
    def model_name(self) -> str:
        """The name the model is served under."""
        return self.engine.model_name

    @property
    def model_source(self) -> str:
        """Where the weights came from, for people."""
        return self.engine.model_source

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and output together."""
        return self.engine.max_model_len

    async def drain(self, timeout: float) -> bool:
        """Waits until no request is running, at most `timeout` seconds. Whether it came to that."""
        deadline = asyncio.get_running_loop().time() + timeout
        while self.loop.active_ids() and self.is_running:
            if asyncio.get_running_loop().time() >= deadline:
                return False
            await asyncio.sleep(0.01)
        return True

    def abort_all(self) -> None:
        """Ends all requests; each reader gets a last output with finish_reason "abort"."""
        for request_id in self.loop.active_ids():
            self.loop.abort(request_id)

    def close(self) -> bool:
        """Ends all requests with EngineDeadError and gives everything back. Again is harmless.

        False if the running step did not end in time: then the device's memory is still taken.
        """
        self._finalizer()
        return self.loop.has_ended

    def outbox(self) -> Outbox:
        """The way outputs take to the running event loop."""
        loop = asyncio.get_running_loop()
        outbox = self._outboxes.get(loop)
        if outbox is None:
            outbox = self._outboxes[loop] = Outbox(loop)
        return outbox

    async def run_in_thread(
        self, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs
    ) -> _T:
        """Runs a function in the tokenizer threads."""
        try:
            future = self._threads.submit(function, *args, **kwargs)
        except RuntimeError as error:  # shut down
            raise EngineDeadError("the engine was closed") from error
        return await asyncio.wrap_future(future)


def _close(
    loop: EngineLoop, threads: concurrent.futures.ThreadPoolExecutor, engine: "LLMEngine"
) -> None:
    ended = loop.stop(STEP_SECONDS)
    threads.shutdown(wait=False, cancel_futures=True)
    if ended:
        engine.close()
    else:
        logger.error("a step has not ended for %g s; its device memory is not freed", STEP_SECONDS)
