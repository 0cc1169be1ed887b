"""Health of ranks: heartbeats in a store; for a failed collective, the rank that is the cause.

In: a store that all ranks reach. Out: if a collective fails or times out, an error that names a rank.

    rank 3 is gone                        its process ended: whoever started it has seen it
    rank 3 is stopped                     its heartbeat stopped, but its process did not end
    rank 3 did not reach 'dispatch'       it is alive, and at an earlier collective
    rank 3 left                           it closed its mesh while others still waited
    rank 3 failed before                  it has raised an error of its own

Each rank writes a heartbeat twice a second from a thread of its own, also while it waits in a
collective. Heartbeats are compared with earlier ones, never with the clock of another machine. A
process that starts ranks and waits for them (processes/) also writes how a rank's process
ended, so that ranks need not wait for a heartbeat.

A slow rank is no failure. Heartbeats have the seconds that a rank worked between the collectives of
its steps; rank 0 compares them and warns (`RankTime`).
"""

from __future__ import annotations

import json
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from signal import Signals
from typing import Any, Generic, TypeVar

from torch.distributed import PrefixStore, Store, TCPStore

from fulgurite.errors import RankError
from fulgurite.logs import LOG
from fulgurite.running_clock import RunningClock

HEARTBEAT_INTERVAL = 0.5  # seconds
# A rank without a heartbeat for so many seconds is gone: after a failure, when only a busy machine
# delays heartbeats,
DIAGNOSIS_TIMEOUT = 6.0
# and before one, when a compiler may have blocked the other threads of a rank.
HEARTBEAT_TIMEOUT = 30.0
STORE_TIMEOUT = timedelta(seconds=10)
WAIT_SLICE = timedelta(seconds=1)
STACK_TIMEOUT = 3.0  # seconds that a rank has to answer with its stack
STACK_FRAMES = 4  # the innermost ones
STACK_REQUEST = "stack-request"
CONNECTION_ERRORS = ("timed out connecting", "Connection refused", "No route to host")  # of gloo
EXITS_PREFIX, EXITS_KEY = "fulgurite-exits", "exits"

# A rank is slow if it works so many times longer than the others, and so many seconds a step longer,
# over so many steps.
SLOW_RATIO = 2.0
SLOW_SECONDS = 0.002
SLOW_STEPS = 100
COMPARE_INTERVAL = 5.0  # seconds between comparisons

Value = TypeVar("Value")
StartCollective = Callable[[], Any]  # starts a collective and returns its work handle


@dataclass(frozen=True)
class Heartbeat:
    """The state of a rank: `count` grows while it is alive; it has entered `step` collectives.

    collective      the last one that it entered; `is_waiting`: it is still in it
    state           running, failed (it has raised an error already) or left
    num_steps       steps of an engine
    work, wait      seconds between and in the collectives of these steps
    """

    count: int
    step: int
    collective: str
    state: str
    is_waiting: bool = False
    num_steps: int = 0
    work: float = 0.0
    wait: float = 0.0

    @property
    def text(self) -> str:
        times = f"{self.num_steps}|{self.work:.6f}|{self.wait:.6f}"
        return f"{self.count}|{self.step}|{self.state}|{int(self.is_waiting)}|{times}|{self.collective}"

    @staticmethod
    def parse(text: str) -> Heartbeat:
        count, step, state, waiting, steps, work, wait, collective = text.split("|", 7)
        times = int(steps), float(work), float(wait)
        return Heartbeat(int(count), int(step), collective, state, waiting == "1", *times)

    @property
    def position(self) -> str:
        """What the rank is doing."""
        if not self.count:
            return "not started yet"
        where = "in" if self.is_waiting else "working after"
        return f"at step {self.step}, {where} '{self.collective}'"


NOT_STARTED = Heartbeat(0, 0, "before the start", "running")


@dataclass(frozen=True)
class RankTime:
    """How a rank spent its steps: seconds a step between collectives, and in them.

    `slowdown` is its work divided by the median of the other ranks' work.
    """

    rank: int
    steps: int
    work_seconds: float
    wait_seconds: float
    slowdown: float

    @property
    def is_slow(self) -> bool:
        median = self.work_seconds / self.slowdown if self.slowdown else 0.0
        is_late = self.work_seconds - median > SLOW_SECONDS
        return self.steps >= SLOW_STEPS and self.slowdown >= SLOW_RATIO and is_late

    def __str__(self) -> str:
        return (
            f"rank {self.rank} is {self.slowdown:.1f}x slower than the median of the others over "
            f"{self.steps} steps: {1e3 * self.work_seconds:.1f} ms a step"
        )


