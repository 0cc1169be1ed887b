"""HTTP as odd clients speak it: HTTP/1.0, upgrades, pipelines, chunks of any size, trailers, 100-continue.

test_security.py and test_chaos.py have the clients that mean harm.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
from typing import Any

import pytest
import uvloop

from fulgurite.serve.http.protocol import MergedWrites
from tests.serve.http.serving import RunningServer, script

PATH = "/v1/completions"
BODY = json.dumps({"prompt": script("Hello."), "max_tokens": 20}).encode()
STREAM = json.dumps({"prompt": script("Hello."), "max_tokens": 20, "stream": True}).encode()
CLOSE = "Connection: close"


def exchange(server: RunningServer, *parts: bytes, pause: float = 0.0) -> bytes:
    """Send these bytes, and read until the server closes the connection."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as sock:
        for part in parts:
            sock.sendall(part)
            time.sleep(pause)
        return b"".join(iter(lambda: sock.recv(1 << 16), b""))


def encode(
    body: bytes, *headers: str, method: str = "POST", path: str = PATH, version: str = "1.1"
) -> bytes:
    names = ["Host: x", "Content-Type: application/json", *headers]
    if not any(one.startswith("Transfer-Encoding") for one in headers):
        names.append(f"Content-Length: {len(body)}")
    head = "\r\n".join([f"{method} {path} HTTP/{version}", *names, "", ""])
    return head.encode() + body


def split(reply: bytes) -> tuple[int, dict[bytes, bytes], bytes]:
    """Status, headers and the rest of one response."""
    head, _, rest = reply.partition(b"\r\n\r\n")
    first, *lines = head.split(b"\r\n")
    headers = dict(line.lower().split(b": ", 1) for line in lines)
    return int(first.split(b" ")[1]), headers, rest


def read_text(body: bytes) -> Any:
    return json.loads(body)["choices"][0]["text"]


def join_events(body: bytes) -> str:
    events = [one.removeprefix(b"data: ") for one in body.split(b"\n\n") if one]
    assert events.pop() == b"[DONE]"
    return "".join(read_text(one) for one in events)


def test_http_1_0_gets_a_stream_without_chunks(server):
    status, headers, body = split(exchange(server, encode(STREAM, version="1.0")))
    assert status == 200 and headers[b"connection"] == b"close"
    assert b"transfer-encoding" not in headers and b"content-length" not in headers
    assert join_events(body) == "Hello."


def test_http_1_0_gets_whole_replies_with_their_length(server):
    for path, body in ((PATH, BODY), ("/v1/unknown", b"")):
        status, headers, rest = split(exchange(server, encode(body, version="1.0", path=path)))
        assert int(headers[b"content-length"]) == len(rest) and b"transfer-encoding" not in headers
        assert (status, read_text(rest) if body else "") in ((200, "Hello."), (404, ""))


UPGRADE = ("Connection: Upgrade, HTTP2-Settings, close", "Upgrade: h2c", "HTTP2-Settings: AAMAAABk")


@pytest.mark.parametrize("cut", [None, 20, -30, -3])
def test_offers_of_another_protocol_are_ignored(server, cut):
    """As Java's client and `curl --http2` send requests: the body must not be lost."""
    data = encode(BODY, *UPGRADE)
    parts = [data] if cut is None else [data[:cut], data[cut:]]
    status, _, rest = split(exchange(server, *parts, pause=0.05))
    assert status == 200 and read_text(rest) == "Hello."
    websocket = ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13")
    first = encode(b"", *websocket, method="GET", path="/health")
    replies = exchange(server, first + encode(BODY, CLOSE))
    assert replies.count(b"HTTP/1.1 200") == 2


def test_requests_of_a_pipeline_are_answered_in_order(server):
    bodies = [json.dumps({"prompt": script(f"reply {n}")}).encode() for n in range(5)]
    data = b"".join(encode(body) for body in bodies) + encode(STREAM) + encode(BODY, CLOSE)
    reply = exchange(server, data)
    assert reply.count(b"HTTP/1.1 200 OK") == 7
    places = [reply.index(f"reply {n}".encode()) for n in range(5)]
    assert places == sorted(places) and places[-1] < reply.index(b"[DONE]")


@pytest.mark.parametrize("seed", range(4))
def test_chunks_of_any_size_with_extensions_and_trailers(server, seed):
    rng = random.Random(seed)
    chunks, rest = b"", BODY
    while rest:
        size = rng.choice((1, 2, 7, 100))
        piece, rest = rest[:size], rest[size:]
        extension = rng.choice((b"", b";a=b", b';name="quoted"'))
        number = rng.choice((b"%x", b"%X", b"000%x")) % len(piece)
        chunks += number + extension + b"\r\n" + piece + b"\r\n"
    chunks += b"0\r\n" + rng.choice((b"", b"X-Checksum: 1\r\n")) + b"\r\n"
    head = encode(b"", "Transfer-Encoding: chunked", CLOSE)
    cut = rng.randrange(1, len(chunks))
    status, _, body = split(exchange(server, head, chunks[:cut], chunks[cut:], pause=0.02))
    assert status == 200 and read_text(body) == "Hello."


@pytest.mark.parametrize(
    "headers",
    [
        ("Transfer-Encoding: chunked", "Content-Length: 5"),
        ("Content-Length: 5",),
        ("Content-Length: -1",),
    ],
)
def test_bodies_of_two_lengths_are_refused(server, headers):
    """Otherwise a proxy in front may see other requests than the server (request smuggling)."""
    status, _, _ = split(exchange(server, encode(BODY, *headers)))
    assert status == 400


def test_the_body_may_wait_for_100_continue(server):
    data = encode(BODY, "Expect: 100-continue", CLOSE)
    reply = exchange(server, data[: -len(BODY)], BODY, pause=0.1)
    assert reply.startswith(b"HTTP/1.1 100 Continue\r\n\r\n")
    assert split(reply.partition(b"\r\n\r\n")[2])[0] == 200


def test_head_has_no_body_and_other_methods_are_refused(server):
    status, _, rest = split(exchange(server, encode(b"", CLOSE, method="HEAD", path="/health")))
    assert status == 200 and rest == b""
    for method in ("OPTIONS", "PUT", "PATCH", "TRACE", "DELETE", "CONNECT"):
        status, headers, rest = split(exchange(server, encode(b"", CLOSE, method=method)))
        assert status == 405 and headers[b"allow"] == b"post" and json.loads(rest)["error"]


def test_writes_to_a_client_that_has_left_are_dropped():
    """uvloop raises for a connection that is gone, and asyncio logs it: strangers must not cause that."""
    problems: list[Any] = []

    async def leave() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: problems.append(context))
        one, other = socket.socketpair()
        transport, _ = await loop.create_connection(asyncio.Protocol, sock=one)
        writes = MergedWrites(transport, loop)
        writes.write(b"sent")
        await asyncio.sleep(0.01)
        assert other.recv(100) == b"sent"
        writes.write(b"not sent")
        transport.abort()
        await asyncio.sleep(0.01)
        writes.write(b"nor this")
        await asyncio.sleep(0.01)
        other.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(leave())
    assert problems == []


def test_compressed_bodies_are_refused_in_words(server):
    reply = exchange(server, encode(BODY, "Content-Encoding: gzip", CLOSE))
    status, _, rest = split(reply)
    assert status == 415 and "content-encoding" in json.loads(rest)["error"]["message"]
    assert split(exchange(server, encode(BODY, "Content-Encoding: identity", CLOSE)))[0] == 200
