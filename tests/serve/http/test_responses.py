"""`/v1/responses` with OpenAI's own client: items, chains, streams, background, the store."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import openai
import pytest

from fulgurite.serve.http.api.responses_input import to_chat_messages
from fulgurite.serve.http.api.responses_output import LogprobQueue, OutputBuilder
from fulgurite.serve.http.chat import ChatDelta
from fulgurite.serve.http.config import Limits
from fulgurite.serve.http.events import ReasoningDelta, TextDelta
from fulgurite.serve.http.generation import ChoiceFinish
from fulgurite.serve.http.response_store import ResponseStore, StoredResponse
from tests.serve.http.serving import MODEL, RunningServer, mock_config, script, serve

WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
OTHER: dict[str, Any] = {"type": "function", "name": "other", "parameters": None}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
SLOW = {"tokens_per_step": 1, "step_seconds": 0.01}
STATUS_SECONDS = 20.0  # until a response in the background has ended


def create(server: RunningServer, input: Any, **fields: Any) -> Any:
    return server.openai().responses.create(model=MODEL, input=input, **fields)


# ---- output items ---------------------------------------------------------------------------------


def test_reply_is_a_message_with_output_text(server: RunningServer) -> None:
    response = create(server, script("Hello there."), metadata={"a": "b"}, user="u")
    assert (response.object, response.status, response.model) == ("response", "completed", MODEL)
    assert response.output_text == "Hello there."
    (message,) = response.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    (part,) = message.content
    assert (part.type, part.annotations, part.logprobs) == ("output_text", [], [])
    assert response.metadata == {"a": "b"}
    assert (response.error, response.incomplete_details) == (None, None)
    usage = response.usage
    assert usage.output_tokens == 4  # with the token that ends the reply
    assert usage.total_tokens == usage.input_tokens + 4


def test_reasoning_message_and_calls_are_items(server: RunningServer) -> None:
    reply = script(f"<think>Let me see.</think>I look.\n{CALL}\n{CALL}")
    response = create(server, reply, tools=[WEATHER])
    kinds = [item.type for item in response.output]
    assert kinds == ["reasoning", "message", "function_call", "function_call"]
    reasoning, message, first, second = response.output
    assert [part.text for part in reasoning.content] == ["Let me see."]
    assert message.content[0].text == "I look."
    assert (first.name, first.arguments) == ("get_weather", '{"city": "Zürich"}')
    assert first.call_id != second.call_id
    assert response.usage.output_tokens_details.reasoning_tokens == 4
    one = create(server, reply, tools=[WEATHER], parallel_tool_calls=False)
    assert [item.type for item in one.output] == ["reasoning", "message", "function_call"]


def test_limit_makes_a_response_incomplete(server: RunningServer) -> None:
    response = create(server, script("one two three four"), max_output_tokens=2)
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output[0].status == "incomplete"
    assert response.usage.output_tokens == 2


def test_empty_reply_is_an_empty_message(server: RunningServer) -> None:
    response = create(server, script(""))
    assert [item.type for item in response.output] == ["message"]
    assert response.output_text == ""


def test_logprobs_are_those_of_the_text(server: RunningServer) -> None:
    reply = script("<think>hm</think>Grüße 🎉 there.")
    fields: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    response = create(server, reply, **fields)
    logprobs = response.output[1].content[0].logprobs
    text = b"".join(bytes(one.bytes) for one in logprobs).decode()
    assert text == response.output_text == "Grüße 🎉 there."
    assert all(len(one.top_logprobs) == 2 for one in logprobs)
    deltas = [
        one
        for event in create(server, reply, stream=True, **fields)
        if event.type == "response.output_text.delta"
        for one in event.logprobs
    ]
    assert [one.token for one in deltas] == [one.token for one in logprobs]


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "function", "name": "get_weather"},
        {
            "type": "allowed_tools",
            "mode": "required",
            "tools": [{"type": "function", "name": "get_weather"}],
        },
    ],
    ids=["required", "function", "allowed_tools"],
)
def test_forced_tool_choice_reads_the_constrained_reply(server: RunningServer, choice: Any) -> None:
    reply = script('{"name": "get_weather", "arguments": {"city": "Bern"}}')
    response = create(server, reply, tools=[WEATHER, OTHER], tool_choice=choice)
    assert [item.type for item in response.output] == ["function_call"]
    assert response.output[0].arguments == '{"city": "Bern"}'


def test_text_format_is_checked_and_repeated(server: RunningServer) -> None:
    format = {"type": "json_schema", "name": "x", "schema": {"type": "object"}, "strict": True}
    response = create(server, script("{}"), text={"format": format})
    assert response.text.format.schema_ == {"type": "object"}
    bad = {"type": "json_schema", "name": "x", "schema": {"type": "nonsense"}}
    with pytest.raises(openai.BadRequestError) as caught:
        create(server, "x", text={"format": bad})
    assert caught.value.param == "text.format"
    assert (
        create(server, script("{}"), text={"format": {"type": "json_object"}}).output_text == "{}"
    )


def test_cached_tokens_are_reported() -> None:
    with serve(mock_config(["Hi."], mock_options={"cached_tokens": 16})) as server:
        assert create(server, "x").usage.input_tokens_details.cached_tokens == 16


# ---- streams --------------------------------------------------------------------------------------

ITEM = ("output_item.added", "output_item.done")
PART = ("content_part.added", "content_part.done")


def test_stream_has_all_events_in_order(server: RunningServer) -> None:
    reply = script(f"<think>Hm.</think>I look.\n{CALL}")
    events = list(create(server, reply, tools=[WEATHER], stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    names = [event.type.removeprefix("response.") for event in events]
    kinds = [one for i, one in enumerate(names) if i == 0 or names[i - 1] != one]
    reasoning = [ITEM[0], PART[0], "reasoning_text.delta", "reasoning_text.done", PART[1], ITEM[1]]
    text = [ITEM[0], PART[0], "output_text.delta", "output_text.done", PART[1], ITEM[1]]
    call = [ITEM[0], "function_call_arguments.delta", "function_call_arguments.done", ITEM[1]]
    assert kinds == ["created", "in_progress", *reasoning, *text, *call, "completed"]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == events[-1].response.output
    indices = [e.output_index for e in events if e.type == "response.output_item.added"]
    assert indices == [0, 1, 2]
    arguments = "".join(
        e.delta for e in events if e.type == "response.function_call_arguments.delta"
    )
    assert arguments == done[2].arguments == '{"city": "Zürich"}'
    assert events[0].response.output == []


def test_client_collects_the_streamed_response(server: RunningServer) -> None:
    reply = script(f"Grüße 🎉!\n{CALL}")
    fields: dict[str, Any] = {"model": MODEL, "input": reply, "tools": [WEATHER]}
    with server.openai().responses.stream(**fields) as stream:
        text = "".join(e.delta for e in stream if e.type == "response.output_text.delta")
        response = stream.get_final_response()
    assert text == "Grüße 🎉!"
    assert response.output[1].arguments == '{"city": "Zürich"}'
    stored = server.openai().responses.retrieve(response.id)
    assert stored.usage == response.usage
    assert [item.type for item in stored.output] == ["message", "function_call"]


def test_stream_at_the_limit_ends_incomplete(server: RunningServer) -> None:
    events = list(create(server, script("one two three"), max_output_tokens=2, stream=True))
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.incomplete_details.reason == "max_output_tokens"


def test_async_clients_get_their_own_replies(server: RunningServer) -> None:
    async def ask(client: openai.AsyncOpenAI, number: int) -> str:
        reply = script(f"I am {number}.")
        if number % 2:
            response = await client.responses.create(model=MODEL, input=reply)
            return response.output_text
        async with client.responses.stream(model=MODEL, input=reply) as stream:
            return (await stream.get_final_response()).output_text

    async def ask_all() -> list[str]:
        async with server.async_openai() as client:
            return await asyncio.gather(*(ask(client, number) for number in range(20)))

    assert asyncio.run(ask_all()) == [f"I am {number}." for number in range(20)]


def test_engine_that_fails_in_a_stream_gives_a_failed_response() -> None:
    with serve(mock_config(mock_options=SLOW, faults=True)) as server:
        events = []
        for event in create(server, "Hello", max_output_tokens=4000, stream=True):
            if event.type == "response.output_text.delta" and not any(
                one.type == event.type for one in events
            ):
                fault = server.app.server.clients[0].inject_fault
                server.loop.call_soon_threadsafe(fault, "raise")
            events.append(event)
        assert events[-1].type == "response.failed"
        assert events[-1].response.status == "failed"
        assert events[-1].response.error.code == "server_error"
        assert server.leaks() == {}
        with pytest.raises(openai.NotFoundError):
            server.openai().responses.retrieve(events[-1].response.id)


def test_leaving_a_stream_frees_everything() -> None:
    with serve(mock_config(mock_options=SLOW)) as server:
        stream = create(server, "Hello", max_output_tokens=4000, stream=True)
        next(stream)
        stream.close()
        assert server.leaks() == {}
        assert len(server.app.server.responses.entries) == 0


# ---- the store ------------------------------------------------------------------------------------


def test_stored_response_is_read_and_deleted(server: RunningServer) -> None:
    client = server.openai()
    response = create(server, script("Hi."))
    assert client.responses.retrieve(response.id) == response
    client.responses.delete(response.id)
    for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError):
            call(response.id)


def test_response_that_is_not_stored_is_gone(server: RunningServer) -> None:
    response = create(server, script("Hi."), store=False)
    assert response.store is False
    with pytest.raises(openai.NotFoundError):
        server.openai().responses.retrieve(response.id)


def test_chain_has_the_earlier_items_and_its_own_instructions(server: RunningServer) -> None:
    first = create(server, script("One."), instructions="Be brief.")
    second = create(server, script("Two."), previous_response_id=first.id)
    third = create(server, "Again", previous_response_id=second.id, instructions="Be kind.")
    same = server.post(
        "/tokenize",
        {
            "messages": [
                {"role": "system", "content": "Be kind."},
                {"role": "user", "content": script("One.")},
                {"role": "assistant", "content": "One."},
                {"role": "user", "content": script("Two.")},
                {"role": "assistant", "content": "Two."},
                {"role": "user", "content": "Again"},
            ]
        },
    )
    assert third.usage.input_tokens == same.json()["count"]
    assert third.output_text == "Two."  # the last <reply> of the prompt
    assert third.previous_response_id == second.id


def test_function_calls_go_on_with_their_outputs(server: RunningServer) -> None:
    first = create(server, script(CALL), tools=[WEATHER])
    (call,) = first.output
    output = {"type": "function_call_output", "call_id": call.call_id, "output": script("Sunny.")}
    second = create(server, [output], tools=[WEATHER], previous_response_id=first.id)
    assert second.output_text == "Sunny."
    asked = {"role": "user", "content": script(CALL)}
    whole = create(server, [asked, call.to_dict(), output], tools=[WEATHER])
    assert whole.usage.input_tokens == second.usage.input_tokens


def test_input_items_in_pages(server: RunningServer) -> None:
    client = server.openai()
    first = create(server, script("One."))
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Look"}]},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "Nothing."},
        {"role": "assistant", "content": "There is nothing.", "id": "msg_mine"},
        {"role": "user", "content": script("Two.")},
    ]
    second = create(server, items, previous_response_id=first.id)
    (only,) = client.responses.input_items.list(first.id).data
    assert only.role == "user" and only.content[0].text == script("One.")
    assert only.type == "message" and only.status == "completed" and only.id.startswith("msg_")

    found = [*client.responses.input_items.list(second.id, limit=2, order="asc")]  # all pages
    assert found[0] == only and found[1].content[0].text == "One."
    assert [one.type for one in found[2:]] == [
        "message",
        "function_call",
        "function_call_output",
        "message",
        "message",
    ]
    assert found[5].id == "msg_mine" and found[5].content[0].type == "output_text"
    assert len({one.id for one in found}) == 7
    assert [*client.responses.input_items.list(second.id, limit=3)] == found[::-1]

    page = client.responses.input_items.list(second.id, order="asc", after="msg_mine")
    assert page.data == found[6:] and not page.has_more
    for query in ("limit=0", "limit=101", "limit=x", "order=up"):
        reply = server.get(f"/v1/responses/{second.id}/input_items?{query}")
        assert reply.status_code == 400 and reply.json()["error"]["param"] in query
    for path in (f"{second.id}/input_items?after=other", "resp_none/input_items"):
        assert server.get(f"/v1/responses/{path}").status_code == 404


def test_chain_of_an_unknown_response_is_refused(server: RunningServer) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        create(server, "x", previous_response_id="resp_unknown")
    assert caught.value.code == "previous_response_not_found"


def test_responses_belong_to_their_key() -> None:
    with serve(mock_config(["Hi."], api_keys=("one", "two"))) as server:
        mine, other = server.openai("one").responses, server.openai("two").responses
        response = mine.create(model=MODEL, input="x")
        assert mine.retrieve(response.id).output_text == "Hi."
        for call in (other.retrieve, other.delete, other.cancel, other.input_items.list):
            with pytest.raises(openai.NotFoundError):
                call(response.id)
        with pytest.raises(openai.BadRequestError):
            other.create(model=MODEL, input="x", previous_response_id=response.id)


def test_oldest_responses_leave_first() -> None:
    with serve(mock_config(["Hi."], limits=Limits(stored_responses=2))) as server:
        client = server.openai()
        first, second = create(server, "1"), create(server, "2")
        client.responses.retrieve(first.id)  # the second is the oldest now
        third = create(server, "3")
        assert client.responses.retrieve(first.id).id == first.id
        assert client.responses.retrieve(third.id).id == third.id
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(second.id)


def test_store_is_bounded_by_bytes() -> None:
    store = ResponseStore(capacity=100, max_bytes=10)
    entries = [StoredResponse(str(i), "", {}, num_bytes=4) for i in range(4)]
    for entry in entries:
        store.put(entry)
    assert list(store.entries) == ["2", "3"]
    assert store.num_bytes == 8
    store.remove(entries[3])
    store.remove(entries[3])
    assert store.num_bytes == 4


# ---- background -----------------------------------------------------------------------------------


def wait_while(server: RunningServer, id: str, *statuses: str) -> Any:
    end = time.monotonic() + STATUS_SECONDS
    client = server.openai()
    while True:
        response = client.responses.retrieve(id)
        if response.status not in statuses or time.monotonic() > end:
            return response
        time.sleep(0.01)


def test_background_response_runs_to_its_end(server: RunningServer) -> None:
    response = create(server, script("Done."), background=True)
    assert (response.status, response.background, response.output) == ("queued", True, [])
    ended = wait_while(server, response.id, "queued", "in_progress")
    assert (ended.status, ended.output_text) == ("completed", "Done.")
    assert ended.usage.output_tokens > 0
    assert server.openai().responses.cancel(response.id).status == "completed"
    after = create(server, script("More."), previous_response_id=response.id)
    assert after.usage.input_tokens > ended.usage.input_tokens


def test_background_response_is_cancelled() -> None:
    with serve(mock_config(mock_options=SLOW)) as server:
        response = create(server, "Hello", background=True, max_output_tokens=4000)
        assert server.openai().responses.cancel(response.id).status == "cancelled"
        assert server.leaks() == {}
        assert server.openai().responses.retrieve(response.id).status == "cancelled"
        with pytest.raises(openai.BadRequestError, match="cancelled"):
            create(server, "x", previous_response_id=response.id)
        running = create(server, "Hello", background=True, max_output_tokens=4000)
        with pytest.raises(openai.BadRequestError, match="only a finished one"):
            create(server, "x", previous_response_id=running.id)
        server.openai().responses.delete(running.id)
        assert server.leaks() == {}
        create(server, "Hello", background=True, max_output_tokens=4000)  # while the server ends


def test_background_response_has_its_failure() -> None:
    with serve(mock_config(mock_options=SLOW, faults=True)) as server:
        response = create(server, "Hello", background=True, max_output_tokens=4000)
        assert wait_while(server, response.id, "queued").status == "in_progress"
        server.loop.call_soon_threadsafe(server.app.server.clients[0].inject_fault, "raise")
        ended = wait_while(server, response.id, "in_progress")
        assert (ended.status, ended.error.code) == ("failed", "server_error")
        assert server.leaks() == {}


def test_background_stream_is_followed_again(server: RunningServer) -> None:
    client = server.openai()
    text = script("One two three four five.")
    events = list(client.responses.create(model=MODEL, input=text, background=True, stream=True))
    names = [event.type for event in events]
    assert names[:3] == ["response.created", "response.queued", "response.in_progress"]
    assert names[-1] == "response.completed"
    assert [event.sequence_number for event in events] == [*range(len(events))]
    id = events[0].response.id
    assert client.responses.retrieve(id).output_text == "One two three four five."
    again = client.responses.retrieve(id, stream=True)
    assert list(again) == events
    after = client.responses.retrieve(id, stream=True, starting_after=4)
    assert list(after) == events[5:]
    assert list(client.responses.retrieve(id, stream=True, starting_after=10_000)) == []
    bad = server.get(f"/v1/responses/{id}?stream=true&starting_after=x")
    assert bad.status_code == 400 and bad.json()["error"]["param"] == "starting_after"


def test_background_stream_goes_on_without_its_client() -> None:
    with serve(mock_config(mock_options=SLOW)) as server:
        client = server.openai()
        options: Any = {"model": MODEL, "background": True, "stream": True}
        with client.responses.create(input="Hello", max_output_tokens=40, **options) as stream:
            first = next(iter(stream))  # at once: the client knows the id
        assert first.type == "response.created" and first.response.status == "queued"
        rest = list(client.responses.retrieve(first.response.id, stream=True, starting_after=0))
        assert rest[0].sequence_number == 1 and rest[-1].type == "response.incomplete"
        with client.responses.create(input="Hello", max_output_tokens=4000, **options) as stream:
            first = next(iter(stream))
            assert client.responses.cancel(first.response.id).status == "cancelled"
            assert [event.type for event in stream][-1] != "response.completed"  # it ends
        assert server.leaks() == {}


def test_background_stream_has_its_failure() -> None:
    with serve(mock_config(mock_options=SLOW, faults=True)) as server:
        options: Any = {"model": MODEL, "background": True, "stream": True}
        stream = server.openai().responses.create(input="x", max_output_tokens=4000, **options)
        events = []
        for event in stream:
            events.append(event)
            if len(events) == 4:
                server.loop.call_soon_threadsafe(server.app.server.clients[0].inject_fault, "raise")
        assert events[-1].type == "response.failed"
        assert events[-1].response.error.code == "server_error"
        assert server.leaks() == {}


def test_events_count_toward_the_size_of_the_store(server: RunningServer) -> None:
    store = server.app.server.responses
    before = store.num_bytes
    text = script("word " * 100)
    list(server.openai().responses.create(model=MODEL, input=text, background=True, stream=True))
    assert store.num_bytes - before > 5000
    assert store.num_bytes == sum(entry.num_bytes for entry in store.entries.values())


def test_only_background_responses_are_cancelled(server: RunningServer) -> None:
    response = create(server, script("Hi."))
    with pytest.raises(openai.BadRequestError, match="background"):
        server.openai().responses.cancel(response.id)


# ---- input ----------------------------------------------------------------------------------------


def test_items_of_one_turn_become_one_message() -> None:
    chat = to_chat_messages(
        [
            {"role": "developer", "content": "Be kind."},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
            {"type": "reasoning", "id": "x", "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"role": "assistant", "content": [{"type": "output_text", "text": "I call."}]},
            {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
            {"type": "function_call", "call_id": "b", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "a", "output": "1"},
            {
                "type": "function_call_output",
                "call_id": "b",
                "output": [{"type": "input_text", "text": "2"}],
            },
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "sum"}]},
            {"role": "assistant", "content": "Done."},
            {"role": "assistant", "content": "Really."},
            {"role": "user", "content": "Go on."},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"role": "assistant", "content": "After the call."},
        ]
    )
    calls = [
        {"id": id, "type": "function", "function": {"name": "f", "arguments": "{}"}} for id in "abc"
    ]
    assert chat == [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "content": "I call.",
            "reasoning_content": "hm",
            "tool_calls": calls[:2],
        },
        {"role": "tool", "tool_call_id": "a", "content": "1"},
        {"role": "tool", "tool_call_id": "b", "content": "2"},
        {"role": "assistant", "content": "Done.", "reasoning_content": "sum"},
        {"role": "assistant", "content": "Really."},
        {"role": "user", "content": "Go on."},
        {"role": "assistant", "content": None, "tool_calls": calls[2:]},
        {"role": "assistant", "content": "After the call."},
    ]


def test_truncation_drops_the_oldest_turns(server: RunningServer) -> None:
    turns = [{"role": "user", "content": f"{number} " + "word " * 1000} for number in range(20)]
    items = [{"role": "system", "content": "Be kind."}, *turns, {"role": "user", "content": "Hi"}]
    with pytest.raises(openai.BadRequestError) as caught:
        create(server, items, max_output_tokens=16)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")
    response = create(server, items, truncation="auto", max_output_tokens=16)
    context = server.get("/v1/models").json()["data"][0]["max_model_len"]
    assert context - 16 - 1100 < response.usage.input_tokens <= context - 16
    with pytest.raises(openai.BadRequestError):
        create(server, "word " * 9000, truncation="auto")


@pytest.mark.parametrize(
    ("fields", "status", "words"),
    [
        ({"input": None}, 400, "input"),
        ({"input": []}, 400, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, 400, "input_image"),
        ({"input": [{"role": "robot", "content": "x"}]}, 400, "input[0].role"),
        ({"input": [{"role": "user"}]}, 400, "input[0] has no content"),
        ({"input": [{"type": "web_search_call"}]}, 400, "web_search_call"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, 400, "previous_response_id"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, 400, "call_id"),
        ({"tools": [{"type": "web_search"}]}, 400, "web_search"),
        ({"tools": [{"type": "file_search", "vector_store_ids": []}]}, 400, "file_search"),
        ({"tools": [{"type": "code_interpreter"}]}, 400, "code_interpreter"),
        ({"tools": [{"type": "computer_use_preview"}]}, 400, "computer_use"),
        ({"tools": [{"type": "mcp", "server_label": "x"}]}, 400, "mcp"),
        ({"tools": [{"type": "function"}]}, 400, "name"),
        ({"tool_choice": "required"}, 400, "no tools"),
        ({"tool_choice": {"type": "function"}}, 400, "name"),
        ({"tool_choice": {"type": "web_search_preview"}}, 400, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, 400, "schema"),
        ({"max_output_tokens": 0}, 400, "max_output_tokens"),
        ({"top_logprobs": 99}, 400, "top_logprobs"),
        ({"include": ["everything"]}, 400, "include"),
        ({"background": True, "store": False}, 400, "store"),
        ({"conversation": "conv_1"}, 400, "conversation"),
        ({"prompt": {"id": "x"}}, 400, "prompt"),
        ({"metadata": {str(i): "x" for i in range(17)}}, 400, "metadata"),
        ({"model": "other"}, 404, "other"),
        ({"unknown": 1}, 400, "unknown"),
    ],
)
def test_requests_that_are_refused(
    server: RunningServer, fields: dict[str, Any], status: int, words: str
) -> None:
    body = {"model": MODEL, "input": "Hello", **fields}
    reply = server.post("/v1/responses", {k: v for k, v in body.items() if v is not None})
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert words in error["message"]


def test_fields_of_clients_are_accepted(server: RunningServer) -> None:
    response = create(
        server,
        script("Yes."),
        safety_identifier="s",
        prompt_cache_key="k",
        service_tier="auto",
        reasoning={"effort": "low", "summary": "auto"},
        truncation="disabled",
        include=["reasoning.encrypted_content"],
        text={"verbosity": "low"},
    )
    assert response.output_text == "Yes."
    assert response.reasoning.effort == "low"


def test_stored_response_is_not_streamed(server: RunningServer) -> None:
    response = create(server, script("Hi."))
    assert server.get(f"/v1/responses/{response.id}?stream=true").status_code == 400
    assert server.get(f"/v1/responses/{response.id}?stream=false").status_code == 200


# ---- log-probabilities ----------------------------------------------------------------------------


def test_logprobs_of_reasoning_are_not_those_of_the_same_text() -> None:
    def describe(logprobs: Any) -> list[dict[str, Any]]:
        return [{"bytes": list(b"Hi"), "logprob": value} for _, value, _ in logprobs]

    builder = OutputBuilder(describe)
    events: list[Any] = [ReasoningDelta("Hi"), TextDelta("Hi")]
    builder.add(ChatDelta(0, events, [7, 7], [(7, -1.0, []), (7, -2.0, [])], ChoiceFinish("stop")))
    assert [one["logprob"] for one in builder.items[1]["content"][0]["logprobs"]] == [-2.0]


def test_tokens_are_found_by_their_text() -> None:
    queue = LogprobQueue()
    texts = ["<think>", "a", "b", "</think>", "\n", "Hi", " ", "there"]
    queue.entries = [{"bytes": list(text.encode())} for text in texts]
    assert [bytes(one["bytes"]) for one in queue.take("ab")] == [b"a", b"b"]
    assert [bytes(one["bytes"]) for one in queue.take("Hi")] == [b"Hi"]
    assert [bytes(one["bytes"]) for one in queue.take(" the")] == [b" ", b"there"]
    queue.entries = [{"bytes": [33]}, *({"bytes": [byte]} for byte in "é".encode())]
    assert len(queue.take("é")) == 2
    assert queue.take("x") == []


def test_input_tokens_are_those_of_the_response(server: RunningServer) -> None:
    items = [{"type": None, "role": "user", "content": "Hello there."}]  # null: a message
    fields = {"model": MODEL, "input": items, "instructions": "Be brief.", "tools": [WEATHER]}
    counted = server.openai().responses.input_tokens.count(**fields)
    response = server.openai().responses.create(**fields, max_output_tokens=4)
    assert counted.object == "response.input_tokens"
    assert counted.input_tokens == response.usage.input_tokens
    refused = server.post("/v1/responses/input_tokens", {"input": [{"role": "robot"}]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input[0].role")
