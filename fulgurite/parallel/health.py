"""Who is still there: every rank beats in the store; a collective that failed asks who stopped.

In: a store that all ranks reach. Out: for a collective that failed or ran out of time, an error that
names the rank to look at.

    rank 3 is gone                          its beat stopped: the process died
    rank 3 did not come to 'dispatch'       it lives, and stands at an earlier collective
    rank 3 left                             it closed its mesh while others still waited

A rank writes one short line twice a second from a thread of its own, so it also beats while it waits
inside a collective. Beats are compared with earlier ones, never with a clock of another machine.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore

from fulgurite.errors import RankError

INTERVAL = 0.5  # seconds between two beats
# A rank without a beat for so long is gone: after a failure, where only a busy machine may delay beats;
PATIENCE = 6.0
# and without one, where a compiler may have kept the other threads of a rank from running.
SILENCE = 30.0
STORE_TIMEOUT = timedelta(seconds=10)
SLICE = timedelta(seconds=1)

Start = Callable[[], Any]  # begins a collective; what it gives can be waited for


@dataclass(frozen=True)
class Beat:
    """What a rank last said: `count` grows while it lives; `step` collectives were entered."""

    count: int
    step: int
    what: str
    state: str  # running, failed (it has raised an error already) or left

    @property
    def text(self) -> str:
        return f"{self.count}|{self.step}|{self.state}|{self.what}"

    @staticmethod
    def read(text: str) -> Beat:
        count, step, state, what = text.split("|", 3)
        return Beat(int(count), int(step), what, state)


SILENT = Beat(0, 0, "before the start", "running")


class Health:
    """The beat of this rank, and the question about the others."""

    def __init__(
        self,
        number: int,
        host: str,
        port: int,
        rank: int,
        ranks: int,
        timeout: float,
        patience: float = PATIENCE,
    ) -> None:
        self.rank, self.ranks = rank, ranks
        self.timeout, self.patience = timeout, patience
        self.place = f"{host}:{port}"
        client = TCPStore(host, port, is_master=False, timeout=STORE_TIMEOUT)
        self.store: Store = PrefixStore(f"fulgurite-health-{number}", client)
        self.beat = Beat(0, 0, "start", "running")
        self.heard: dict[
            int, tuple[int, float]
        ] = {}  # rank -> its last count, and when that was new
        self.lock = threading.Lock()
        self.stopping = threading.Event()
        self._publish()
        self.thread = threading.Thread(target=self._run, name="fulgurite-health", daemon=True)
        self.thread.start()

    def finish(self, what: str, start: Start, on_host: bool) -> None:
        """Start a collective and wait for it: counted, and if it fails, explained.

        `on_host`: the wait ends when the data is there, and not just when a stream knows of it.
        """
        self._say(step=self.beat.step + 1, what=what)
        try:
            work = start()
            if on_host:
                self._wait(work)
            else:
                work.wait()
        except RuntimeError as error:  # what torch.distributed raises, whatever the backend
            raise self.explain(what, error) from error

    def _wait(self, work: Any) -> None:
        """Wait in slices: a rank that hears of trouble need not sit out the whole timeout."""
        while True:
            try:
                work.wait(SLICE)
                return
            except RuntimeError:
                if work.is_completed() or self._trouble():
                    raise

    def _trouble(self) -> bool:
        """Whether some rank has failed, or has not been heard for longer than it may. One that left is
        no trouble yet: it may have done its part of this before."""
        now = time.monotonic()
        for rank, beat in self._beats().items():
            count, since = self.heard.get(rank, (-1, now))
            if beat.count != count:
                self.heard[rank], since = (beat.count, now), now
            silent = beat.state == "running" and now - since > SILENCE
            if rank != self.rank and (silent or beat.state == "failed"):
                return True
        return False

    def has_left(self, rank: int) -> bool:
        """Whether a rank closed its mesh."""
        return self._beats()[rank].state == "left"

    def explain(self, what: str, error: RuntimeError) -> RankError:
        """Who is the reason that the collective `what` failed here."""
        self._say(state="failed", publish=True)
        first, last, seconds = {}, {}, 0.0
        started = time.monotonic()
        try:
            first = last = self._beats()
            while not self._settled(first, last) and seconds < self.patience:
                time.sleep(INTERVAL / 2)
                last, seconds = self._beats(), time.monotonic() - started
        except RuntimeError:
            return RankError(
                f"'{what}' failed, and so did the store at {self.place}: its host is gone",
                where=f"rank {self.rank}",
                next="rank 0 hosts the store unless torchrun or parallel.launch started the ranks: "
                "look at its last lines",
            )
        return self._verdict(what, error, first, last)

    def close(self) -> None:
        """This rank leaves in good order."""
        if not self.stopping.is_set():
            self.stopping.set()
            self.thread.join()
            try:
                self._say(state="left", publish=True)
            except RuntimeError:
                return  # the store went first, and nobody is left to be told

    def _verdict(
        self, what: str, error: RuntimeError, first: dict[int, Beat], last: dict[int, Beat]
    ) -> RankError:
        silent = {r for r in last if last[r].count == first[r].count and r != self.rank}
        gone = [r for r in silent if last[r].state == "running"]
        left = [r for r in last if last[r].state == "left"]
        step = self.beat.step
        behind = [r for r in last if last[r].step < step and r not in silent and r not in left]
        place = f"rank {self.rank} of {self.ranks}, step {step}"
        reason = str(error).splitlines()[0][:200]
        if gone:
            text = f"{_ranks(gone)} gone: '{what}' can't be finished without"
            next = "look at the last lines of that process; start all ranks again"
        elif behind:
            at = "; ".join(f"rank {r} is at step {last[r].step}, '{last[r].what}'" for r in behind)
            text = f"{_ranks(behind, 'did not come')} to '{what}' in {self.timeout:g} s: {at}"
            next = "every rank must make the same calls in the same order, also with no tokens"
        elif left:
            text = f"{_ranks(left, 'left')} while others waited in '{what}'"
            next = "every rank must make the same calls in the same order, also with no tokens"
        else:
            text = f"'{what}' failed though all {self.ranks} ranks are alive"
            next = "all ranks have been told; the first error of all of them is the cause"
        return RankError(
            text, where=place, reason=reason, next=next, ranks=tuple(gone or behind or left)
        )

    def _settled(self, first: dict[int, Beat], last: dict[int, Beat]) -> bool:
        """Whether every rank has been heard again, or has said why it won't be."""
        others = (rank for rank in last if rank != self.rank)
        return all(last[r].count != first[r].count or last[r].state != "running" for r in others)

    def _beats(self) -> dict[int, Beat]:
        """What every rank said last; a rank that has not started yet has said nothing."""
        keys = [str(rank) for rank in range(self.ranks)]
        there = [key for key in keys if self.store.check([key])]  # get would wait for the others
        texts = self.store.multi_get(there) if there else []
        found = {int(key): Beat.read(text.decode()) for key, text in zip(there, texts, strict=True)}
        return {rank: found.get(rank, SILENT) for rank in range(self.ranks)}

    def _say(
        self,
        step: int | None = None,
        what: str | None = None,
        state: str | None = None,
        publish: bool = False,
    ) -> None:
        with self.lock:
            old = self.beat
            self.beat = Beat(
                old.count,
                old.step if step is None else step,
                old.what if what is None else what,
                old.state if state is None else state,
            )
        if publish:
            self._publish()

    def _publish(self) -> None:
        with self.lock:
            self.beat = Beat(self.beat.count + 1, self.beat.step, self.beat.what, self.beat.state)
            text = self.beat.text
        self.store.set(str(self.rank), text)

    def _run(self) -> None:
        while not self.stopping.wait(INTERVAL):
            try:
                self._publish()
            except RuntimeError:
                return  # the store is gone; the next collective that fails will say so


def _ranks(ranks: list[int], verb: str | None = None) -> str:
    """'rank 3 is', 'ranks 1, 3 are', or with another verb."""
    many = len(ranks) > 1
    names = f"rank{'s' if many else ''} {', '.join(map(str, sorted(ranks)))}"
    return f"{names} {verb or ('are' if many else 'is')}"
