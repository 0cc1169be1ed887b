"""A real server in a thread, for tests with real clients: a `ServerConfig` in, its URL out.

    with serve(mock_config(replies=["Hello."])) as server:
        server.openai().chat.completions.create(...)
        assert server.leaks() == {}

Requests to a server with `replies` get these texts in turn. A prompt with <reply>text</reply> gets that
text (`script`). Others get random tokens that depend on the prompt only.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import anthropic
import httpx
import openai
import uvicorn

from fulgurite.serve.http.app import App, create_app
from fulgurite.serve.http.config import ServerConfig
from fulgurite.serve.http.protocol import limit_protocol

MODEL = "test-model"
# Without certificates, which take 50 ms to load for each client. Connections are not kept.
PLAIN = httpx.Client(verify=False, timeout=30.0, limits=httpx.Limits(max_keepalive_connections=0))
SETTLE_SECONDS = 10.0  # that a server has to notice that its clients have left


@dataclass(frozen=True)
class RunningServer:
    """A server that runs. `url` has no path: clients of OpenAI add `/v1`."""

    url: str
    app: App
    loop: asyncio.AbstractEventLoop

    def openai(self, api_key: str = "none", **options: Any) -> openai.OpenAI:
        options = {"max_retries": 0, "timeout": 30.0, "http_client": PLAIN, **options}
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=api_key, **options)

    def async_openai(self, api_key: str = "none", **options: Any) -> openai.AsyncOpenAI:
        options = {"max_retries": 0, "timeout": 30.0, **options}
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=api_key, **options)

    def anthropic(self, api_key: str = "none", **options: Any) -> anthropic.Anthropic:
        options = {"max_retries": 0, "timeout": 30.0, **options}
        return anthropic.Anthropic(base_url=self.url, api_key=api_key, **options)

    def async_anthropic(self, api_key: str = "none", **options: Any) -> anthropic.AsyncAnthropic:
        options = {"max_retries": 0, "timeout": 30.0, **options}
        return anthropic.AsyncAnthropic(base_url=self.url, api_key=api_key, **options)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return PLAIN.post(self.url + path, json=body, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return PLAIN.get(self.url + path, **options)

    def run(self, coroutine: Any) -> Any:
        """The result of a coroutine on the server's event loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(30.0)

    def leaks(self) -> dict[str, int]:
        """What requests have left behind, once nothing changes any more; empty: nothing."""
        end = time.monotonic() + SETTLE_SECONDS
        while True:
            audit = self.run(self.app.server.audit())
            found = {
                f"{place}.{kind}": count
                for place, kinds in audit.items()
                for kind, count in kinds.items()
                if count
            }
            if not found or time.monotonic() > end:
                return found
            time.sleep(0.01)


def script(reply: str) -> str:
    """A prompt whose reply is this text."""
    return f"<reply>{reply}</reply>"


def mock_config(
    replies: Sequence[str] = (), *, mock_options: dict[str, Any] | None = None, **fields: Any
) -> ServerConfig:
    """A config with the mock engine in a thread. `fields` are those of `ServerConfig`."""
    options = {"replies": list(replies), "echo": True, **(mock_options or {})}
    fields = {"served_names": (MODEL,), "engine_in": "thread", **fields}
    return ServerConfig(mock=True, mock_options=options, **fields)


class ThreadedServer(uvicorn.Server):
    """uvicorn that tells on which event loop it runs."""

    loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.loop = asyncio.get_running_loop()
        await super().startup(sockets)


@contextmanager
def serve(config: ServerConfig) -> Iterator[RunningServer]:
    """Run a server on a free port until the block ends."""
    app = create_app(config)
    sock = socket.create_server(("127.0.0.1", 0), backlog=1024)
    settings = uvicorn.Config(
        app.asgi,
        lifespan="on",
        log_config=None,
        access_log=False,
        ws="none",
        http=limit_protocol(config.limits),
        timeout_keep_alive=75,
    )
    settings.timeout_graceful_shutdown = 2
    server = ThreadedServer(settings)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    try:
        while not server.started and thread.is_alive():
            time.sleep(0.002)
        assert server.started and server.loop is not None, "the server did not start; see the log"
        yield RunningServer(f"http://127.0.0.1:{sock.getsockname()[1]}", app, server.loop)
    finally:
        server.should_exit = True
        thread.join(30.0)
        sock.close()
        assert not thread.is_alive(), "the server did not end"
