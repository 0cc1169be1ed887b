"""Worker processes for a single process: it becomes rank 0, they become the other ranks.

    workers = WorkerProcesses(4, "fulgurite.serve.worker_main", arguments)    three processes
    mesh = Mesh(tensor=4)                                                     as under torchrun
    ...
    workers.close()

Each process runs `python -m module` on this machine. It reads its arguments, bytes, from stdin
(`read_arguments`) and its rank from the environment. Rank 0 hosts the store. Until every process has
started, a process that exits is noticed at once; after that the mesh's `HealthMonitor` does it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore

from fulgurite.errors import RankError
from fulgurite.parallel.launch import rank_environment
from fulgurite.parallel.mesh import reset_mesh_count

START_TIMEOUT = 120.0  # seconds; importing torch takes long on a busy machine
EXIT_TIMEOUT = 10.0  # seconds
STORE_PREFIX = "fulgurite-workers"


class WorkerProcesses:
    """The processes of ranks 1 to `world_size` - 1, until `close`."""

    def __init__(self, world_size: int, module: str, arguments: bytes) -> None:
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        reset_mesh_count("127.0.0.1", self.store.port)
        threads = max(1, torch.get_num_threads() // world_size)
        environments = [
            rank_environment(rank, world_size, self.store.port) for rank in range(world_size)
        ]
        self.saved_environment = {name: os.environ.get(name) for name in environments[0]}
        self.saved_threads = torch.get_num_threads()
        self.processes = [
            _start_worker(module, arguments, environment, threads)
            for environment in environments[1:]
        ]
        try:
            self._wait_until_started()
        except RankError:
            self.kill()
            raise
        os.environ.update(environments[0])
        torch.set_num_threads(threads)

    def _wait_until_started(self) -> None:
        """Wait until every process has started."""
        store: Store = PrefixStore(STORE_PREFIX, self.store)
        ranks = range(1, len(self.processes) + 1)
        deadline = time.monotonic() + START_TIMEOUT
        while not store.check([str(rank) for rank in ranks]):
            ended = [r for r, p in zip(ranks, self.processes, strict=True) if p.poll() is not None]
            if ended or time.monotonic() > deadline:
                late = ended or [rank for rank in ranks if not store.check([str(rank)])]
                raise RankError(
                    f"rank {late[0]} did not start",
                    ranks=tuple(late),
                    next="look at its last output, above; or start the ranks with torchrun",
                )
            time.sleep(0.05)

    def close(self, timeout: float = EXIT_TIMEOUT) -> None:
        """Wait for every process, and kill it after the timeout. Restore the environment."""
        deadline = time.monotonic() + timeout
        for process in self.processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                break
        self.kill()
        torch.set_num_threads(self.saved_threads)
        for name, value in self.saved_environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()


def _start_worker(
    module: str, arguments: bytes, environment: dict[str, str], threads: int
) -> subprocess.Popen[bytes]:
    paths = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process = subprocess.Popen(
        [sys.executable, "-m", module],
        stdin=subprocess.PIPE,
        env={"OMP_NUM_THREADS": str(threads)} | dict(os.environ) | paths | environment,
        start_new_session=True,  # rank 0 handles ctrl-C
    )
    assert process.stdin is not None, "stdin is a pipe"
    process.stdin.write(arguments)
    process.stdin.close()
    return process


def read_arguments() -> bytes:
    """The arguments of this worker process; also reports that it has started."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    client = TCPStore(host, port, is_master=False)
    PrefixStore(STORE_PREFIX, client).set(os.environ["RANK"], "started")
    return sys.stdin.buffer.read()


def is_single_process() -> bool:
    """Whether no launcher has made this process one of several ranks."""
    return "WORLD_SIZE" not in os.environ and not dist.is_initialized()
