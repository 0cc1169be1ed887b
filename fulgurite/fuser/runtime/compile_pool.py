"""A pool of worker processes that compile Triton kernels.

In: `CompileJob`s. Out: kernels in Triton's cache, from where this process loads them. A third of Triton's
compiler is Python (its frontend, linking). So threads block each other, and they all block the thread that
captures the program: ResNet-50 has 160 kernels of 0.3 s each.

The workers are forks of one process that has Triton imported (`compile_worker`). It takes a second to start.
Until then, and for a program of few kernels, threads compile. Idle workers exit after a while. If workers can't
be started or die, threads compile too; Triton's cache holds the same kernels afterwards.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager

from fulgurite.fuser.runtime import compile_worker
from fulgurite.fuser.runtime.compile_worker import MAX_MESSAGE_BYTES, READY_ID, CompileJob

MAX_LOCAL_COMPILES = 2  # kernels that threads compile at once while no workers are ready
IDLE_SECONDS = 30.0  # after which idle workers exit
MIN_CORES = 4  # on fewer, threads keep all cores busy anyway


def worker_count() -> int:
    """How many kernels compile at once: the cores, divided by the ranks of this node."""
    cores = len(os.sched_getaffinity(0))
    return max(1, min(32, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


class WorkerProcesses:
    """Workers that share one socket: an idle one takes the next message."""

    def __init__(self, count: int) -> None:
        self.is_ready = False  # the workers reported so
        self.has_ended = False
        self.has_failed = False  # ended before they were ready, or died at work
        self._job_ids = itertools.count()
        self._pending: dict[int, Future[bool]] = {}
        self._lock = threading.Lock()
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.settimeout(IDLE_SECONDS)
        with theirs:
            command = [sys.executable, "-P", compile_worker.__file__]
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno()), str(count)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # a failed job is compiled again here, which raises
                start_new_session=True,  # not interrupted from the keyboard
            )
        threading.Thread(target=self._listen, name="fulgurite-compilers", daemon=True).start()

    def compile(self, job: CompileJob) -> bool:
        """Wait until the job is done; return whether Triton's cache has the kernel."""
        with self._lock:
            if self.has_ended:
                return False
            job_id, result = next(self._job_ids), Future[bool]()
            self._pending[job_id] = result
            try:
                self._channel.send(job.to_message(job_id))
            except OSError:  # the workers have just died
                del self._pending[job_id]
                return False
        return result.result()

    def _listen(self) -> None:
        """Receive results until the workers end."""
        while self._receive():
            pass
        self._channel.close()
        self._process.wait()

    def _receive(self) -> bool:
        try:
            message = self._channel.recv(MAX_MESSAGE_BYTES)
        except TimeoutError:
            with self._lock:
                self.has_ended = not self._pending
                return not self.has_ended
        except OSError:
            message = b""
        if not message:
            with self._lock:
                self.has_ended = self.has_failed = True
                for result in self._pending.values():
                    result.set_result(False)
            return False
        job_id, error = json.loads(message)
        if job_id == READY_ID:
            self.is_ready = True
            return True
        with self._lock:
            self._pending.pop(job_id).set_result(error is None)
        return True


class CompilePool:
    """The workers of this process, and when to use them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._workers: WorkerProcesses | None = None
        self._disabled = len(os.sched_getaffinity(0)) < MIN_CORES or not sys.executable
        self._local_slots = threading.BoundedSemaphore(MAX_LOCAL_COMPILES)

    def start_workers(self) -> None:
        """Start the workers: many kernels are about to be compiled."""
        self._get_workers()

    @contextmanager
    def offload(self, job: CompileJob) -> Iterator[None]:
        """A context to compile a kernel in; a worker has compiled it before, if that is faster."""
        is_local = not self._workers_are_ready() and self._local_slots.acquire(blocking=False)
        try:
            if not is_local and (workers := self._get_workers()) is not None:
                workers.compile(job)
            yield
        finally:
            if is_local:
                self._local_slots.release()

    def _workers_are_ready(self) -> bool:
        workers = self._workers
        return workers is not None and workers.is_ready and not workers.has_ended

    def _get_workers(self) -> WorkerProcesses | None:
        """The workers, started if there are none; None if there can't be any."""
        with self._lock:
            workers = self._workers
            if workers is not None and workers.has_failed:
                self._disabled = True
            if self._disabled:
                return None
            if workers is None or workers.has_ended:
                try:
                    self._workers = WorkerProcesses(worker_count())
                except OSError:
                    self._disabled = True
                    return None
            return self._workers


compile_pool = functools.cache(CompilePool)
os.register_at_fork(after_in_child=compile_pool.cache_clear)  # a fork can't receive results
