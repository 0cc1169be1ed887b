"""Heartbeats: a rank says that it is alive and at which step; a supervisor reads it.

In: calls of `beat`. Out: `ranks/rank-0.beat` in the run's folder: step and number of beats. A beat is one
write of a few bytes. A rank whose file does not change stalls.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

FOLDER = "ranks"


@dataclass(frozen=True)
class Beat:
    """The last sign of life of a rank: which step it had finished, and how many beats it gave."""

    step: int
    count: int


class Heartbeat:
    """The heartbeat of one rank."""

    def __init__(self, run: Path | str, rank: int) -> None:
        path = beat_path(Path(run), rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
        self._count = 0

    def beat(self, step: int) -> None:
        """Say that this rank is alive; during a long evaluation too, with the same step."""
        self._count += 1
        text = f"{step:>12} {self._count:>12}\n".encode()
        os.pwrite(self._descriptor, text, 0)  # always the same length: never half an old one

    def close(self) -> None:
        os.close(self._descriptor)


def beat_path(run: Path, rank: int) -> Path:
    return run / FOLDER / f"rank-{rank}.beat"


def error_path(run: Path, rank: int) -> Path:
    """Where a rank leaves its last error."""
    return run / FOLDER / f"rank-{rank}.error"


def read_beat(run: Path, rank: int) -> Beat | None:
    """The last beat; None before the first."""
    try:
        step, count = beat_path(run, rank).read_text().split()
        return Beat(int(step), int(count))
    except (FileNotFoundError, ValueError):  # no beat yet
        return None
