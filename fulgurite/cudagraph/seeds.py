"""Seeds of random kernels inside CUDA graphs.

In: kernels that get a seed from the host. Out: new seeds at every replay. A replay launches kernels with
the arguments that were captured. So a captured kernel gets the address of device memory instead, from
which it reads its seed. Before a replay, the host draws the seeds that calls without the graph would
draw, in the same order, and writes them there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

MAX_SEEDS = 4096  # of one graph


class CapturedSeeds:
    """The seeds of one captured call, in device memory."""

    def __init__(self, device: torch.device) -> None:
        self.memory = torch.zeros(MAX_SEEDS, dtype=torch.int64, device=device)
        self.draws: list[Callable[[], int]] = []

    def add(self, draw: Callable[[], int]) -> None:
        """A kernel of the captured call takes a seed: `draw` makes it at every replay."""
        if len(self.draws) == MAX_SEEDS:
            raise RuntimeError(f"a CUDA graph has more than {MAX_SEEDS} random kernels")
        self.draws.append(draw)

    @property
    def last_address(self) -> int:
        """Where the last added seed is."""
        return self.memory.data_ptr() + 8 * (len(self.draws) - 1)

    def draw(self) -> None:
        """Draw the seeds of the next replay."""
        seeds = [draw() for draw in self.draws]
        if len(seeds) == 1:
            self.memory[:1].fill_(seeds[0])  # the value is an argument of the kernel that fills
        else:  # from pageable memory, which CUDA copies before the call returns
            self.memory[: len(seeds)].copy_(torch.tensor(seeds), non_blocking=True)


class _State(threading.local):
    seeds: CapturedSeeds | None = None


_state = _State()


def captured_seeds() -> CapturedSeeds | None:
    """The seeds of the call that this thread captures; None: it captures none."""
    return _state.seeds


@contextmanager
def capture_seeds(seeds: CapturedSeeds) -> Iterator[None]:
    """Give kernels that are launched inside the block their seeds in device memory."""
    outer, _state.seeds = _state.seeds, seeds
    try:
        yield
    finally:
        _state.seeds = outer
