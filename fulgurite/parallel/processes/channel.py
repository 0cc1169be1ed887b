"""Broadcast of messages from rank 0: bytes in on rank 0, the same bytes out on all others, in order.

Any time may pass between two messages, so this is not a collective with a timeout. Messages are keys of
the store that the ranks use, until rank 0 knows that all ranks have them (`release`). A rank that waits
for one checks once a second whether rank 0 is gone, has failed or has left, and raises an error if so.
"""

from __future__ import annotations

import os
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore

from fulgurite.parallel.health import STORE_TIMEOUT, WAIT_SLICE, HealthMonitor
from fulgurite.parallel.mesh import Mesh

SENDER_RANK = 0
MESSAGE_LABEL = "message of rank 0"


class BroadcastChannel:
    """One end a rank: rank 0 calls `send`, every other rank calls `receive` equally often."""

    def __init__(self, mesh: Mesh) -> None:
        self.is_sender, self.health = mesh.rank == SENDER_RANK, mesh.health
        self.count = 0
        self.num_released = 0
        self.store: Store | None = None
        if self.health is not None:
            # A connection of its own: a wait would block the heartbeats on a shared one.
            host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            timeout = STORE_TIMEOUT if self.is_sender else WAIT_SLICE
            client = TCPStore(host, port, is_master=False, timeout=timeout)
            self.store = PrefixStore(f"fulgurite-channel-{mesh.mesh_number}", client)

    def send(self, message: bytes) -> int:
        """Send a message; returns its number."""
        assert self.is_sender, "only rank 0 sends"
        if self.store is not None and self.health is not None:
            pending = _PendingSend(self.store, str(self.count), message)
            self.health.run_collective(MESSAGE_LABEL, pending.start, on_host=True, begins_step=True)
        self.count += 1
        return self.count - 1

    def release(self, number: int) -> None:
        """Delete the messages up to this one: every rank has received them."""
        while self.store is not None and self.num_released <= number:
            self.store.delete_key(str(self.num_released))
            self.num_released += 1

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

    def start(self) -> _PendingSend:
        self.store.set(self.key, self.message)
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
        self.message = self.store.get(self.key)

    def is_completed(self) -> bool:
        """Whether waiting again is pointless, since the sender left."""
        return self.health.has_left(SENDER_RANK)
