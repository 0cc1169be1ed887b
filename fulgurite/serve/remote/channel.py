"""Frames on a socket: messages in, messages out. A frame is its length in 4 bytes, then msgpack.

`FrameReader` cuts a byte stream into frames, wherever it was split. `Channel` is the engine's side: it
never blocks on a slow reader, since what can't be sent now is kept and sent later.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any

import msgspec

LENGTH = struct.Struct("<I")
MAX_FRAME = 1 << 30  # a longer one means that the stream is damaged
READ_SIZE = 1 << 18
LARGE_FRAME_SECONDS = 0.005  # of a step, for a frame that is larger than the socket's buffer
ENCODER = msgspec.msgpack.Encoder()


def encode_frame(message: Any) -> bytes:
    body = ENCODER.encode(message)
    return LENGTH.pack(len(body)) + body


class FrameReader:
    """Cuts received bytes into the bodies of frames."""

    def __init__(self) -> None:
        self.buffer = bytearray()

    def push(self, data: bytes | memoryview) -> Iterator[bytes]:
        self.buffer += data
        start = 0
        while len(self.buffer) - start >= LENGTH.size:
            (size,) = LENGTH.unpack_from(self.buffer, start)
            if size > MAX_FRAME:
                raise ValueError(f"a frame of {size} bytes: the stream is damaged")
            end = start + LENGTH.size + size
            if len(self.buffer) < end:
                break
            yield bytes(memoryview(self.buffer)[start + LENGTH.size : end])
            start = end
        del self.buffer[:start]

    @property
    def missing(self) -> int:
        """Bytes of a frame that has begun and is not complete; 0: there is none."""
        if len(self.buffer) < LENGTH.size:
            return 0
        return int(LENGTH.unpack_from(self.buffer)[0]) + LENGTH.size - len(self.buffer)


class Channel:
    """The engine's end of a socket: decodes `message_type`, sends anything msgspec can encode."""

    def __init__(self, sock: socket.socket, message_type: Any) -> None:
        sock.setblocking(False)
        self.socket = sock
        self.poll = select.poll()  # not `select`: the socket's number may be above its 1,024
        self.poll.register(sock, select.POLLIN)
        self.decoder = msgspec.msgpack.Decoder(message_type)
        self.reader = FrameReader()
        self.unsent = bytearray()
        self.is_closed = False

    def send(self, message: Any) -> None:
        self.unsent += encode_frame(message)
        self.flush()

    def flush(self) -> None:
        """Send what the socket takes now."""
        while self.unsent and not self.is_closed:
            try:
                sent = self.socket.send(memoryview(self.unsent)[:READ_SIZE])
            except BlockingIOError:
                return
            except OSError:  # the other side is gone
                self.is_closed = True
                return
            del self.unsent[:sent]

    @property
    def has_large_frame(self) -> bool:
        """Whether a frame is under way that takes the socket's buffer many times."""
        return max(len(self.unsent), self.reader.missing) > READ_SIZE

    def receive(self, timeout: float) -> list[Any]:
        """All messages that are there; waits up to `timeout` seconds for the first.

        It goes on for up to `LARGE_FRAME_SECONDS` with a large frame: a busy engine would otherwise
        send or receive one buffer of it a step.
        """
        messages: list[Any] = []
        deadline = time.monotonic() + timeout + LARGE_FRAME_SECONDS
        while not self.is_closed:
            self.poll.modify(self.socket, select.POLLIN | (select.POLLOUT if self.unsent else 0))
            events = sum(event for _, event in self.poll.poll(1e3 * timeout))
            if events & select.POLLOUT:
                self.flush()
            if events & ~select.POLLOUT:
                self._read(messages)
            if not events or not self.has_large_frame or time.monotonic() > deadline:
                break
            timeout = 0.001  # the other side is at work on the same frame
        return messages

    def _read(self, messages: list[Any]) -> None:
        while not self.is_closed:
            try:
                data = self.socket.recv(READ_SIZE)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self.is_closed = True
                break
            messages += map(self.decoder.decode, self.reader.push(data))
            if len(data) < READ_SIZE:
                break

    def close(self) -> None:
        self.is_closed = True
        self.socket.close()
