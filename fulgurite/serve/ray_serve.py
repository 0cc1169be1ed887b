"""`fulgurite serve --ray`: the same server on a Ray cluster. A `ServerConfig` in, a Ray Serve app out.

    Ray's HTTP proxy ─▶ Ingress (our ASGI app, Router, admission) ══ frames ══▶ EngineActor ─▶ engine process
                                                                  ══ frames ══▶ EngineActor ─▶ engine process

Each replica is a Ray Serve deployment with one actor, on any machine that has its GPUs. The actor starts
the process of an engine and passes bytes on: to the ingress an engine is an `EngineClient` whose socket
is Ray. So routing, hand-over, cancelling and metrics are those of one machine. Ray Serve replaces an
actor that dies; the client connects to the new one, and the model is loaded again.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import ray
from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette

from fulgurite.errors import ArgumentError
from fulgurite.logs import LOG, configure_logging
from fulgurite.serve.http.app import create_app
from fulgurite.serve.http.config import ServerConfig
from fulgurite.serve.http.placement import count_ranks
from fulgurite.serve.remote.channel import READ_SIZE, FrameReader, encode_frame
from fulgurite.serve.remote.client import EXIT_SECONDS, EngineClient, EngineLoadError
from fulgurite.serve.remote.launch import launch_process
from fulgurite.serve.remote.messages import LoadModel, Message, Shutdown

APP_NAME = "fulgurite"
MAX_ONGOING = 64  # calls of one actor: one stream, one write at a time, and some that end
INGRESS_REQUESTS = 1 << 16  # admission limits requests, not Ray
QUIET = {"log_level": "WARNING", "enable_access_log": False}  # the access log is the ingress's


class EngineActor:
    """The machine of one replica: starts the engine's process and passes its frames on."""

    def __init__(self, index: int) -> None:
        configure_logging(default="warning")
        self.index = index
        self.socket: socket.socket | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self.connection = ""

    async def connect(self) -> AsyncIterator[bytes]:
        """Start an engine. Yields who this is, as JSON, then what the engine sends until it ends."""
        await self.disconnect()
        own, other = socket.socketpair()
        own.setblocking(False)
        try:
            self.process = launch_process(other, {})
        finally:
            other.close()
        self.socket, self.connection = own, uuid.uuid4().hex
        yield msgspec.json.encode(self.describe())
        loop = asyncio.get_running_loop()
        try:
            while data := await loop.sock_recv(own, READ_SIZE):
                yield data
        finally:
            if self.socket is own:
                await self.disconnect()

    def describe(self) -> dict[str, str]:
        context = ray.get_runtime_context()
        name = serve.get_replica_context().replica_id.to_full_id_str()
        node = f"node {context.get_node_id()[:8]}, process {os.getpid()}"
        return {"connection": self.connection, "name": f"{name} ({node})"}

    async def write(self, connection: str, data: bytes) -> None:
        """Send frames to the engine of this connection."""
        if self.socket is None or connection != self.connection:
            raise RuntimeError("this engine has ended")
        await asyncio.get_running_loop().sock_sendall(self.socket, data)

    async def disconnect(self) -> None:
        """End the engine: its process ends when the socket closes."""
        sock, self.socket = self.socket, None
        process, self.process = self.process, None
        if sock is not None:
            sock.close()
        if process is not None:
            await asyncio.to_thread(end_process, process)


