"""Numbers of the heuristics for Blackwell (sm_100). Not measured yet: those of Hopper."""

from __future__ import annotations

from fulgurite.kernels.tuning.sm_90 import Sm90Heuristics


class Sm100Heuristics(Sm90Heuristics):
    """Override what `fulgurite bench` and the sweeps show to be different on sm_100."""
