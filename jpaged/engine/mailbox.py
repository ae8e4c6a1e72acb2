"""Mailboxes: where outputs wait on an event loop for the tasks that read them.

Knows one thread that adds and one event loop that reads; nothing of engines or prompts.
"""

import asyncio
import dataclasses
from collections import deque

from jpaged.engine.outputs import CompletionOutput, RequestOutput
from jpaged.sampling.params import RequestOutputKind


class Outbox:
    """Outputs on their way from the engine thread to one event loop.

    However many requests a step moves, the loop is woken once; and not again before it has looked.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._items: deque[tuple[Mailbox, RequestOutput | BaseException]] = deque()
        self._wake_is_due = False

    def add(self, mailbox: "Mailbox", item: RequestOutput | BaseException) -> None:
        """Engine thread: takes an item; `flush` sends it."""
        self._items.append((mailbox, item))

    def flush(self) -> bool:
        """Engine thread: wakes the event loop. False if it is closed and nobody will read."""
        if self._wake_is_due:
            return True
        self._wake_is_due = True
        try:
            self._loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:  # the loop is closed
            return False
        return True

    def _deliver(self) -> None:
        # Cleared first: what is added from here on has a wake of its own.
        self._wake_is_due = False
        items = self._items
        while items:
            mailbox, item = items.popleft()
            mailbox.put(item)


class Mailbox:
    """Where one request's outputs wait for their reader. Used on its event loop only.

    Holds at most one output: what arrives before the reader has come is merged into it.
    """

    def __init__(self, request_id: str, outbox: Outbox, kind: RequestOutputKind) -> None:
        self.request_id = request_id
        self.outbox = outbox
        self._kind = kind
        self._output: RequestOutput | None = None
        self._error: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None
        # Set when the reader is gone; from any thread.
        self.closed = False

    def put(self, item: RequestOutput | BaseException) -> None:
        if isinstance(item, BaseException):
            self._error = item
        elif self._output is None:
            self._output = item
        else:
            self._output = merge(self._output, item, self._kind)
        self.wake()

    def wake(self) -> None:
        """Lets the reader look again."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> RequestOutput | None:
        """The next output; None once the mailbox is closed. Raises what ended the request."""
        while not self.closed:
            if self._output is not None:
                output, self._output = self._output, None
                return output
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return None


def merge(old: RequestOutput, new: RequestOutput, kind: RequestOutputKind) -> RequestOutput:
    """One output that says what `old` and then `new` said, sample by sample."""
    by_index = {part.index: part for part in old.outputs}
    for part in new.outputs:
        before = by_index.get(part.index)
        if before is not None and kind is RequestOutputKind.DELTA:
            part = _joined(before, part)
        by_index[part.index] = part
    return dataclasses.replace(new, outputs=[by_index[index] for index in sorted(by_index)])


def _joined(old: CompletionOutput, new: CompletionOutput) -> CompletionOutput:
    logprobs = None
    if old.logprobs is not None or new.logprobs is not None:
        logprobs = [*(old.logprobs or ()), *(new.logprobs or ())]
    return dataclasses.replace(
        new,
        text=old.text + new.text,
        token_ids=[*old.token_ids, *new.token_ids],
        logprobs=logprobs,
    )
