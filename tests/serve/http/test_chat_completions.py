"""`/v1/chat/completions` with the openai client: every feature, whole and streamed."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

from tests.serve.http.serving import MODEL, PLAIN, RunningServer, mock_config, script, serve
from tests.serve.http.tiny_server import serve_tiny

HI = [{"role": "user", "content": "Hi"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "get_time"}}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    with serve_tiny(tmp_path_factory.mktemp("tiny")) as running:
        yield running


def ask(server: RunningServer, messages: Any = HI, **options: Any) -> Any:
    options = {"max_completion_tokens": 12, "temperature": 0, **options}
    return server.openai().chat.completions.create(model=MODEL, messages=messages, **options)


def stream(server: RunningServer, messages: Any = HI, **options: Any) -> list[Any]:
    return list(ask(server, messages, stream=True, **options))


def say(text: str) -> list[dict[str, str]]:
    """A conversation that the mock engine answers with this text."""
    return [{"role": "user", "content": script(text)}]


def join_content(chunks: list[Any], index: int = 0) -> str:
    choices = (choice for chunk in chunks for choice in chunk.choices if choice.index == index)
    return "".join(choice.delta.content or "" for choice in choices)


def join_calls(chunks: list[Any]) -> list[tuple[str, str, str]]:
    """(id, name, arguments) of each call of a stream."""
    calls: dict[int, list[str]] = {}
    for chunk in chunks:
        for part in chunk.choices[0].delta.tool_calls or [] if chunk.choices else []:
            call = calls.setdefault(part.index, ["", "", ""])
            call[0] += part.id or ""
            call[1] += part.function.name or ""
            call[2] += part.function.arguments or ""
    return [(id, name, arguments) for id, name, arguments in calls.values()]


# ---- text, whole and streamed ---------------------------------------------------------------------


def test_reply_has_the_shape_of_openai(server):
    reply = ask(server, say("Hello there."))
    assert reply.object == "chat.completion" and reply.id.startswith("chatcmpl-")
    assert reply.model == MODEL
    [choice] = reply.choices
    assert choice.message.role == "assistant" and choice.message.content == "Hello there."
    assert choice.finish_reason == "stop" and choice.logprobs is None
    usage = reply.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_stream_gives_the_same_text_as_the_whole_reply(server):
    text = "Räksmörgås, 日本語, 😀👩‍👩‍👧 and " + "more words " * 8
    whole = ask(server, say(text), max_completion_tokens=400)
    chunks = stream(server, say(text), max_completion_tokens=400)
    assert whole.choices[0].message.content == text == join_content(chunks)
    assert chunks[0].choices[0].delta.role == "assistant"
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons[-1] == "stop" and set(reasons[:-1]) == {None}
    assert len({chunk.id for chunk in chunks}) == 1


def test_async_clients_get_their_own_replies(server):
    async def run() -> list[str]:
        async with server.async_openai() as client:

            async def one(number: int) -> str:
                events = await client.chat.completions.create(
                    model=MODEL, messages=say(f"reply {number}"), stream=True
                )
                return "".join([e.choices[0].delta.content or "" async for e in events])

            return await asyncio.gather(*(one(number) for number in range(20)))

    assert asyncio.run(run()) == [f"reply {number}" for number in range(20)]


def test_usage_in_streams(server):
    chunks = stream(server, stream_options={"include_usage": True})
    *others, last = chunks
    assert last.choices == [] and last.usage.completion_tokens == 12
    assert all(chunk.usage is None and chunk.choices for chunk in others)
    assert all(chunk.usage is None for chunk in stream(server))


def test_continuous_usage_grows(server):
    with serve(mock_config(mock_options={"tokens_per_step": 1, "step_seconds": 0.01})) as slow:
        options = {"include_usage": True, "continuous_usage_stats": True}
        chunks = stream(slow, stream_options=options)
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 12 and len(set(counts)) > 3


def test_max_completion_tokens_wins_over_max_tokens(server):
    assert ask(server, max_tokens=3).usage.completion_tokens == 12
    assert ask(server, max_tokens=3, max_completion_tokens=5).usage.completion_tokens == 5
    reply = ask(server, max_tokens=3, max_completion_tokens=None)
    assert reply.usage.completion_tokens == 3 and reply.choices[0].finish_reason == "length"


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("count", [0, -1])
def test_no_tokens_are_refused(server, field, count):
    with pytest.raises(openai.BadRequestError, match="must be 1 or more"):
        ask(server, **{"max_completion_tokens": None, field: count})


def test_n_choices_are_numbered(server):
    reply = ask(server, say("same"), n=3)
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    assert {choice.message.content for choice in reply.choices} == {"same"}
    chunks = stream(server, say("same"), n=3)
    assert [join_content(chunks, index) for index in range(3)] == ["same"] * 3
    assert sum(chunk.choices[0].finish_reason == "stop" for chunk in chunks) == 3


# ---- sampling (tiny model) ------------------------------------------------------------------------


def test_same_seed_same_text(tiny):
    texts = {ask(tiny, temperature=1, seed=7).choices[0].message.content for _ in range(3)}
    others = {ask(tiny, temperature=1, seed=s).choices[0].message.content for s in range(5)}
    assert len(texts) == 1 and len(others) > 1


def test_choices_of_a_seed_differ_and_repeat(tiny):
    first = [c.message.content for c in ask(tiny, temperature=1, seed=7, n=4).choices]
    second = [c.message.content for c in ask(tiny, temperature=1, seed=7, n=4).choices]
    assert first == second and len(set(first)) > 1
    assert first[0] == ask(tiny, temperature=1, seed=7).choices[0].message.content


def test_negative_seed(tiny):
    texts = {ask(tiny, temperature=1, seed=-3).choices[0].message.content for _ in range(2)}
    assert len(texts) == 1


def test_logit_bias_forces_a_token(tiny):
    token = tiny.post("/tokenize", {"prompt": "z"}).json()["tokens"][0]
    reply = ask(tiny, logit_bias={str(token): 100}, max_completion_tokens=4)
    assert reply.choices[0].message.content == "zzzz"


def test_a_request_that_bans_every_token_is_a_bad_request(tiny):
    """The only allowed token would end the reply before `min_tokens`."""
    token = tiny.post("/tokenize", {"prompt": "z"}).json()["tokens"][0]
    body = {"allowed_token_ids": [token], "stop_token_ids": [token], "min_tokens": 3}
    with pytest.raises(openai.BadRequestError, match="every token is banned"):
        ask(tiny, extra_body=body)
    assert ask(tiny).choices[0].finish_reason == "length"


def test_logprobs_bytes_concatenate_to_the_text(tiny):
    reply = ask(tiny, logprobs=True, top_logprobs=3, max_completion_tokens=24, seed=1)
    choice = reply.choices[0]
    entries = choice.logprobs.content
    data = bytes(byte for entry in entries for byte in entry.bytes)
    assert data.decode(errors="replace") == choice.message.content
    for entry in entries:
        values = [top.logprob for top in entry.top_logprobs]
        assert len(values) == 3 and values == sorted(values, reverse=True)
        assert entry.logprob <= 0 and entry.top_logprobs[0].token == entry.token  # greedy


def test_streamed_logprobs_are_those_of_the_whole_reply(tiny):
    options = dict(logprobs=True, top_logprobs=2, max_completion_tokens=24)
    whole = ask(tiny, **options).choices[0].logprobs.content
    parts = [
        entry
        for chunk in stream(tiny, **options)
        for choice in chunk.choices
        if choice.logprobs
        for entry in choice.logprobs.content
    ]
    assert parts == whole


def test_prompt_logprobs_of_a_conversation(tiny):
    body = {
        "messages": [{"role": "user", "content": "abc"}],
        "max_tokens": 2,
        "prompt_logprobs": 1,
        "return_token_ids": True,
        "n": 2,
    }
    reply = tiny.post("/v1/chat/completions", body).json()
    none, *rest = reply["prompt_logprobs"]
    assert none is None and len(reply["choices"]) == 2
    assert [next(iter(one)) for one in rest] == [str(id) for id in reply["prompt_token_ids"][1:]]
    assert len(reply["prompt_token_ids"]) == reply["usage"]["prompt_tokens"]
    refused = tiny.post("/v1/chat/completions", {**body, "stream": True})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "prompt_logprobs"


def test_stop_token_is_no_part_of_logprobs(server):
    reply = ask(server, say("Hello there, you."), logprobs=True)
    data = bytes(byte for entry in reply.choices[0].logprobs.content for byte in entry.bytes)
    assert data.decode() == reply.choices[0].message.content == "Hello there, you."


@pytest.mark.parametrize("per_step", [1, 3, 16])
def test_stop_string_across_chunks(per_step):
    text = "first part. E EN END second part"
    with serve(mock_config([text], mock_options={"tokens_per_step": per_step})) as mock:
        for stop, first in (("END", "END"), (["no", "END"], "END"), (["END", "EN"], "EN")):
            whole = ask(mock, stop=stop, max_completion_tokens=100).choices[0]
            chunks = stream(mock, stop=stop, max_completion_tokens=100)
            expected = text[: text.index(first)]
            assert whole.message.content == expected == join_content(chunks)
            assert whole.finish_reason == "stop" and whole.stop_reason == first
        assert mock.leaks() == {}


def test_token_ids_on_request(server):
    reply = ask(server, say("Hello there."), extra_body={"return_token_ids": True})
    ids = reply.choices[0].token_ids
    assert len(ids) == reply.usage.completion_tokens
    text = server.post("/detokenize", {"tokens": ids[:-1]}).json()["prompt"]
    assert text == "Hello there."
    chunks = stream(server, say("Hello there."), extra_body={"return_token_ids": True}, n=2)
    prompts = [chunk.prompt_token_ids for chunk in chunks if hasattr(chunk, "prompt_token_ids")]
    assert prompts == [reply.prompt_token_ids] and hasattr(chunks[0], "prompt_token_ids")
    choices = [one for chunk in chunks for one in chunk.choices if one.index == 0]
    assert [token for one in choices for token in one.token_ids] == ids


# ---- tools ----------------------------------------------------------------------------------------

CALLS = (
    "Let me look.\n"
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
)


def test_tool_calls(server):
    options = {"tools": [WEATHER, CLOCK], "max_completion_tokens": 200}
    reply = ask(server, say(CALLS), **options)
    [choice] = reply.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content.strip() == "Let me look."
    calls = choice.message.tool_calls
    assert [call.function.name for call in calls] == ["get_weather", "get_time"]
    assert json.loads(calls[0].function.arguments) == {"city": "Oslo"}
    assert len({call.id for call in calls}) == 2
    chunks = stream(server, say(CALLS), **options)
    parts = join_calls(chunks)
    assert [(name, json.loads(text)) for _, name, text in parts] == [
        ("get_weather", {"city": "Oslo"}),
        ("get_time", {}),
    ]
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_parallel_tool_calls_off_gives_one(server):
    options = {"tools": [WEATHER, CLOCK], "parallel_tool_calls": False}
    reply = ask(server, say(CALLS), max_completion_tokens=200, **options)
    assert [c.function.name for c in reply.choices[0].message.tool_calls] == ["get_weather"]


def test_allowed_tools_are_the_only_ones(tiny):
    other = {"type": "function", "function": {"name": "other"}}
    named = [{"type": "function", "function": {"name": "other"}}]

    def ask(choice: Any) -> Any:
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 200}
        return tiny.post(
            "/v1/chat/completions", {**body, "tools": [WEATHER, other], "tool_choice": choice}
        )

    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": named}}
    calls = ask(choice).json()["choices"][0]["message"]["tool_calls"]
    assert {call["function"]["name"] for call in calls} == {"other"}
    unknown = [{"type": "function", "function": {"name": "third"}}]
    for wrong in (
        {"mode": "auto", "tools": unknown},
        {"mode": "none", "tools": named},
        {"mode": "auto", "tools": [{"type": "custom"}]},
        None,
    ):
        reply = ask({"type": "allowed_tools", "allowed_tools": wrong})
        assert reply.status_code == 400 and reply.json()["error"]["param"] == "tool_choice"


def test_arguments_that_no_text_matches_are_a_bad_request(tiny):
    """A grammar that comes to a dead end: the same request would fail again."""
    endless = {"type": "function", "function": {"name": "f", "parameters": {"$ref": "#"}}}
    body = {"messages": [{"role": "user", "content": "x"}], "tool_choice": "required"}
    reply = tiny.post("/v1/chat/completions", {**body, "tools": [endless]})
    assert reply.status_code == 400, reply.text
    assert "no text can follow" in reply.json()["error"]["message"]


def test_top_p_0_is_the_most_likely_token(tiny):
    body = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 12}
    texts = [
        tiny.post("/v1/chat/completions", {**body, **fields}).json()["choices"][0]["message"]
        for fields in ({"temperature": 0}, {"temperature": 1.5, "top_p": 0, "seed": 5})
    ]
    assert texts[0] == texts[1]


def test_errors_repeat_little_of_a_request(server):
    long = "k" * 100_000
    for fields in ({long: 1}, {"model": long}, {"reasoning_effort": long}, {"tool_choice": long}):
        body = {"messages": [{"role": "user", "content": "x"}], **fields}
        reply = server.post("/v1/chat/completions", body)
        assert reply.status_code in (400, 404) and len(reply.content) < 2000, reply.text[:300]
    assert len(server.get("/" + "a" * 20_000).content) < 500


def test_tool_choice_none_leaves_calls_as_text(server):
    reply = ask(server, say("Hi."), tools=[WEATHER], tool_choice="none")
    assert reply.choices[0].message.tool_calls is None


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "get_weather"}}]
)
def test_forced_calls_are_valid(tiny, choice):
    """A model with random weights must call the tool, with arguments of its schema."""
    options = {"tools": [WEATHER], "tool_choice": choice, "max_completion_tokens": 150}
    for seed in range(3):
        reply = ask(tiny, temperature=1, seed=seed, parallel_tool_calls=False, **options)
        [call] = reply.choices[0].message.tool_calls
        assert call.function.name == "get_weather"
        assert json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")
        assert reply.choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize("limit", [1, 4, 9, 25])
def test_forced_call_that_is_cut_leaves_no_text(tiny, limit):
    """What is left of a call before its name is known is not the content of a message."""
    options = {"tools": [WEATHER], "tool_choice": "required", "max_completion_tokens": limit}
    choice = ask(tiny, temperature=1, seed=0, **options).choices[0]
    assert choice.finish_reason == "length" and not choice.message.content
    parts = [chunk.choices[0].delta.content for chunk in stream(tiny, **options)]
    assert not any(parts)


def test_conversation_with_results_of_tools(server):
    messages = [
        *HI,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": script("Cold.")},
    ]
    assert ask(server, messages, tools=[WEATHER]).choices[0].message.content == "Cold."


# ---- reasoning, structured output -----------------------------------------------------------------


def test_reasoning_is_apart_from_the_answer(server):
    text = "<think>It greets.</think>Hello."
    message = ask(server, say(text), max_completion_tokens=50).choices[0].message
    assert message.reasoning_content == "It greets." and message.content == "Hello."
    chunks = stream(server, say(text), max_completion_tokens=50)
    deltas = [chunk.choices[0].delta for chunk in chunks]
    reasoning = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    assert reasoning == "It greets." and join_content(chunks) == "Hello."


SCHEMA = {
    "type": "object",
    "properties": {"size": {"enum": ["small", "large"]}, "ok": {"type": "boolean"}},
    "required": ["size", "ok"],
    "additionalProperties": False,
}
CONSTRAINTS: dict[str, tuple[dict[str, Any], Any]] = {
    "json_schema": (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": SCHEMA},
            }
        },
        SCHEMA,
    ),
    "structured_outputs": ({"structured_outputs": {"json": SCHEMA}}, SCHEMA),
    "guided_json": ({"guided_json": json.dumps(SCHEMA)}, SCHEMA),
    "choice": ({"structured_outputs": {"choice": ["yes", "no"]}}, {"yes", "no"}),
    "guided_choice": ({"guided_choice": ["left", "right"]}, {"left", "right"}),
    "regex": ({"structured_outputs": {"regex": "(ab){2}|c"}}, {"abab", "c"}),
    "guided_regex": ({"guided_regex": "x[yz]"}, {"xy", "xz"}),
    "grammar": ({"guided_grammar": 'start: "one" | "two"'}, {"one", "two"}),
}


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_constrained_replies(tiny, name):
    fields, expected = CONSTRAINTS[name]
    for seed in range(2):
        reply = ask(tiny, temperature=1, seed=seed, max_completion_tokens=200, extra_body=fields)
        text = reply.choices[0].message.content
        assert reply.choices[0].finish_reason == "stop", text
        if isinstance(expected, set):
            assert text in expected
        else:
            value = json.loads(text)
            assert value["size"] in ("small", "large") and isinstance(value["ok"], bool)


def test_two_constraints_are_refused(server):
    fields = {"guided_regex": "a", "structured_outputs": {"choice": ["b"]}}
    with pytest.raises(openai.BadRequestError, match="one constraint"):
        ask(server, extra_body=fields)


@pytest.mark.parametrize(
    "format",
    [
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"name": "x"}},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}},
        {"type": "regex", "regex": "("},
        {"type": "grammar", "grammar": "start: ("},
        {"type": "unknown"},
    ],
)
def test_bad_formats_are_refused_and_not_ignored(server, format):
    with pytest.raises(openai.BadRequestError) as error:
        ask(server, response_format=format)
    assert "response_format" in (error.value.param or "")


# ---- scheduling, ids, errors ----------------------------------------------------------------------


def test_extras_are_accepted(server):
    extras = {"priority": -5, "cache_salt": "a", "deadline": 20.0, "request_id": "mine-1"}
    options = {"user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto"}
    options |= {"prompt_cache_retention": "24h", "reasoning_effort": "max"}
    reply = ask(server, say("ok"), extra_body=extras, **options)
    assert reply.choices[0].message.content == "ok" and reply.id == "chatcmpl-mine-1"


def test_request_ids(server):
    create = server.openai().chat.completions.with_raw_response.create
    given = create(model=MODEL, messages=HI, max_tokens=1, extra_headers={"x-request-id": "a.b:1"})
    assert given.headers["x-request-id"] == "a.b:1"
    made = create(model=MODEL, messages=HI, max_tokens=1, extra_headers={"x-request-id": "a b"})
    assert made.headers["x-request-id"].startswith("req-")


def test_cache_salt_isolates_the_prefix_cache(tiny):
    def cached(salt: str | None) -> int:
        messages = [{"role": "user", "content": "a long prefix of a prompt " * 5}]
        reply = ask(tiny, messages, extra_body={"cache_salt": salt}, max_completion_tokens=2)
        return reply.usage.prompt_tokens_details.cached_tokens

    assert [cached("a") > 0, cached("a") > 0] == [False, True]
    assert cached("b") == 0 and cached(None) == 0
    assert cached("b") > 0 and cached(None) > 0


def test_continue_final_message(tiny):
    messages = [*HI, {"role": "assistant", "content": "The answer is"}]
    fields = {"continue_final_message": True, "add_generation_prompt": False}
    reply = ask(tiny, messages, extra_body=fields)
    assert reply.usage.completion_tokens == 12
    with pytest.raises(openai.BadRequestError):
        ask(tiny, HI, extra_body=fields)


ERRORS: list[tuple[dict[str, Any], int, str | None]] = [
    ({"messages": []}, 400, "messages"),
    ({"messages": [{"content": "x"}]}, 400, "messages"),
    ({"messages": [{"role": "user", "content": 5}]}, 400, "messages"),
    ({"messages": [{"role": "user", "contents": "x"}]}, 400, "messages"),
    ({"messages": [{"role": "system", "content": None}]}, 400, "messages"),
    ({"messages": [{"role": "robot", "content": "x"}]}, 400, "messages"),
    ({"max_tokens": 4.5}, 400, "max_tokens"),
    ({"stop_token_ids": [99999999]}, 400, "stop_token_ids"),
    ({"messages": "x"}, 400, "messages"),
    ({"messages": None}, 400, "messages"),
    ({"model": "other"}, 404, "model"),
    ({"temperature": -1}, 400, "temperature"),
    ({"temperature": "hot"}, 400, "temperature"),
    ({"top_p": -0.1}, 400, "top_p"),
    ({"n": 0}, 400, "n"),
    ({"n": 1000}, 400, "n"),
    ({"stop": [""]}, 400, "stop"),
    ({"stop": ["x"] * 17}, 400, "stop"),
    ({"logit_bias": {"x": 1}}, 400, "logit_bias"),
    ({"logit_bias": {"1": 101}}, 400, "logit_bias[...]"),
    ({"logit_bias": {"99999999": 1}}, 400, "logit_bias"),
    ({"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs"),
    ({"top_logprobs": 2}, 400, "top_logprobs"),
    ({"audio": {"voice": "x"}}, 400, "audio"),
    ({"modalities": ["audio"]}, 400, "modalities"),
    ({"function_call": "auto"}, 400, "function_call"),
    ({"surprise": 1}, 400, "surprise"),
    ({"stream_options": {"include_usage": True}}, 400, "stream_options"),
    ({"tool_choice": "required"}, 400, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"function": {"name": "other"}}}, 400, "tool_choice"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, 400, "tools"),
    ({"max_tokens": 0}, 400, "max_tokens"),
    ({"max_completion_tokens": 0}, 400, "max_completion_tokens"),
    ({"response_format": {}}, 400, "response_format.type"),
    ({"response_format": {"type": "text", "more": 1}}, 400, "response_format.more"),
    ({"moderation": {"model": "x"}}, 400, "moderation"),
    ({"request_id": "a b"}, 400, "request_id"),
    ({"deadline": 0}, 400, "deadline"),
    ({"priority": 1 << 40}, 400, "priority"),
    ({"chat_template_kwargs": {"messages": []}}, 400, "chat_template_kwargs"),
    ({"chat_template": "{{ messages }}"}, 400, "chat_template"),
]


@pytest.mark.parametrize(("fields", "status", "param"), ERRORS, ids=lambda value: str(value)[:50])
def test_errors_name_the_field(server, fields, status, param):
    reply = server.post("/v1/chat/completions", {"messages": HI, "max_tokens": 2, **fields})
    assert reply.status_code == status, reply.text
    assert set(reply.json()) == {"error"}
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param and error["message"]
    assert error["type"] == {400: "invalid_request_error", 404: "not_found_error"}[status]


def test_prompt_longer_than_the_context(tiny):
    with pytest.raises(openai.BadRequestError) as error:
        ask(tiny, [{"role": "user", "content": "x" * 1100}])
    assert error.value.code == "context_length_exceeded"


def test_pictures_are_refused_without_a_fetch(server):
    part = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/x.png"}}
    with pytest.raises(openai.BadRequestError, match="reads text only"):
        ask(server, [{"role": "user", "content": [part]}])


def test_whole_floats_are_integers(server):
    """JSON has one kind of number: clients of languages without integers send 2.0."""
    body = {"messages": HI, "max_tokens": 2.0, "n": 2.0, "seed": 1.0, "logit_bias": {"5": 1.0}}
    reply = server.post("/v1/chat/completions", body)
    assert reply.status_code == 200, reply.text
    assert len(reply.json()["choices"]) == 2 and reply.json()["usage"]["completion_tokens"] == 4


def test_null_is_the_default_of_every_field(server):
    names = (
        "add_generation_prompt",
        "continue_final_message",
        "include_reasoning",
        "tools",
        "stop",
    )
    options = {"include_usage": None, "continuous_usage_stats": None}
    body = {"messages": HI, "max_tokens": 2, "stream": True, "stream_options": options}
    reply = server.post("/v1/chat/completions", {**body, **dict.fromkeys(names)})
    assert reply.status_code == 200, reply.text


def test_streamed_calls_have_no_content(tiny):
    chunks = stream(tiny, tools=[WEATHER], tool_choice="required", max_completion_tokens=90)
    assert chunks[0].choices[0].delta.role == "assistant" and join_calls(chunks)
    assert all(chunk.choices[0].delta.content is None for chunk in chunks if chunk.choices)


def test_the_models_own_end_is_no_stop_reason(server):
    """vLLM's field: the stop string or token of the request."""
    choice = ask(server, say("Hello."), max_completion_tokens=None).choices[0]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", None)


@pytest.mark.parametrize("text", ["\\ud83d", "a\\uDE00", "\\ud83d\\u0041"])
def test_half_of_a_character_is_named(server, text):
    body = json.dumps({"messages": [{"role": "user", "content": "HALF"}]}).replace("HALF", text)
    headers = {"content-type": "application/json"}
    reply = PLAIN.post(f"{server.url}/v1/chat/completions", content=body, headers=headers)
    assert reply.status_code == 400
    assert "is half of a character" in reply.json()["error"]["message"]
