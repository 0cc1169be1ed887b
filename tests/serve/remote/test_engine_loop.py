"""`EngineLoop`: commands that fail, steps that fail, reports; driven by hand, without a thread."""

from __future__ import annotations

import socket
from typing import Any

import msgspec
import pytest

from fulgurite.serve.remote.channel import Channel, FrameReader, encode_frame
from fulgurite.serve.remote.engine_loop import MAX_FAILED_STEPS, EngineLoop
from fulgurite.serve.remote.messages import (
    Audit,
    Cancel,
    Command,
    Done,
    Generate,
    InjectFault,
    Message,
    Rejected,
    Report,
    Shutdown,
)
from fulgurite.serve.remote.mock import MockEngine


class Broken(MockEngine):
    """Every step raises."""

    can_continue = True  # type: ignore[assignment]
    failed = 0

    def step(self) -> None:
        super().step()
        raise RuntimeError("broken")

    def fail_step(self, reason: str) -> None:
        self.failed += 1
        super().fail_step(reason)


class Harness:
    """A loop and the other end of its socket."""

    def __init__(self, engine: MockEngine, faults: bool = False) -> None:
        own, self.socket = socket.socketpair()
        self.loop = EngineLoop(engine, Channel(own, Command), faults=faults)
        self.reader, self.decoder = FrameReader(), msgspec.msgpack.Decoder(Message)

    def send(self, *commands: Any) -> None:
        self.socket.sendall(b"".join(map(encode_frame, commands)))

    def receive(self) -> list[Any]:
        self.socket.setblocking(False)
        try:
            return [*map(self.decoder.decode, self.reader.push(self.socket.recv(1 << 20)))]
        except BlockingIOError:
            return []


def generate(id: int, max_tokens: int = 8, prompt: tuple[int, ...] = (1,)) -> Generate:
    return Generate(id, [*prompt], {"max_tokens": max_tokens, "ignore_eos": True})


def test_commands_are_answered_until_shutdown():
    harness = Harness(MockEngine(tokens_per_step=4))
    harness.send(generate(1), generate(2, prompt=()), Audit(3), Shutdown())
    harness.loop.run()
    messages = harness.receive()
    assert [type(one) for one in messages[:2]] == [Rejected, Done]
    assert messages[0].id == 2 and messages[1].id == 3


def test_updates_of_a_request_are_merged_into_one_report():
    engine = MockEngine(tokens_per_step=4)
    harness = Harness(engine)
    harness.loop.run_command(generate(1, max_tokens=12))
    while engine.has_unfinished_requests:
        harness.loop.step()
    harness.loop.flush_if_due()
    [report] = harness.receive()
    assert isinstance(report, Report)
    [update] = report.updates
    assert len(update.token_ids) == 12 and update.finish is not None
    assert report.progress.steps == 3


def test_the_loop_gives_up_after_several_failures_in_a_row():
    engine = Broken()
    harness = Harness(engine)
    for number in range(MAX_FAILED_STEPS - 1):
        harness.loop.run_command(generate(number))
        harness.loop.step()
    assert engine.failed == MAX_FAILED_STEPS - 1 and not engine.has_unfinished_requests
    harness.loop.run_command(generate(99))
    with pytest.raises(RuntimeError, match="broken"):
        harness.loop.step()


def test_an_engine_of_several_ranks_gives_up_at_once():
    engine = Broken()
    engine.can_continue = False  # type: ignore[assignment]
    harness = Harness(engine)
    harness.loop.run_command(generate(1))
    with pytest.raises(RuntimeError, match="broken"):
        harness.loop.step()


def test_unknown_requests_are_cancelled_without_harm():
    harness = Harness(MockEngine())
    harness.loop.run_command(Cancel([5, 6]))
    harness.loop.run_command(generate(5))
    harness.loop.run_command(Cancel([5, 5]))
    assert not harness.loop.engine.has_unfinished_requests


def test_the_loop_ends_when_the_server_is_gone():
    harness = Harness(MockEngine())
    harness.send(generate(1, max_tokens=1000))
    harness.socket.close()
    harness.loop.run()
    assert harness.loop.channel.is_closed


def test_faults_need_permission():
    harness = Harness(MockEngine())
    harness.loop.run_command(InjectFault("exit"))  # would end this process
    assert harness.loop.fault is None
    allowed = Harness(MockEngine(), faults=True)
    allowed.loop.run_command(InjectFault("oom"))
    allowed.loop.run_command(generate(1))
    allowed.loop.step()
    assert allowed.loop.failed_steps == 1
