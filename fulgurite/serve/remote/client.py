"""`EngineClient`: the asyncio side of an engine. Requests in, streams of token updates out.

It starts the engine in a process (or a thread), restarts it if it dies or stalls, and knows from its
reports whether it is idle, busy or stalled. All calls are made on one event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

import msgspec

from fulgurite.errors import FulguriteError
from fulgurite.logs import LOG
from fulgurite.serve.engine.prefix_chunk import CHUNK_BYTES, PrefixBlocks
from fulgurite.serve.engine.request import SamplingParams
from fulgurite.serve.remote.channel import FrameReader, encode_frame
from fulgurite.serve.remote.engine_main import run_engine
from fulgurite.serve.remote.launch import LaunchedEngine, launch_engine
from fulgurite.serve.remote.messages import (
    Audit,
    Cancel,
    Done,
    Embed,
    Embeddings,
    EngineInfo,
    Exported,
    ExportPrefix,
    Generate,
    ImportPrefix,
    InjectFault,
    LoadFailed,
    LoadModel,
    Message,
    Progress,
    Ready,
    Rejected,
    Report,
    ResetPrefixCache,
    Shutdown,
    TokenUpdate,
    encode_params,
)
from fulgurite.serve.remote.watchdog import watch_stalls

REAP_SECONDS = 0.1  # that the event loop waits for a process that was killed
EXIT_SECONDS = 10.0  # that a process has to end after `Shutdown`
RESTART_DELAYS = (0.0, 1.0, 5.0, 15.0, 60.0)  # seconds before the next start; the last one repeats
HEALTHY_SECONDS = 60.0  # after which earlier restarts no longer count


class EngineError(FulguriteError):
    """The engine can't run a request: it has died, is restarting, or has refused it."""


class EngineLoadError(FulguriteError):
    """The model can't be loaded."""


class TokenStream:
    """The updates of one generation. Iterate, or `cancel`; a stream that is left must be cancelled."""

    def __init__(self, client: EngineClient, request: Generate) -> None:
        self.client, self.request = client, request
        self.updates: deque[TokenUpdate | EngineError] = deque()
        self.waiter: asyncio.Future[None] | None = None
        self.is_finished = False

    def put(self, item: TokenUpdate | EngineError) -> None:
        self.updates.append(item)
        waiter = self.waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def next(self) -> TokenUpdate:
        """All tokens that are there; waits for some. EngineError if there will be none."""
        while not self.updates:
            self.waiter = asyncio.get_running_loop().create_future()
            try:
                await self.waiter
            finally:
                self.waiter = None
        item = self.updates.popleft()
        if isinstance(item, EngineError):
            self.is_finished = True
            raise item
        while self.updates and item.finish is None and isinstance(self.updates[0], TokenUpdate):
            item = merge_updates(item, self.updates.popleft())  # type: ignore[arg-type]
        self.is_finished = item.finish is not None
        return item

    def cancel(self) -> None:
        """End the generation, if it still runs; the engine frees its blocks before the next step."""
        if not self.is_finished:
            self.is_finished = True
            self.client.cancel(self.request.id)


def merge_updates(first: TokenUpdate, second: TokenUpdate) -> TokenUpdate:
    logprobs = first.logprobs
    if second.logprobs is not None:
        logprobs = [*(logprobs or ()), *second.logprobs]
    tokens = [*first.token_ids, *second.token_ids]
    prompt_logprobs = first.prompt_logprobs or second.prompt_logprobs
    return TokenUpdate(first.id, tokens, logprobs, second.finish, prompt_logprobs)


class Connection(Protocol):
    """The way to an engine; `EngineProtocol` is the one on this machine."""

    def write(self, message: Any) -> None: ...

    def close(self) -> None: ...


