"""`python -m fulgurite.serve.remote.engine_main FD`: the process of an engine.

In: `LoadModel`, then commands, as frames on the socket FD. Out: `Ready` or `LoadFailed`, then reports.
It ends when the socket closes, so that no engine outlives its server.
"""

from __future__ import annotations

import gc
import signal
import socket
import sys
import time

from fulgurite.errors import FulguriteError
from fulgurite.logs import LOG, configure_logging
from fulgurite.process_exit import run_program
from fulgurite.serve.remote.channel import Channel
from fulgurite.serve.remote.engine_interface import ServedEngine
from fulgurite.serve.remote.engine_loop import EngineLoop
from fulgurite.serve.remote.launch import read_process_age
from fulgurite.serve.remote.messages import Command, LoadFailed, LoadModel, Ready
from fulgurite.serve.remote.mock import MockEngine


def run_engine(sock: socket.socket, process_seconds: float | None = None) -> int:
    """Load the model of the first message and serve it until the socket closes.

    `process_seconds`: what the start of the engine's own process has taken so far; None: it runs in a
    thread of another's.
    """
    channel = Channel(sock, LoadModel | Command)
    try:
        request = receive_load(channel)
        if request is None:
            return 0
        try:
            engine = build_engine(request, process_seconds or 0.0)
        except FulguriteError as error:
            send_and_flush(channel, LoadFailed(str(error)))
            return 1
        except Exception as error:  # the server must hear of it before this process ends
            LOG.exception("the model can't be loaded")
            send_and_flush(channel, LoadFailed(f"{type(error).__name__}: {error}"))
            return 1
        if process_seconds is not None:  # a thread would freeze the garbage of its process for ever
            gc.collect()
            gc.freeze()  # the model's objects: later collections skip them
        channel.send(Ready(engine.info))
        EngineLoop(engine, channel, faults=request.faults).run()
        return 0
    finally:
        channel.close()


def receive_load(channel: Channel) -> LoadModel | None:
    while not channel.is_closed:
        for message in channel.receive(timeout=1.0):
            assert isinstance(message, LoadModel), "the first message loads the model"
            return message
    return None


def build_engine(request: LoadModel, started_seconds: float = 0.0) -> ServedEngine:
    """The engine of a message. The mock engine needs no torch: nothing imports it."""
    if request.mock is not None:
        return MockEngine(**request.mock)
    start = time.perf_counter()
    from fulgurite.serve.remote.served_engine import load_engine

    return load_engine(request, started_seconds + time.perf_counter() - start)


def send_and_flush(channel: Channel, message: object) -> None:
    """Send a last message before the process ends."""
    channel.send(message)
    deadline = time.monotonic() + 5.0
    while channel.unsent and not channel.is_closed and time.monotonic() < deadline:
        channel.receive(timeout=0.1)


def main() -> int:
    configure_logging(default="warning")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C is for the server, which drains first
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return run_engine(socket.socket(fileno=int(sys.argv[1])), read_process_age())


if __name__ == "__main__":
    run_program(main)
