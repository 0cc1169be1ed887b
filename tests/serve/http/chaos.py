"""Clients that misbehave, and engines that fail: a seed in, figures out; replayable.

    figures = asyncio.run(run_chaos(server, seed=1, num_actions=200, faults=("raise", "kill")))

Each action draws from a generator of the seed and its own number, so that timing changes nothing about
what is sent. Every client that waits for a reply must get one, whole replies must be right, and errors
must have the right shape; else `ChaosError` says which action of which seed went wrong, what it sent and
received on each connection, how that ended, and after how long.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from fulgurite.serve.engine.engine_core import EngineCore
from tests.serve.http.serving import RunningServer

OK_STATUSES = {200, 400, 404, 408, 413, 415, 429, 431, 500, 503, 504}
ENGINE_CODES = {"engine_error", "engine_not_ready"}  # the only reasons for a 500
REPLY_SECONDS = 60.0  # after which a request without an answer hangs


class ChaosError(AssertionError):
    """Something that must not happen, whatever clients do."""


@dataclass
class Figures:
    """Counts of actions and of how they ended, and how long answered requests took."""

    actions: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    reply_seconds: list[float] = field(default_factory=list)  # of `complete` that ended well

    def add(self, other: Figures) -> None:
        self.actions += other.actions
        self.outcomes += other.outcomes
        self.faults += other.faults
        self.reply_seconds += other.reply_seconds


@dataclass(frozen=True)
class Prompt:
    """A body, the path that it is for, and the text that its greedy reply has; None: any."""

    path: str
    body: dict[str, Any]
    text: str | None = None


@dataclass
class Connection:
    """A client's socket, and what happened on it."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    opened: float
    sent: bytes = b""  # last
    num_sent: int = 0
    sent_at: float = 0.0
    received: bytes = b""  # of the reply that is being read
    answered_at: float | None = None  # when its headers came
    end: str = "open"

    def send(self, data: bytes) -> None:
        self.sent, self.sent_at = data, time.monotonic()
        self.num_sent += len(data)
        self.writer.write(data)

    async def read_reply(self) -> tuple[int, bytes]:
        """The status and the body; ChaosError if the connection ends before a whole reply."""
        self.received, self.answered_at = b"", None
        try:
            async with asyncio.timeout(REPLY_SECONDS):
                head = await self._keep(self.reader.readuntil(b"\r\n\r\n"))
                self.answered_at = time.monotonic()
                status = int(head.split(b" ", 2)[1])
                if b"transfer-encoding: chunked" in head:
                    return status, await self._read_chunks()
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                return status, await self._keep(self.reader.readexactly(length))
        except TimeoutError:
            self.end = f"still open, silent for {REPLY_SECONDS:.0f} s"
        except asyncio.IncompleteReadError as error:
            self.received += error.partial
            self.end = "closed by the server (end of file)"
        except ConnectionError as error:
            self.end = f"{type(error).__name__}, errno {error.errno}"
        raise ChaosError("no whole reply")

    async def _keep(self, reading: Awaitable[bytes]) -> bytes:
        data = await reading
        self.received += data
        return data

    async def _read_chunks(self) -> bytes:
        parts = []
        while size := int(await self._keep(self.reader.readuntil(b"\r\n")), 16):
            parts.append(await self._keep(self.reader.readexactly(size + 2)))
        await self._keep(self.reader.readexactly(2))
        return b"".join(part[:-2] for part in parts)

    def close(self) -> None:
        self.writer.close()

    def describe(self) -> str:
        now = time.monotonic()
        unsent = self.writer.transport.get_write_buffer_size()
        answered = "never" if self.answered_at is None else f"{now - self.answered_at:.3f} s ago"
        return (
            f"connection: {self.end}; opened {now - self.opened:.3f} s ago, last sent "
            f"{now - self.sent_at:.3f} s ago, headers of the last reply {answered}\n"
            f"  sent {self.num_sent} bytes ({unsent} of them still here), last "
            f"{shorten(self.sent)}\n  received {len(self.received)} bytes: {shorten(self.received)}"
        )


def shorten(data: bytes, limit: int = 600) -> str:
    """The beginning and the end of what was sent or received."""
    if len(data) <= limit:
        return repr(data)
    return f"{data[: limit // 2]!r} … {data[-limit // 2 :]!r}"


