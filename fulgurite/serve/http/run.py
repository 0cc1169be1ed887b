"""The server's process: a `ServerConfig` in, HTTP on a socket out, until a signal ends it."""

from __future__ import annotations

import asyncio
import gc
import resource
import signal
import socket
import sys
import time
from collections.abc import Collection, Sequence
from types import FrameType

import uvicorn

from fulgurite.errors import ArgumentError
from fulgurite.logs import configure_logging
from fulgurite.serve.http.app import App, create_app
from fulgurite.serve.http.config import ServerConfig
from fulgurite.serve.http.protocol import limit_protocol
from fulgurite.serve.remote.launch import LaunchedEngine, read_process_age
from fulgurite.serve.remote.messages import EngineInfo, Progress
from fulgurite.units import format_bytes

STATUS_SECONDS = 1.0
CLEAR_LINE = "\r\033[K"  # of a terminal
CURL = """curl {url}/v1/chat/completions -H 'content-type: application/json'{key} \\
  -d '{{"model":"{model}","messages":[{{"role":"user","content":"Hi"}}]}}'"""


class HttpServer(uvicorn.Server):
    """uvicorn that drains: after a signal it answers what it has taken, then ends."""

    def __init__(self, config: uvicorn.Config, app: App) -> None:
        super().__init__(config)
        self.app = app
        self.draining: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.draining is None and not self.should_exit:
            loop = asyncio.get_running_loop()
            self.draining = loop.create_task(self.drain())
        else:
            self.should_exit = self.force_exit = True

    async def drain(self) -> None:
        count = self.app.server.admission.entered
        if count:
            start = CLEAR_LINE if self.app.config.status_line else ""
            print(f"{start}draining {count} requests · ctrl-C again ends them", file=sys.stderr)
        await self.app.server.drain(self.app.config.drain_seconds)
        self.should_exit = True


def run_server(config: ServerConfig, launched: Sequence[LaunchedEngine] = ()) -> None:
    """Run the server until a signal ends it. `launched`: its engines, if they load already."""
    configure_logging(default="warning")
    raise_file_limit()
    app = create_app(config, launched=launched)
    sock = listen(config.host, config.port)
    settings = uvicorn.Config(
        app.asgi,
        log_config=None,
        access_log=False,
        lifespan="off",
        http=limit_protocol(config.limits),
        ws="none",
        server_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=2,
        loop="uvloop",
    )
    runner = asyncio.Runner(loop_factory=settings.get_loop_factory())
    with runner:
        runner.run(run(app, HttpServer(settings, app), sock))


async def run(app: App, http: HttpServer, sock: socket.socket) -> None:
    """Load the engines, print where the server is, and answer requests."""
    loop = asyncio.get_running_loop()
    loading = asyncio.ensure_future(app.server.start())
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, loading.cancel)
    try:
        info = await loading
    except asyncio.CancelledError:
        await app.server.close()
        raise KeyboardInterrupt from None
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.remove_signal_handler(number)
    gc.collect()
    gc.freeze()  # objects of the start: later collections skip them
    print_banner(app.config, info, sock, read_process_age())
    status = loop.create_task(print_status(app)) if app.config.status_line else None
    try:
        await http.serve(sockets=[sock])
    finally:
        if status is not None:
            status.cancel()
        await app.server.close()


def raise_file_limit() -> None:
    """As many open files as the system allows: each stream is one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise ArgumentError(
            f"can't listen on {host}:{port}: {error.strerror}", next="use another --port or --host"
        ) from error
    sock.listen(2048)
    return sock


def print_banner(
    config: ServerConfig, info: EngineInfo, sock: socket.socket, seconds: float
) -> None:
    host, port = sock.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    name = config.model_names[0]
    replicas = f" · {config.replicas} replicas" if config.replicas > 1 else ""
    parts = ", ".join(f"{name} {spent:.1f} s" for name, spent in info.start_seconds.items())
    key = " -H 'authorization: Bearer KEY'" if config.api_keys else ""
    print(
        f"{name} · {info.weights} · {info.cache_tokens:,} tokens of cache for "
        f"{info.max_sequences} requests · {format_bytes(info.planned_bytes)} of "
        f"{format_bytes(info.available_bytes)}{replicas} · ready in {seconds:.1f} s"
        + (f" ({parts})" if parts else ""),
        file=sys.stderr,
    )
    print(
        f"{url}   chat page /   OpenAI /v1   Anthropic /v1/messages   metrics /metrics",
        file=sys.stderr,
    )
    print(CURL.format(url=url, key=key, model=name) + "\n", file=sys.stderr, flush=True)


async def print_status(app: App) -> None:
    """One line a second while requests run, in place on a terminal."""
    tokens, was_busy = 0, False
    while True:
        await asyncio.sleep(STATUS_SECONDS)
        clients = app.server.clients
        now = sum(client.progress.generated_tokens for client in clients)
        running = sum(client.progress.running for client in clients)
        waiting = app.server.admission.waiting + sum(one.progress.waiting for one in clients)
        if running or waiting or was_busy:
            rate = max(now - tokens, 0) / STATUS_SECONDS
            line = f"{time.strftime('%H:%M:%S')}  {running} running · {waiting} waiting · {rate:.0f} tokens/s"
            parts = (line, format_cache([client.progress for client in clients]))
            latency = format_first_tokens(app.server.metrics.recent_first_tokens)
            text = " · ".join((*parts, latency) if latency else parts)
            print(f"{CLEAR_LINE}{text}", end="", file=sys.stderr, flush=True)
            if not running and not waiting:
                print(file=sys.stderr)
        was_busy, tokens = bool(running or waiting), now


def format_cache(progress: Sequence[Progress]) -> str:
    """The used part of the KV caches, and prompt tokens found in them."""
    used = sum(one.used_blocks for one in progress) / (
        sum(one.total_blocks for one in progress) or 1
    )
    hits = sum(one.prefix_hits for one in progress) / (
        sum(one.prefix_queries for one in progress) or 1
    )
    return f"cache {used:.0%} (prefix hits {hits:.0%})"


def format_first_tokens(seconds: Collection[float]) -> str:
    """Percentiles of the time to the first token; empty without any."""
    if not seconds:
        return ""
    ordered = sorted(seconds)
    p50, p99 = (1e3 * ordered[int(part * (len(ordered) - 1))] for part in (0.5, 0.99))
    return f"ttft p50 {p50:.0f} ms p99 {p99:.0f} ms"
