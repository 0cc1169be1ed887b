"""Strict tools with tool choice auto, over HTTP: calls that the model begins follow their schemas.

The tiny model has random weights. A bias makes it write "~", which begins a call here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from fulgurite.serve.http.parsers import TOOL_FORMATS
from fulgurite.serve.http.parsers.choice import ParserChoice
from tests.serve.http.serving import MODEL, RunningServer
from tests.serve.http.tiny_server import serve_tiny

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Oslo", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
UNSUPPORTED = {
    "type": "object",
    "properties": {"tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True}},
}
HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with serve_tiny(tmp_path_factory.mktemp("tiny")) as server:
        format = replace(TOOL_FORMATS["hermes"], opens=("~",))
        server.app.server.formats = ParserChoice(format, None)
        yield server


def bias(server: RunningServer) -> dict[str, float]:
    tokenizer = server.app.server.require_tokenizer()
    return {str(tokenizer.encode("~", False)[0]): 100}


def make_tool(parameters: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"name": "get_weather", "parameters": parameters, **fields}


def check_calls(calls: list[tuple[str, str]], is_cut: bool) -> None:
    assert calls
    for name, arguments in calls[: len(calls) - is_cut]:
        assert name == "get_weather"
        jsonschema.validate(json.loads(arguments), SCHEMA)
    assert len(calls) > is_cut


@pytest.mark.parametrize("stream", [False, True])
def test_chat_completions(tiny: RunningServer, stream: bool) -> None:
    tool = {"type": "function", "function": make_tool(SCHEMA, strict=True)}
    body = {"model": MODEL, "messages": HI, "tools": [tool], "logit_bias": bias(tiny)}
    created = tiny.openai().chat.completions.create(
        **body, max_completion_tokens=150, temperature=1, seed=3, stream=stream
    )
    if not stream:
        [choice] = created.choices
        calls = [(one.function.name, one.function.arguments) for one in choice.message.tool_calls]
        check_calls(calls, choice.finish_reason == "length")
        return
    streamed: list[list[str]] = []
    for chunk in created:
        for part in chunk.choices[0].delta.tool_calls or ():
            if part.function.name:
                streamed.append([part.function.name, ""])
            streamed[-1][1] += part.function.arguments or ""
    check_calls([(name, arguments) for name, arguments in streamed], True)


def test_responses(tiny: RunningServer) -> None:
    tool = {"type": "function", **make_tool(SCHEMA, strict=True)}
    response = tiny.openai().responses.create(
        model=MODEL,
        input="Hi",
        tools=[tool],
        max_output_tokens=150,
        extra_body={"logit_bias": bias(tiny), "seed": 3},
    )
    calls = [(one.name, one.arguments) for one in response.output if one.type == "function_call"]
    check_calls(calls, response.status == "incomplete")


def test_messages(tiny: RunningServer) -> None:
    body = {"model": MODEL, "messages": HI, "max_tokens": 150, "logit_bias": bias(tiny), "seed": 3}
    tool = {"name": "get_weather", "input_schema": SCHEMA, "strict": True}
    reply = tiny.post("/v1/messages", {**body, "tools": [tool]})
    assert reply.status_code == 200, reply.text
    blocks = [one for one in reply.json()["content"] if one["type"] == "tool_use"]
    calls = [(one["name"], json.dumps(one["input"])) for one in blocks]
    check_calls(calls, reply.json()["stop_reason"] == "max_tokens")


def test_tools_that_are_not_strict_leave_the_reply_free(tiny: RunningServer) -> None:
    tool = {"type": "function", "function": make_tool(SCHEMA)}
    body = {"messages": HI, "tools": [tool], "logit_bias": bias(tiny), "max_tokens": 20}
    message = tiny.post("/v1/chat/completions", body).json()["choices"][0]["message"]
    assert message["content"].startswith("~~~") and not message.get("tool_calls")


def test_a_schema_that_cannot_be_enforced_is_a_bad_request(tiny: RunningServer) -> None:
    """Never an unconstrained call; the message names the keyword and its place."""
    tool = {"type": "function", "function": make_tool(UNSUPPORTED, strict=True)}
    body = {"messages": HI, "max_tokens": 20, "tools": [tool]}
    reply = tiny.post("/v1/chat/completions", body)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == "tools"
    assert "'uniqueItems' at #/properties/tags" in error["message"]
    tool["function"]["strict"] = False
    assert tiny.post("/v1/chat/completions", body).status_code == 200
