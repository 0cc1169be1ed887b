"""How long an asynchronous save holds the training loop: a model in, milliseconds out.

A save copies weights and optimizer states to host memory; a thread writes them. On a GPU the copy runs on
a stream of its own, beside the next forward and backward. Two figures of each save:

    call    how long `CheckpointManager.save` keeps the training thread
    loop    how much longer the next three steps and the save take than three steps without one
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fulgurite.bench import results
from fulgurite.train.checkpoint import CheckpointManager, training_state
from fulgurite.train.config import CheckpointSection
from fulgurite.train.step import TrainStep

Row = dict[str, Any]
STEPS = 3  # after a save: the copy ends during the first of them
SAVES = 3


def measure_stall(
    name: str, step: TrainStep, run: Callable[[], Any], warmup_steps: int
) -> Iterator[Row]:
    """A row for each save; `run` is one step."""
    for _ in range(warmup_steps):
        run()
    base = statistics.median(_time_steps(run) for _ in range(3))
    state = training_state(step.model, step.optimizer)
    with (
        tempfile.TemporaryDirectory() as folder,
        CheckpointManager(folder, CheckpointSection(keep=1)) as manager,
    ):
        manager.overlap_copies(step.optimizer)
        manager.prepare(state)
        for number in range(SAVES):
            manager.wait()  # for the writing thread of the save before
            start = time.perf_counter()
            manager.save(number, state)
            seconds = time.perf_counter() - start
            loop = seconds + _time_steps(run) - base
            yield {
                "model": name,
                "save": number,
                "bytes": _count_bytes(state),
                "step_ms": base / STEPS * 1e3,
                "call_ms": seconds * 1e3,
                "loop_ms": loop * 1e3,
            }


def _time_steps(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    for _ in range(STEPS):
        run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _count_bytes(state: Any) -> int:
    leaves = torch.utils._pytree.tree_leaves(state)
    return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))


def format_stalls(rows: list[Row]) -> str:
    lines = [["model", "save", "state", "step", "call", "loop"]]
    lines += [
        [
            row["model"],
            str(row["save"] + 1),
            f"{row['bytes'] / 2**30:.2f} GiB",
            f"{row['step_ms']:.1f} ms",
            f"{row['call_ms']:.1f} ms",
            f"{row['loop_ms']:.1f} ms",
        ]
        for row in rows
    ]
    return results.format_table(lines)