def compare_ranks(
    before: Mapping[int, Heartbeat], after: Mapping[int, Heartbeat]
) -> tuple[RankTime, ...]:
    """The times of all ranks between two readings; empty if some rank has made no step."""
    steps = {rank: one.num_steps - before[rank].num_steps for rank, one in after.items()}
    if len(steps) < 2 or min(steps.values()) < 1:
        return ()
    work = {r: (one.work - before[r].work) / steps[r] for r, one in after.items()}
    wait = {r: (one.wait - before[r].wait) / steps[r] for r, one in after.items()}
    found = []
    for rank in sorted(after):
        median = statistics.median(work[other] for other in work if other != rank)
        slowdown = work[rank] / median if median > 0 else 1.0
        found.append(RankTime(rank, steps[rank], work[rank], wait[rank], slowdown))
    return tuple(found)


def publish_exits(store: Store, exits: Mapping[int, str]) -> None:
    """Tell all ranks which processes have ended, and how. For the process that waits for them all.

    Without any: says that there is such a process, so that a silent rank is known to exist.
    """
    PrefixStore(EXITS_PREFIX, store).set(EXITS_KEY, json.dumps([*exits.items()]))


class HealthMonitor:
    """Publishes the heartbeat of this rank, and finds the cause of failed collectives.

    mesh_number         number of the mesh among those at the same store
    world_size          number of ranks
    timeout             seconds of a collective
    diagnosis_timeout   seconds to wait for heartbeats after a failure
    counts_match        all ranks make the same number of calls. Pipeline stages don't: there a rank
                        that works while others wait is late
    """

    counts_match = True

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
        self.exits_store: Store = PrefixStore(EXITS_PREFIX, client)
        # Written by the thread that runs collectives, read by the thread of heartbeats.
        self.count, self.step, self.collective, self.state = 0, 0, "start", "running"
        self.is_waiting = False
        self.num_steps, self.work, self.wait = 0, 0.0, 0.0
        self.released = time.perf_counter()  # the end of the last collective
        self.caller = threading.get_ident()
        # Time in which this process was suspended is no silence of the others.
        self.clock = RunningClock()
        # By rank: the last heartbeat count, and the time at which it was new.
        self.last_seen: dict[int, tuple[int, float]] = {}
        self.lock = threading.Lock()
        self.stopping = threading.Event()
        self.has_sent_stack = False
        self.times: tuple[RankTime, ...] = ()
        self._publish()
        self.compared = self._read_heartbeats() if rank == 0 else {}
        self.thread = threading.Thread(target=self._run, name="fulgurite-health", daemon=True)
        self.thread.start()

    # ---- collectives -------------------------------------------------------------------------------

    def run_collective(
        self, label: str, start: StartCollective, on_host: bool, *, begins_step: bool = False
    ) -> None:
        """Start a collective and wait for it; RankError with the cause if it fails.

        `on_host`: wait until the data is there, and not only until the stream waits for it.
        `begins_step`: a step of the engine begins with it; the time before and in it is idle time.
        """
        entered = time.perf_counter()
        if begins_step:
            self.num_steps += 1
        elif self.num_steps:
            self.work += entered - self.released
        self.caller = threading.get_ident()
        self.step += 1
        self.collective, self.is_waiting = label, True
        try:
            work = start()
            if on_host:
                self._wait(work)
            else:
                work.wait()
        except RuntimeError as error:  # all backends of torch.distributed raise it
            raise self.explain(label, error) from error
        self.is_waiting = False
        self.released = time.perf_counter()
        if self.num_steps and not begins_step:
            self.wait += self.released - entered

    def wait_for_ranks(self, label: str) -> None:
        """Wait until all ranks have called this; RankError that names the one that did not.

        Needs no process group, so that one can be made after it without a wait for a lost rank.
        """
        self.run_collective(label, _StoreBarrier(self).start, on_host=True)

    def run_blocking(self, label: str, call: Callable[[], Value]) -> Value:
        """The result of a call that waits for other ranks and returns no work handle, such as
        `dist.new_group`; the same errors, soon after a rank was lost.

        It runs in a thread of its own. One that is given up ends with the timeout of the call.
        """
        pending = _PendingCall(call)
        self.run_collective(label, pending.start, on_host=True)
        return pending.results[0]

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
        """Whether a rank has failed, its process has ended, or its heartbeat has stopped.

        A rank that left does not count: it may have done its part of this collective before.
        """
        heartbeats = self._read_heartbeats()
        silence = self._measure_silence(heartbeats)
        limit = min(HEARTBEAT_TIMEOUT, max(self.timeout, self.diagnosis_timeout))
        exits = self._read_exits() or {}
        return any(
            one.state == "failed"
            or (one.state == "running" and (rank in exits or (one.count and silence[rank] > limit)))
            for rank, one in heartbeats.items()
            if rank != self.rank
        )

    def _measure_silence(self, heartbeats: Mapping[int, Heartbeat]) -> dict[int, float]:
        """By rank: seconds since its heartbeat was seen to change."""
        now = self.clock.now()
        for rank, one in heartbeats.items():
            if self.last_seen.get(rank, (-1, now))[0] != one.count:
                self.last_seen[rank] = one.count, now
        return {rank: now - self.last_seen[rank][1] for rank in heartbeats}

    def has_left(self, rank: int) -> bool:
        """Whether a rank closed its mesh."""
        return self._read_heartbeats()[rank].state == "left"

    # ---- diagnosis ---------------------------------------------------------------------------------

    def explain(self, label: str, error: RuntimeError) -> RankError:
        """The error of a failed collective, with the rank that is the cause."""
        try:
            self.state = "failed"
            self._publish()
            heartbeats, silent, exits = self._observe()
            return self._diagnose(label, error, heartbeats, silent, exits)
        except RuntimeError:
            return RankError(
                f"'{label}' failed, and the store at {self.store_address} is gone, too",
                where=f"rank {self.rank}",
                next="rank 0 hosts the store unless torchrun or parallel.launch started the ranks: "
                "look at its last output",
            )

    def _observe(self) -> tuple[dict[int, Heartbeat], dict[int, float], dict[int, str] | None]:
        """The last heartbeats, the silent ranks with their seconds of silence, and the exits.

        Waits until each other rank has a new heartbeat, has failed or left, has been silent for
        `diagnosis_timeout`, or until the process of one has ended.
        """
        first = self._read_heartbeats()
        silence = self._measure_silence(first)
        started = time.monotonic()
        while True:
            last, exits = self._read_heartbeats(), self._read_exits()
            silence = self._measure_silence(last)
            unsettled = [
                rank
                for rank, one in last.items()
                if rank != self.rank and one.state == "running" and one.count == first[rank].count
                if one.count  # a rank that has not started may be late, and is not silent
            ]
            lost = [r for r, one in last.items() if one.state == "running" and r in (exits or {})]
            late = [rank for rank in unsettled if silence[rank] < self.diagnosis_timeout]
            waited = time.monotonic() - started
            if lost or not late or waited > self.diagnosis_timeout:
                return last, {rank: max(silence[rank], waited) for rank in unsettled}, exits
            time.sleep(HEARTBEAT_INTERVAL / 4)

    def _is_late(self, one: Heartbeat) -> bool:
        """Whether a rank has not reached what this one waits for."""
        if self.counts_match:
            return one.step < self.step
        return one.state == "running" and not one.is_waiting

    def _diagnose(
        self,
        label: str,
        error: RuntimeError,
        heartbeats: Mapping[int, Heartbeat],
        silent: Mapping[int, float],
        exits: Mapping[int, str] | None,
    ) -> RankError:
        ended = exits or {}
        gone = find_first_exits(ended, heartbeats)
        stopped = [] if gone else sorted(silent)
        left = [rank for rank, one in heartbeats.items() if one.state == "left"]
        others = [(rank, one.state) for rank, one in heartbeats.items() if rank != self.rank]
        failed = [rank for rank, state in others if state == "failed"]
        behind = [
            rank
            for rank, one in heartbeats.items()
            if self._is_late(one) and rank not in (*silent, *left, *failed)
        ]
        stack = None
        if gone:
            text = f"{_format_ranks(gone)} gone: '{label}' can't finish: " + "; ".join(
                f"rank {rank} {ended[rank]}, last seen {heartbeats[rank].position}" for rank in gone
            )
            next = "look at the last output of that process; start all ranks again"
        elif stopped:
            # Without a process that waits for the ranks, nobody knows whether it has ended.
            verb = "gone" if exits is None else "stopped"
            seconds = min(silent.values())
            text = f"{_format_ranks(stopped)} {verb}: '{label}' can't finish: " + "; ".join(
                f"rank {rank} has had no heartbeat for {seconds:.0f} s, {heartbeats[rank].position}"
                for rank in stopped
            )
            next = "look at the last output of that process; start all ranks again"
        elif behind:
            positions = "; ".join(f"rank {rank} is {heartbeats[rank].position}" for rank in behind)
            ranks = _format_ranks(behind, "did not reach")
            text = f"{ranks} '{label}' in {self.timeout:g} s: {positions}"
            next = "all ranks must make the same calls in the same order, also without tokens"
            stack = self._request_stacks(behind)
        elif any(one in str(error) for one in CONNECTION_ERRORS):
            text = f"'{label}' failed: this rank can't connect to another one"
            next = (
                "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name the network interface between the "
                "hosts, such as eth0; set them on all hosts if a host's name leads to 127.0.0.1 or "
                "127.0.1.1, and open the ports between the hosts"
            )
        elif left:  # those that failed may have waited for it, too
            text = f"{_format_ranks(left, 'left')} while others waited in '{label}'"
            next = "all ranks must make the same calls in the same order, also without tokens"
        elif failed:
            text = f"'{label}' can't finish: {_format_ranks(failed, 'failed')} before"
            next = f"see the error of {_name_ranks(failed)}: it is the cause, or names it"
        else:
            text = f"'{label}' failed, but all {self.world_size} ranks are alive"
            next = "see the first error of all ranks: it is the cause"
        return RankError(
            text,
            where=f"rank {self.rank} of {self.world_size}, step {self.step}",
            reason=str(error).splitlines()[0][:200] if str(error) else None,
            stack=stack,
            next=next,
            ranks=tuple(gone or stopped or behind or left or failed),
        )

    def _request_stacks(self, ranks: Iterable[int]) -> str | None:
        """The Python stacks of these ranks, as far as they answer."""
        self.store.set(STACK_REQUEST, "1")
        deadline = time.monotonic() + STACK_TIMEOUT
        waiting, found = {*ranks} - {self.rank}, []
        while waiting and time.monotonic() < deadline:
            for rank in sorted(waiting):
                if self.store.check([f"stack-{rank}"]):
                    waiting.discard(rank)
                    found.append(f"rank {rank}: {self.store.get(f'stack-{rank}').decode()}")
            time.sleep(HEARTBEAT_INTERVAL / 4)
        return "\n".join(found) or None

    def close(self) -> None:
        """Leave the mesh in good order."""
        if not self.stopping.is_set():
            self.stopping.set()
            self.thread.join()
            try:
                if self.state != "failed":  # that others must see, whenever they look
                    self.state = "left"
                self._publish()
            except RuntimeError:
                return  # the store is gone, and with it all who could read this

    # ---- the store ---------------------------------------------------------------------------------

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

    def _read_exits(self) -> dict[int, str] | None:
        """How processes of ranks have ended; None: nobody would tell."""
        if not self.exits_store.check([EXITS_KEY]):
            return None
        return {int(rank): text for rank, text in json.loads(self.exits_store.get(EXITS_KEY))}

    def _publish(self) -> None:
        with self.lock:
            self.count += 1
            heartbeat = Heartbeat(
                self.count,
                self.step,
                self.collective,
                self.state,
                self.is_waiting,
                self.num_steps,
                self.work,
                self.wait,
            )
            self.store.set(str(self.rank), heartbeat.text)

    def _run(self) -> None:
        compare_at = time.monotonic() + COMPARE_INTERVAL
        while not self.stopping.wait(HEARTBEAT_INTERVAL):
            try:
                self.clock.now()
                self._publish()
                if not self.has_sent_stack and self.store.check([STACK_REQUEST]):
                    self.has_sent_stack = True
                    self.store.set(f"stack-{self.rank}", _format_stack(self.caller))
                if self.rank == 0 and time.monotonic() >= compare_at:
                    self._warn_of_slow_ranks()
                    compare_at = time.monotonic() + COMPARE_INTERVAL
            except RuntimeError:
                return  # the store is gone; the next failed collective reports it

    # ---- slow ranks --------------------------------------------------------------------------------

    def read_times(self) -> tuple[RankTime, ...]:
        """The times of all ranks over the last `SLOW_STEPS` steps or more; before that, so far."""
        if self.times:
            return self.times
        return compare_ranks(self.compared, self._read_heartbeats()) if self.compared else ()

    def _warn_of_slow_ranks(self) -> None:
        """Compare the steps since the last comparison, once there are enough; warn of slow ranks."""
        now = self._read_heartbeats()
        times = compare_ranks(self.compared, now)
        if not times or min(one.steps for one in times) < SLOW_STEPS:
            return
        known = {one.rank for one in self.times if one.is_slow}
        self.times, self.compared = times, now
        for one in times:
            if one.is_slow and one.rank not in known:
                LOG.warning("%s", one, extra={"fields": {"event": "slow rank", "rank": one.rank}})