@dataclass
class Action:
    """One client: its own random numbers and its target."""

    server: RunningServer
    rng: random.Random
    prompts: Sequence[Prompt]
    connections: list[Connection] = field(default_factory=list)

    async def connect(self, receive_buffer: int | None = None) -> Connection:
        host, _, port = self.server.url.removeprefix("http://").partition(":")
        sock = socket.socket()
        sock.setblocking(False)
        if receive_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        opened = time.monotonic()
        await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
        streams = await asyncio.open_connection(sock=sock, limit=1 << 24)
        self.connections.append(Connection(*streams, opened))
        return self.connections[-1]

    def encode(self, prompt: Prompt, **changes: Any) -> bytes:
        body = json.dumps({**prompt.body, **changes}).encode()
        return encode_request(prompt.path, body)

    def pick(self) -> Prompt:
        return self.rng.choice(self.prompts)


def encode_request(path: str, body: bytes, length: int | None = None) -> bytes:
    length = len(body) if length is None else length
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    return head.encode() + f"content-length: {length}\r\n\r\n".encode() + body


# ---- checks ---------------------------------------------------------------------------------------


def check_reply(status: int, body: bytes, prompt: Prompt | None) -> str:
    """The outcome of a reply; ChaosError if it is wrong."""
    if status not in OK_STATUSES:
        raise ChaosError(f"status {status}: {body[:500]!r}")
    if status == 200:
        return check_text(body, prompt)
    return check_error(status, json.loads(body)["error"])


def check_error(status: int, error: dict[str, Any]) -> str:
    if set(error) != {"message", "type", "param", "code"}:
        raise ChaosError(f"an error of another shape: {error}")
    if status == 500 and error["code"] not in ENGINE_CODES:
        raise ChaosError(f"an internal error: {error}")
    if "Traceback" in error["message"] or ".py" in error["message"]:
        raise ChaosError(f"an error that tells internals: {error}")
    return f"{status} {error['code']}"


def check_text(body: bytes, prompt: Prompt | None) -> str:
    if body.startswith(b"data: "):
        events = [line[6:] for line in body.split(b"\n\n") if line]
        if events[-1] != b"[DONE]":
            raise ChaosError(f"a stream without an end: {body[-200:]!r}")
        values = [json.loads(event) for event in events[:-1]]
        if "error" in values[-1]:
            return "stream: " + check_error(500, {**values[-1]["error"]})
        text = "".join(value["choices"][0]["text"] for value in values)
    else:
        text = json.loads(body)["choices"][0]["text"]
    if prompt is not None and prompt.text is not None and text != prompt.text:
        raise ChaosError(f"a wrong reply to {prompt.body}: {text!r} instead of {prompt.text!r}")
    return "ok"


# ---- actions --------------------------------------------------------------------------------------


async def complete(action: Action) -> str:
    """A request that waits for its reply, whole or streamed."""
    prompt = action.pick()
    connection = await action.connect()
    connection.send(action.encode(prompt, stream=action.rng.random() < 0.5))
    status, body = await connection.read_reply()
    connection.close()
    return check_reply(status, body, prompt)


async def keep_alive(action: Action) -> str:
    """Several requests on one connection, one after another."""
    connection = await action.connect()
    outcome = "ok"
    for _ in range(action.rng.randrange(2, 5)):
        prompt = action.pick()
        connection.send(action.encode(prompt))
        outcome = check_reply(*await connection.read_reply(), prompt)
        if outcome != "ok":
            break
    connection.close()
    return outcome


async def disconnect(action: Action) -> str:
    """A client that leaves at any moment: before, at or after the first token."""
    connection = await action.connect()
    changes = {"stream": action.rng.random() < 0.7, "max_tokens": 4000, "ignore_eos": True}
    connection.send(action.encode(action.pick(), **changes))
    await asyncio.sleep(action.rng.choice((0, 0.001, 0.01, 0.05, 0.2)))
    if action.rng.random() < 0.5:
        connection.writer.transport.abort()  # a reset instead of an end
    connection.close()
    return "left"


async def read_then_leave(action: Action) -> str:
    connection = await action.connect()
    changes = {"stream": True, "max_tokens": 4000, "ignore_eos": True}
    connection.send(action.encode(action.pick(), **changes))
    with suppress(TimeoutError):
        async with asyncio.timeout(
            1.0
        ):  # an error is short, and the connection stays open after it
            for _ in range(action.rng.randrange(1, 6)):
                if not await connection.reader.read(action.rng.choice((1, 100, 4096))):
                    break
    connection.close()
    return "left"


