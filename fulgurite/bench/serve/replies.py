"""What a server replied: bytes of a body in, times and token counts out.

A stream is Server-Sent Events: `data: JSON`, an empty line, …, `data: [DONE]`. At thousands of requests a
second the client must not take the CPU that it measures. So after the first token an event is counted, not
decoded, unless it may carry more than text: usage, a finish reason, an error, the end. These words are found
by substring search. In JSON text their quotes would be escaped, so a reply that contains them costs a decode
and changes no figure.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

decode_json: Callable[[bytes], Any]
try:
    from msgspec.json import decode as decode_json
except ImportError:  # the extra `serve` is not installed: slower, the same values
    decode_json = json.loads

OK = "ok"
BROKEN_STREAM = "broken stream"
STREAM_ERROR = "error in the stream"
INVALID_REPLY = "invalid reply"
DONE = b"[DONE]"
# An event with one of these is decoded. The `": "` forms are what json.dumps writes.
MARKS = (
    b'"usage":{',
    b'"usage": {',
    b'"finish_reason":"',
    b'"finish_reason": "',
    b'"error"',
    DONE,
)


def has_mark(block: bytes) -> bool:
    for mark in MARKS:  # noqa: SIM110  # `any` costs more, and this runs for every read
        if mark in block:
            return True
    return False


@dataclass(slots=True)
class Reply:
    """The outcome of one request. Times are seconds of `time.perf_counter`.

    `kind` is `ok`, or the kind of failure. `start` is when the request was due: when it was sent, or when an
    open loop planned to send it. `gaps` are the seconds between arrivals of tokens; tokens that arrive in one
    read are one arrival.
    """

    start: float
    kind: str = OK
    detail: str = ""
    first_token: float = 0.0
    end: float = 0.0
    wanted_tokens: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None  # None: the server does not say
    has_usage: bool = False
    reconnects: int = 0  # times that it was sent again, see `Connection.send`
    text: str = ""
    gaps: array[float] = field(default_factory=lambda: array("d"))

    def fail(self, kind: str, detail: str = "") -> None:
        """Record a failure; the first one counts."""
        if self.kind == OK:
            self.kind, self.detail = kind, detail[:300]

    def read_usage(self, usage: Any) -> None:
        """Take the token counts of an OpenAI `usage` object."""
        if not isinstance(usage, dict):
            return
        self.has_usage = True
        self.prompt_tokens = int(usage.get("prompt_tokens") or 0)
        self.output_tokens = int(usage.get("completion_tokens") or 0)
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict) and details.get("cached_tokens") is not None:
            self.cached_tokens = int(details["cached_tokens"])


def read_content(event: Any) -> tuple[str, int | None]:
    """The text of all choices of a body or an event, and the number of its `token_ids` if it has them."""
    text, count = "", None
    for choice in event.get("choices") or ():
        message = choice.get("delta") or choice.get("message") or {}
        text += choice.get("text") or message.get("content") or ""
        text += message.get("reasoning_content") or ""
        token_ids = choice.get("token_ids")
        if token_ids is not None:
            count = (count or 0) + len(token_ids)
    return text, count


def read_body(reply: Reply, body: bytes, now: float) -> None:
    """Fill in the reply from a body that was not streamed. All its tokens arrive now."""
    try:
        content = decode_json(body)
        text, count = read_content(content)
        reply.read_usage(content.get("usage"))
    except (ValueError, AttributeError, TypeError) as error:
        reply.fail(INVALID_REPLY, f"{error}: {body[:200]!r}")
        return
    reply.text, reply.first_token = text, now
    if not reply.has_usage:
        reply.output_tokens = count or 0


class StreamReader:
    """Reads the events of one streamed reply into a `Reply`.

    `decode_all`: decode every event. The text is then complete, and without usage tokens are counted by
    `token_ids`, or by events with text. Otherwise both are known only from usage.
    """

    def __init__(self, reply: Reply, decode_all: bool = False) -> None:
        self.reply = reply
        self.decode_all = decode_all
        self.rest = b""  # the beginning of an event
        self.is_done = False
        self.last_arrival = 0.0
        self.counted = 0

    def feed(self, data: bytes, now: float) -> None:
        """Read the next bytes of the body, which arrived at `now`."""
        if self.rest:
            data = self.rest + data
        if b"\r" in data:  # lines may end with \r\n; in JSON text it is escaped
            data = data.replace(b"\r", b"")
        end = data.rfind(b"\n\n") + 2
        if end == 1:
            self.rest = data
            return
        self.rest = data[end:]
        block = data[:end] if self.rest else data
        if self.decode_all or not self.last_arrival or has_mark(block):
            has_tokens = sum(map(self._read_event, block.split(b"\n\n"))) > 0
        else:
            has_tokens = b"data:" in block  # else a comment that keeps the connection open
        if has_tokens:
            self._record_arrival(now)

    def _record_arrival(self, now: float) -> None:
        if self.last_arrival:
            self.reply.gaps.append(now - self.last_arrival)
        else:
            self.reply.first_token = now
        self.last_arrival = now

    def _read_event(self, event: bytes) -> bool:
        """Decode one event; True if it has tokens."""
        lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
        data = b"\n".join(lines)
        if not data:
            return False
        if data == DONE:
            self.is_done = True
            return False
        try:
            return self._read_content(decode_json(data))
        except (ValueError, AttributeError, TypeError) as error:
            self.reply.fail(BROKEN_STREAM, f"{error}: {data[:200]!r}")
            return False

    def _read_content(self, content: Any) -> bool:
        if content.get("error") is not None or content.get("object") == "error":
            self.reply.fail(STREAM_ERROR, str(content.get("error") or content))
            return False
        if content.get("usage") is not None:
            self.reply.read_usage(content["usage"])
        text, count = read_content(content)
        if self.decode_all:
            self.reply.text += text
        self.counted += bool(text) if count is None else count
        return bool(text or count)

    def finish(self) -> None:
        """The body has ended."""
        if self.rest.strip():
            self.reply.fail(BROKEN_STREAM, f"ends within an event: {self.rest[:200]!r}")
        elif not self.is_done:
            self.reply.fail(BROKEN_STREAM, "ends without [DONE]")
        if not self.reply.has_usage:
            self.reply.output_tokens = self.counted
        if not self.last_arrival:  # no event had text
            self.reply.first_token = self.reply.end
