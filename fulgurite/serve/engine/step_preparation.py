"""Steps on padding that an idle engine runs, so that requests don't wait for recordings and captures.

The first steps of a shape are slow: they compile, touch memory first, and are recorded (on a CPU) or
captured (on a GPU). While readers wait for tokens, each new number of requests would be a gap in all
replies. `StepPreparation` runs these steps before, one at a time, with inputs that change no request:

    CPU   decode steps of 1 to MAX_PREPARED_DECODE requests, then mixed steps (recorded_step.py)
    GPU   decode steps of 1, 2, 4, ... requests, for the ways of sampling that were captured before

Shapes that are not prepared are recorded or captured when a request needs them.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import TYPE_CHECKING

from fulgurite.serve.engine.recorded_step import MAX_TOKENS, TOKEN_MULTIPLE, StepShape, mixed_shape

if TYPE_CHECKING:
    from fulgurite.serve.engine.runner import ModelRunner

LOG = logging.getLogger(__name__)

MAX_PREPARED_DECODE = 16  # requests of recorded decode steps
MAX_STEP_SECONDS = 0.15  # a request may come while a step runs; slow ones hide what recording costs


class StepPreparation:
    """The shapes that the runner of an idle engine has not prepared yet."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.shapes = deque(find_shapes(runner))
        self.num_runs = 0  # of the first shape

    def run_next(self) -> bool:
        """Run one step, or capture one; False: nothing is left to prepare."""
        if self.runner.no_capture_reason is not None:
            self.shapes.clear()
        if not self.shapes:
            return False
        shape, start = self.shapes[0], time.thread_time()  # whatever else the machine does
        try:
            is_prepared = self.runner.prepare_step(shape)
        except RuntimeError as error:  # a step of requests reports it, if it fails there too
            LOG.warning("steps are not prepared: %s", str(error).partition("\n")[0])
            self.shapes.clear()
            return False
        self.num_runs += 1
        is_slow = time.thread_time() - start > MAX_STEP_SECONDS
        if is_prepared:
            self.shapes.popleft()
            self.num_runs = 0
        elif is_slow and self.num_runs > 1:  # the first one may have compiled
            self.shapes.clear()
        return bool(self.shapes)


def find_shapes(runner: ModelRunner) -> list[StepShape]:
    """The shapes to prepare, in this order."""
    kv_cache, rows = runner.kv_cache, runner.block_manager.num_rows
    if runner.mesh is not None or runner.stage_runner is not None:
        return []  # ranks run steps together
    if runner.graph_pool is not None:
        sizes = [1 << power for power in range(1 + (rows - 1).bit_length())]
        return [StepShape(size, size) for size in sizes]
    if kv_cache.has_states or kv_cache.mla_sizes:
        return []  # their kernels have no token that is written nowhere
    decode = [StepShape(n, n) for n in range(1, min(rows, MAX_PREPARED_DECODE) + 1)]
    mixed = [mixed_shape(n, rows) for n in range(TOKEN_MULTIPLE, MAX_TOKENS + 1, TOKEN_MULTIPLE)]
    return decode + mixed