async def cancel_storm(action: Action) -> str:
    """Many clients that leave at once."""
    storm = [disconnect(action) for _ in range(action.rng.randrange(4, 12))]
    await asyncio.gather(*storm, return_exceptions=True)
    return "left"


async def half_request(action: Action) -> str:
    data = action.encode(action.pick())
    connection = await action.connect()
    connection.send(data[: action.rng.randrange(1, len(data))])
    await asyncio.sleep(action.rng.choice((0, 0.01, 0.1)))
    connection.close()
    return "left"


async def wrong_length(action: Action) -> str:
    """A body that is shorter or longer than declared."""
    prompt = action.pick()
    body = json.dumps(prompt.body).encode()
    length = max(0, len(body) + action.rng.choice((-len(body), -7, -1, 1, 1000)))
    connection = await action.connect()
    connection.send(encode_request(prompt.path, body, length))
    if length <= len(body):
        outcome = check_reply(*await connection.read_reply(), None)
    else:
        outcome = "left"
    connection.close()
    return outcome


async def malformed_body(action: Action) -> str:
    rng = action.rng
    body = rng.choice(
        [
            b"",
            b"{",
            b'{"prompt": ',
            b"[" * rng.choice((65, 100_000)),
            b'{"prompt": "\xff\xfe"}',
            b'{"prompt": "\\ud800"}',
            b'{"prompt": "x", "temperature": NaN}',
            b'{"prompt": "x", "n": 1e99}',
            b'{"prompt": "x", "max_tokens": -5}',
            b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}",
            b'{"prompt": "x", "guided_regex": "' + b"(" * 1000 + b'"}',
            b'{"prompt": "x", "guided_grammar": "start: start start"}',
            b'{"prompt": "x", "guided_json": {"$ref": "#"}}',
            rng.randbytes(rng.randrange(1, 2000)),
        ]
    )
    connection = await action.connect()
    connection.send(encode_request("/v1/completions", body))
    status, reply = await connection.read_reply()
    connection.close()
    if status not in (400, 429, 503):
        raise ChaosError(f"status {status} for {body[:80]!r}: {reply[:300]!r}")
    return check_reply(status, reply, None)


async def huge_body(action: Action) -> str:
    size = action.server.app.config.limits.body_bytes + 1
    connection = await action.connect()
    connection.send(encode_request("/v1/completions", b" " * size))
    status, reply = await connection.read_reply()
    connection.close()
    if status != 413:
        raise ChaosError(f"status {status} for a body of {size} bytes")
    return check_reply(status, reply, None)


async def header_flood(action: Action) -> str:
    connection = await action.connect()
    headers = b"".join(
        b"x-%d: %s\r\n" % (i, b"v" * 1000) for i in range(action.rng.randrange(40, 400))
    )
    connection.send(b"GET /health HTTP/1.1\r\n" + headers + b"\r\n" * (action.rng.random() < 0.5))
    status, reply = await connection.read_reply()
    connection.close()
    if status != 431:
        raise ChaosError(f"status {status} for {len(headers)} bytes of headers")
    return check_reply(status, reply, None)


async def garbage(action: Action) -> str:
    """Bytes that are no HTTP, first or after a request."""
    connection = await action.connect()
    prompt = action.pick()
    if action.rng.random() < 0.5:
        connection.send(action.encode(prompt))
    connection.send(action.rng.randbytes(action.rng.randrange(1, 3000)) + b"\r\n\r\n")
    async with asyncio.timeout(REPLY_SECONDS):
        reply = await connection.reader.read(200)
    connection.close()
    if not reply.startswith(b"HTTP/1.1 "):
        raise ChaosError(f"no answer but {reply!r}")
    return "left"


async def pipeline(action: Action) -> str:
    """Two requests at once on a connection, of which the client may not wait for the second."""
    connection = await action.connect()
    first, second = action.pick(), action.pick()
    connection.send(action.encode(first) + action.encode(second))
    outcome = check_reply(*await connection.read_reply(), first)
    if outcome == "ok" and action.rng.random() < 0.5:
        outcome = check_reply(*await connection.read_reply(), second)
    connection.close()
    return outcome


