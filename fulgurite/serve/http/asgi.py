"""ASGI helpers: JSON and server-sent events out, disconnects in.

`while_connected` runs a coroutine and cancels it if the client goes away: also for replies that are
not streamed, where nothing is sent until the end.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from fulgurite.serve.http.body import encode_json
from fulgurite.serve.http.errors import ApiError

T = TypeVar("T")
ENCODER = msgspec.json.Encoder()
SSE_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # proxies must not collect events
}


class Disconnected(Exception):
    """The client has gone away."""


class JsonResponse(Response):
    """JSON by msgspec."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return encode_json(content)


def encode_event(value: Any) -> bytes:
    """One `data:` event with a JSON value."""
    return b"data: " + ENCODER.encode(value) + b"\n\n"


def encode_named_event(name: str, value: Any) -> bytes:
    """An event with a name, as Anthropic's clients and `/v1/responses` expect."""
    return b"event: " + name.encode() + b"\ndata: " + ENCODER.encode(value) + b"\n\n"


DONE_EVENT = b"data: [DONE]\n\n"


class ConnectionWatcher:
    """Cancels the task that answers a request if its client goes away. One small task a request."""

    def __init__(self, receive: Receive) -> None:
        task = asyncio.current_task()
        assert task is not None, "requests are answered in tasks"
        self.task = task
        self.is_gone = False
        self.watching = asyncio.ensure_future(self._watch(receive))

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.is_gone = True
        self.task.cancel()

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.watching.cancel()
        if kind is asyncio.CancelledError and self.is_gone:
            self.task.uncancel()
            raise Disconnected from None


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`; Disconnected, after cancelling it, if the client leaves first."""
    with ConnectionWatcher(request.receive):
        return await work


class EventStream(Response):
    """A response of server-sent events. Leaving it early closes the events, which cancels their work.

    The first event is awaited before anything is sent (`start_stream`), so that errors up to there have
    a status code. protocol.py ends the connection of a client that does not read.
    """

    def __init__(self, events: OpenedEvents) -> None:
        self.events = events
        self.status_code, self.background = 200, None
        self.init_headers(SSE_HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with ConnectionWatcher(receive):
                await self._write(send)
        finally:
            await self.events.aclose()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        await send({"type": "http.response.body", "body": self.events.first, "more_body": True})
        async for event in self.events.rest:
            await send({"type": "http.response.body", "body": event, "more_body": True})


@dataclass(frozen=True)
class OpenedEvents:
    """Events whose first one is there. `aclose` must be called."""

    first: bytes
    rest: AsyncIterator[bytes]

    async def aclose(self) -> None:
        await self.rest.aclose()  # type: ignore[attr-defined]


async def open_stream(events: AsyncIterator[bytes]) -> OpenedEvents:
    """The events, after the first one is there: its errors are raised here."""
    return OpenedEvents(await anext(events, b""), events)


async def start_stream(request: Request, events: AsyncIterator[bytes]) -> EventStream:
    """A response with these events, once the first one is there; Disconnected if the client leaves."""
    return EventStream(await while_connected(request, open_stream(events)))


def error_response(error: ApiError, request_id: str, is_anthropic: bool) -> JsonResponse:
    body = error.to_anthropic(request_id) if is_anthropic else error.to_openai()
    return JsonResponse(body, error.status, headers=error.headers)
