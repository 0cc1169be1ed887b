"""Every other GPU, and Triton's interpreter: not measured, so the numbers are Hopper's."""

from __future__ import annotations

from fulgurite.kernels.tuning.sm_90 import Sm90Heuristics


class GenericHeuristics(Sm90Heuristics):
    """A GPU without a table. Override a number here when it was measured, with GPU and
    benchmark."""