def end_process(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(EXIT_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class RayConnection:
    """Frames between a client and its actor. Writes are sent in order, one call at a time."""

    def __init__(self, client: RayEngineClient, handle: DeploymentHandle, id: str) -> None:
        self.client, self.handle, self.id = client, handle, id
        self.reader = FrameReader()
        self.decoder = msgspec.msgpack.Decoder(Message)
        self.unsent = bytearray()
        self.sender: asyncio.Task[None] | None = None
        self.receiver: asyncio.Task[None] | None = None

    def write(self, message: Any) -> None:
        self.unsent += encode_frame(message)
        if self.sender is None:
            self.sender = asyncio.get_running_loop().create_task(self._send())

    async def _send(self) -> None:
        try:
            while self.unsent:
                data, self.unsent = bytes(self.unsent), bytearray()
                await self.handle.write.remote(self.id, data)
        except Exception as error:  # Ray raises many kinds; each means that the actor is gone
            self.lose(error)
        finally:
            self.sender = None

    async def receive(self, stream: AsyncIterator[bytes]) -> None:
        try:
            async for data in stream:
                for body in self.reader.push(data):
                    self.client.receive(self.decoder.decode(body))
        except Exception as error:  # as above
            self.lose(error)
        else:
            self.lose(None)

    def lose(self, error: Exception | None) -> None:
        """The actor is gone, or the engine has ended."""
        if self.client.protocol is self:
            reason = "its engine has ended" if error is None else type(error).__name__
            name = self.client.actor_name
            LOG.warning("engine %d: actor %s is lost: %s", self.client.index, name, reason)
            self.client.connection_lost()

    def close(self) -> None:
        self.client.protocol = None
        for task in (self.sender, self.receiver):
            if task is not None:
                task.cancel()


class RayEngineClient(EngineClient):
    """The engine of a Ray actor. `actor_name` says where it runs."""

    def __init__(
        self, load: LoadModel, handle: DeploymentHandle, index: int, config: ServerConfig
    ) -> None:
        super().__init__(
            load,
            stall_seconds=config.stall_seconds,
            stall_timeout=config.stall_timeout,
            index=index,
        )
        self.handle = handle
        self.actor_name = ""

    async def _connect(self) -> RayConnection:
        """Wait for an actor, which may have to be started first, and connect to it."""
        try:
            response: Any = self.handle.options(stream=True).connect.remote()
            stream = aiter(response)
            about = msgspec.json.decode(await anext(stream), type=dict[str, str])
        except Exception as error:  # Ray raises many kinds
            raise EngineLoadError(f"no actor for engine {self.index}: {error}") from error
        self.actor_name = about["name"]
        LOG.warning("engine %d runs in actor %s", self.index, self.actor_name)
        connection = RayConnection(self, self.handle, about["connection"])
        receiving = connection.receive(stream)
        connection.receiver = asyncio.get_running_loop().create_task(receiving)
        connection.write(self.load)
        return connection

    async def close(self) -> None:
        """Shut the engine down, and wait until its last frame is here."""
        self.is_closing = True
        connection = self.protocol
        if isinstance(connection, RayConnection) and connection.receiver is not None:
            connection.write(Shutdown())
            await asyncio.wait({connection.receiver}, timeout=EXIT_SECONDS)
        await super().close()

    def kill(self) -> None:
        """End the engine at once: the actor ends it when it is connected to again."""
        if self.protocol is not None:
            self.protocol.close()
            self.connection_lost()


@serve.ingress(None)
class Ingress:
    """The HTTP side: our ASGI app. There is one, since it knows what each replica has cached."""

    def __init__(self, config: ServerConfig, engines: list[DeploymentHandle]) -> None:
        configure_logging(default="warning")
        self.config, self.engines = config, engines

    def __serve_build_asgi_app__(self) -> Starlette:
        def make_client(load: LoadModel, index: int) -> EngineClient:
            return RayEngineClient(load, self.engines[index], index, self.config)

        return create_app(self.config, make_client).asgi


def build_app(config: ServerConfig, num_gpus: float) -> serve.Application:
    """The Ray Serve app: an ingress, and a deployment for each replica with `num_gpus` GPUs."""
    resources = {"num_cpus": config.threads or 1, "num_gpus": num_gpus}
    deploy: Any = serve.deployment  # a decorator, which takes a class as well
    engines = [
        deploy(EngineActor)
        .options(
            name=f"engine-{index}",
            num_replicas=1,
            max_ongoing_requests=MAX_ONGOING,
            ray_actor_options=resources,
            health_check_period_s=2,
            graceful_shutdown_wait_loop_s=0.5,
            graceful_shutdown_timeout_s=EXIT_SECONDS,
        )
        .bind(index)
        for index in range(config.replicas)
    ]
    ingress = deploy(Ingress).options(
        name="ingress",
        num_replicas=1,
        max_ongoing_requests=INGRESS_REQUESTS,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=config.drain_seconds,
    )
    app: serve.Application = ingress.bind(config, engines)
    return app


def count_replica_gpus(config: ServerConfig) -> int:
    """GPUs of a replica: one a rank, if the cluster has GPUs and the config does not say `cpu`."""
    device = str(config.engine.get("device") or "cuda")
    if config.mock or not device.startswith("cuda") or not ray.cluster_resources().get("GPU"):
        return 0
    return count_ranks(config)


def start_on_ray(config: ServerConfig, address: str | None = None) -> None:
    """Deploy the server. `address`: of a cluster; None: that of this machine, or a new one."""
    if not ray.is_initialized():
        try:
            ray.init(address=address, log_to_driver=True, configure_logging=False)
        except ConnectionError as error:
            raise ArgumentError(
                f"no Ray cluster at {address}", next="run `ray start --head` there"
            ) from error
    gpus = count_replica_gpus(config)
    check_resources(config, gpus)
    serve.start(
        proxy_location="EveryNode",
        http_options={"host": config.host, "port": config.port},
        logging_config=QUIET,
    )
    serve.run(build_app(config, gpus), name=APP_NAME, route_prefix="/", logging_config=QUIET)


def check_resources(config: ServerConfig, gpus: int) -> None:
    """ArgumentError if the cluster can never have all replicas: Ray would wait for ever."""
    resources = ray.cluster_resources()
    for kind, wanted in (("GPU", gpus), ("CPU", config.threads or 1)):
        total = int(resources.get(kind, 0))
        if wanted * config.replicas > total:
            raise ArgumentError(
                f"{config.replicas} replicas need {wanted * config.replicas} {kind}s, "
                f"but the Ray cluster has {total}",
                next="use fewer replicas, or add machines with `ray start --address`",
            )


def run_on_ray(config: ServerConfig, address: str | None = None) -> None:
    """Deploy the server, and end it with ctrl-C or SIGTERM."""
    configure_logging(default="warning")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    start_on_ray(config, address)
    print(
        f"{config.model_names[0]} on Ray · {config.replicas} replicas · ", end="", file=sys.stderr
    )
    print(f"http://{config.host}:{config.port}", file=sys.stderr, flush=True)
    try:
        threading.Event().wait()
    finally:
        serve.delete(APP_NAME)
