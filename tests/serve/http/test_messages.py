"""`/v1/messages` with Anthropic's own client: blocks, tools, thinking, streams, errors."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import anthropic
import pytest

from fulgurite.serve.http.api.messages import ContentBuilder, read_input
from fulgurite.serve.http.api.messages_input import InputMessage, TextPart, to_chat_messages
from fulgurite.serve.http.body import parse_body
from fulgurite.serve.http.config import Limits
from fulgurite.serve.http.errors import ApiError
from fulgurite.serve.http.events import ReasoningDelta, TextDelta
from tests.serve.http.serving import MODEL, RunningServer, mock_config, script, serve

WEATHER = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'


def make_body(text: str, **fields: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "max_tokens": 100,
        "messages": [{"role": "user", "content": text}],
        **fields,
    }


def create(server: RunningServer, text: str, **fields: Any) -> anthropic.types.Message:
    return server.anthropic().messages.create(**make_body(text, **fields))


# ---- replies --------------------------------------------------------------------------------------


def test_reply_is_a_text_block(server: RunningServer) -> None:
    message = create(server, script("Hello there."))
    assert (message.type, message.role, message.model) == ("message", "assistant", MODEL)
    assert [(block.type, block.text) for block in message.content] == [("text", "Hello there.")]
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message.usage.output_tokens == 4  # with the token that ends the reply
    assert message.usage.input_tokens > 4


def test_tool_use_has_its_input_as_an_object(server: RunningServer) -> None:
    message = create(server, script(f"I look it up.\n{CALL}"), tools=[WEATHER])
    text, call = message.content
    assert text.text == "I look it up."
    assert (call.type, call.name, call.input) == ("tool_use", "get_weather", {"city": "Zürich"})
    assert call.id
    assert message.stop_reason == "tool_use"


def test_two_calls_are_two_blocks_and_one_without_parallel_tool_use(server: RunningServer) -> None:
    reply = script(f"{CALL}\n{CALL}")
    blocks = create(server, reply, tools=[WEATHER]).content
    assert [block.type for block in blocks] == ["tool_use", "tool_use"]
    assert blocks[0].id != blocks[1].id
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    blocks = create(server, reply, tools=[WEATHER], tool_choice=choice).content
    assert [block.type for block in blocks] == ["tool_use"]
    assert blocks[0].input == {"city": "Zürich"}


@pytest.mark.parametrize(
    "choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}], ids=["any", "tool"]
)
def test_forced_tool_choice_reads_the_constrained_reply(
    server: RunningServer, choice: dict[str, str]
) -> None:
    reply = script('{"name": "get_weather", "arguments": {"city": "Bern"}}')
    message = create(server, reply, tools=[WEATHER], tool_choice=choice)
    assert [(one.type, one.input) for one in message.content] == [("tool_use", {"city": "Bern"})]


def test_calls_are_text_with_tool_choice_none(server: RunningServer) -> None:
    message = create(server, script(CALL), tools=[WEATHER], tool_choice={"type": "none"})
    assert [block.type for block in message.content] == ["text"]
    assert message.stop_reason == "end_turn"


def test_thinking_is_shown_if_it_is_enabled(server: RunningServer) -> None:
    reply = script("<think>Let me see.</think>Four.")
    thinking = {"type": "enabled", "budget_tokens": 1024}
    blocks = create(server, reply, thinking=thinking).content
    assert [block.type for block in blocks] == ["thinking", "text"]
    assert (blocks[0].thinking, blocks[1].text) == ("Let me see.", "Four.")
    for hidden in ({}, {"thinking": {"type": "disabled"}}):
        blocks = create(server, reply, **hidden).content
        assert [block.text for block in blocks] == ["Four."]


def test_stop_sequence_and_limit(server: RunningServer) -> None:
    message = create(server, script("one two END three"), stop_sequences=["END"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "END")
    assert message.content[0].text == "one two "
    message = create(server, script("one two three four"), max_tokens=2)
    assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 2)


def test_call_that_is_cut_off_keeps_its_text(server: RunningServer) -> None:
    message = create(server, script(CALL), tools=[WEATHER], max_tokens=22)
    assert message.stop_reason == "max_tokens"
    call = message.content[-1]
    assert call.type == "tool_use"
    assert list(call.input) == ["INVALID_JSON"]


def test_cached_tokens_are_counted_apart() -> None:
    with serve(mock_config(["Hi."], mock_options={"cached_tokens": 16})) as server:
        usage = create(server, "Hello").usage
        assert usage.cache_read_input_tokens == 16
        assert (
            usage.input_tokens + 16
            == server.anthropic()
            .messages.count_tokens(model=MODEL, messages=[{"role": "user", "content": "Hello"}])
            .input_tokens
        )


def test_output_config_constrains_the_reply(server: RunningServer) -> None:
    bad = {"format": {"type": "json_schema", "schema": {"type": "nonsense"}}}
    with pytest.raises(anthropic.BadRequestError):
        create(server, "Hello", output_config=bad)
    good = {"format": {"type": "json_schema", "schema": {"type": "object"}}, "effort": "low"}
    assert create(server, script("{}"), output_config=good).content[0].text == "{}"


# ---- streams --------------------------------------------------------------------------------------


def test_stream_has_all_events_in_order(server: RunningServer) -> None:
    body = make_body(
        script(f"<think>Hm.</think>I look.\n{CALL}"),
        tools=[WEATHER],
        thinking={"type": "enabled", "budget_tokens": 1024},
        stream=True,
    )
    text = server.post("/v1/messages", body).text
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    names = [line[7:] for line in text.splitlines() if line.startswith("event: ")]
    assert names == [event["type"] for event in events]
    kinds = [one for i, one in enumerate(names) if i == 0 or names[i - 1] != one]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert kinds == [
        "message_start",
        "ping",
        *block,
        *block,
        *block,
        "message_delta",
        "message_stop",
    ]
    starts = [one["content_block"] for one in events if one["type"] == "content_block_start"]
    assert [one["type"] for one in starts] == ["thinking", "text", "tool_use"]
    assert starts[2]["input"] == {}
    assert [e["index"] for e in events if e["type"] == "content_block_stop"] == [0, 1, 2]
    end = events[-2]
    assert end["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert end["usage"]["output_tokens"] > 0


def test_client_collects_the_streamed_message(server: RunningServer) -> None:
    body = make_body(script(f"Grüße 🎉!\n{CALL}"), tools=[WEATHER])
    with server.anthropic().messages.stream(**body) as stream:
        text = "".join(stream.text_stream)
        message = stream.get_final_message()
    assert text == "Grüße 🎉!"
    assert message.content[1].input == {"city": "Zürich"}
    assert message.stop_reason == "tool_use"
    whole = server.anthropic().messages.create(**body)
    assert whole.usage == message.usage


def test_async_clients_get_their_own_replies(server: RunningServer) -> None:
    async def ask(client: anthropic.AsyncAnthropic, number: int) -> str:
        async with client.messages.stream(**make_body(script(f"I am {number}."))) as stream:
            return await stream.get_final_text()

    async def ask_all() -> list[str]:
        async with server.async_anthropic() as client:
            return await asyncio.gather(*(ask(client, number) for number in range(20)))

    assert asyncio.run(ask_all()) == [f"I am {number}." for number in range(20)]


def test_leaving_a_stream_frees_everything() -> None:
    options = {"tokens_per_step": 1, "step_seconds": 0.01}
    with serve(mock_config(mock_options=options)) as server:
        body = make_body("Tell a long story.", max_tokens=4000)
        with server.anthropic().messages.stream(**body) as stream:
            next(iter(stream.text_stream))
        assert server.leaks() == {}


def test_engine_that_fails_in_a_stream_gives_an_error_event() -> None:
    options = {"tokens_per_step": 1, "step_seconds": 0.01}
    with serve(mock_config(mock_options=options, faults=True)) as server:
        client = server.anthropic()
        with pytest.raises(anthropic.APIError, match="api_error"):
            for event in client.messages.create(**make_body("Hello", max_tokens=4000, stream=True)):
                if event.type == "content_block_delta":
                    fault = server.app.server.clients[0].inject_fault
                    server.loop.call_soon_threadsafe(fault, "raise")
        assert server.leaks() == {}


# ---- prompts --------------------------------------------------------------------------------------


def read_messages(*messages: Any) -> list[dict[str, Any]]:
    body = parse_body(json.dumps(messages).encode(), list[InputMessage], Limits())
    return to_chat_messages([TextPart("text", "Be"), TextPart("text", "kind.")], body)


def test_blocks_become_chat_messages() -> None:
    use = {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}}
    cached = {"type": "text", "text": "Now.", "cache_control": {"type": "ephemeral"}}
    result = {
        "type": "tool_result",
        "tool_use_id": "t1",
        "content": [{"type": "text", "text": "2"}],
    }
    failed = {"type": "tool_result", "tool_use_id": "t2", "content": "no", "is_error": True}
    thinking = {"type": "thinking", "thinking": "hm", "signature": "x"}
    text = {"type": "text", "text": "I call."}
    chat = read_messages(
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": [thinking, text, use]},
        {"role": "user", "content": [result, failed, cached]},
        {"role": "user", "content": "Please."},
    )
    function = {"name": "f", "arguments": '{"a": 1}'}
    assert chat == [
        {"role": "system", "content": "Be\nkind."},
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "content": "I call.",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "t1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "2"},
        {"role": "tool", "tool_call_id": "t2", "content": "Error: no"},
        {"role": "user", "content": "Now.\nPlease."},
    ]


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ({"role": "user", "content": []}, "messages[0].content"),
        (
            {"role": "user", "content": [{"type": "thinking", "thinking": "x"}]},
            "messages[0].content[0]",
        ),
        (
            {"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "x"}]},
            "messages[0].content[0]",
        ),
        ({"role": "assistant", "content": "  "}, "messages"),
        (
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "x", "name": "f", "input": {}}],
            },
            "messages",
        ),
    ],
)
def test_blocks_in_the_wrong_place_are_refused(message: Any, named: str) -> None:
    with pytest.raises(ApiError) as caught:
        read_messages(message)
    assert (caught.value.status, caught.value.param) == (400, named)


def test_last_message_of_the_assistant_is_continued(server: RunningServer) -> None:
    asked = {"role": "user", "content": script(" four.")}
    started = {"role": "assistant", "content": "Two and two is"}
    body = {"model": MODEL, "max_tokens": 20, "messages": [asked, started]}
    message = server.anthropic().messages.create(**body)
    assert message.content[0].text == " four."
    counted = server.anthropic().messages.count_tokens(model=MODEL, messages=[asked, started])
    assert counted.input_tokens == message.usage.input_tokens
    ended = {"messages": [asked, started], "add_generation_prompt": False}
    closing = 2  # <|im_end|> and a line break: the message is not ended
    assert server.post("/tokenize", ended).json()["count"] == counted.input_tokens + closing


def test_count_tokens_equals_the_usage_of_the_same_message(server: RunningServer) -> None:
    fields: dict[str, Any] = {
        "model": MODEL,
        "system": "Be brief.",
        "messages": [{"role": "user", "content": "Hello"}],
        "tools": [WEATHER],
    }
    client = server.anthropic()
    counted = client.messages.count_tokens(**fields).input_tokens
    assert counted == client.messages.create(max_tokens=1, **fields).usage.input_tokens
    fields["messages"] = [{"role": "user", "content": "word " * 9000}]  # more than the context
    assert client.messages.count_tokens(**fields).input_tokens > 9000


# ---- errors ---------------------------------------------------------------------------------------

IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}


@pytest.mark.parametrize(
    ("fields", "status", "words"),
    [
        ({"max_tokens": None}, 400, "max_tokens"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"model": "other"}, 404, "other"),
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, 400, "'image'"),
        ({"messages": [{"role": "tool", "content": "x"}]}, 400, "role"),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            400,
            "web_search_2025",
        ),
        ({"tools": [{"name": "f"}]}, 400, "input_schema"),
        ({"tool_choice": {"type": "any"}}, 400, "tools"),
        ({"tool_choice": {"type": "tool"}}, 400, "name"),
        ({"temperature": -1}, 400, "temperature"),
        ({"stop_sequences": [""]}, 400, "stop"),
        ({"stop_sequences": ["x"] * 17}, 400, "stop"),
        ({"mcp_servers": [{"type": "url"}]}, 400, "mcp_servers"),
        ({"unknown": 1}, 400, "unknown"),
        ({"chat_template_kwargs": {"messages": []}}, 400, "messages"),
        ({"messages": [{"role": "user", "content": "word " * 9000}]}, 400, "context length"),
    ],
)
def test_errors_have_the_shape_of_anthropic(
    server: RunningServer, fields: dict[str, Any], status: int, words: str
) -> None:
    for stream in (False, True):
        body = {**make_body("Hello"), "stream": stream, **fields}
        reply = server.post("/v1/messages", {k: v for k, v in body.items() if v is not None})
        value = reply.json()
        assert reply.status_code == status
        assert (value["type"], set(value["error"])) == ("error", {"type", "message"})
        assert value["request_id"] == reply.headers["x-request-id"]
        assert words in value["error"]["message"]


def test_fields_of_clients_are_accepted(server: RunningServer) -> None:
    message = create(
        server,
        script("Yes."),
        metadata={"user_id": "u"},
        service_tier="auto",
        system=[{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}],
        extra_body={"temperature": 0.5, "top_p": 0.9, "top_k": 5, "workspace_id": "w"},
        thinking={"type": "between_tools"},
        tools=[{**WEATHER, "cache_control": {"type": "ephemeral"}, "type": "custom"}],
    )
    assert message.content[0].text == "Yes."


def test_key_is_read_from_either_header() -> None:
    with serve(mock_config(["Hi."], api_keys=("secret",))) as server:
        assert server.anthropic("secret").messages.create(**make_body("x")).content[0].text == "Hi."
        with pytest.raises(anthropic.AuthenticationError):
            server.anthropic("wrong").messages.create(**make_body("x"))
        client = anthropic.Anthropic(base_url=server.url, auth_token="secret", max_retries=0)
        assert client.messages.create(**make_body("x")).content[0].text == "Hi."


# ---- the builder ----------------------------------------------------------------------------------


def test_text_after_hidden_thinking_is_one_block() -> None:
    builder = ContentBuilder(shows_thinking=False)
    events = [TextDelta("a"), ReasoningDelta("x"), TextDelta("b")]
    types = [one["type"] for event in events for one in builder.add(event)] + [
        one["type"] for one in builder.close()
    ]
    assert types == ["content_block_start", *["content_block_delta"] * 2, "content_block_stop"]
    assert builder.blocks == [{"type": "text", "text": "ab"}]


@pytest.mark.parametrize("text", ["", "[1]", '{"a":', "7", "[" * 100_000])
def test_arguments_that_are_no_object_are_kept(text: str) -> None:
    assert read_input(text) == {"INVALID_JSON": text}


@anthropic.beta_tool
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


def test_tool_runner_goes_on_without_threads() -> None:
    """The client asks for a thread that the server holds, and sends whole conversations instead."""
    call = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    with serve(mock_config([call, "It is 3."], tool_call_parser="hermes")) as server:
        runner = server.anthropic().beta.messages.tool_runner(
            model=MODEL,
            max_tokens=200,
            messages=[{"role": "user", "content": "1 + 2?"}],
            tools=[add],
        )
        assert [message.stop_reason for message in runner] == ["tool_use", "end_turn"]
        assert server.leaks() == {}


def test_thread_is_refused_in_the_words_of_the_client(server: RunningServer) -> None:
    reply = server.post("/v1/messages", make_body("hi", thread={"type": "create"}))
    error = reply.json()["error"]
    assert reply.status_code == 400 and "'thread' is not supported" in error["message"]
    assert error["details"]["error_code"] == "thread_unsupported_request"
    assert server.post("/v1/messages", make_body("hi", thread=None)).status_code == 200
