"""HTTP/1.1 of one connection, with limits: bytes in, requests for the application out.

uvicorn's protocol reads headers without end and waits for slow clients for ever. This one bounds both:

    header_bytes     of a request's line, headers and trailers: 431 beyond
    body_bytes       twice as many raw bytes of a message (chunks have overhead): 413 beyond
    read_seconds     from a request's first byte to its last: 408 after it
    write_seconds    in which a client must read something of a response: the connection ends

A request that can't be read is refused once the requests before it on the connection are answered. A
refusal, and any answer to a request whose body is not complete, says `connection: close`.

Connections end in two steps (lingering close): no more is sent, and what still arrives is dropped until
the client closes. Closing at once would reset the connection, and a client that is still sending would
not see the answer.

A connection that is lost is told to the request that runs, also if another one was pipelined after it.

What is written in one turn of the event loop, such as headers and the first events of a stream, goes
out in one system call (`MergedWrites`).

A client may offer to go on in another protocol (`Upgrade: h2c`, as Java's client and `curl --http2` do).
The offer is ignored, and the request answered. For HTTP/1.0, which has no chunks, a stream ends with the
connection.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable
from typing import Any

import httptools
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from fulgurite.serve.http.body import encode_json
from fulgurite.serve.http.config import Limits
from fulgurite.serve.http.errors import ANTHROPIC_PATH, ID_HEADERS, ApiError

# Strangers must not fill the log: uvicorn warns of each request that is no HTTP.
logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
# How long a client that was answered may go on sending, and without a pause of how long.
LINGER_SECONDS, LINGER_IDLE_SECONDS = 30.0, 2.0
BAD_REQUEST = ApiError(400, "this is not a valid HTTP request", code="invalid_http")


class MergedWrites:
    """A transport that sends once a turn of the event loop what was written in it.

    `on_close` ends the connection; None: the transport does.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        self.transport, self.loop = transport, loop
        self.on_close = transport.close if on_close is None else on_close
        self.pending: list[bytes] = []
        self.num_flushed = 0  # bytes
        self.is_ended = False  # `write_eof` was called

    def write(self, data: bytes) -> None:
        if not self.pending:
            self.loop.call_soon(self.flush)
        self.pending.append(data)

    def flush(self) -> None:
        pending, self.pending = self.pending, []
        if pending and not self.transport.is_closing():  # the client may have left in this turn
            data = b"".join(pending)
            self.num_flushed += len(data)
            self.transport.write(data)

    def write_eof(self) -> None:
        self.flush()
        self.is_ended = True
        self.transport.write_eof()

    def close(self) -> None:
        self.flush()
        self.on_close()

    def abort(self) -> None:
        self.pending = []
        self.transport.abort()

    def is_closing(self) -> bool:
        return self.is_ended or self.transport.is_closing()

    def get_write_buffer_size(self) -> int:
        return sum(map(len, self.pending)) + self.transport.get_write_buffer_size()

    def count_accepted(self) -> int:
        """The bytes that the system has taken: more of them if the client reads."""
        return self.num_flushed - self.transport.get_write_buffer_size()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.transport, name)