class EngineClient:
    """One engine. `start` loads it; after that it restarts by itself until `close`.

    stall_seconds   it counts as stalled if it reports nothing for so long
    stall_timeout   after so many seconds without a report it is ended and started again; 0: never
    env             of its process, in addition
    launched        a process that loads it already; None: `start` launches one
    """

    def __init__(
        self,
        load: LoadModel,
        *,
        in_thread: bool = False,
        stall_seconds: float = 60.0,
        stall_timeout: float = 0.0,
        index: int = 0,
        env: Mapping[str, str] | None = None,
        launched: LaunchedEngine | None = None,
    ) -> None:
        self.load, self.in_thread, self.index = load, in_thread, index
        self.env, self.launched = {} if env is None else env, launched
        self.stall_seconds, self.stall_timeout = stall_seconds, stall_timeout
        self.watchdog: asyncio.Task[None] | None = None
        self.kill_reason = ""  # why it was ended from here
        self.info: EngineInfo | None = None
        self.progress = Progress()
        self.last_report = time.monotonic()
        self.restarts = self.quick_restarts = 0  # all; those since it was healthy
        self.is_ready = self.is_closing = False
        self.on_progress: list[Callable[[EngineClient, Progress], None]] = []
        self.on_ready: list[Callable[[], None]] = []  # called after each start, and after a stall
        self.streams: dict[int, TokenStream] = {}
        self.replies: dict[int, asyncio.Future[Any]] = {}
        self.ids = itertools.count(1)
        self.protocol: Connection | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self.thread: threading.Thread | None = None
        self.loaded: asyncio.Future[EngineInfo] | None = None
        self.started_at = 0.0
        self.restart_task: asyncio.Task[None] | None = None

    # ---- life --------------------------------------------------------------------------------------

    async def start(self) -> EngineInfo:
        """Start the engine and wait until the model is loaded; EngineLoadError if it can't be."""
        loop = asyncio.get_running_loop()
        self.loaded = loop.create_future()
        self.started_at = self.last_report = time.monotonic()
        self.progress = Progress()
        self.protocol = await self._connect()
        self.info = await self.loaded
        if self.protocol is None:
            raise EngineLoadError("the engine has died after it loaded the model")
        self.is_ready = True
        if self.stall_timeout and self.watchdog is None:
            self.watchdog = loop.create_task(watch_stalls(self))
        for listener in self.on_ready:
            listener()
        return self.info

    async def _connect(self) -> Connection:
        """Launch the engine, tell it what to load, and connect. Its messages go to `receive`."""
        sock = self._launch_thread() if self.in_thread else self._launch_process()
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        _, protocol = await loop.create_unix_connection(lambda: EngineProtocol(self), sock=sock)
        return protocol

    def _launch_thread(self) -> socket.socket:
        own, other = socket.socketpair()
        name = f"fulgurite-engine-{self.index}"
        self.thread = threading.Thread(target=run_engine, args=(other,), name=name, daemon=True)
        self.thread.start()
        own.sendall(encode_frame(self.load))
        return own

    def _launch_process(self) -> socket.socket:
        launched, self.launched = self.launched, None  # a restart needs a new one
        if launched is None:
            launched = launch_engine(self.load, self.env)
        self.process = launched.process
        return launched.socket

    async def close(self) -> None:
        """Shut the engine down; unfinished requests get an error."""
        was_ready = self.is_ready
        self.is_closing, self.is_ready = True, False
        if not was_ready:
            self.kill()  # it reads no commands while it loads
        for task in (self.restart_task, self.watchdog):
            if task is not None:
                task.cancel()
        if self.protocol is not None:
            self.protocol.write(Shutdown())
        await asyncio.to_thread(self._join)
        if self.protocol is not None:
            self.protocol.close()
        self._fail_all("the server is shutting down")

    def _join(self) -> None:
        if self.process is not None:
            try:
                self.process.wait(EXIT_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        if self.thread is not None:
            self.thread.join(EXIT_SECONDS)

    def connection_lost(self) -> None:
        """The engine's end of the socket has closed."""
        self.is_ready, self.protocol = False, None
        reason, self.kill_reason = self.kill_reason or "the engine has died", ""
        if self.process is not None:
            self.process.kill()  # the socket is closed: it ends anyway
            with suppress(subprocess.TimeoutExpired):  # freeing a GPU's memory takes a while
                reason += f" (exit status {self.process.wait(REAP_SECONDS)})"
        if self.loaded is not None and not self.loaded.done():
            self.loaded.set_exception(EngineLoadError(f"{reason} while it loaded the model"))
        self._fail_all(reason)
        if not self.is_closing and self.info is not None and self.restart_task is None:
            LOG.error("engine %d: %s", self.index, reason)
            self.restart_task = asyncio.get_running_loop().create_task(self._restart())

    async def _restart(self) -> None:
        if time.monotonic() - self.started_at >= HEALTHY_SECONDS:
            self.quick_restarts = 0
        await asyncio.to_thread(self._join)  # two engines at once may not fit into memory
        while not self.is_closing:
            delay = RESTART_DELAYS[min(self.quick_restarts, len(RESTART_DELAYS) - 1)]
            await asyncio.sleep(delay)
            self.restarts += 1
            self.quick_restarts += 1
            LOG.warning("starting engine %d again", self.index)
            try:
                await self.start()
            except (FulguriteError, OSError) as error:
                LOG.error("engine %d can't start: %s", self.index, error)
            else:
                break
        self.restart_task = None

    def kill(self) -> None:
        """End the process at once; it is started again."""
        if self.process is not None:
            self.process.kill()

    def restart_stalled(self) -> None:
        """Fail the requests of an engine that is stalled, end its process, and start it again.

        A thread can't be ended. Its requests fail as well, and it goes on if its step ever ends.
        """
        if self.protocol is None:
            return
        reason = f"the engine is stalled: no step has ended for {self.stall_timeout:g} s"
        LOG.error("engine %d: %s", self.index, reason)
        if self.in_thread:
            self.protocol.write(Cancel([*self.streams]))
            self._fail_all(reason)
            return
        self.kill_reason = f"{reason}, so it is started again"
        self.protocol.close()  # its end may never come: a process that waits for a driver lives on
        self.connection_lost()

    def _fail_all(self, reason: str) -> None:
        streams, self.streams = self.streams, {}
        for stream in streams.values():
            stream.put(EngineError(reason, next="send the request again"))
        replies, self.replies = self.replies, {}
        for reply in replies.values():
            if not reply.done():
                reply.set_exception(EngineError(reason, next="send the request again"))

    # ---- requests ----------------------------------------------------------------------------------

    def generate(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
    ) -> TokenStream:
        """Start a generation. Stop strings are the caller's: an engine knows tokens only."""
        request = Generate(next(self.ids), prompt_ids, encode_params(params), priority, cache_salt)
        stream = TokenStream(self, request)
        self._write(request)
        self.streams[request.id] = stream
        return stream

    def cancel(self, id: int) -> None:
        if self.streams.pop(id, None) is not None and self.protocol is not None:
            self.protocol.write(Cancel([id]))

    async def embed(self, prompts: list[list[int]]) -> list[bytes]:
        """One vector a prompt: float32 values, little-endian."""
        reply: Embeddings = await self._call(lambda id: Embed(id, prompts))
        return reply.rows

    async def export_prefix(
        self,
        prompt_ids: list[int],
        cache_salt: str = "",
        *,
        hashes: Sequence[bytes] = (),
        start: int = 0,
        max_bytes: int = CHUNK_BYTES,
    ) -> PrefixBlocks:
        """A chunk of the cached blocks of a prompt; see serve/engine/prefix_blocks.py."""
        reply: Exported = await self._call(
            lambda id: ExportPrefix(id, prompt_ids, cache_salt, list(hashes), start, max_bytes)
        )
        return reply.blocks

    async def import_prefix(self, blocks: PrefixBlocks) -> int:
        """How many blocks of the prefix the engine has or will have; see prefix_blocks.py."""
        reply: Done = await self._call(lambda id: ImportPrefix(id, blocks))
        return reply.values["blocks"]

    async def audit(self) -> dict[str, int]:
        reply: Done = await self._call(Audit)
        return reply.values

    def reset_prefix_cache(self) -> None:
        self._write(ResetPrefixCache())

    def inject_fault(self, kind: str, seconds: float = 0.0) -> None:
        self._write(InjectFault(kind, seconds))

    def _write(self, command: Any) -> None:
        if not self.is_ready or self.protocol is None:
            raise EngineError("the engine is not ready", next="try again in a few seconds")
        self.protocol.write(command)

    async def _call(self, make_command: Callable[[int], Any]) -> Any:
        id = next(self.ids)
        reply = self.replies[id] = asyncio.get_running_loop().create_future()
        try:
            self._write(make_command(id))
            return await reply
        finally:
            self.replies.pop(id, None)

    # ---- health ------------------------------------------------------------------------------------

    @property
    def num_requests(self) -> int:
        """Unfinished generations."""
        return len(self.streams)

    @property
    def is_silent_by_intent(self) -> bool:
        """Whether no reports are expected: it loads a model, or restarts its ranks."""
        return not self.is_ready or bool(self.progress.restarting)

    @property
    def state(self) -> str:
        """starting, idle, busy, stalled (no report for `stall_seconds`), or restarting its ranks."""
        if not self.is_ready:
            return "starting"
        if self.progress.restarting:
            return "restarting"
        if time.monotonic() - self.last_report > self.stall_seconds:
            return "stalled"
        return "busy" if self.streams else "idle"

    # ---- messages ----------------------------------------------------------------------------------

    def receive(self, message: Any) -> None:
        was_stalled = self.state == "stalled"
        self.last_report = time.monotonic()
        if was_stalled:
            for notify in self.on_ready:
                notify()
        match message:
            case Report(updates=updates, progress=progress):
                for update in updates:
                    self._deliver(update)
                self.restarts += max(progress.rank_restarts - self.progress.rank_restarts, 0)
                self.progress = progress
                for listener in self.on_progress:
                    listener(self, progress)
            case Rejected(id=id, message=text):
                self._reject(id, text)
            case Ready(info=info):
                self._set_loaded(info)
            case LoadFailed(message=text):
                if self.loaded is not None and not self.loaded.done():
                    self.loaded.set_exception(EngineLoadError(text))
            case Embeddings() | Exported() | Done():
                reply = self.replies.get(message.id)
                if reply is not None and not reply.done():
                    reply.set_result(message)

    def _set_loaded(self, info: EngineInfo) -> None:
        if self.loaded is not None and not self.loaded.done():
            self.loaded.set_result(info)

    def _deliver(self, update: TokenUpdate) -> None:
        stream = self.streams.get(update.id)
        if stream is None:
            return
        if update.finish is not None:
            del self.streams[update.id]
        stream.put(update)

    def _reject(self, id: int, text: str) -> None:
        stream = self.streams.pop(id, None)
        if stream is not None:
            stream.put(RequestRejected(text))
        reply = self.replies.get(id)
        if reply is not None and not reply.done():
            reply.set_exception(RequestRejected(text))


class RequestRejected(EngineError):
    """The engine has refused a request: the text says why. It can't be sent again unchanged."""


class EngineProtocol(asyncio.Protocol):
    """Frames of one engine's socket."""

    def __init__(self, client: EngineClient) -> None:
        self.client = client
        self.reader = FrameReader()
        self.decoder = msgspec.msgpack.Decoder(Message)
        self.transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        for body in self.reader.push(data):
            self.client.receive(self.decoder.decode(body))

    def connection_lost(self, error: Exception | None) -> None:
        if self.client.protocol is self:
            self.client.connection_lost()

    def write(self, message: Any) -> None:
        if self.transport is not None:
            self.transport.write(encode_frame(message))

    def close(self) -> None:
        self.client.protocol = None
        if self.transport is not None:
            self.transport.close()
