"""What rank 0 says to all others: bytes in there, the same bytes out everywhere else, in order.

Between two messages any time may pass, so this is no collective with its timeout: messages lie in the
store the ranks met at, and a rank that waits for one looks around once a second. It gives up when rank 0
is gone, has failed or has left, and says so.
"""

from __future__ import annotations

import os
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore

from fulgurite.parallel.health import SLICE, STORE_TIMEOUT, Health
from fulgurite.parallel.mesh import Mesh

SPEAKER = 0
WHAT = "message of rank 0"


class Channel:
    """Every rank of a mesh has one end; rank 0 calls `send`, all others as often `receive`."""

    def __init__(self, mesh: Mesh) -> None:
        self.speaks, self.health = mesh.rank == SPEAKER, mesh.health
        self.count = 0
        self.store: Store | None = None
        if self.health is not None:
            # A connection of its own: who waits on one keeps beats from being written through it.
            host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            timeout = STORE_TIMEOUT if self.speaks else SLICE
            client = TCPStore(host, port, is_master=False, timeout=timeout)
            self.store = PrefixStore(f"fulgurite-channel-{mesh.number}", client)

    def send(self, message: bytes) -> None:
        assert self.speaks, "only rank 0 sends"
        if self.store is not None and self.health is not None:
            sending = _Sending(self.store, str(self.count), message)
            self.health.finish(WHAT, sending.start, on_host=True)
            # Whoever took part in the last step has read what came before it.
            self.store.delete_key(str(self.count - 2))
        self.count += 1

    def receive(self) -> bytes:
        """The next message, whenever it comes."""
        assert not self.speaks and self.store is not None, "rank 0 does not hear itself"
        assert self.health is not None, "ranks that are many have one"
        waiting = _Waiting(self.store, str(self.count), self.health)
        self.health.finish(WHAT, lambda: waiting, on_host=True)
        self.count += 1
        return waiting.message


class _Sending:
    """A message being set, in the shape of a collective: so both ends count alike."""

    def __init__(self, store: Store, key: str, message: bytes) -> None:
        self.store, self.key, self.message = store, key, message

    def start(self) -> _Sending:
        self.store.set(self.key, self.message)
        return self

    def wait(self, timeout: timedelta) -> None:
        return None


class _Waiting:
    """The wait for a message, in the shape of a collective."""

    def __init__(self, store: Store, key: str, health: Health) -> None:
        self.store, self.key, self.health = store, key, health
        self.message = b""

    def wait(self, timeout: timedelta) -> None:
        """Until it is there, or for as long as the store's connection has patience."""
        self.message = self.store.get(self.key)

    def is_completed(self) -> bool:
        """Asked after a wait in vain: whether another one makes no sense."""
        return self.health.has_left(SPEAKER)
