"""Streams are read the same wherever they are split, and figures don't depend on the fast path."""

from __future__ import annotations

import pytest

from fulgurite.bench.serve.replies import (
    BROKEN_STREAM,
    INVALID_REPLY,
    OK,
    STREAM_ERROR,
    Reply,
    StreamReader,
    read_body,
)
from tests.bench.serve.fake_server import DONE, STREAM, event, text_event


def read(pieces: list[bytes], decode_all: bool = False) -> Reply:
    """Read pieces that arrive at 1, 2, 3, … seconds."""
    reply = Reply(start=0.5)
    reader = StreamReader(reply, decode_all)
    for now, piece in enumerate(pieces, start=1):
        reader.feed(piece, float(now))
    reply.end = float(len(pieces))
    reader.finish()
    return reply


@pytest.mark.parametrize("decode_all", [False, True])
@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
def test_a_stream_split_anywhere(decode_all: bool, newline: bytes) -> None:
    whole = b"".join(STREAM).replace(b"\n", newline)
    for first in range(len(whole)):
        second = (first * 7) % len(whole)
        low, high = sorted((first, second))
        reply = read([whole[:low], whole[low:high], whole[high:]], decode_all)
        assert (reply.kind, reply.prompt_tokens, reply.output_tokens) == (OK, 7, 3), reply.detail
        assert reply.cached_tokens == 4 and reply.first_token >= 1
        assert reply.text == ("abc" if decode_all else reply.text)


@pytest.mark.parametrize("decode_all", [False, True])
def test_times_of_tokens_are_those_of_their_arrival(decode_all: bool) -> None:
    role = event({"choices": [{"delta": {"role": "assistant"}}]})
    pieces = [role, *STREAM[:2], b": keep-alive\n\n", *STREAM[2:]]
    reply = read(pieces, decode_all)
    assert reply.first_token == 2.0  # not the role
    assert list(reply.gaps) == [1.0, 2.0]  # not the comment, the finish reason, the usage, the end


def test_tokens_of_one_read_are_one_arrival() -> None:
    reply = read([STREAM[0], STREAM[1] + STREAM[2], b"".join(STREAM[3:])])
    assert list(reply.gaps) == [1.0]


def test_tokens_are_counted_without_usage() -> None:
    assert read([*STREAM[:4], DONE], decode_all=True).output_tokens == 3
    ids = [text_event("", token_ids=[1]), text_event("é", token_ids=[2, 3])]
    reply = read([*ids, DONE], decode_all=True)
    assert reply.output_tokens == 3 and not reply.has_usage and reply.first_token == 1.0


def test_text_that_looks_like_a_mark_changes_nothing() -> None:
    odd = text_event('[DONE] "usage":{ "error" "finish_reason":"')
    reply = read([STREAM[0], odd, odd, *STREAM[3:]])
    assert reply.kind == OK and list(reply.gaps) == [1.0, 1.0]


@pytest.mark.parametrize(
    "pieces, kind",
    [
        ([*STREAM[:5]], BROKEN_STREAM),
        ([STREAM[0], STREAM[1][:20]], BROKEN_STREAM),
        ([STREAM[0], b"data: {nonsense\n\n", DONE], OK),  # counted, not decoded
        ([b"data: {nonsense\n\n", DONE], BROKEN_STREAM),
        ([b"data: [1]\n\n", DONE], BROKEN_STREAM),
        ([STREAM[0], event({"error": {"message": "no memory"}}), DONE], STREAM_ERROR),
        ([STREAM[0], event({"object": "error", "error": "x"}), DONE], STREAM_ERROR),
        ([], BROKEN_STREAM),
    ],
)
def test_what_is_no_whole_stream(pieces: list[bytes], kind: str) -> None:
    assert read(pieces).kind == kind


def test_a_stream_without_text_has_its_first_token_at_its_end() -> None:
    reply = read([*STREAM[3:]])
    assert reply.kind == OK and reply.first_token == reply.end == 3.0


def test_bodies_that_are_not_streamed() -> None:
    reply = Reply(0.0)
    body = b'{"choices": [{"message": {"content": "hi"}}], "usage": {"prompt_tokens": 2, "completion_tokens": 1}}'
    read_body(reply, body, 4.0)
    assert (reply.kind, reply.text, reply.output_tokens, reply.first_token) == (OK, "hi", 1, 4.0)
    assert reply.cached_tokens is None
    for body in (b"", b"[]", b"nonsense", b'{"choices": [3]}'):
        reply = Reply(0.0)
        read_body(reply, body, 4.0)
        assert reply.kind == INVALID_REPLY, body


def test_the_first_failure_counts() -> None:
    reply = Reply(0.0)
    reply.fail("timeout", "a")
    reply.fail("connection reset", "b")
    assert (reply.kind, reply.detail) == ("timeout", "a")
