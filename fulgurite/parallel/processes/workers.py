"""Worker processes for a single process: it becomes rank 0, they become the other ranks.

    workers = WorkerProcesses(4, "fulgurite.serve.worker_main", arguments)    three processes
    mesh = Mesh(tensor=4)                                                     as under torchrun
    ...
    workers.close()

Each process runs `python -m module` on this machine. It reads its arguments, bytes, from stdin
(`read_arguments`) and its rank from the environment. Rank 0 hosts the store.

A thread a process waits for its exit, and publishes it in the store: the `HealthMonitor`s of all ranks
name that rank at once. Workers end with rank 0's process, however it ends (lifeline.py).
"""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore

from fulgurite.errors import RankError
from fulgurite.lifeline import BoundProcess
from fulgurite.parallel.health import STORE_TIMEOUT, describe_exit, publish_exits
from fulgurite.parallel.mesh import reset_mesh_count
from fulgurite.parallel.processes.launch import rank_environment
from fulgurite.running_clock import RunningClock

START_TIMEOUT = 120.0  # seconds at least; importing torch takes long on a busy machine
STOPPED_TIMEOUT = 10.0  # seconds; a process that a signal has stopped does not start by itself
EXIT_TIMEOUT = 10.0  # seconds
STORE_PREFIX = "fulgurite-workers"
LENGTH = struct.Struct("<Q")  # of the arguments, before them
# A rank that waits for work looks once a second whether rank 0 is alive. torch warns of each such
# wait, on the terminal of an idle server.
QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}


