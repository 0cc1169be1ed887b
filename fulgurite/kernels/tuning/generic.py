"""Numbers of the heuristics for GPUs without a table of their own: those of Hopper."""

from __future__ import annotations

from fulgurite.kernels.tuning.sm_90 import Sm90Heuristics


class GenericHeuristics(Sm90Heuristics):
    """SM count and shared memory are the device's; the rest is untuned."""
