"""Servers for the tests: one that writes given bytes, and a small OpenAI-compatible one."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from fulgurite.bench.serve.http_client import Address

CLOSE = b""  # in a script: close the connection
RESET = b"!reset"  # close it without the usual goodbye


@asynccontextmanager
async def scripted_server(*scripts: Sequence[bytes]) -> AsyncIterator[tuple[Address, list[int]]]:
    """Answers its n-th request with the pieces of the n-th script, each written by itself.

    Yields its address, and a list that gets the number of the connection of every request.
    """
    connections: list[int] = []
    opened = iter(range(1000))
    remaining = iter(scripts)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = next(opened)
        try:
            while await _read_request(reader):
                connections.append(number)
                for piece in next(remaining, (CLOSE,)):
                    if piece == RESET:
                        writer.transport.abort()
                    if piece in (CLOSE, RESET):
                        return
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield Address("127.0.0.1", server.sockets[0].getsockname()[1]), connections
    finally:
        server.close()


async def _read_request(reader: asyncio.StreamReader) -> bool:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
    except (asyncio.IncompleteReadError, ConnectionError):
        return False
    _, found, length = head.partition(b"content-length: ")
    if found:
        await reader.readexactly(int(length.split(b"\r\n")[0]))
    return True


def as_chunks(events: Sequence[bytes], length: int | None = None) -> bytes:
    """A chunked 200 of these bytes: a chunk each, or chunks of `length` bytes."""
    pieces = list(events)
    if length is not None:
        whole = b"".join(events)
        pieces = [whole[i : i + length] for i in range(0, len(whole), length)]
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
    return head + b"transfer-encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"


def event(content: Any) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def text_event(text: str, **more: Any) -> bytes:
    return event({"choices": [{"text": text, "finish_reason": None, **more}]})


USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}
DONE = b"data: [DONE]\n\n"
STREAM = [
    text_event("a"),
    text_event("b"),
    text_event("c"),
    event({"choices": [{"text": "", "finish_reason": "length"}]}),
    event({"choices": [], "usage": USAGE}),
    DONE,
]


# ---- OpenAI's interface --------------------------------------------------------------------------


class FakeOpenAI:
    """Replies with `max_tokens` words. Every `fail_every`-th request gets a 429. Records bodies."""

    def __init__(self, fail_every: int = 0, has_usage: bool = True) -> None:
        self.fail_every, self.has_usage = fail_every, has_usage
        self.bodies: list[dict[str, Any]] = []
        self.app = Starlette(
            routes=[
                Route("/health", lambda request: Response()),
                Route("/v1/models", lambda request: JSONResponse({"data": [{"id": "fake"}]})),
                Route("/v1/completions", self.complete, methods=["POST"]),
                Route("/v1/chat/completions", self.complete, methods=["POST"]),
            ]
        )

    async def complete(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        if self.fail_every and len(self.bodies) % self.fail_every == 0:
            return JSONResponse({"error": {"message": "too many"}}, status_code=429)
        wrap: Callable[[str], dict[str, Any]] = lambda text: {"text": text}  # noqa: E731
        if "messages" in body:
            wrap = lambda text: {"delta": {"content": text}, "message": {"content": text}}  # noqa: E731
        prompt = body.get("prompt") or " ".join(m["content"] for m in body["messages"]).split()
        usage = {"prompt_tokens": len(prompt), "completion_tokens": body["max_tokens"]}
        if not body.get("stream"):
            text = "word " * body["max_tokens"]
            return JSONResponse({"choices": [wrap(text)], "usage": usage})
        events = [event({"choices": [wrap("word ")]}) for _ in range(body["max_tokens"])]
        if "messages" in body:
            events.insert(0, event({"choices": [{"delta": {"role": "assistant"}}]}))
        if self.has_usage:
            events.append(event({"choices": [], "usage": usage}))
        return StreamingResponse(iter([*events, DONE]), media_type="text/event-stream")

    @contextmanager
    def run(self) -> Iterator[Address]:
        """Serve on a free port, in a thread."""
        config = uvicorn.Config(self.app, port=0, log_level="warning", lifespan="off")
        server = uvicorn.Server(config)
        started = threading.Event()
        startup = server.startup

        async def start(sockets: Any = None) -> None:
            await startup(sockets)
            started.set()

        server.startup = start  # type: ignore[method-assign]
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        assert started.wait(30)
        try:
            yield Address("127.0.0.1", server.servers[0].sockets[0].getsockname()[1])
        finally:
            server.should_exit = True
            thread.join(30)