class WorkerProcesses:
    """The processes of ranks 1 to `world_size` - 1, until `close`.

    `exits` has how processes have ended that were not told to, by rank. `timeout`: seconds after which a
    process that starts and uses no CPU time is given up; less if a signal has stopped it.
    """

    def __init__(
        self, world_size: int, module: str, arguments: bytes, timeout: float = START_TIMEOUT
    ) -> None:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.store: TCPStore | None = store
        publish_exits(store, {})
        reset_mesh_count("127.0.0.1", store.port)
        threads = max(1, torch.get_num_threads() // world_size)
        environments = [
            rank_environment(rank, world_size, store.port) for rank in range(world_size)
        ]
        self.saved_environment = {name: os.environ.get(name) for name in environments[0]}
        self.saved_threads = torch.get_num_threads()
        self.processes = [
            _start_worker(module, arguments, environment, threads)
            for environment in environments[1:]
        ]
        self.exits: dict[int, str] = {}
        self.exits_lock = threading.Lock()
        self.is_closing = False
        self.watchers = [
            threading.Thread(
                target=self._watch,
                args=(rank, process, store),
                name="fulgurite-worker",
                daemon=True,
            )
            for rank, process in enumerate(self.processes, 1)
        ]
        for watcher in self.watchers:
            watcher.start()
        try:
            self._wait_until_started(PrefixStore(STORE_PREFIX, store), timeout)
        except BaseException:  # ctrl-C as well: no process stays
            self.kill()
            self.store = None
            raise
        os.environ.update(environments[0])
        torch.set_num_threads(threads)

    def _watch(self, rank: int, process: subprocess.Popen[bytes], store: TCPStore) -> None:
        """Wait for the end of a process, and tell all ranks of it."""
        text = describe_exit(process.wait())
        if self.is_closing:
            return
        errors: Store = PrefixStore(STORE_PREFIX, store)
        if errors.check([f"error-{rank}"]):
            text += f" ({errors.get(f'error-{rank}').decode()})"
        with self.exits_lock:
            self.exits[rank] = text
            publish_exits(store, self.exits)

    def _wait_until_started(self, store: Store, timeout: float) -> None:
        """Wait until every process has started; RankError for one that ends or gets stuck before."""
        starting = {rank: StartingProcess(p) for rank, p in enumerate(self.processes, 1)}
        while starting:
            for rank in [rank for rank in starting if store.check([str(rank)])]:
                del starting[rank]
            found = {rank: one.find_failure(timeout) for rank, one in starting.items()}
            late = {rank: why for rank, why in found.items() if why is not None}
            if late:
                raise RankError(
                    "; ".join(f"rank {rank} did not start: it {why}" for rank, why in late.items()),
                    ranks=tuple(late),
                    next="look at its last output, above; or start the ranks with torchrun",
                )
            time.sleep(0.05)

    def close(self, timeout: float = EXIT_TIMEOUT) -> None:
        """Wait for every process, and kill it after the timeout. Restore the environment."""
        self.is_closing = True
        deadline = time.monotonic() + timeout
        for process in self.processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                break
        self.kill()
        self.store = None  # its port is free once the mesh has left, too
        torch.set_num_threads(self.saved_threads)
        for name, value in self.saved_environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    def kill(self) -> None:
        """Kill every process and wait for its end."""
        self.is_closing = True
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
            if process.stdin is not None:
                process.stdin.close()
        for watcher in self.watchers:
            watcher.join()

    def check(self) -> None:
        """RankError if a process has ended that was not told to."""
        if self.exits and not self.is_closing:
            ranks = sorted(self.exits)
            raise RankError(
                "; ".join(f"rank {rank} is gone: it {self.exits[rank]}" for rank in ranks),
                ranks=tuple(ranks),
                next="look at the last output of that process; start all ranks again",
            )


class StartingProcess:
    """A process that has not reported yet; whether it still makes progress."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.clock = RunningClock()
        self.started = self.advanced = self.clock.now()
        self.state, self.cpu_time = "", -1

    def find_failure(self, timeout: float) -> str | None:
        """Why it won't start: it ended, is stopped, used no CPU time for `timeout` seconds, or took too
        long."""
        code = self.process.poll()
        if code is not None:
            return describe_exit(code)
        now = self.clock.now()
        before, (self.state, self.cpu_time) = self.cpu_time, read_process_state(self.process.pid)
        if self.cpu_time != before:
            self.advanced = now
        silence = min(timeout, STOPPED_TIMEOUT) if self.state == "T" else timeout
        if self.state and now - self.advanced > silence:
            does = "is stopped" if self.state in "tT" else "waits"
            return f"{does}, and has not reported in {silence:g} s"
        limit = max(START_TIMEOUT, timeout)
        return f"runs, and has not reported in {limit:g} s" if now - self.started > limit else None


def read_process_state(pid: int) -> tuple[str, int]:
    """The state of a process, one letter, and its CPU time; ("", 0) without /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", 0
    return fields[0], int(fields[11]) + int(fields[12])


def _start_worker(
    module: str, arguments: bytes, environment: dict[str, str], threads: int
) -> subprocess.Popen[bytes]:
    paths = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process = BoundProcess(
        [sys.executable, "-m", module],
        stdin=subprocess.PIPE,
        env={"OMP_NUM_THREADS": str(threads)} | QUIET | dict(os.environ) | paths | environment,
        start_new_session=True,  # rank 0 handles ctrl-C
    )
    assert process.stdin is not None, "stdin is a pipe"
    with suppress(BrokenPipeError):  # it has ended already: `_wait_until_started` says so
        process.stdin.write(LENGTH.pack(len(arguments)) + arguments)
        process.stdin.flush()
    return process


def read_arguments() -> bytes:
    """The arguments of this worker process; also reports that it has started."""
    _connect().set(os.environ["RANK"], "started")
    (size,) = LENGTH.unpack(sys.stdin.buffer.read(LENGTH.size))
    return sys.stdin.buffer.read(size)


def report_error(error: BaseException) -> None:
    """Tell rank 0's process why this worker is about to end."""
    text = " ".join(f"{type(error).__name__}: {error}".split("\n")[0].split())
    with suppress(RuntimeError):  # the store is gone: rank 0 has ended before
        _connect().set(f"error-{os.environ['RANK']}", text[:500])


def _connect() -> Store:
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return PrefixStore(STORE_PREFIX, TCPStore(host, port, is_master=False, timeout=STORE_TIMEOUT))


def is_single_process() -> bool:
    """Whether no launcher has made this process one of several ranks."""
    return "WORLD_SIZE" not in os.environ and not dist.is_initialized()
