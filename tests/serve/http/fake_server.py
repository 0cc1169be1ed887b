"""A server for tests of the chat page: OpenAI's shapes with canned answers, no model.

In: a chat request; the last message's text names a scenario of `SCENARIOS`. Out: server-sent events.
`FakeServer` runs it on a free port in a thread and keeps the bodies and keys that it got.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from fulgurite.serve.http.page import ROUTES, make_page_headers, read_page

MARKDOWN = """\
## Why the sky is blue

Sunlight meets **molecules of air**, which scatter *short* waves most.

1. Blue light has `450 nm`.
2. Red light has `700 nm`:
   - it is scattered less,
   - and goes **straight** on.

```python
def scatter(wavelength: float) -> float:
    return wavelength ** -4  # Rayleigh: far more of the blue than of the red
```

| colour | share |
|--------|-------|
| blue   | 5.9   |

So <b>blue</b> & 😀 wins.
"""
HOSTILE = "<img src=x onerror=\"document.title='owned'\"> <script>document.title='owned'</script>"
ALTERNATIVES = [0.5, 0.2, 0.1, 0.05]
Events = Iterator[dict[str, Any]]


def make_logprobs(token: str, position: int, is_partial: bytes | None = None) -> dict[str, Any]:
    """The entry of one token: it is likely, except every fifth."""
    p = 0.07 if position % 5 == 3 else 0.62 if position % 5 == 1 else 0.97
    rest = [(f" other{i}", (1 - p) * share) for i, share in enumerate(ALTERNATIVES)]
    top = sorted([(token, p), *rest], key=lambda entry: -entry[1])
    return {
        "token": token,
        "logprob": math.log(p),
        "bytes": list(is_partial if is_partial is not None else token.encode()),
        "top_logprobs": [
            {"token": text, "logprob": math.log(q), "bytes": list(text.encode())} for text, q in top
        ],
    }


def make_chunk(delta: dict[str, Any], finish: str | None = None, **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": finish, **more}
    return {"id": "chat-1", "object": "chat.completion.chunk", "choices": [choice]}


def stream_text(text: str, finish: str = "stop") -> Events:
    yield make_chunk({"role": "assistant", "content": ""})
    for position, token in enumerate(re.findall(r"\s?\w+|\s|.", text)):
        entry = make_logprobs(token, position)
        yield make_chunk({"content": token}, logprobs={"content": [entry]})
    yield make_chunk({}, finish)


def stream_emoji() -> Events:
    """One character in two tokens, then tokens that are no part of the text."""
    first = make_logprobs("\ufffd", 0, b"\xf0\x9f")
    second = make_logprobs("\ufffd", 1, b"\x98\x80")
    yield make_chunk({"content": "😀"}, logprobs={"content": [first, second]})
    end = make_logprobs("<|end|>", 3)
    entries = [make_logprobs("<|x|>", 2), make_logprobs(" ok", 3), end]
    yield make_chunk({"content": " ok"}, "stop", logprobs={"content": entries})


def stream_tool_calls() -> Events:
    for index, city in enumerate(["Oslo", "Rome"]):
        call = {"index": index, "id": f"call-{index}", "type": "function"}
        yield make_chunk(
            {"tool_calls": [{**call, "function": {"name": "weather", "arguments": ""}}]}
        )
        for piece in ('{"city": ', f'"{city}"', "}"):
            yield make_chunk({"tool_calls": [{"index": index, "function": {"arguments": piece}}]})
    yield make_chunk({}, "tool_calls")


def stream_reasoning() -> Events:
    for word in ("The user ", "greets. ", "I greet back."):
        yield make_chunk({"reasoning_content": word})
    yield from stream_text("Hello there.")


def stream_error() -> Events:
    yield from list(stream_text("Half an"))[:-1]
    yield {"error": {"message": "the engine was restarted", "type": "server_error", "code": 500}}


SCENARIOS = {
    "markdown": lambda: stream_text(MARKDOWN),
    "hostile": lambda: stream_text(HOSTILE),
    "emoji": stream_emoji,
    "tools": stream_tool_calls,
    "reason": stream_reasoning,
    "break": stream_error,
    "cut": lambda: list(stream_text("No end of it."))[:-1],
    "long": lambda: stream_text("one two three", "length"),
    "slow": lambda: stream_text("slow words " * 2000),
}
REFUSED = {"error": {"message": "the queue is full", "type": "overloaded", "code": 429}}


def remove_logprobs(event: dict[str, Any]) -> dict[str, Any]:
    for choice in event.get("choices", []):
        choice.pop("logprobs", None)
    return event


async def write_events(
    events: Events | list[dict[str, Any]], delay: float, send_end: bool
) -> AsyncIterator[str]:
    count = 0
    broken = not send_end
    for event in events:
        count += 1
        broken |= "error" in event
        yield f"data: {json.dumps(event)}\n\n"
        await asyncio.sleep(delay)
    usage = {"prompt_tokens": 31, "completion_tokens": count, "total_tokens": 31 + count}
    usage |= {"prompt_tokens_details": {"cached_tokens": 16}}  # type: ignore[dict-item]
    if not broken:
        yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n"
        yield "data: [DONE]\n\n"


class FakeServer:
    """Use as a context: the server runs inside it."""

    def __init__(self, api_key: str | None = None) -> None:
        self.api_key = api_key
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.disconnects = 0
        self.send_end = True  # False: streams break off without usage and `[DONE]`
        routes = [Route(path, self.send_page) for path in ROUTES]
        routes.append(Route("/v1/models", self.list_models))
        routes.append(Route("/v1/chat/completions", self.complete, methods=["POST"]))
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        config = uvicorn.Config(Starlette(routes=routes), log_level="warning", lifespan="off")
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(
            target=self.server.run, kwargs={"sockets": [self.socket]}, daemon=True
        )

    def __enter__(self) -> FakeServer:
        self.thread.start()
        return self

    def __exit__(self, *problem: object) -> None:
        self.server.should_exit = self.server.force_exit = True
        self.thread.join(10)

    async def send_page(self, request: Request) -> Response:
        self.paths.append(request.url.path)
        name = ROUTES[request.url.path]
        return Response(read_page(name), headers=make_page_headers(name))

    def refuse(self, request: Request) -> Response | None:
        wanted = f"Bearer {self.api_key}"
        if self.api_key is None or request.headers.get("authorization") == wanted:
            return None
        error = {"message": "the API key is missing or wrong.", "type": "authentication_error"}
        return JSONResponse({"error": error}, 401)

    async def list_models(self, request: Request) -> Response:
        models = [{"id": "tiny"}, {"id": "tiny-lora"}]
        return self.refuse(request) or JSONResponse({"object": "list", "data": models})

    async def complete(self, request: Request) -> Response:
        refused = self.refuse(request)
        if refused:
            return refused
        body = await request.json()
        self.bodies.append(body)
        last = body["messages"][-1]
        words = last["content"].split()
        if last["role"] == "tool":
            return self.stream(stream_text(f"It is {last['content']}."))
        if words[0] == "full":
            return JSONResponse(REFUSED, 429, headers={"retry-after": "3"})
        if words[0] == "html":
            return Response("<h1>Bad gateway</h1>", 502, media_type="text/html")
        events = SCENARIOS.get(words[0], lambda: stream_text(f"You said {' '.join(words)}."))()
        if not body.get("logprobs"):
            events = [remove_logprobs(event) for event in events]
        return self.stream(events, 0.02 if words[0] == "slow" else 0.0)

    def stream(self, events: Events | list[dict[str, Any]], delay: float = 0.0) -> Response:
        async def watch() -> AsyncIterator[str]:
            try:
                async for text in write_events(events, delay, self.send_end):
                    yield text
            except asyncio.CancelledError:
                self.disconnects += 1
                raise

        return StreamingResponse(watch(), media_type="text/event-stream")
