"""The client records what a server does, whatever it does."""

from __future__ import annotations

import asyncio
import socket

import pytest

from fulgurite.bench.serve.http_client import (
    INVALID_HTTP,
    NO_CONNECTION,
    TIMEOUT,
    Address,
    Connection,
    Expected,
    encode_request,
)
from fulgurite.bench.serve.http_client import RESET as CONNECTION_RESET
from fulgurite.bench.serve.load import run_coroutine
from fulgurite.bench.serve.replies import BROKEN_STREAM, INVALID_REPLY, OK, Reply
from fulgurite.errors import ArgumentError
from tests.bench.serve.fake_server import CLOSE, RESET, STREAM, as_chunks, scripted_server

WHOLE = Expected(is_stream=False)
BODY = b'{"choices": [{"text": "hi"}], "usage": {"prompt_tokens": 2, "completion_tokens": 1}}'


def with_length(body: bytes, status: bytes = b"200 OK", more: bytes = b"") -> bytes:
    return b"HTTP/1.1 %b\r\n%bcontent-length: %d\r\n\r\n%b" % (status, more, len(body), body)


def exchange(
    *scripts: list[bytes], expected: Expected | None = None
) -> tuple[list[Reply], list[int]]:
    """The replies to as many requests as there are scripts, on one `Connection`."""

    async def send_all() -> tuple[list[Reply], list[int]]:
        async with scripted_server(*scripts) as (address, connections):
            connection = Connection(address)
            request = encode_request(address, "POST", "/v1/completions", b"{}")
            replies = []
            for _ in scripts:
                reply, _ = await connection.send(request, expected or Expected())
                replies.append(reply)
            connection.close()
            return replies, connections

    return run_coroutine(send_all())


@pytest.mark.parametrize("length", [None, 1, 2, 7, 64, 10_000])
def test_chunks_of_any_length(length: int | None) -> None:
    ((reply,), _) = exchange([as_chunks(STREAM, length)])
    assert (reply.kind, reply.prompt_tokens, reply.output_tokens) == (OK, 7, 3), reply.detail
    assert reply.start <= reply.first_token <= reply.end


def test_a_reply_that_arrives_byte_by_byte() -> None:
    whole = as_chunks(STREAM)
    ((reply,), _) = exchange([whole[i : i + 1] for i in range(len(whole))])
    assert (reply.kind, reply.output_tokens) == (OK, 3)


def test_connections_are_kept() -> None:
    replies, connections = exchange(*[[as_chunks(STREAM)]] * 3)
    assert [reply.kind for reply in replies] == [OK] * 3 and connections == [0, 0, 0]


def test_a_closed_connection_is_opened_again() -> None:
    closing = with_length(BODY, more=b"connection: close\r\n")
    replies, connections = exchange([closing], [with_length(BODY)], expected=WHOLE)
    assert [reply.kind for reply in replies] == [OK] * 2 and connections == [0, 1]


def test_a_kept_connection_that_closes_costs_no_reply() -> None:
    """llama.cpp's server closes after a stream, and does not say so."""
    replies, connections = exchange([as_chunks(STREAM)], [CLOSE], [as_chunks(STREAM)])
    assert [reply.kind for reply in replies][:2] == [OK] * 2 and connections[:3] == [0, 0, 1]
    assert [reply.reconnects for reply in replies][:2] == [0, 1]


def test_a_request_is_sent_again_only_once_and_never_after_a_byte() -> None:
    replies, _ = exchange([as_chunks(STREAM)], [CLOSE], [CLOSE])
    assert replies[1].kind == CONNECTION_RESET and replies[1].reconnects == 1
    replies, connections = exchange([as_chunks(STREAM)], [b"HTTP", CLOSE], [as_chunks(STREAM)])
    assert replies[1].kind == CONNECTION_RESET and connections == [0, 0, 1]


def test_a_reply_in_one_piece() -> None:
    ((reply,), _) = exchange([with_length(BODY)], expected=WHOLE)
    assert (reply.kind, reply.text, reply.prompt_tokens) == (OK, "hi", 2)


