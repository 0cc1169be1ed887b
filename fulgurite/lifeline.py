"""Child processes that end with this one: the kernel kills them, whatever they are doing.

    process = BoundProcess(command)               a `subprocess.Popen`

    lifeline = Lifeline()                         the same for a process that something else starts
    process = context.Process(target=run, args=(lifeline.child_end,))
    process.start()
    lifeline.attach(process.pid)
    ... and first of all in `run`: bind(child_end)

A pipe leads to the child. Its end there sends SIGKILL to the child (O_ASYNC, F_SETSIG) once every copy of
the other end is closed, and this process has the only one. The child runs no code for it: it may still
import its modules, hold the GIL, wait in a collective, or be stopped. Only a child of a fork server has
to `bind` itself, as its parent may have ended before it was started.

PR_SET_PDEATHSIG would kill a child when the thread that started it ends, and the child of a fork server
when that server ends.

Only Linux sends such a signal. On other systems children that outlive this process end when they next
talk to it.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Sequence
from multiprocessing.connection import Connection, Pipe
from typing import Any

_open: weakref.WeakSet[Lifeline] = weakref.WeakSet()


class Lifeline:
    """The pipe to one child. It is closed with this object, which kills a child that still runs."""

    def __init__(self) -> None:
        self.child_end, self._own_end = Pipe(duplex=False)
        _open.add(self)

    def attach(self, pid: int) -> None:
        """Kill this process with the calling one. It must have got a copy of `child_end`."""
        _kill_at_end(self.child_end, pid)
        self.child_end.close()

    def close(self) -> None:
        self.child_end.close()
        self._own_end.close()


def bind(child_end: Connection) -> None:
    """In a child of a fork server, first of all: end with the process that asked for it.

    That one may have been killed before `attach`: the server starts what it was asked for even then.
    """
    _kill_at_end(child_end, os.getpid())
    if child_end.poll():  # closed before; no signal comes for that
        os.kill(os.getpid(), signal.SIGKILL)


def _kill_at_end(child_end: Connection, pid: int) -> None:
    """Kill a process when the other end of a pipe is closed.

    This belongs to the pipe's end, and so to every copy of it.
    """
    if sys.platform == "linux":
        end = child_end.fileno()
        fcntl.fcntl(end, fcntl.F_SETOWN, pid)
        fcntl.fcntl(end, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(end, fcntl.F_SETFL, fcntl.fcntl(end, fcntl.F_GETFL) | os.O_ASYNC)


class BoundProcess(subprocess.Popen[bytes]):
    """A child process that ends with this one. Keep the object as long as the process may run."""

    def __init__(self, command: Sequence[str], *, pass_fds: Sequence[int] = (), **options: Any):
        self.lifeline = Lifeline()
        pass_fds = [*pass_fds, self.lifeline.child_end.fileno()]
        super().__init__(command, pass_fds=pass_fds, **options)
        self.lifeline.attach(self.pid)


def _close_all() -> None:
    """In a forked child: it must not keep the other children of its parent alive."""
    for lifeline in [*_open]:
        lifeline.close()


os.register_at_fork(after_in_child=_close_all)
