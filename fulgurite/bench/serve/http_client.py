"""A small HTTP/1.1 client for load generation: one connection, one request at a time.

In: a URL, a path and the bytes of a JSON body. Out: a `Reply` with times, token counts and what went wrong.
It never raises for what a server does: every outcome is the `kind` of a `Reply`.

llhttp (httptools) parses. Bodies go from its callback into a list without Python code of our own in between,
so a read of many chunks costs little more than a read of one.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

from fulgurite.bench.serve.replies import OK, Reply, StreamReader, read_body
from fulgurite.errors import ArgumentError

try:
    import httptools
except ImportError:  # the extra `serve` is not installed; `check_packages` says so
    httptools = None  # type: ignore[assignment]

NO_CONNECTION = "no connection"
RESET = "connection reset"
TIMEOUT = "timeout"
INVALID_HTTP = "invalid HTTP"
DEFAULT_PORTS = {"http": 80, "https": 443}


def check_packages() -> None:
    """ArgumentError if the packages of the load generator are not installed."""
    if httptools is None:
        raise ArgumentError(
            "fulgurite bench serve needs httptools", next="pip install 'fulgurite[serve]'"
        )


@dataclass(frozen=True)
class Address:
    """Where a server listens. `path` comes before `/v1/…`."""

    host: str
    port: int
    path: str = ""
    is_tls: bool = False

    @classmethod
    def parse(cls, url: str) -> Address:
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            port = parts.port or DEFAULT_PORTS.get(parts.scheme, 0)
        except ValueError as error:
            raise ArgumentError(f"--url {url}: {error}") from error
        if not parts.hostname or not port:
            raise ArgumentError(
                f"--url {url} is no address of a server", next="http://127.0.0.1:8000"
            )
        path = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port, path, parts.scheme == "https")

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.is_tls else 'http'}://{host}:{self.port}{self.path}"


def encode_request(
    address: Address, method: str, path: str, body: bytes = b"", api_key: str | None = None
) -> bytes:
    """The bytes of a request."""
    name = f"[{address.host}]" if ":" in address.host else address.host
    lines = [f"{method} {address.path}{path} HTTP/1.1", f"host: {name}:{address.port}"]
    if body:
        lines += ["content-type: application/json", f"content-length: {len(body)}"]
    if api_key:
        lines.append(f"authorization: Bearer {api_key}")
    return "\r\n".join([*lines, "", ""]).encode() + body


@dataclass(frozen=True)
class Expected:
    """How a reply is read.

    Attributes:
        is_stream: events; otherwise one JSON body.
        decode_all: decode every event, see `StreamReader`.
        timeout: seconds from sending to the end of the reply.
    """

    is_stream: bool = True
    decode_all: bool = False
    timeout: float = 600.0


class Connection(asyncio.Protocol):
    """A keep-alive connection. It opens with the first request, and again after it was closed."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self.transport: asyncio.Transport | None = None
        self.reply: Reply | None = None  # of the request in flight
        self.parts: list[bytes] = []  # of the body
        self.status = 0
        self.is_complete = False

    async def open(self) -> None:
        """Connect; OSError if that fails."""
        loop, address = asyncio.get_running_loop(), self.address
        await loop.create_connection(
            lambda: self, address.host, address.port, ssl=True if address.is_tls else None
        )

    def close(self) -> None:
        if self.transport is not None:
            self.transport.abort()
            self.transport = None

    async def send(
        self, request: bytes, expected: Expected, start: float | None = None
    ) -> tuple[Reply, bytes]:
        """Send a request and wait for its end: the reply, and the body if it was not streamed.

        A server may close a kept connection at any time. A request that meets this before the first
        byte of a reply is sent again on a new one, once (RFC 9112, 9.3.1), and `reconnects` says so.
        """
        assert self.reply is None, "one request at a time"
        now = time.perf_counter()
        reply = Reply(now if start is None else min(start, now))  # timers may be 1 ms early
        was_open = self.is_open
        await self._exchange(request, expected, reply)
        if was_open and reply.kind == RESET and not self.has_data:
            reply.kind, reply.detail, reply.reconnects = OK, "", 1
            await self._exchange(request, expected, reply)
        return reply, b"".join(self.parts)

    @property
    def is_open(self) -> bool:
        return self.transport is not None and not self.transport.is_closing()

    async def _exchange(self, request: bytes, expected: Expected, reply: Reply) -> None:
        """One request on the open connection, or on a new one."""
        if not self.is_open:
            try:
                await asyncio.wait_for(self.open(), expected.timeout)
            except (OSError, TimeoutError) as error:
                is_timeout = isinstance(error, TimeoutError)
                reply.fail(TIMEOUT if is_timeout else NO_CONNECTION, str(error))
                reply.end = time.perf_counter()
                return
        loop = asyncio.get_running_loop()
        self._begin(reply, expected, loop.create_future())
        timer = loop.call_later(expected.timeout, self._end, TIMEOUT, f"{expected.timeout} s")
        assert self.transport is not None
        self.transport.write(request)
        try:
            await self.finished
        finally:
            timer.cancel()
            self.reply = None
            if not self.can_reuse:
                self.close()

    def _begin(self, reply: Reply, expected: Expected, finished: asyncio.Future[None]) -> None:
        self.reply, self.expected, self.finished = reply, expected, finished
        self.stream = StreamReader(reply, expected.decode_all) if expected.is_stream else None
        self.status = 0
        self.is_complete = self.can_reuse = self.has_length = self.has_data = False
        self.parts.clear()

    def _end(self, kind: str = OK, detail: str = "") -> None:
        """The reply has ended, well or not."""
        reply = self.reply
        if reply is None or self.finished.done():
            return
        reply.end = time.perf_counter()
        self.is_complete = kind == OK
        if kind != OK:
            reply.fail(kind, detail)
        elif self.status != 200:
            reply.fail(f"http {self.status}", b"".join(self.parts).decode(errors="replace"))
        elif self.stream is not None:
            self.stream.finish()
        else:
            read_body(reply, b"".join(self.parts), reply.end)
        self.finished.set_result(None)

    # ---- asyncio.Protocol ----------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.parts = []
        self.on_body = self.parts.append  # read once, by the parser
        self.parser = httptools.HttpResponseParser(self)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if self.reply is None:  # nothing was asked
            self.close()
            return
        self.has_data = True
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(INVALID_HTTP, f"{error}: {data[:100]!r}")
            return
        if self.parts and self.stream is not None and self.status == 200:
            self.stream.feed(b"".join(self.parts), now)
            self.parts.clear()
        if self.is_complete:
            self._end()

    def connection_lost(self, error: Exception | None) -> None:
        self.transport = None
        if self.reply is None:
            return
        if self.status and not self.has_length and error is None:
            self._end()  # a body without a length ends with its connection
        elif self.status:
            self._end(RESET, f"within the reply: {error or 'closed'}")
        else:
            self._end(RESET, f"before the reply: {error or 'closed'}")

    # ---- httptools -----------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self.has_length = True

    def on_headers_complete(self) -> None:
        self.status = self.parser.get_status_code()

    def on_message_complete(self) -> None:
        self.is_complete, self.can_reuse = True, self.parser.should_keep_alive()
