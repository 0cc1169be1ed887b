"""NVIDIA Blackwell (sm_100, sm_103): not measured yet, so the numbers are Hopper's."""

from __future__ import annotations

from fulgurite.kernels.tuning.sm_90 import Sm90Heuristics


class Sm100Heuristics(Sm90Heuristics):
    """B200. Override a number here when it was measured, with the benchmark."""

    mla_fp8_block_m = 32  # Triton 3.6 fails to compile 64 rows for sm_100
