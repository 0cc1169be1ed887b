"""Frames: whatever way a stream is cut, messages come out whole and in order."""

from __future__ import annotations

import random
import resource
import socket
import threading

import msgspec
import pytest

from fulgurite.serve.remote.channel import LENGTH, MAX_FRAME, Channel, FrameReader, encode_frame
from fulgurite.serve.remote.messages import Cancel, Command, Generate


def make_messages(rng: random.Random, count: int) -> list[Generate | Cancel]:
    return [
        Cancel([rng.randrange(1 << 40)])
        if rng.random() < 0.5
        else Generate(number, [1] * rng.randrange(3000), {"temperature": rng.random()})
        for number in range(count)
    ]


@pytest.mark.parametrize("seed", range(5))
def test_frames_of_a_stream_that_is_cut_anywhere(seed):
    rng = random.Random(seed)
    messages = make_messages(rng, 30)
    stream = b"".join(map(encode_frame, messages))
    reader, decoder, found, start = FrameReader(), msgspec.msgpack.Decoder(Command), [], 0
    while start < len(stream):
        size = rng.choice((1, 3, 100, 5000))
        found += map(decoder.decode, reader.push(stream[start : start + size]))
        start += size
    assert found == messages and not reader.buffer


def test_a_damaged_stream_is_noticed():
    with pytest.raises(ValueError, match="damaged"):
        list(FrameReader().push(LENGTH.pack(MAX_FRAME + 1)))


def test_a_channel_does_not_wait_for_a_slow_reader():
    """All messages are taken at once, and arrive when the other side reads."""
    own, other = socket.socketpair()
    channel = Channel(own, Command)
    messages = [Generate(number, [number] * 50_000, {}) for number in range(20)]
    for message in messages:
        channel.send(message)
    assert channel.unsent
    received: list[object] = []

    def read() -> None:
        reader, decoder = FrameReader(), msgspec.msgpack.Decoder(Command)
        while len(received) < len(messages):
            received.extend(map(decoder.decode, reader.push(other.recv(65536))))

    thread = threading.Thread(target=read)
    thread.start()
    while channel.unsent:
        channel.receive(timeout=1.0)
    thread.join()
    assert received == messages
    other.close()
    assert channel.receive(timeout=1.0) == [] and channel.is_closed
    channel.send(messages[0])  # nobody reads: no error
    channel.close()


def test_sockets_with_large_numbers():
    """A server with a thousand connections starts an engine again: `select` could not wait for it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 1200:
        pytest.skip("the machine allows too few files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (1200, hard))
    held = []
    try:
        while not held or held[-1].fileno() < 1100:
            held.append(socket.socket())
        own, other = socket.socketpair()
        assert own.fileno() > 1024
        channel = Channel(own, Command)
        other.sendall(encode_frame(Cancel([7])))
        assert channel.receive(timeout=1.0) == [Cancel([7])]
        channel.close()
        other.close()
    finally:
        for sock in held:
            sock.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