def test_a_body_may_end_with_its_connection() -> None:
    ((reply,), _) = exchange([b"HTTP/1.1 200 OK\r\n\r\n" + b"".join(STREAM), CLOSE])
    assert (reply.kind, reply.output_tokens) == (OK, 3)


@pytest.mark.parametrize(
    "script, kind, detail",
    [
        ([with_length(b"slow down", b"429 Too Many Requests")], "http 429", "slow down"),
        ([with_length(b"", b"500 Oops")], "http 500", ""),
        ([as_chunks(STREAM[:5])], BROKEN_STREAM, "without [DONE]"),
        ([as_chunks(STREAM)[:-5], CLOSE], CONNECTION_RESET, "within the reply"),
        ([as_chunks(STREAM)[:200], RESET], CONNECTION_RESET, "within the reply"),
        ([CLOSE], CONNECTION_RESET, "before the reply"),
        ([b"HTTP/1.1 200 OK\r\nconte", CLOSE], CONNECTION_RESET, "before the reply"),
        ([b"SSH-2.0-OpenSSH\r\n"], INVALID_HTTP, "SSH"),
        ([b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\n"], INVALID_HTTP, ""),
        ([b"HTTP/1.1 200 OK\r\n\r\n" + b"".join(STREAM[:2]), CLOSE], BROKEN_STREAM, ""),
    ],
)
def test_failures_are_recorded_and_the_next_request_works(
    script: list[bytes], kind: str, detail: str
) -> None:
    (failed, after), _ = exchange(script, [as_chunks(STREAM)])
    assert failed.kind == kind and detail in failed.detail, failed
    assert failed.end >= failed.start and after.kind == OK


def test_invalid_json_in_one_piece() -> None:
    (failed, after), _ = exchange([with_length(b"oops")], [with_length(BODY)], expected=WHOLE)
    assert (failed.kind, after.kind) == (INVALID_REPLY, OK)


def test_a_silent_server_times_out_and_the_next_request_works() -> None:
    silent = [as_chunks(STREAM)[:200]]
    ((reply,), _) = exchange(silent, expected=Expected(timeout=0.05))
    assert reply.kind == TIMEOUT
    ((reply,), _) = exchange([as_chunks(STREAM)])
    assert reply.kind == OK


def test_nobody_listens() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = Address("127.0.0.1", listener.getsockname()[1])
        connection = Connection(address)
        reply, _ = run_coroutine(connection.send(b"", Expected()))
    assert reply.kind == NO_CONNECTION and reply.end >= reply.start


def test_it_works_on_the_event_loop_of_asyncio() -> None:
    async def send() -> Reply:
        async with scripted_server([as_chunks(STREAM)]) as (address, _):
            connection = Connection(address)
            reply, _ = await connection.send(encode_request(address, "GET", "/"), Expected())
            connection.close()
            return reply

    assert asyncio.run(send()).output_tokens == 3


@pytest.mark.parametrize(
    "url, address, text",
    [
        ("http://host:81/", Address("host", 81), "http://host:81"),
        ("localhost:8000", Address("localhost", 8000), "http://localhost:8000"),
        ("https://host/api/v1/", Address("host", 443, "/api", True), "https://host:443/api"),
        ("http://[::1]:80", Address("::1", 80), "http://[::1]:80"),
    ],
)
def test_addresses(url: str, address: Address, text: str) -> None:
    assert Address.parse(url) == address and str(address) == text


@pytest.mark.parametrize(
    "url", ["", "http://", "ftp://host", "http://host:99999999", "http://[::1"]
)
def test_addresses_that_are_none(url: str) -> None:
    with pytest.raises(ArgumentError, match="--url"):
        Address.parse(url)


def test_requests() -> None:
    request = encode_request(Address("::1", 80, "/api"), "POST", "/v1/completions", b"{}", "key")
    assert request == (
        b"POST /api/v1/completions HTTP/1.1\r\nhost: [::1]:80\r\ncontent-type: application/json\r\n"
        b"content-length: 2\r\nauthorization: Bearer key\r\n\r\n{}"
    )
