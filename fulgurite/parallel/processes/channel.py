"""Broadcast of messages from rank 0: bytes in on rank 0, the same bytes out on all others, in order.

Any time may pass between two messages, so this is not a collective with a timeout. Messages are keys of
the store that the ranks use, until rank 0 knows that all ranks have them (`release`). A rank that waits
for one checks once a second whether rank 0 is gone, has failed or has left, and raises an error if so.

A rank may also have something for rank 0 alone (`post`), which takes it once it knows of it. Nothing
waits for that: the rank has posted it before rank 0 learns of it in a collective.

The store takes 8 MiB at once, so what is larger goes in parts.
"""

from __future__ import annotations

import os
import struct
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore

from fulgurite.parallel.health import STORE_TIMEOUT, WAIT_SLICE, HealthMonitor
from fulgurite.parallel.mesh import Mesh

SENDER_RANK = 0
MESSAGE_LABEL = "message of rank 0"
PART_BYTES = (
    4 << 20
)  # of one value of the store; torch's server drops a connection that sends over 8 MiB
NUM_PARTS = struct.Struct("<I")  # before the first part


class BroadcastChannel:
    """One end a rank: rank 0 calls `send`, every other rank calls `receive` equally often."""

    def __init__(self, mesh: Mesh) -> None:
        self.is_sender, self.health = mesh.rank == SENDER_RANK, mesh.health
        self.count = 0
        self.num_released = 0
        self.num_parts: dict[int, int] = {}  # of messages that are not released
        self.store: Store | None = None
        if self.health is not None:
            # A connection of its own: a wait would block the heartbeats on a shared one.
            host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            client = TCPStore(host, port, is_master=False, timeout=STORE_TIMEOUT)
            if not self.is_sender:
                client.set_timeout(WAIT_SLICE)  # not of the connection: a busy machine needs longer
            self.store = PrefixStore(f"fulgurite-channel-{mesh.mesh_number}", client)

    def send(self, message: bytes) -> int:
        """Send a message; returns its number."""
        assert self.is_sender, "only rank 0 sends"
        if self.store is not None and self.health is not None:
            pending = _PendingSend(self.store, str(self.count), message)
            self.health.run_collective(MESSAGE_LABEL, pending.start, on_host=True, begins_step=True)
            self.num_parts[self.count] = pending.num_parts
        self.count += 1
        return self.count - 1

    def release(self, number: int) -> None:
        """Delete the messages up to this one: every rank has received them."""
        while self.store is not None and self.num_released <= number:
            for part in range(self.num_parts.pop(self.num_released)):
                self.store.delete_key(_part_key(str(self.num_released), part))
            self.num_released += 1

    def post(self, key: str, value: bytes) -> None:
        """Leave something for rank 0."""
        assert self.store is not None, "several ranks have a store"
        set_in_parts(self.store, f"post-{key}", value)

    def take(self, key: str) -> bytes:
        """On rank 0: what a rank has posted, which is then deleted."""
        assert self.is_sender and self.store is not None, "only rank 0 takes what others post"
        value, num_parts = get_in_parts(self.store, f"post-{key}")
        for part in range(num_parts):
            self.store.delete_key(_part_key(f"post-{key}", part))
        return value

    def receive(self) -> bytes:
        """The next message, whenever it comes."""
        assert not self.is_sender and self.store is not None, "rank 0 only sends"
        assert self.health is not None, "several ranks have a health monitor"
        pending = _PendingReceive(self.store, str(self.count), self.health)
        self.health.run_collective(MESSAGE_LABEL, lambda: pending, on_host=True, begins_step=True)
        self.count += 1
        return pending.message


class _PendingSend:
    """A send with the interface of a collective, so that both ends count the same steps."""

    def __init__(self, store: Store, key: str, message: bytes) -> None:
        self.store, self.key, self.message = store, key, message
        self.num_parts = 0

    def start(self) -> _PendingSend:
        self.num_parts = set_in_parts(self.store, self.key, self.message)
        return self

    def wait(self, timeout: timedelta) -> None:
        return None


class _PendingReceive:
    """The wait for a message, with the interface of a collective."""

    def __init__(self, store: Store, key: str, health: HealthMonitor) -> None:
        self.store, self.key, self.health = store, key, health
        self.message = b""

    def wait(self, timeout: timedelta) -> None:
        """Wait for the message, up to the timeout of the store's connection."""
        self.message, _ = get_in_parts(self.store, self.key)

    def is_completed(self) -> bool:
        """Whether waiting again is pointless, since the sender left."""
        return self.health.has_left(SENDER_RANK)


def set_in_parts(store: Store, key: str, value: bytes) -> int:
    """Set a value of any size; returns the number of its parts."""
    num_parts = max(1, -(-len(value) // PART_BYTES))
    for part in reversed(range(num_parts)):  # whoever sees the first one finds the others, too
        data = value[part * PART_BYTES : (part + 1) * PART_BYTES]
        header = NUM_PARTS.pack(num_parts) if part == 0 else b""
        store.set(_part_key(key, part), header + data)
    return num_parts


def get_in_parts(store: Store, key: str) -> tuple[bytes, int]:
    """Wait for a value of `set_in_parts`; it, and the number of its parts."""
    first = store.get(_part_key(key, 0))
    (num_parts,) = NUM_PARTS.unpack_from(first)
    rest = [store.get(_part_key(key, part)) for part in range(1, num_parts)]
    return b"".join([first[NUM_PARTS.size :], *rest]), num_parts


def _part_key(key: str, part: int) -> str:
    return key if part == 0 else f"{key}.{part}"