class LimitedProtocol(HttpToolsProtocol):
    """A connection. `limits` is set by `limit_protocol`."""

    limits = Limits()
    transport: MergedWrites  # type: ignore[assignment]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.url = b""  # of the message that is being read
        self.running: RequestResponseCycle | None = None  # the request that the application answers
        self.refusal = BAD_REQUEST  # what is sent if the parser gives up
        self.late_refusal: ApiError | None = None  # what is sent after the requests that run
        self.header_bytes = 0  # of the message that is being read, by its parts
        self.message_bytes = 0  # the same, as received; without those that came with its beginning
        self.current: RequestResponseCycle | None = (
            None  # of that message, once its headers are here
        )
        self.keep_alive = True  # after that message, if it is complete
        self.offers_upgrade = False  # the message that is being read
        self.is_partial = False  # some bytes of a message are here, but not all
        self.read_timer: asyncio.TimerHandle | None = None
        self.write_timer: asyncio.TimerHandle | None = None
        self.accepted_bytes = 0  # of responses, when the write timer was set
        self.linger_timer: asyncio.TimerHandle | None = None
        self.linger_end = 0.0  # by the loop's clock
        self.still_sends = False  # whether something arrived since the linger timer was set

    # ---- connection --------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        merged = MergedWrites(transport, self.loop, self._linger)
        super().connection_made(merged)  # type: ignore[arg-type]
        self._start_read_timer()  # for a connection that sends nothing

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self.read_timer, self.write_timer, self.linger_timer):
            if timer is not None:
                timer.cancel()
        if self.running is not None and not self.running.response_complete:
            self.running.disconnected = True
            self.running.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self.still_sends = True
        if self.transport.is_closing() or self.late_refusal is not None:
            return
        self.message_bytes += len(data)
        self.is_partial = True
        self._parse(data)
        if not self.is_partial:
            self._stop_read_timer()
            return
        if self.read_timer is None:
            self._start_read_timer()
        if self.current is None and self.message_bytes > self.limits.header_bytes:
            self.refuse(self._make_header_error())
        elif self.message_bytes > 2 * self.limits.body_bytes + self.limits.header_bytes:
            self.refuse(ApiError(413, "the body is too large", code="body_too_large"))

    def _parse(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            self.refuse(self.refusal)
        except httptools.HttpParserUpgrade as upgrade:
            if self.offers_upgrade:
                self._ignore_upgrade(data[upgrade.args[0] :])

    def _ignore_upgrade(self, rest: bytes) -> None:
        """Read the request once more without its offer. The parser would skip its body."""
        head = [self.parser.get_method(), b" ", self.url, b" HTTP/1.1\r\n"]
        for name, value in self.headers:
            if name != b"upgrade":
                head += [name, b": ", value, b"\r\n"]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn sets it
        self._parse(b"".join([*head, b"\r\n", rest]))

    # ---- the end of a connection -------------------------------------------------------------------

    def shutdown(self) -> None:
        """The server ends: close as soon as the request that runs is answered."""
        self.keep_alive = False
        if self.is_running:
            super().shutdown()
        else:
            self.transport.flush()
            self.transport.transport.close()

    def _linger(self) -> None:
        """Send no more, and drop what arrives until the client closes or stops sending."""
        if self.transport.is_closing():
            return
        self._stop_read_timer()
        self.transport.write_eof()
        self.flow.resume_reading()
        self.linger_end = self.loop.time() + LINGER_SECONDS
        self._wait_for_silence()
        self._watch_writes()

    def _wait_for_silence(self) -> None:
        self.still_sends = False
        self.linger_timer = self.loop.call_later(LINGER_IDLE_SECONDS, self._end_linger)

    def _end_linger(self) -> None:
        if self.still_sends and self.loop.time() < self.linger_end:
            self._wait_for_silence()
        else:
            self.transport.transport.close()

    # ---- parser callbacks --------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self.offers_upgrade = False
        self.header_bytes = self.message_bytes = 0
        self.current, self.is_partial = None, True
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count_header(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_header(len(name) + len(value) + 4)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        is_connect = self.parser.get_method() == b"CONNECT"  # the application refuses it
        self.offers_upgrade = self.parser.should_upgrade() and not is_connect
        if not self.offers_upgrade:
            super().on_headers_complete()
            self.current, self.keep_alive = self.cycle, self.cycle.keep_alive
            self.current.keep_alive = False  # if it is answered before it is complete

    def on_message_complete(self) -> None:
        if self.offers_upgrade:
            return
        self.message_bytes, self.current, self.is_partial = 0, None, False
        if not self.cycle.response_started:
            self.cycle.keep_alive = self.keep_alive
        super().on_message_complete()

    def _count_header(self, count: int) -> None:
        self.header_bytes += count
        if self.header_bytes > self.limits.header_bytes:
            self.refusal = self._make_header_error()
            raise ValueError("the parser stops, and `send_400_response` sends the refusal")

    def _make_header_error(self) -> ApiError:
        limit = self.limits.header_bytes
        return ApiError(431, f"the headers have more than {limit} bytes", code="headers_too_large")

    # ---- refusals ----------------------------------------------------------------------------------

    def send_400_response(self, msg: str) -> None:
        self.refuse(self.refusal)

    def refuse(self, error: ApiError) -> None:
        """Answer a message that can't be read, after those before it, and end the connection."""
        if self.transport.is_closing():
            return
        current = self.current
        if current is not None and current.response_started:
            return  # with `connection: close`
        if self.is_running and self.running is not current:
            self.late_refusal = error
            self._stop_read_timer()
            if current is not None:
                self.pipeline.popleft()  # the newest
                self.current = None
            return
        if current is not None:  # the application need not wait for the rest
            current.disconnected = True
            current.message_event.set()
        id = f"req-{uuid.uuid4().hex}"
        is_anthropic = self.url.startswith(ANTHROPIC_PATH.encode())
        body = encode_json(error.to_anthropic(id) if is_anthropic else error.to_openai())
        head = [
            STATUS_LINE[error.status],
            b"content-type: application/json\r\nconnection: close\r\n",
            *(b"%b: %b\r\n" % (name.encode(), id.encode()) for name in ID_HEADERS),
            b"content-length: %d\r\n\r\n" % len(body),
        ]
        self.transport.write(b"".join([*head, body]))
        self._linger()

    @property
    def is_running(self) -> bool:
        """Whether the application answers a request of this connection."""
        return self.running is not None and not self.running.response_complete

    # ---- slow clients ------------------------------------------------------------------------------

    def _start_read_timer(self) -> None:
        self.read_timer = self.loop.call_later(self.limits.read_seconds, self._end_reading)

    def _stop_read_timer(self) -> None:
        if self.read_timer is not None:
            self.read_timer.cancel()
            self.read_timer = None

    def _end_reading(self) -> None:
        """A request is not complete after `read_seconds`. A request that runs is not disturbed."""
        if self.flow.read_paused or (self.is_running and self.current is None):
            self._start_read_timer()
            return
        self.read_timer = None
        seconds = self.limits.read_seconds
        message = f"the request was not complete after {seconds:g} s"
        self.refuse(ApiError(408, message, code="request_timeout"))

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_writes()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch_writes()
        if self.late_refusal is not None and not self.is_running:
            self.refuse(self.late_refusal)

    def _watch_writes(self) -> None:
        """Look again in `write_seconds` whether the client reads."""
        if self.write_timer is None and self.transport.get_write_buffer_size():
            self.accepted_bytes = self.transport.count_accepted()
            seconds = self.limits.write_seconds
            self.write_timer = self.loop.call_later(seconds, self._check_writes)

    def _check_writes(self) -> None:
        """End a connection whose client reads nothing. What is not flushed yet is not its fault."""
        self.write_timer = None
        is_full = self.transport.transport.get_write_buffer_size() > 0
        if is_full and self.transport.count_accepted() == self.accepted_bytes:
            self.transport.abort()
        else:
            self._watch_writes()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self.running = cycle
        if cycle.scope["http_version"] == "1.0":
            app = end_by_closing(app, cycle)
        super()._start_asgi_task(cycle, app)


def end_by_closing(app: Any, cycle: RequestResponseCycle) -> ASGIApp:
    """The application for a client of HTTP/1.0: bodies of unknown length are sent as they are."""

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        has_length = True

        async def send_plain(message: Message) -> None:
            nonlocal has_length
            if message["type"] == "http.response.start":
                has_length = any(
                    name.lower() == b"content-length" for name, _ in message["headers"]
                )
                cycle.chunked_encoding = None if has_length else False
            elif not has_length:
                cycle.expected_content_length += len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_plain)

    return run


def limit_protocol(limits: Limits) -> type[LimitedProtocol]:
    """The protocol class for a server with these limits."""
    return type("LimitedProtocol", (LimitedProtocol,), {"limits": limits})
