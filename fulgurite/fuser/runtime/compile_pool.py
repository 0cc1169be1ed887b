"""Processes that compile Triton kernels beside this one.

In: recipes of kernels. Out: kernels in Triton's cache, from where this process loads them. Triton's compiler is a
third Python (its front end, linking), so that threads wait for one another, and the thread that captures the program
for all of them: ResNet-50 has 160 kernels of 0.3 s each.

The processes are forks of one that has Triton imported (`compile_worker`), which takes a second to start: until then,
and for a program of a few kernels, threads compile. They end when nobody has asked for a while. If they can't be started or die,
threads compile, too: what is in Triton's cache afterwards is the same.
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
from fulgurite.fuser.runtime.compile_worker import MESSAGE, READY, Recipe

FEW = 2  # kernels that threads compile at once while there are no processes
IDLE = 30.0  # seconds after which processes that nobody asks end
LEAST_CORES = 4  # fewer are busy with the threads that there are anyway


def count() -> int:
    """How many compile at once: this process' cores, or its share where a machine has several like it."""
    cores = len(os.sched_getaffinity(0))
    return max(1, min(32, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


class Processes:
    """Compilers behind one socket: a message is taken by whoever is free."""

    def __init__(self, number: int) -> None:
        self.ready = False  # they have said so
        self.ended = False
        self.failed = False  # they ended before they were ready, or died at work
        self._numbers = itertools.count()
        self._waiting: dict[int, Future[bool]] = {}
        self._lock = threading.Lock()
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.settimeout(IDLE)
        with theirs:
            command = [sys.executable, "-P", compile_worker.__file__]
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno()), str(number)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # who asked compiles what failed again, and shows it
                start_new_session=True,  # an interrupt from the keyboard is not for them
            )
        threading.Thread(target=self._listen, name="fulgurite-compilers", daemon=True).start()

    def compile(self, recipe: Recipe) -> bool:
        """Waits until Triton's cache has the kernel; whether it has."""
        with self._lock:
            if self.ended:
                return False
            number, done = next(self._numbers), Future[bool]()
            self._waiting[number] = done
            try:
                self._channel.send(recipe.message(number))
            except OSError:  # they have just died
                del self._waiting[number]
                return False
        return done.result()

    def _listen(self) -> None:
        """Hands out answers until there are none to come."""
        while self._hear():
            pass
        self._channel.close()
        self._process.wait()

    def _hear(self) -> bool:
        try:
            message = self._channel.recv(MESSAGE)
        except TimeoutError:
            with self._lock:
                self.ended = not self._waiting
                return not self.ended
        except OSError:
            message = b""
        if not message:
            with self._lock:
                self.ended = self.failed = True
                for done in self._waiting.values():
                    done.set_result(False)
            return False
        number, problem = json.loads(message)
        if number == READY:
            self.ready = True
            return True
        with self._lock:
            self._waiting.pop(number).set_result(problem is None)
        return True


class Compilers:
    """The processes of this one, and when to ask them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._processes: Processes | None = None
        self._given_up = len(os.sched_getaffinity(0)) < LEAST_CORES or not sys.executable
        self._few = threading.BoundedSemaphore(FEW)

    def expect(self) -> None:
        """Many kernels are about to come: processes may start."""
        self._current()

    @contextmanager
    def beside(self, recipe: Recipe) -> Iterator[None]:
        """Around compiling a kernel here: another process has done it before, where that is sooner."""
        few = not self._are_ready() and self._few.acquire(blocking=False)
        try:
            if not few and (processes := self._current()) is not None:
                processes.compile(recipe)
            yield
        finally:
            if few:
                self._few.release()

    def _are_ready(self) -> bool:
        processes = self._processes
        return processes is not None and processes.ready and not processes.ended

    def _current(self) -> Processes | None:
        """The processes, started where there are none; None where there can't be any."""
        with self._lock:
            known = self._processes
            if known is not None and known.failed:
                self._given_up = True
            if self._given_up:
                return None
            if known is None or known.ended:
                try:
                    self._processes = Processes(count())
                except OSError:
                    self._given_up = True
                    return None
            return self._processes


compilers = functools.cache(Compilers)
os.register_at_fork(after_in_child=compilers.cache_clear)  # a fork can't hear its parent's answers
