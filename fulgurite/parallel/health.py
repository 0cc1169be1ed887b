"""Health of ranks: heartbeats in a store; for a failed collective, the rank that is the cause.

In: a store that all ranks reach. Out: if a collective fails or times out, an error that names a rank.

    rank 3 is gone                        its heartbeat stopped: the process died
    rank 3 did not reach 'dispatch'       it is alive, and at an earlier collective
    rank 3 left                           it closed its mesh while others still waited

Each rank writes a heartbeat twice a second from a thread of its own, also while it waits in a
collective. Heartbeats are compared with earlier ones, never with the clock of another machine.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore

from fulgurite.errors import RankError

HEARTBEAT_INTERVAL = 0.5  # seconds
# A rank without a heartbeat for so many seconds is gone: after a failure, when only a busy machine
# delays heartbeats,
DIAGNOSIS_TIMEOUT = 6.0
# and before one, when a compiler may have blocked the other threads of a rank.
HEARTBEAT_TIMEOUT = 30.0
STORE_TIMEOUT = timedelta(seconds=10)
WAIT_SLICE = timedelta(seconds=1)

StartCollective = Callable[[], Any]  # starts a collective and returns its work handle


@dataclass(frozen=True)
class Heartbeat:
    """The state of a rank: `count` grows while it is alive; it has entered `step` collectives."""

    count: int
    step: int
    collective: str
    state: str  # running, failed (it has raised an error already) or left

    @property
    def text(self) -> str:
        return f"{self.count}|{self.step}|{self.state}|{self.collective}"

    @staticmethod
    def parse(text: str) -> Heartbeat:
        count, step, state, collective = text.split("|", 3)
        return Heartbeat(int(count), int(step), collective, state)


NOT_STARTED = Heartbeat(0, 0, "before the start", "running")


class HealthMonitor:
    """Publishes the heartbeat of this rank, and finds the cause of failed collectives.

    mesh_number         number of the mesh among those at the same store
    world_size          number of ranks
    timeout             seconds of a collective
    diagnosis_timeout   seconds to wait for heartbeats after a failure
    """

    def __init__(
        self,
        mesh_number: int,
        host: str,
        port: int,
        rank: int,
        world_size: int,
        timeout: float,
        diagnosis_timeout: float = DIAGNOSIS_TIMEOUT,
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self.timeout, self.diagnosis_timeout = timeout, diagnosis_timeout
        self.store_address = f"{host}:{port}"
        client = TCPStore(host, port, is_master=False, timeout=STORE_TIMEOUT)
        self.store: Store = PrefixStore(f"fulgurite-health-{mesh_number}", client)
        self.heartbeat = Heartbeat(0, 0, "start", "running")
        # By rank: the last heartbeat count, and the time at which it was new.
        self.last_seen: dict[int, tuple[int, float]] = {}
        self.lock = threading.Lock()
        self.stopping = threading.Event()
        self._publish()
        self.thread = threading.Thread(target=self._run, name="fulgurite-health", daemon=True)
        self.thread.start()

    def run_collective(self, label: str, start: StartCollective, on_host: bool) -> None:
        """Start a collective and wait for it; RankError with the cause if it fails.

        `on_host`: wait until the data is there, and not only until the stream waits for it.
        """
        self._update(step=self.heartbeat.step + 1, collective=label)
        try:
            work = start()
            if on_host:
                self._wait(work)
            else:
                work.wait()
        except RuntimeError as error:  # all backends of torch.distributed raise it
            raise self.explain(label, error) from error

    def _wait(self, work: Any) -> None:
        """Wait in slices, so that a failure of another rank ends the wait before the timeout."""
        while True:
            try:
                work.wait(WAIT_SLICE)
                return
            except RuntimeError:
                if work.is_completed() or self._has_failed_rank():
                    raise

    def _has_failed_rank(self) -> bool:
        """Whether a rank has failed or its heartbeat has stopped.

        A rank that left does not count: it may have done its part of this collective before.
        """
        now = time.monotonic()
        for rank, heartbeat in self._read_heartbeats().items():
            count, since = self.last_seen.get(rank, (-1, now))
            if heartbeat.count != count:
                self.last_seen[rank], since = (heartbeat.count, now), now
            is_silent = heartbeat.state == "running" and now - since > HEARTBEAT_TIMEOUT
            if rank != self.rank and (is_silent or heartbeat.state == "failed"):
                return True
        return False

    def has_left(self, rank: int) -> bool:
        """Whether a rank closed its mesh."""
        return self._read_heartbeats()[rank].state == "left"

    def explain(self, label: str, error: RuntimeError) -> RankError:
        """The error of a failed collective, with the rank that is the cause."""
        self._update(state="failed", publish=True)
        first, last, seconds = {}, {}, 0.0
        started = time.monotonic()
        try:
            first = last = self._read_heartbeats()
            while not self._is_settled(first, last) and seconds < self.diagnosis_timeout:
                time.sleep(HEARTBEAT_INTERVAL / 2)
                last, seconds = self._read_heartbeats(), time.monotonic() - started
        except RuntimeError:
            return RankError(
                f"'{label}' failed, and the store at {self.store_address} is gone, too",
                where=f"rank {self.rank}",
                next="rank 0 hosts the store unless torchrun or parallel.launch started the ranks: "
                "look at its last output",
            )
        return self._diagnose(label, error, first, last)

    def close(self) -> None:
        """Leave the mesh in good order."""
        if not self.stopping.is_set():
            self.stopping.set()
            self.thread.join()
            try:
                self._update(state="left", publish=True)
            except RuntimeError:
                return  # the store is gone, and with it all who could read this

    def _diagnose(
        self,
        label: str,
        error: RuntimeError,
        first: dict[int, Heartbeat],
        last: dict[int, Heartbeat],
    ) -> RankError:
        silent = {r for r in last if last[r].count == first[r].count and r != self.rank}
        gone = [r for r in silent if last[r].state == "running"]
        left = [r for r in last if last[r].state == "left"]
        step = self.heartbeat.step
        behind = [r for r in last if last[r].step < step and r not in silent and r not in left]
        if gone:
            text = f"{_format_ranks(gone)} gone: '{label}' can't finish"
            next = "look at the last output of that process; start all ranks again"
        elif behind:
            steps = "; ".join(
                f"rank {r} is at step {last[r].step}, '{last[r].collective}'" for r in behind
            )
            ranks = _format_ranks(behind, "did not reach")
            text = f"{ranks} '{label}' in {self.timeout:g} s: {steps}"
            next = "all ranks must make the same calls in the same order, also without tokens"
        elif left:
            text = f"{_format_ranks(left, 'left')} while others waited in '{label}'"
            next = "all ranks must make the same calls in the same order, also without tokens"
        else:
            text = f"'{label}' failed, but all {self.world_size} ranks are alive"
            next = "see the first error of all ranks: it is the cause"
        return RankError(
            text,
            where=f"rank {self.rank} of {self.world_size}, step {step}",
            reason=str(error).splitlines()[0][:200],
            next=next,
            ranks=tuple(gone or behind or left),
        )

    def _is_settled(self, first: dict[int, Heartbeat], last: dict[int, Heartbeat]) -> bool:
        """Whether every other rank has a new heartbeat, or has failed or left."""
        others = (rank for rank in last if rank != self.rank)
        return all(last[r].count != first[r].count or last[r].state != "running" for r in others)

    def _read_heartbeats(self) -> dict[int, Heartbeat]:
        """The last heartbeat of every rank."""
        keys = [str(rank) for rank in range(self.world_size)]
        present = [
            key for key in keys if self.store.check([key])
        ]  # `get` would wait for missing keys
        texts = self.store.multi_get(present) if present else []
        found = {
            int(key): Heartbeat.parse(text.decode())
            for key, text in zip(present, texts, strict=True)
        }
        return {rank: found.get(rank, NOT_STARTED) for rank in range(self.world_size)}

    def _update(
        self,
        step: int | None = None,
        collective: str | None = None,
        state: str | None = None,
        publish: bool = False,
    ) -> None:
        with self.lock:
            old = self.heartbeat
            self.heartbeat = Heartbeat(
                old.count,
                old.step if step is None else step,
                old.collective if collective is None else collective,
                old.state if state is None else state,
            )
        if publish:
            self._publish()

    def _publish(self) -> None:
        with self.lock:
            self.heartbeat = replace(self.heartbeat, count=self.heartbeat.count + 1)
            text = self.heartbeat.text
        self.store.set(str(self.rank), text)

    def _run(self) -> None:
        while not self.stopping.wait(HEARTBEAT_INTERVAL):
            try:
                self._publish()
            except RuntimeError:
                return  # the store is gone; the next failed collective reports it


def _format_ranks(ranks: list[int], verb: str | None = None) -> str:
    """'rank 3 is', 'ranks 1, 3 are', or with another verb."""
    many = len(ranks) > 1
    names = f"rank{'s' if many else ''} {', '.join(map(str, sorted(ranks)))}"
    return f"{names} {verb or ('are' if many else 'is')}"
