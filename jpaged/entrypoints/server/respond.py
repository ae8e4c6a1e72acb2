"""respond(): runs the requests behind one HTTP request, and writes the answer as it comes or at its end.

Whatever way it ends (client gone, error, server closing), no request is left running.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence

from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from jpaged.engine.async_llm_engine import AsyncLLMEngine, RequestStream
from jpaged.engine.input_processor import Prompt
from jpaged.engine.outputs import RequestOutput
from jpaged.entrypoints.server.errors import (
    INTERNAL_ERROR,
    ApiError,
    as_api_error,
    error_event,
    failure,
    logger,
)
from jpaged.entrypoints.server.metrics import Metrics
from jpaged.entrypoints.server.protocol import streamed
from jpaged.entrypoints.server.writers import Writer, encode
from jpaged.errors import RequestError
from jpaged.sampling.params import SamplingParams

# What nginx writes for it; nobody reads the answer.
CLIENT_GONE = 499


class ClientWatch:
    """Aborts requests as soon as their client closes the connection."""

    def __init__(self, receive: Receive, streams: Sequence[RequestStream]) -> None:
        self.gone = False
        self._receive = receive
        self._streams = streams
        self._task = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.gone = True
        self._abort()

    def end(self) -> None:
        """Stops watching; what is still running is aborted."""
        self._task.cancel()
        self._abort()

    def _abort(self) -> None:
        for stream in self._streams:
            stream.abort()


async def respond(
    request: Request,
    engine: AsyncLLMEngine,
    metrics: Metrics,
    writer: Writer,
    *,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    stream: bool,
    priority: int = 0,
    timeout: float | None = None,
) -> Response:
    """The answer to a request whose body has been read.

    All prompts are checked before any is queued. An error raises as long as nothing has been sent.
    """
    if stream:
        params = streamed(params)
    streams = [
        engine.generate(
            prompt,
            params,
            f"{writer.request_id}-{i}" if i else writer.request_id,
            priority=priority,
            timeout=timeout,
        )
        for i, prompt in enumerate(prompts)
    ]
    watch = ClientWatch(request.receive, streams)
    handed_over = False
    try:
        await asyncio.gather(*(s.prepare() for s in streams))
        if not stream:
            outputs = await asyncio.gather(*streams)
            body = encode(writer.body(outputs))
            for i, output in enumerate(outputs):
                metrics.observe(output, writer.longest(i))
            for output in outputs:
                if (failed := failure(output)) is not None:
                    raise failed
            return Response(body.encode(), media_type="application/json")
        events = _events(streams, writer, metrics)
        first = await anext(events, b"")
        handed_over = True
        return EventStream(first, events, watch)
    except asyncio.CancelledError:
        if watch.gone:
            return Response(status_code=CLIENT_GONE)
        raise
    except RequestError as error:
        raise RequestError(str(error), field=writer.param(error.field), code=error.code) from error
    except Exception as error:
        raise _told(error) from error
    finally:
        if not handed_over:
            watch.end()


def _told(error: Exception) -> ApiError:
    """What the client is told of an error; the log has the whole story of one of ours."""
    told = as_api_error(error)
    if told.code == INTERNAL_ERROR and told is not error:
        logger.error("a request failed", exc_info=error)
    return told


class EventStream(Response):
    """Server-sent events. Writes no faster than the client reads; ends when the client is gone."""

    def __init__(
        self, first: bytes, events: AsyncGenerator[bytes, None], watch: ClientWatch
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers(
            {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
        )
        self._first = first
        self._events = events
        self._watch = watch

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
            )
            await send({"type": "http.response.body", "body": self._first, "more_body": True})
            try:
                async for event in self._events:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
            except Exception as error:
                body = error_event(_told(error))
                await send({"type": "http.response.body", "body": body, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._watch.end()
            await self._events.aclose()


async def _events(
    streams: Sequence[RequestStream], writer: Writer, metrics: Metrics
) -> AsyncGenerator[bytes, None]:
    """The stream's bytes, step by step. Raises if a request did not end by itself."""
    left = len(streams)
    async for i, output in _together(streams):
        data = writer.events(i, output)
        if output.finished:
            left -= 1
            metrics.observe(output, writer.longest(i))
        if (failed := failure(output)) is not None:
            raise failed
        if not left:
            data += writer.last_events()
        if data:
            yield data


async def _together(
    streams: Sequence[RequestStream],
) -> AsyncIterator[tuple[int, RequestOutput]]:
    """Outputs of several requests as they come, each with the number of its request."""
    if len(streams) == 1:
        async for output in streams[0]:
            yield 0, output
        return
    # Bounded: a slow client holds the readers up, and then each request's outputs are merged.
    items: asyncio.Queue[tuple[int, RequestOutput | Exception | None]]
    items = asyncio.Queue(len(streams))

    async def read(i: int) -> None:
        try:
            async for output in streams[i]:
                await items.put((i, output))
        except Exception as error:
            await items.put((i, error))
        else:
            await items.put((i, None))

    readers = [asyncio.ensure_future(read(i)) for i in range(len(streams))]
    try:
        left = len(readers)
        while left:
            i, item = await items.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                left -= 1
            else:
                yield i, item
    finally:
        for reader in readers:
            reader.cancel()
