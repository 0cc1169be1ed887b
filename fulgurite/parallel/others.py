"""Other ranks for a process that nobody started as one of many: it becomes rank 0, and they its followers.

    others = Others(4, "fulgurite.serve.worker_main", arguments)      three processes, on this machine
    mesh = Mesh(tensor=4)                                        as under torchrun
    ...
    others.close()

Each process runs `python -m module`, finds the arguments, bytes, on its stdin (`arguments_given` reads
them) and the mesh's place in its environment. The store they all meet at lives here. Until every process has
begun, those that end are noticed at once; from then on the mesh's own health tells.
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
from fulgurite.parallel.mesh import new_store

PATIENCE = 120.0  # seconds for a process to begin: imports of torch on a busy machine
GRACE = 10.0  # seconds to end
PREFIX = "fulgurite-others"


class Others:
    """Ranks 1 to `count` - 1, until `close`."""

    def __init__(self, count: int, module: str, arguments: bytes) -> None:
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        new_store("127.0.0.1", self.store.port)
        threads = max(1, torch.get_num_threads() // count)
        places = [rank_environment(rank, count, self.store.port) for rank in range(count)]
        self.before = {name: os.environ.get(name) for name in places[0]}
        self.threads = torch.get_num_threads()
        self.processes = [_start(module, arguments, place, threads) for place in places[1:]]
        try:
            self._wait()
        except RankError:
            self.kill()
            raise
        os.environ.update(places[0])
        torch.set_num_threads(threads)

    def _wait(self) -> None:
        """Until every process has begun."""
        store: Store = PrefixStore(PREFIX, self.store)
        ranks = range(1, len(self.processes) + 1)
        deadline = time.monotonic() + PATIENCE
        while not store.check([str(rank) for rank in ranks]):
            ended = [r for r, p in zip(ranks, self.processes, strict=True) if p.poll() is not None]
            if ended or time.monotonic() > deadline:
                late = ended or [rank for rank in ranks if not store.check([str(rank)])]
                raise RankError(
                    f"rank {late[0]} did not begin",
                    ranks=tuple(late),
                    next="look at its last lines, above; or start the ranks with torchrun",
                )
            time.sleep(0.05)

    def close(self, grace: float = GRACE) -> None:
        """Let every process end; kill what has not after a moment. This one is a single process again."""
        deadline = time.monotonic() + grace
        for process in self.processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                break
        self.kill()
        torch.set_num_threads(self.threads)
        for name, value in self.before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()


def _start(
    module: str, arguments: bytes, place: dict[str, str], threads: int
) -> subprocess.Popen[bytes]:
    paths = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process = subprocess.Popen(
        [sys.executable, "-m", module],
        stdin=subprocess.PIPE,
        env={"OMP_NUM_THREADS": str(threads)} | dict(os.environ) | paths | place,
        start_new_session=True,  # ctrl-C is for rank 0 to see
    )
    assert process.stdin is not None, "it was asked for"
    process.stdin.write(arguments)
    process.stdin.close()
    return process


def arguments_given() -> bytes:
    """In a process that `Others` started: what it was given; says that it has begun."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    client = TCPStore(host, port, is_master=False)
    PrefixStore(PREFIX, client).set(os.environ["RANK"], "begun")
    return sys.stdin.buffer.read()


def started_alone() -> bool:
    """Whether no launcher made this process one of many."""
    return "WORLD_SIZE" not in os.environ and not dist.is_initialized()
