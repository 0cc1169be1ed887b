"""What is measured: a server at an address, a server that is started here, or an engine without one.

Each opens as a context manager that yields a function: a `Job` in, a run and the CPU seconds of the other side
out. A candidate is opened for each repeat, so that every repeat has fresh processes and an empty
prefix cache.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from fulgurite.bench.serve.http_client import Address, Expected
from fulgurite.bench.serve.load import (
    Run,
    Target,
    get,
    run_closed_loop,
    run_coroutine,
    run_open_loop,
)
from fulgurite.bench.serve.processes import (
    Server,
    ServerError,
    find_free_port,
    fulgurite_command,
    llama_command,
    run_server,
    thread_environment,
)
from fulgurite.bench.serve.replies import OK, Reply
from fulgurite.bench.serve.workloads import BodyOptions, Conversation, Workload, draw_arrivals

# not imported: it needs the packages of the extra `serve`, other suites don't
ENGINE_MODULE = "fulgurite.bench.serve.engine_main"
WARMUP_TOKENS = 8
MAX_WARMUPS = 32
WARMUP_SEED = 1 << 32


@dataclass(frozen=True)
class Load:
    """How many clients, or conversations a second; and how many requests."""

    requests: int
    clients: int = 1
    rate: float | None = None
    seed: int = 0

    def __str__(self) -> str:
        if self.rate is not None:
            return f"{self.rate:g} a second"
        return f"{self.clients} client{'s' * (self.clients > 1)}"

    def draw_arrivals(self, count: int) -> list[float] | None:
        return None if self.rate is None else draw_arrivals(count, self.rate, self.seed)


@dataclass(frozen=True)
class Job:
    """Conversations to measure, and others of the same kind to warm up with."""

    load: Load
    conversations: Sequence[Conversation]
    warmup: Sequence[Conversation]


def shorten(conversations: Sequence[Conversation]) -> list[Conversation]:
    """First turns only, with short replies."""
    return [
        (replace(one[0], output_tokens=min(one[0].output_tokens, WARMUP_TOKENS)),)
        for one in conversations
    ]


def make_job(workload: Workload, load: Load) -> Job:
    """The seed of the load determines everything. Warm-ups share no prompt with what is measured."""
    count = min(max(2, load.clients), MAX_WARMUPS) * workload.turns_per_conversation
    others = workload.make_conversations(count, load.seed + WARMUP_SEED)
    measured = workload.make_conversations(load.requests, load.seed)
    return Job(load, measured, shorten(others))


Measure = Callable[[Job], tuple[Run, float | None]]


@dataclass(frozen=True)
class Candidate:
    """A name for the table, and what opens it."""

    name: str
    open: Callable[[], AbstractContextManager[Measure]]


@dataclass(frozen=True)
class HttpOptions:
    """How requests are made and read. `model` None: the first that the server lists.

    settle_seconds   between the first warm-up and the first run. A server may use the time to prepare
    """

    model: str | None = None
    api_key: str | None = None
    expected: Expected = field(default_factory=Expected)
    extra: tuple[tuple[str, Any], ...] = ()
    settle_seconds: float = 0.0


# ---- over HTTP -----------------------------------------------------------------------------------


@contextmanager
def open_server(server: Server, options: HttpOptions) -> Iterator[Measure]:
    """Measure a running server."""
    model = options.model or find_model(server.address, options.api_key)
    body = BodyOptions(model, options.expected.is_stream, options.extra)
    target = Target(server.address, body, options.expected, options.api_key)
    settle_seconds = options.settle_seconds

    def measure(job: Job) -> tuple[Run, float | None]:
        needs_text = any(len(one) > 1 for one in job.conversations)
        careful = replace(target, expected=replace(options.expected, decode_all=True))
        has_usage = warm_up(careful, job)
        nonlocal settle_seconds
        time.sleep(settle_seconds)
        settle_seconds = 0.0
        used = careful if needs_text or not has_usage else target
        before = server.cpu_seconds()
        run = run_coroutine(_run(used, job))
        after = server.cpu_seconds()
        return run, None if before is None or after is None else after - before

    yield measure


async def _run(target: Target, job: Job) -> Run:
    arrivals = job.load.draw_arrivals(len(job.conversations))
    if arrivals is None:
        return await run_closed_loop(target, job.conversations, job.load.clients)
    return await run_open_loop(target, job.conversations, arrivals)


def warm_up(target: Target, job: Job) -> bool:
    """Whether the server reports usage; ServerError if no request succeeds."""
    run = run_coroutine(run_closed_loop(target, job.warmup, job.load.clients))
    whole = [reply for reply in run.replies if reply.kind == OK]
    if not whole:
        first = run.replies[0]
        raise ServerError(
            f"{target.address} answers no request: {first.kind}", where=first.detail or None
        )
    return all(reply.has_usage for reply in whole)


def find_model(address: Address, api_key: str | None) -> str:
    """The first name that `/v1/models` lists."""
    status, body = run_coroutine(get(address, "/v1/models", 30.0, api_key))
    try:
        return str(json.loads(body)["data"][0]["id"])
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ServerError(
            f"{address}/v1/models lists no model (status {status or 'none'})",
            next="is the server running? give its model with --model NAME",
        ) from error


def serve_fulgurite(
    arguments: Sequence[str], options: HttpOptions, threads: int | None
) -> AbstractContextManager[Measure]:
    """`fulgurite serve` with these arguments."""
    port = find_free_port()
    return _serve(fulgurite_command(port, arguments), port, options, threads)


@dataclass(frozen=True)
class LlamaServer:
    """llama.cpp's server, with as many slots as our engine runs requests at once."""

    binary: Path
    model: Path
    threads: int
    parallel: int
    context: int

    def open(self, options: HttpOptions) -> AbstractContextManager[Measure]:
        port = find_free_port()
        command = llama_command(
            self.binary, self.model, port, self.threads, self.parallel, self.context
        )
        return _serve(command, port, options, self.threads)