async def slow_reader(action: Action) -> str:
    """A client that asks for much and reads nothing."""
    connection = await action.connect(receive_buffer=4096)
    connection.writer.transport.pause_reading()  # type: ignore[attr-defined]
    changes = {"stream": True, "logprobs": 20, "max_tokens": 2000, "ignore_eos": True}
    connection.send(action.encode(action.pick(), **changes))
    await asyncio.sleep(3 * action.server.app.config.limits.write_seconds)
    connection.writer.transport.abort()
    return "left"


ACTIONS: dict[Callable[[Action], Awaitable[str]], int] = {  # action → how often
    complete: 30,
    keep_alive: 6,
    disconnect: 15,
    read_then_leave: 10,
    cancel_storm: 3,
    half_request: 6,
    wrong_length: 6,
    malformed_body: 8,
    huge_body: 1,
    header_flood: 3,
    garbage: 4,
    pipeline: 4,
    slow_reader: 1,
}


# ---- faults ---------------------------------------------------------------------------------------


def inject(server: RunningServer, kind: str) -> None:
    """Make an engine fail; it may just be starting, which is failure enough."""

    def run() -> None:
        for client in server.app.server.clients:
            if client.is_ready and kind == "kill":
                client.kill()
            elif client.is_ready:
                client.inject_fault(kind, 0.3)

    server.loop.call_soon_threadsafe(run)


@contextmanager
def failing_steps(seed: int, every: int = 40) -> Iterator[Counter[str]]:
    """Steps of engines in this process fail in the middle: about one of `every`. Counts by kind."""
    rng, execute, counts = random.Random(seed), EngineCore._execute, Counter[str]()

    def fail_sometimes(engine: EngineCore, *step: Any) -> Any:
        draw = rng.randrange(2 * every)
        if draw == 0:
            counts["raise"] += 1
            raise RuntimeError("injected into the step")
        if draw == 1:
            counts["oom"] += 1
            raise MemoryError("injected into the step")
        sampled = execute(engine, *step)
        if draw == 2:
            counts["raise late"] += 1
            raise RuntimeError("injected after the model has run")
        return sampled

    EngineCore._execute = fail_sometimes  # type: ignore[method-assign]
    try:
        yield counts
    finally:
        EngineCore._execute = execute  # type: ignore[method-assign]


def describe(action: Action) -> Iterator[str]:
    """What a failed action did, and how its server was."""
    for connection in action.connections:
        yield connection.describe()
    admission = action.server.app.server.admission
    yield f"server: {admission.audit()}"
    for client in action.server.app.server.clients:
        yield (
            f"engine {client.index}: {client.state}, last report "
            f"{time.monotonic() - client.last_report:.3f} s ago, {client.restarts} restarts"
        )
    yield f"load of the machine: {os.getloadavg()[0]:.1f}"


async def run_chaos(
    server: RunningServer,
    prompts: Sequence[Prompt],
    *,
    seed: int,
    num_actions: int,
    faults: Sequence[str] = (),
    fault_every: int = 25,
    concurrency: int = 12,
    first_action: int = 0,
) -> Figures:
    """Run the actions of a seed, `concurrency` at a time, with a fault after each `fault_every`."""
    figures = Figures()
    gate = asyncio.Semaphore(concurrency)
    names, weights = [*ACTIONS], [*ACTIONS.values()]

    async def run_one(number: int) -> None:
        rng = random.Random(f"{seed} {number}")
        function = rng.choices(names, weights)[0]
        action, start = Action(server, rng, prompts), time.monotonic()
        try:
            outcome = await function(action)
        except (ChaosError, ConnectionError, TimeoutError, ValueError) as error:
            where = f"action {number} ({function.__name__}) of seed {seed}"
            what = f"{error!r} after {time.monotonic() - start:.3f} s"
            raise ChaosError("\n".join([f"{where}: {what}", *describe(action)])) from None
        finally:
            gate.release()
        figures.actions[function.__name__] += 1
        figures.outcomes[outcome] += 1
        if function is complete and outcome == "ok":
            figures.reply_seconds.append(time.monotonic() - start)

    async with asyncio.TaskGroup() as group:
        for number in range(first_action, first_action + num_actions):
            await gate.acquire()
            group.create_task(run_one(number))
            if faults and number % fault_every == fault_every - 1:
                kind = random.Random(f"fault {seed} {number}").choice(faults)
                figures.faults[kind] += 1
                inject(server, kind)
    return figures
