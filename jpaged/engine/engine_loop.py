"""EngineLoop: the thread that steps an LLMEngine.

The thread owns the engine. Everybody else sends it commands through one queue and gets outputs through
mailboxes that live on an asyncio event loop. Knows nothing of prompts, tokenising or HTTP.

Nothing here takes a lock: the queue may be written to from a destructor, in any thread, at any moment.
"""

import concurrent.futures
import logging
import queue
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from jpaged.engine.input_processor import EngineRequest
from jpaged.engine.mailbox import Mailbox, Outbox
from jpaged.engine.outputs import RequestOutput
from jpaged.errors import EngineDeadError, RequestError

if TYPE_CHECKING:
    from jpaged.engine.llm_engine import LLMEngine

logger = logging.getLogger("jpaged")

CLOSED = "the engine was closed"


class EngineLoop:
    """Steps an engine in a thread of its own while there is work, and sleeps while there is none."""

    def __init__(self, engine: "LLMEngine") -> None:
        self._engine = engine
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        # Requests that hold their id, from submission to their last output.
        self._active: dict[str, Mailbox] = {}
        # Engine thread only: where the outputs of requests inside the engine go.
        self._routes: dict[str, Mailbox] = {}
        self._calls: dict[concurrent.futures.Future[None], None] = {}
        self._stopping = False
        # Why nothing is served any more; set before those who wait are told, so that whoever came
        # too late to be told sees it.
        self._end: EngineDeadError | None = None
        self._thread = threading.Thread(target=self._run, name="jpaged-engine", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether requests are served: not stopped, and no step has failed."""
        return self._end is None and not self._stopping

    @property
    def has_ended(self) -> bool:
        """Whether the thread is gone, and with it the last step."""
        return not self._thread.is_alive()

    def active_ids(self) -> list[str]:
        """Ids of the requests that have not had their last output."""
        return list(self._active)

    def check(self) -> None:
        """Raises EngineDeadError unless requests are served."""
        if self._end is not None:
            raise _copy(self._end)
        if self._stopping:
            raise EngineDeadError(CLOSED)

    def submit(self, mailbox: Mailbox, request: EngineRequest) -> None:
        """Hands a checked request to the engine. RequestError if its id is in use."""
        self.check()
        if self._active.setdefault(mailbox.request_id, mailbox) is not mailbox:
            raise RequestError(
                f"request_id {mailbox.request_id!r} is in use by a running request",
                field="request_id",
            )
        self._commands.put(lambda: self._add(mailbox, request))
        if self._end is not None:
            self._forget(mailbox)
            raise _copy(self._end)

    def abandon(self, mailbox: Mailbox) -> None:
        """Drops a request whose reader is gone. Any thread, any number of times, in a destructor."""
        if mailbox.closed:
            return
        mailbox.closed = True
        if self._active.get(mailbox.request_id) is mailbox:
            self._active.pop(mailbox.request_id, None)
            self._commands.put(lambda: self._drop(mailbox))

    def abort(self, request_id: str) -> None:
        """Ends a request; its reader gets a last output with finish_reason "abort"."""
        self._commands.put(lambda: self._abort(request_id))

    def call(self, function: Callable[[], None]) -> "concurrent.futures.Future[None]":
        """Runs a function on the engine thread between two steps."""
        self.check()
        future: concurrent.futures.Future[None] = concurrent.futures.Future()

        def command() -> None:
            self._calls.pop(future, None)
            if future.done() or not future.set_running_or_notify_cancel():
                return
            try:
                function()
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(None)

        self._calls[future] = None
        self._commands.put(command)
        if self._end is not None:
            _fail(future, self._end)
        return future

    def stop(self, timeout: float) -> bool:
        """Ends the thread; whoever still waits gets EngineDeadError. False if a step does not end."""
        self._stopping = True
        self._commands.put(lambda: None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)
        return self.has_ended

    def _run(self) -> None:
        end = EngineDeadError(CLOSED)
        try:
            while not self._stopping:
                self._run_commands(wait=not self._engine.has_unfinished_requests())
                if not self._stopping and self._engine.has_unfinished_requests():
                    self._deliver(self._engine.step())
            self._engine.abort_request(list(self._routes))
        except BaseException as error:  # whatever it is, nobody may be left waiting
            logger.exception("the engine's step failed; it serves no more requests")
            told = isinstance(error, EngineDeadError)
            end = EngineDeadError(str(error) if told else f"the engine is dead: {error!r}")
            end.__cause__ = error
        self._end = end
        self._routes.clear()
        for mailbox in list(self._active.values()):
            self._forget(mailbox)
            mailbox.outbox.add(mailbox, _copy(end))
            mailbox.outbox.flush()
        for future in list(self._calls):
            _fail(future, end)

    def _run_commands(self, *, wait: bool) -> None:
        try:
            while True:
                self._commands.get(block=wait)()
                wait = False
        except queue.Empty:
            return

    def _add(self, mailbox: Mailbox, request: EngineRequest) -> None:
        if mailbox.closed:
            return
        self._routes[mailbox.request_id] = mailbox
        try:
            self._engine.add_processed(request)
        except Exception as error:  # this request's fault alone
            self._forget(mailbox)
            mailbox.outbox.add(mailbox, error)
            mailbox.outbox.flush()

    def _drop(self, mailbox: Mailbox) -> None:
        if self._routes.get(mailbox.request_id) is mailbox:
            del self._routes[mailbox.request_id]
            self._engine.abort_request([mailbox.request_id])

    def _abort(self, request_id: str) -> None:
        if request_id in self._routes:
            self._deliver(self._engine.abort_request([request_id]))

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        touched: dict[Outbox, None] = {}
        for output in outputs:
            mailbox = self._routes.get(output.request_id)
            if mailbox is None:
                continue
            if output.finished:
                self._forget(mailbox)
            mailbox.outbox.add(mailbox, output)
            touched[mailbox.outbox] = None
        for outbox in touched:
            if not outbox.flush():
                for mailbox in [m for m in self._routes.values() if m.outbox is outbox]:
                    self.abandon(mailbox)

    def _forget(self, mailbox: Mailbox) -> None:
        """The request has ended: its id is free again."""
        self._routes.pop(mailbox.request_id, None)
        if self._active.get(mailbox.request_id) is mailbox:
            self._active.pop(mailbox.request_id, None)


def _copy(error: EngineDeadError) -> EngineDeadError:
    """The same error as an object of its own, since each raise adds to its traceback."""
    copy = EngineDeadError(str(error))
    copy.__cause__ = error.__cause__
    return copy


def _fail(future: "concurrent.futures.Future[None]", error: EngineDeadError) -> None:
    try:
        future.set_exception(_copy(error))
    except concurrent.futures.InvalidStateError:  # it was answered, or given up, already
        return
