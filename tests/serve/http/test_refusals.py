"""Requests that are refused: each client gets its answer and then the end of the connection, no reset.

Also clients that write a huge body to the end before they read, and servers that are slow themselves.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from fulgurite.serve.http import protocol
from fulgurite.serve.http.config import Limits
from tests.serve.http.serving import RunningServer, mock_config, script, serve

LIMITS = Limits(body_bytes=100_000, header_bytes=4096, read_seconds=1.0)
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"
HUGE = 20_000_000  # more than the sockets' buffers hold
GOOD = json.dumps({"prompt": script("Hello."), "max_tokens": 20}).encode()


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with serve(mock_config(limits=LIMITS, api_keys=("key",))) as running:
        yield running
        assert running.leaks() == {}


def with_length(body: bytes, length: int | None = None, head: bytes = HEAD) -> bytes:
    length = len(body) if length is None else length
    return head + b"authorization: Bearer key\r\ncontent-length: %d\r\n\r\n" % length + body


def chunked(*chunks: bytes) -> bytes:
    encoded = [b"%x\r\n%s\r\n" % (len(one), one) for one in chunks]
    return (
        HEAD
        + b"authorization: Bearer key\r\ntransfer-encoding: chunked\r\n\r\n"
        + b"".join(encoded)
    )


def exchange(server: RunningServer, data: bytes) -> bytes:
    """Write everything, then read to the end. A reset is an error."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as sock:
        sock.sendall(data)
        return b"".join(iter(lambda: sock.recv(1 << 16), b""))


