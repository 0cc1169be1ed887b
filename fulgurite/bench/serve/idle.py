"""Idle streams: the memory of a server that holds many streams in which little happens.

In: a number of streams. Out: one row: the resident memory of the server's process (HTTP, tokenizer,
admission) without a stream and with all of them. The engine is the mock engine with a token every half
second, so that all streams stay open.
"""

from __future__ import annotations

import asyncio
import json
import resource
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from fulgurite.bench import results
from fulgurite.bench.serve.http_client import Address, encode_request
from fulgurite.bench.serve.load import run_coroutine
from fulgurite.bench.serve.processes import (
    ServerError,
    find_free_port,
    fulgurite_command,
    read_resident_bytes,
    run_server,
)
from fulgurite.errors import ArgumentError
from fulgurite.units import format_bytes

Row = dict[str, Any]
GROUP = "mock engine · idle streams"
STEP_SECONDS = 0.5
SETTLE_SECONDS = 2.0  # all streams have got some tokens
OPEN_AT_ONCE = 64  # connections; the rest wait their turn, as a listen queue has an end
SPARE_FILES = 64  # open files of the client that are not streams


def make_config(count: int) -> str:
    """The TOML file of a server whose engine runs `count` requests at once, slowly."""
    return (
        f"mock = true\nmax_waiting = {count}\n[mock_options]\nmax_sequences = {count}\n"
        f"tokens_per_step = 1\nstep_seconds = {STEP_SECONDS}\n"
    )


def measure_idle_streams(count: int) -> Row:
    """Start a server, open `count` streams, and read its memory before and after."""
    if count < 1:
        raise ArgumentError(f"--idle-streams {count} must be 1 or more")
    raise_file_limit(count)
    port = find_free_port()
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(make_config(count))
        file.flush()
        begin = time.perf_counter()
        with run_server(fulgurite_command(port, ["--config", file.name]), port) as server:
            ready = time.perf_counter() - begin
            assert server.pid is not None, "it was started here"
            before = read_resident_bytes(server.pid)
            during = run_coroutine(hold_streams(server.address, count, server.pid))
    return {
        "idle_streams": count,
        "ready_s": ready,
        "resident_bytes": before,
        "resident_bytes_with_streams": during,
    }


def raise_file_limit(count: int) -> None:
    """Allow this process and its children so many connections, if the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + SPARE_FILES
    if hard != resource.RLIM_INFINITY and wanted > hard:
        raise ArgumentError(
            f"--idle-streams {count} needs {wanted} open files, and the limit is {hard}",
            next="raise it with ulimit -Hn, or measure fewer streams",
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))


async def hold_streams(address: Address, count: int, pid: int) -> int:
    """Open all streams, and read the server's memory while they are open."""
    body = {"model": "smollm2", "prompt": [1, 2, 3], "max_tokens": 4096, "stream": True}
    body["ignore_eos"] = True
    request = encode_request(address, "POST", "/v1/completions", json.dumps(body).encode())
    turns = asyncio.Semaphore(OPEN_AT_ONCE)

    async def open_stream() -> asyncio.StreamWriter:
        async with turns:
            reader, writer = await asyncio.open_connection(address.host, address.port)
            writer.write(request)
            status = await reader.readline()
            if b" 200 " not in status:
                raise ServerError(f"a stream was answered {status.decode(errors='replace')!r}")
        return writer

    writers = await asyncio.gather(*(open_stream() for _ in range(count)))
    try:
        await asyncio.sleep(SETTLE_SECONDS)
        return read_resident_bytes(pid)
    finally:
        for writer in writers:
            writer.transport.abort()


def format_idle_streams(rows: Sequence[Row]) -> str:
    """The table of rows of `measure_idle_streams`."""
    lines = [["streams", "server", "with the streams", "a stream", "ready in"]]
    for row in rows:
        before, during = row["resident_bytes"], row["resident_bytes_with_streams"]
        lines.append([
            f"{row['idle_streams']:,}",
            format_bytes(before),
            format_bytes(during),
            format_bytes(max(during - before, 0) / row["idle_streams"]),
            f"{row['ready_s']:.1f} s",
        ])  # fmt: skip
    return "\n".join([GROUP, results.format_table(lines), "resident memory of the HTTP process"])


def make_row(count: int, command: str) -> Row:
    facts = {"group": GROUP, "load": f"{count} streams", "candidate": "fulgurite", "repeats": 1}
    return {**facts, "command": command, **measure_idle_streams(count)}