class _PendingCall(Generic[Value]):
    """A call in a thread, with the interface of a collective."""

    def __init__(self, call: Callable[[], Value]) -> None:
        self.call = call
        self.results: list[Value] = []
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, name="fulgurite-call", daemon=True)

    def start(self) -> _PendingCall[Value]:
        self.thread.start()
        return self

    def _run(self) -> None:
        try:
            self.results.append(self.call())
        except BaseException as error:  # raised by `wait`
            self.error = error

    def wait(self, timeout: timedelta) -> None:
        self.thread.join(timeout.total_seconds())
        if self.error is not None:
            raise self.error
        if self.thread.is_alive():
            raise RuntimeError("other ranks have not come")

    def is_completed(self) -> bool:
        """Whether waiting again is pointless."""
        return self.error is not None


class _StoreBarrier:
    """A barrier of all ranks by the store alone, with the interface of a collective."""

    def __init__(self, health: HealthMonitor) -> None:
        self.health = health
        self.keys = [f"barrier-{rank}" for rank in range(health.world_size)]
        self.deadline = time.monotonic() + health.timeout

    def start(self) -> _StoreBarrier:
        self.health.store.set(self.keys[self.health.rank], "1")
        return self

    def wait(self, timeout: timedelta) -> None:
        end = time.monotonic() + timeout.total_seconds()
        while not self.health.store.check(self.keys):
            if time.monotonic() > end:
                raise RuntimeError("not all ranks have come")
            time.sleep(0.01)

    def is_completed(self) -> bool:
        """Whether waiting again is pointless."""
        return time.monotonic() > self.deadline


def find_first_exits(exits: Mapping[int, str], heartbeats: Mapping[int, Heartbeat]) -> list[int]:
    """The ranks whose processes ended first: those that had not failed or left before.

    The others ended because of them. If all had, those whose own error is no RankError.
    """
    found = [rank for rank in exits if heartbeats[rank].state == "running"]
    if not found:
        known = ("RankError", describe_exit(0))
        found = [rank for rank, text in exits.items() if not any(one in text for one in known)]
    return sorted(found)


def describe_exit(code: int) -> str:
    """How a process ended: `was killed by SIGKILL`, `ended with exit code 1`."""
    return f"was killed by {Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _format_stack(thread: int) -> str:
    """The innermost frames of a thread, one line each."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return "its thread has ended"
    frames = traceback.extract_stack(frame)[-STACK_FRAMES:]
    return "\n  ".join(f"{one.filename}:{one.lineno} in {one.name}" for one in reversed(frames))


def _format_ranks(ranks: list[int], verb: str | None = None) -> str:
    """'rank 3 is', 'ranks 1, 3 are', or with another verb."""
    return f"{_name_ranks(ranks)} {verb or ('are' if len(ranks) > 1 else 'is')}"


def _name_ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"
