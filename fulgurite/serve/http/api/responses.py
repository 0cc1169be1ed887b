"""`/v1/responses`: items in, a response with output items out: whole, streamed, or in the background.

Responses are stored (response_store.py), so that clients can read, continue, cancel and delete them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from fulgurite.logs import LOG
from fulgurite.serve.http.admission import Ticket
from fulgurite.serve.http.api.chat_completions import describe_logprobs
from fulgurite.serve.http.api.responses_input import to_chat_messages
from fulgurite.serve.http.api.responses_items import collect_items, describe_page
from fulgurite.serve.http.api.responses_output import OutputBuilder
from fulgurite.serve.http.api.responses_request import ResponseRequest, parse_response_body
from fulgurite.serve.http.asgi import (
    JsonResponse,
    encode_named_event,
    start_stream,
    while_connected,
)
from fulgurite.serve.http.body import read_body
from fulgurite.serve.http.chat import (
    ChatDelta,
    ChatGeneration,
    Conversation,
    prepare_chat,
    start_chat,
)
from fulgurite.serve.http.errors import ApiError, invalid, to_api_error
from fulgurite.serve.http.generation import ChoiceFinish
from fulgurite.serve.http.response_store import EventLog, StoredResponse
from fulgurite.serve.http.server import Server, new_id

FALSE_VALUES = ("", "0", "false")
PARAMS = {"messages": "input", "response_format": "text.format"}  # of chats → of responses


@dataclass
class ResponseRun:
    """A response while it is made.

    messages   the conversation before the reply, without instructions
    """

    server: Server
    body: ResponseRequest
    chat: ChatGeneration
    model: str
    messages: list[dict[str, Any]]
    output: OutputBuilder
    id: str = field(default_factory=partial(new_id, "resp_"))
    created_at: int = field(default_factory=lambda: int(time.time()))
    finish: ChoiceFinish | None = None
    num_events: int = 0

    def add(self, delta: ChatDelta) -> list[dict[str, Any]]:
        if delta.finish is not None:
            self.finish = delta.finish
        return self.output.add(delta)

    def describe(self, status: str, **fields: Any) -> dict[str, Any]:
        """The response object. Before its end it has no output: events tell that."""
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created_at,
            "status": status,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "model": self.model,
            "output": [],
            "usage": None,
            **self.body.describe(self.server.sampling_defaults),
            **fields,
        }

    async def describe_end(self) -> dict[str, Any]:
        """The complete response, or the incomplete one at its limit of tokens."""
        assert self.finish is not None, "the reply has ended"
        fields: dict[str, Any] = {"output": self.output.items, "usage": await self.count_usage()}
        if self.finish.reason == "length":
            details = {"reason": "max_output_tokens"}
            return self.describe("incomplete", incomplete_details=details, **fields)
        return self.describe("completed", completed_at=int(time.time()), **fields)

    def describe_failure(self, failure: ApiError) -> dict[str, Any]:
        code = "rate_limit_exceeded" if failure.status == 429 else "server_error"
        error = {"code": code, "message": failure.message}
        self.output.close("incomplete")
        return self.describe("failed", error=error, output=self.output.items)

    async def count_usage(self) -> dict[str, Any]:
        usage, reasoning_tokens = self.chat.usage, 0
        if self.output.reasoning:
            ids = await self.server.encode("".join(self.output.reasoning), False)
            reasoning_tokens = min(len(ids), usage.completion_tokens)
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": usage.cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
            "total_tokens": usage.total_tokens,
        }

    def encode(self, event: dict[str, Any]) -> bytes:
        """An event with its number, as bytes."""
        event["sequence_number"] = self.num_events
        self.num_events += 1
        return encode_named_event(event["type"], event)

    def encode_status(self, name: str, response: dict[str, Any]) -> bytes:
        return self.encode({"type": f"response.{name}", "response": response})


# ---- create ---------------------------------------------------------------------------------------


async def create_response(request: Request, server: Server) -> Response:
    """Handle a request."""
    limits = server.config.limits
    raw = await read_body(request, limits)
    body = parse_response_body(raw, limits)
    model = server.check_model(body.model)
    body.check()
    owner = read_owner(request, server)
    previous = find_previous(server, body.previous_response_id, owner)
    messages = [*(previous.messages if previous else ()), *to_chat_messages(body.input)]
    num_bytes = len(raw) + (previous.num_bytes if previous else 0)
    ticket = server.enter(request, len(raw), body.deadline)
    try:
        run = await start_run(server, body, model, messages, ticket)
        entry = StoredResponse(
            run.id,
            owner,
            run.describe("queued"),
            num_bytes=num_bytes,
            input_items=collect_items(body.input, previous),
        )
        if body.background:
            entry.log = EventLog() if body.stream else None
            entry.task = asyncio.create_task(run_in_background(run, entry))
            entry.task.add_done_callback(lambda _: end_background(entry, ticket))
            server.responses.put(entry)
            if entry.log is not None:
                return await start_stream(request, entry.log.follow())
            return JsonResponse(entry.response)
        if body.stream:
            stream = stream_events(run, entry, ticket)
            return await start_stream(request, stream)
        await while_connected(request, complete(run, entry))
        ticket.close()
        return JsonResponse(entry.response)
    except BaseException:  # also a cancelled task: the place is given back, then it goes on
        ticket.close()
        raise


async def count_input_tokens(request: Request, server: Server) -> Response:
    """The tokens of the prompt that the same request would have."""
    limits = server.config.limits
    raw = await read_body(request, limits)
    body = parse_response_body(raw, limits)
    server.check_model(body.model)
    body.check()
    previous = find_previous(server, body.previous_response_id, read_owner(request, server))
    messages = [*(previous.messages if previous else ()), *to_chat_messages(body.input)]
    with server.enter(request, len(raw), None):
        try:
            ids, _, _ = await prepare_chat(server, body.to_conversation(messages))
        except ApiError as error:
            error.param = PARAMS.get(error.param or "", error.param)
            raise
    return JsonResponse({"object": "response.input_tokens", "input_tokens": len(ids)})


def read_owner(request: Request, server: Server) -> str:
    """Whose responses these are. Without API keys, they are everybody's."""
    return str(request.state.key) if server.config.api_keys else ""