@contextmanager
def _serve(
    command: Sequence[str], port: int, options: HttpOptions, threads: int | None
) -> Iterator[Measure]:
    with run_server(command, port, threads) as server, open_server(server, options) as measure:
        yield measure


# ---- without a server ----------------------------------------------------------------------------


@contextmanager
def open_engine(model: str, llm_options: dict[str, Any], threads: int | None) -> Iterator[Measure]:
    """An `LLM` in its own process (engine_main.py)."""
    wanted = json.dumps({"model": model, "options": llm_options})
    process = subprocess.Popen(
        [sys.executable, "-m", ENGINE_MODULE, wanted],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=thread_environment(threads),
    )
    assert process.stdin is not None and process.stdout is not None
    stdin, stdout = process.stdin, process.stdout

    def send(conversations: Sequence[Conversation], load: Load) -> dict[str, Any]:
        turns = [[asdict(turn) for turn in one] for one in conversations]
        arrivals = load.draw_arrivals(len(conversations))
        job = {"conversations": turns, "clients": load.clients, "arrivals": arrivals}
        stdin.write(json.dumps(job) + "\n")
        stdin.flush()
        return dict(json.loads(_read_line()))

    def _read_line() -> str:
        line = stdout.readline()
        if not line:
            raise ServerError(f"the engine has ended with status {process.wait()}")
        return line

    def measure(job: Job) -> tuple[Run, float | None]:
        send(job.warmup, replace(job.load, rate=None))
        found = send(job.conversations, job.load)
        replies = [Reply(**{**one, "gaps": array("d", one["gaps"])}) for one in found["replies"]]
        return Run(replies, found["seconds"], 0.0), found["cpu_seconds"]

    try:
        _read_line()  # ready
        yield measure
    finally:
        with suppress(BrokenPipeError):  # it has died
            stdin.close()  # the end of its jobs
        process.wait()