def read_replies(data: bytes) -> list[tuple[int, bytes, Any]]:
    """Status, headers and JSON of each response with a length."""
    found = []
    while data:
        head, _, rest = data.partition(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        found.append((int(head.split(b" ")[1]), head.lower(), json.loads(rest[:length])))
        data = rest[length:]
    return found


def check_refusal(reply: tuple[int, bytes, Any], status: int) -> None:
    assert reply[0] == status, reply
    assert set(reply[2]["error"]) == {"message", "type", "param", "code"}
    assert b"connection: close" in reply[1]


def test_refusal_has_an_id_and_the_shape_of_its_path(server: RunningServer) -> None:
    """Also what never reaches the application: a message that can't be read."""
    for path in (b"/v1/messages", b"/v1/messages/count_tokens"):
        data = CHUNKED.replace(b"/v1/completions", path) + b"zz\r\n"
        [(status, head, body)] = read_replies(exchange(server, data))
        assert status == 400 and body["type"] == "error"
        assert body["error"]["type"] == "invalid_request_error"
        assert b"request-id: " + body["request_id"].encode() in head
    [(status, head, body)] = read_replies(exchange(server, CHUNKED + b"zz\r\n"))
    assert set(body) == {"error"} and b"x-request-id: req-" in head


REFUSED: dict[str, tuple[bytes, int]] = {
    "no HTTP": (b"\x16\x03\x01\x02\x00\x01\x00\xfc\r\n\r\n", 400),
    "no HTTP, huge": (b"\x00" * HUGE, 400),
    "a path without a slash": (b"GET health HTTP/1.1\r\n\r\n", 400),
    "headers, huge": (b"GET /health HTTP/1.1\r\n" + b"x: %s\r\n" % (b"v" * 1000) * 20_000, 431),
    "a path, huge": (b"GET /" + b"v" * HUGE, 431),
    "a body, huge": (with_length(b" " * HUGE), 413),
    "a body, huge, and close": (
        with_length(b" " * HUGE, head=HEAD + b"connection: close\r\n"),
        413,
    ),
    "a body, huge, HTTP/1.0": (with_length(b" " * HUGE, head=HEAD.replace(b"1.1", b"1.0")), 413),
    "chunks, huge": (chunked(*[b" " * 65_536] * (HUGE // 65_536)), 413),
    "chunks of one byte": (chunked(*[b" "] * 200_000), 413),
    "no key, huge": (HEAD + b"content-length: %d\r\n\r\n" % HUGE + b" " * HUGE, 401),
    "another type, huge": (with_length(b" " * HUGE, head=HEAD.replace(b"/json", b"/xml")), 415),
    "another path, huge": (with_length(b" " * HUGE, head=HEAD.replace(b"/v1", b"/v9")), 404),
    "a size that is no number": (chunked() + b"xyz\r\n", 400),
    "a chunk without its end": (chunked(b"{") + b"3\r\nabcdef\r\n0\r\n\r\n", 400),
    "two lengths": (with_length(GOOD, head=HEAD + b"content-length: 3\r\n"), 400),
    "a negative length": (with_length(b"", -1), 400),
    "trailers, huge": (chunked() + b"0\r\n" + b"x: %s\r\n" % (b"v" * 1000) * 20_000, 431),
    "a part of the headers": (b"GET /health HTTP/1.1\r\nhost", 408),
    "a part of the body": (with_length(GOOD[:-5], len(GOOD)), 408),
    "a part of a chunk": (chunked() + b"100\r\n{", 408),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_client_gets_one_answer_and_the_end(server, name, monkeypatch):
    monkeypatch.setattr(protocol, "LINGER_IDLE_SECONDS", 0.5)
    data, status = REFUSED[name]
    (reply,) = read_replies(exchange(server, data))
    check_refusal(reply, status)


@pytest.mark.parametrize("missing", [1, 7, len(GOOD)])
def test_a_body_that_is_longer_than_declared(server, missing):
    """Its beginning is no JSON, and its end no request."""
    first, second = read_replies(exchange(server, with_length(GOOD, len(GOOD) - missing)))
    assert first[0] == 400 and first[2]["error"]["code"] == "invalid_json"
    check_refusal(second, 400)
    assert second[2]["error"]["code"] == "invalid_http"


BAD_NEXT = {
    "garbage": (b"\x00\xff\r\n\r\n", 400),
    "a bad path": (b"GET health HTTP/1.1\r\n\r\n", 400),
    "a long header": (b"GET /health HTTP/1.1\r\nx: " + b"v" * 5000 + b"\r\n\r\n", 431),
    "a bad chunk": (CHUNKED + b"xyz\r\n", 400),
    "a part of a body": (with_length(GOOD[:-5], len(GOOD)), 408),
}


@pytest.mark.parametrize("name", BAD_NEXT)
@pytest.mark.parametrize("waits", [True, False])
def test_requests_before_a_bad_one_are_answered_first(server, name, waits):
    """On one connection: two requests, then bytes that are refused, at once or after the replies."""
    data, status = BAD_NEXT[name]
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as sock:
        received = b""
        sock.sendall(with_length(GOOD) + with_length(GOOD))
        if waits:
            while received.count(b'"usage"') < 2:
                received += sock.recv(1 << 16)
        sock.sendall(data)
        received += b"".join(iter(lambda: sock.recv(1 << 16), b""))
    *good, bad = read_replies(received)
    assert [one[2]["choices"][0]["text"] for one in good] == ["Hello.", "Hello."]
    check_refusal(bad, status)


def test_bytes_after_the_last_request_do_not_reset_the_connection(server):
    """The client has asked to close the connection after the reply, and sends on."""
    data = with_length(GOOD, head=HEAD + b"connection: close\r\n")
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as sock:
        sock.sendall(data)
        first = sock.recv(1 << 16)
        for _ in range(20):
            sock.sendall(GOOD)
            time.sleep(0.01)
        reply = first + b"".join(iter(lambda: sock.recv(1 << 16), b""))
    assert [one[0] for one in read_replies(reply)] == [200]


def test_a_stream_before_a_bad_request_is_complete(server):
    body = json.dumps({"prompt": script("Hello."), "max_tokens": 20, "stream": True}).encode()
    reply = exchange(server, with_length(body) + b"\x00\r\n\r\n")
    stream, _, rest = reply.partition(b"0\r\n\r\n")
    assert b"[DONE]" in stream
    check_refusal(read_replies(rest)[0], 400)


def test_an_answer_instead_of_100_continue_ends_the_connection(server):
    """The client does not send the body: what it sends next would be taken for it."""
    head = HEAD + b"expect: 100-continue\r\ncontent-length: 9999999\r\n\r\n"
    (reply,) = read_replies(exchange(server, head))
    check_refusal(reply, 401)


def test_a_client_that_never_stops_sending_is_ended(server, monkeypatch):
    monkeypatch.setattr(protocol, "LINGER_SECONDS", 1.0)
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as sock:
        sock.sendall(b"\x00" * 10_000)
        end = time.monotonic() + 20
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            while time.monotonic() < end:
                sock.sendall(b"\x00" * 10_000)
                time.sleep(0.05)


def test_a_server_that_is_late_itself_does_not_cut_off(monkeypatch):
    """The loop stops for longer than `write_seconds` between a reply's last byte and its flush."""
    with serve(mock_config(limits=Limits(write_seconds=0.2))) as running:
        write = running.app.access_log.write

        def pause(*arguments: Any) -> None:
            time.sleep(0.4)
            write(*arguments)

        monkeypatch.setattr(running.app.access_log, "write", pause)
        assert running.get("/health").status_code == 200


def test_a_timer_of_an_earlier_reply_does_not_cut_off_the_next(monkeypatch):
    """It ends while the next reply, which is longer, is written but not flushed."""
    with serve(mock_config(limits=Limits(write_seconds=0.5))) as running:
        host, port = running.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=10) as sock:
            sock.sendall(b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n")
            assert sock.recv(1 << 16).startswith(b"HTTP/1.1 200")
            monkeypatch.setattr(running.app.access_log, "write", lambda *_: time.sleep(0.3))
            time.sleep(0.3)
            sock.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            assert sock.recv(1 << 16).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("data", [b"GET /he", b"\x00\r\n\r\n"], ids=["a part", "refused"])
def test_a_server_that_ends_does_not_linger(data, monkeypatch):
    monkeypatch.setattr(protocol, "LINGER_IDLE_SECONDS", 60.0)
    with ExitStack() as stack:
        running = stack.enter_context(serve(mock_config()))
        host, port = running.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=10) as sock:
            sock.sendall(data)
            time.sleep(0.1)
            start = time.monotonic()
            stack.close()
            assert time.monotonic() - start < 30  # on a busy machine, too