def find_previous(server: Server, id: str | None, owner: str) -> StoredResponse | None:
    """The response that a new one continues; ApiError 400 if that is not possible."""
    if id is None:
        return None
    param = "previous_response_id"
    entry = server.responses.find(id, owner)
    if entry is None:
        text = f"Previous response with id '{id[:100]}' not found."
        raise invalid(text, param, "previous_response_not_found")
    status = entry.response["status"]
    if status not in ("completed", "incomplete"):
        raise invalid(f"the previous response is {status}; only a finished one goes on", param)
    return entry


async def start_run(
    server: Server,
    body: ResponseRequest,
    model: str,
    messages: list[dict[str, Any]],
    ticket: Ticket,
) -> ResponseRun:
    """Render, tokenize and check the conversation; ApiError with the names of this API."""
    logprobs = body.count_logprobs(server.config.limits)
    try:
        conversation = body.to_conversation(messages)
        if body.truncation == "auto":
            conversation = await truncate(server, conversation, body.max_output_tokens)
        chat = await start_chat(
            server,
            conversation,
            body.to_sampling_fields(),
            ticket,
            max_tokens=body.max_output_tokens,
            logprobs=logprobs,
            constraint=body.read_constraint(),
        )
    except ApiError as error:
        error.param = PARAMS.get(error.param or "", error.param)
        raise
    describe = None if logprobs is None else partial(describe_logprobs, server)
    return ResponseRun(server, body, chat, model, messages, OutputBuilder(describe))


