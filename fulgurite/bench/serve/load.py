"""Sends a workload to a server: conversations in, a `Reply` for every request out.

A closed loop has C clients. Each sends its next request when the reply before has ended. An open loop
begins conversations at given times, whatever the server does; a request that is sent late counts from
the time when it was due, so a stalled server can't hide its queue.
"""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fulgurite.bench.serve.http_client import Address, Connection, Expected, encode_request
from fulgurite.bench.serve.replies import OK, Reply
from fulgurite.bench.serve.workloads import BodyOptions, Conversation, Turn, build_body

new_event_loop: Callable[[], asyncio.AbstractEventLoop]
try:
    from uvloop import new_event_loop
except ImportError:  # the extra `serve` is not installed
    new_event_loop = asyncio.new_event_loop

SKIPPED = "not sent: an earlier turn failed"
Value = TypeVar("Value")


@dataclass(frozen=True)
class Target:
    """A server, and how requests to it are made and read."""

    address: Address
    body: BodyOptions
    expected: Expected = field(default_factory=Expected)
    api_key: str | None = None

    def encode(self, turn: Turn, history: Sequence[dict[str, str]] = ()) -> bytes:
        body = json.dumps(build_body(turn, history, self.body), separators=(",", ":")).encode()
        path = "/v1/chat/completions" if turn.text else "/v1/completions"
        return encode_request(self.address, "POST", path, body, self.api_key)


@dataclass(frozen=True)
class Run:
    """All replies of one run. `cpu_seconds` are those of this process: the load generator."""

    replies: list[Reply]
    seconds: float
    cpu_seconds: float


def run_coroutine(coroutine: Coroutine[Any, Any, Value]) -> Value:
    """`asyncio.run` on uvloop, if it is installed."""
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(coroutine)


async def run_closed_loop(
    target: Target, conversations: Sequence[Conversation], clients: int
) -> Run:
    """Play all conversations with `clients` connections."""
    requests = [target.encode(conversation[0]) for conversation in conversations]
    work = zip(conversations, requests, strict=True)
    replies: list[Reply] = []
    connections = [Connection(target.address) for _ in range(min(clients, len(conversations)))]
    await asyncio.gather(*(one.open() for one in connections), return_exceptions=True)

    async def play_all(connection: Connection) -> None:
        for conversation, first in work:  # one iterator for all clients
            replies.extend(await _play(target, connection, conversation, first))

    with _without_garbage_collection():
        clock, cpu = time.perf_counter(), time.process_time()
        await asyncio.gather(*map(play_all, connections))
        run = Run(replies, time.perf_counter() - clock, time.process_time() - cpu)
    for connection in connections:
        connection.close()
    return run


async def run_open_loop(
    target: Target, conversations: Sequence[Conversation], arrivals: Sequence[float]
) -> Run:
    """Begin each conversation at its time. Connections are opened as they are needed, and used again."""
    requests = [target.encode(conversation[0]) for conversation in conversations]
    replies: list[Reply] = []
    idle: list[Connection] = []

    async def play(conversation: Conversation, first: bytes, due: float) -> None:
        connection = idle.pop() if idle else Connection(target.address)
        replies.extend(await _play(target, connection, conversation, first, due))
        idle.append(connection)

    with _without_garbage_collection():
        clock, cpu = time.perf_counter(), time.process_time()
        tasks = []
        for conversation, first, arrival in zip(conversations, requests, arrivals, strict=True):
            delay = clock + arrival - time.perf_counter()
            if delay > 0:
                await asyncio.sleep(delay)
            tasks.append(asyncio.create_task(play(conversation, first, clock + arrival)))
        await asyncio.gather(*tasks)
        run = Run(replies, time.perf_counter() - clock, time.process_time() - cpu)
    for connection in idle:
        connection.close()
    return run


async def _play(
    target: Target,
    connection: Connection,
    conversation: Conversation,
    first: bytes,
    due: float | None = None,
) -> list[Reply]:
    """The replies to the turns of a conversation. After a failure the rest is not sent."""
    replies: list[Reply] = []
    history: list[dict[str, str]] = []
    for number, turn in enumerate(conversation):
        if replies and replies[-1].kind != OK:
            now = time.perf_counter()
            replies.append(Reply(now, SKIPPED, end=now, wanted_tokens=turn.output_tokens))
            continue
        request = target.encode(turn, history) if number else first
        reply, _ = await connection.send(request, target.expected, None if number else due)
        reply.wanted_tokens = turn.output_tokens
        replies.append(reply)
        if len(conversation) > 1:
            history.append({"role": "user", "content": turn.text})
            history.append({"role": "assistant", "content": reply.text})
    return replies


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Collections would stop the clock of all clients at once."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def get(
    address: Address, path: str, timeout: float, api_key: str | None = None
) -> tuple[int, bytes]:
    """GET: the status, 0 if there is no reply, and the body."""
    connection = Connection(address)
    request = encode_request(address, "GET", path, api_key=api_key)
    _, body = await connection.send(request, Expected(is_stream=False, timeout=timeout))
    connection.close()
    return (connection.status if connection.is_complete else 0), body
