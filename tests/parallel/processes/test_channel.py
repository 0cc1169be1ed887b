"""Messages of rank 0 over the store: any size, in order, and deleted once all ranks have them."""

from __future__ import annotations

from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from fulgurite.parallel import Mesh
from fulgurite.parallel.processes import channel
from fulgurite.parallel.processes.channel import BroadcastChannel, get_in_parts, set_in_parts
from tests.ranks import open_once

STORE_LIMIT = 8 << 20  # bytes of one value, in torch's TCPStoreLibUvBackend


@pytest.mark.parametrize("size", [0, 1, 10, 11, 29, 30, 31])
def test_parts(monkeypatch, size: int) -> None:
    monkeypatch.setattr(channel, "PART_BYTES", 10)
    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=5))
    value = bytes(range(size))
    num_parts = set_in_parts(store, "key", value)
    assert num_parts == max(1, -(-size // 10)) and get_in_parts(store, "key") == (value, num_parts)


def exchange(size: int) -> tuple[bool, int]:
    """Whether both ways keep a value of this size; and the keys that are left, on rank 0."""
    mesh = open_once("channel", lambda: Mesh(data=2, timeout=60))
    one, value = BroadcastChannel(mesh), bytes(1000) + b"x" * size
    assert one.store is not None
    if mesh.rank == 0:
        number = one.send(value)
        taken = one.take("prompt-3")
        one.release(number)
        keys = [name for key in ("0", "post-prompt-3") for name in (key, f"{key}.1", f"{key}.2")]
        return taken == value, sum(one.store.check([name]) for name in keys)
    received = one.receive()
    one.post("prompt-3", value)
    return received == value, 0


def test_a_message_larger_than_the_store_takes_at_once(ranks) -> None:
    assert ranks(2).run(exchange, STORE_LIMIT) == [(True, 0), (True, 0)]