async def truncate(
    server: Server, conversation: Conversation, max_tokens: int | None
) -> Conversation:
    """The conversation without its oldest turns if all of them don't fit into the context."""
    context = server.context
    ids, _, _ = await prepare_chat(server, conversation)
    if len(ids) < context:
        return conversation
    room = min(context // 2, max_tokens or context // 8)  # for the reply
    messages = list(conversation.messages)
    head = messages[:1] if messages[0]["role"] in ("system", "developer") else []
    starts = [i for i in range(len(head), len(messages)) if messages[i]["role"] == "user"]
    low, high = 0, len(starts) - 1  # the first turn to keep; the last one stays in any case
    shorter = conversation
    while low <= high:
        middle = (low + high) // 2
        candidate = replace(conversation, messages=[*head, *messages[starts[middle] :]])
        ids, _, _ = await prepare_chat(server, candidate)
        if len(ids) + room <= context:
            shorter, high = candidate, middle - 1
        else:
            low = middle + 1
    return shorter


async def complete(run: ResponseRun, entry: StoredResponse) -> None:
    """Make the whole response, and store it."""
    async for delta in run.chat.deltas():
        if entry.response["status"] == "queued":
            entry.response = run.describe("in_progress")
        run.add(delta)
    await finish(run, entry)


async def finish(run: ResponseRun, entry: StoredResponse) -> None:
    entry.response = await run.describe_end()
    entry.messages = (*run.messages, *to_chat_messages(run.output.items, "output"))
    if run.body.is_stored and not run.body.background:
        run.server.responses.put(entry)


async def run_in_background(run: ResponseRun, entry: StoredResponse) -> None:
    """Make a response that clients ask for later. Its errors are in the response."""
    try:
        if entry.log is None:
            await complete(run, entry)
        else:
            await log_events(run, entry, entry.log)
    except asyncio.CancelledError:
        run.output.close("incomplete")
        entry.response = run.describe("in_progress", output=run.output.items)
        raise
    except Exception as error:  # there is no request that could carry it
        failure = to_api_error(error)
        if failure is None:
            LOG.exception("response %s failed: %s", run.id, error)
            failure = ApiError(500, f"internal error; the server's log has it under {run.id}")
        entry.response = run.describe_failure(failure)
        if entry.log is not None:
            entry.log.add(run.encode_status("failed", entry.response))


def end_background(entry: StoredResponse, ticket: Ticket) -> None:
    """The task of a response has ended, or never started."""
    ticket.close()
    if entry.log is not None:
        entry.log.close()


async def log_events(run: ResponseRun, entry: StoredResponse, log: EventLog) -> None:
    """Make a response, and log its events: clients follow the log, and may come back to it."""
    for name in ("created", "queued"):
        log.add(run.encode_status(name, entry.response))
    events = make_events(run, entry)
    try:
        async for group in events:
            for event in group:
                log.add(event)
            run.server.responses.add_bytes(entry, sum(map(len, group)))
    finally:
        await events.aclose()  # type: ignore[attr-defined]


async def make_events(run: ResponseRun, entry: StoredResponse) -> AsyncIterator[list[bytes]]:
    """The response without output, its items, and the whole response. `created` may be there."""
    deltas = run.chat.deltas()
    is_first = True
    try:
        async for delta in deltas:
            if is_first:
                is_first = False
                entry.response = run.describe("in_progress")
                names = ("in_progress",) if run.num_events else ("created", "in_progress")
                yield [run.encode_status(name, entry.response) for name in names]
            events = run.add(delta)
            if events:
                yield [run.encode(event) for event in events]
        await finish(run, entry)
        yield [run.encode_status(entry.response["status"], entry.response)]
    finally:
        await deltas.aclose()  # type: ignore[attr-defined]


async def stream_events(
    run: ResponseRun, entry: StoredResponse, ticket: Ticket
) -> AsyncIterator[bytes]:
    """The events for the one client that asked for the response."""
    groups = make_events(run, entry)
    try:
        async for group in groups:
            yield b"".join(group)
    except Exception as error:  # a stream that has begun can only end with an event
        failure = to_api_error(error)
        if failure is None or not run.num_events:
            raise
        entry.response = run.describe_failure(failure)
        yield run.encode_status("failed", entry.response)
    finally:
        await groups.aclose()  # type: ignore[attr-defined]
        ticket.close()


# ---- stored responses -----------------------------------------------------------------------------


def find_stored(request: Request, server: Server) -> StoredResponse:
    id = request.path_params["id"]
    entry = server.responses.find(id, read_owner(request, server))
    if entry is None:
        raise ApiError(404, f"Response with id '{id[:100]}' not found.", param="id")
    return entry


async def get_response(request: Request, server: Server) -> Response:
    """A response as it is now; with `stream` its events, those after `starting_after`."""
    entry, query = find_stored(request, server), request.query_params
    if query.get("stream", "").lower() in FALSE_VALUES:
        return JsonResponse(entry.response)
    if entry.log is None:
        raise invalid(
            "only a response that was created with 'background' and 'stream' can be streamed again; "
            "read it without 'stream'",
            "stream",
        )
    after = query.get("starting_after", "")
    if after and not (after.isascii() and after.isdigit() and len(after) < 10):
        raise invalid("'starting_after' must be the number of an event", "starting_after")
    return await start_stream(request, entry.log.follow(int(after) + 1 if after else 0))


async def list_input_items(request: Request, server: Server) -> Response:
    entry = find_stored(request, server)
    return JsonResponse(describe_page(entry.input_items, request.query_params))


async def delete_response(request: Request, server: Server) -> Response:
    entry = find_stored(request, server)
    server.responses.remove(entry)
    return JsonResponse({"id": entry.id, "object": "response", "deleted": True})


async def cancel_response(request: Request, server: Server) -> Response:
    """Stop a response in the background. One that has ended stays as it is."""
    entry = find_stored(request, server)
    if not entry.response["background"]:
        raise invalid("only a response with 'background': true can be cancelled", "id")
    if entry.task is not None and entry.is_running:
        entry.task.cancel()
        await asyncio.gather(entry.task, return_exceptions=True)
    if entry.response["status"] in ("queued", "in_progress"):
        entry.response = {**entry.response, "status": "cancelled"}
    return JsonResponse(entry.response)
