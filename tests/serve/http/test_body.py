"""Bodies that can't be used: messages that say which values are allowed, and what is no JSON."""

from __future__ import annotations

from typing import Any

import pytest

from fulgurite.serve.http.api.chat_completions import ChatCompletionRequest
from fulgurite.serve.http.api.messages import MessageRequest
from fulgurite.serve.http.api.operations import EmbeddingRequest
from fulgurite.serve.http.api.responses_request import ResponseRequest
from fulgurite.serve.http.body import encode_json, parse_body
from fulgurite.serve.http.config import Limits
from fulgurite.serve.http.errors import ApiError

HI = [{"role": "user", "content": "hi"}]


def find_error(kind: Any, body: bytes | dict[str, Any]) -> ApiError:
    raw = body if isinstance(body, bytes) else encode_json(body)
    with pytest.raises(ApiError) as error:
        parse_body(raw, kind, Limits())
    return error.value


@pytest.mark.parametrize(
    "kind, body, param, named",
    [
        (
            ChatCompletionRequest,
            {"messages": HI, "response_format": {"type": "xml"}},
            "response_format.type",
            "'xml' is not one of 'grammar', 'json_object', 'json_schema'",
        ),
        (
            ChatCompletionRequest,
            {"messages": HI, "reasoning_effort": "huge"},
            "reasoning_effort",
            "'high'",
        ),
        (ResponseRequest, {"input": "x", "include": ["y"]}, "include[0]", "encrypted_content"),
        (ResponseRequest, {"input": "x", "tool_choice": "y"}, "tool_choice", "'required'"),
        (
            MessageRequest,
            {"model": "m", "max_tokens": 1, "messages": [{"role": "bot", "content": "x"}]},
            "messages[0].role",
            "'assistant'",
        ),
        (EmbeddingRequest, {"input": "x", "encoding_format": "z"}, "encoding_format", "'base64'"),
    ],
)
def test_allowed_values_are_named(kind: Any, body: dict[str, Any], param: str, named: str) -> None:
    error = find_error(kind, body)
    assert error.status == 400 and error.param == param and named in error.message


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"-Infinity"])
def test_numbers_that_json_does_not_have(number: bytes) -> None:
    body = b'{"messages": [{"role": "user", "content": "x"}], "temperature": ' + number + b"}"
    error = find_error(ChatCompletionRequest, body)
    assert f"{number.decode().lstrip('-')}, which is no number of JSON" in error.message
    text = b'{"messages": [{"role": "user", "content": "NaN"}], }'
    assert "no number" not in find_error(ChatCompletionRequest, text).message
