"""`hold_run`: the folder of a run in; a lock that one process at a time holds out.

Two runs in one folder would write each other's checkpoints, metrics and receipt. The lock ends with the
process that holds it, also if that is killed. Who holds it removes what killed processes left
half-written; checkpoints have names of their own for that (`checkpoint/folder.py`).
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from fulgurite.errors import ArgumentError
from fulgurite.logs import LOG
from fulgurite.train.checkpoint import list_checkpoints
from fulgurite.train.metrics import read_metrics

LOCK = ".run.lock"
CHECKPOINTS = "checkpoints"
CONFIG = "config.toml"  # written when a run begins
# Names of what is written beside its place and renamed: `files.write_atomically`, `FolderWriter`, the
# tokenizer.
UNFINISHED = re.compile(r"\..+\.\d+-\d+$|\..+\.partial-\w+$|\.tokenizer-\w+$")


@contextmanager
def hold_run(folder: Path) -> Iterator[None]:
    """Hold the lock of a run's folder; ArgumentError if another process holds it."""
    with (folder / LOCK).open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise ArgumentError(
                f"{folder} is in use by another run ({lock.read().strip() or 'unknown'})",
                next="wait until it ends, or give another --output",
            ) from None
        except OSError:
            LOG.warning("%s can't be locked; start no second run in it", folder)
            yield
            return
        try:
            _sign(lock)
            remove_unfinished(folder)
            yield
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)  # a forked child would keep it


def remove_abandoned(folder: Path) -> bool:
    """Remove the folder of a run that was killed before it began; whether it was one.

    A run signs its lock once it has it: with a name in it and nobody who holds it, the run is gone.
    """
    path = folder / LOCK
    if (folder / CONFIG).exists() or has_begun(folder) or not path.is_file():
        return False
    try:
        with path.open("a+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            lock.seek(0)
            if not lock.read().strip():
                return False
            shutil.rmtree(folder)
    except OSError:  # it is held, belongs to somebody else, or can't be locked
        return False
    return True


def _sign(lock: IO[str]) -> None:
    """Say who holds the lock; a full disk must not end a run."""
    with suppress(OSError):
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        lock.flush()


def remove_unfinished(folder: Path) -> None:
    """Remove files and folders that a killed process was writing."""
    for path in folder.iterdir():
        if not UNFINISHED.match(path.name):
            continue
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def has_begun(folder: Path) -> bool:
    """Whether a run has done a step."""
    return bool(list_checkpoints(folder / CHECKPOINTS) or read_metrics(folder))
