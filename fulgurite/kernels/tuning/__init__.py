"""Launch heuristics of the hand-written kernels: sizes and a device in, a `LaunchConfig` out.

    config.py         `LaunchConfig`: block sizes, warps, stages, split-K of one launch
    heuristics.py     `heuristics_for(device)`, `num_sms(device)`, `override_heuristics(...)`
    base.py           `Heuristics`: one class of all of them, a mixin an operator family:
                      gemm.py  small_m.py  grouped_gemm.py  moe.py  quantize.py  fused_linear.py
                      gemm_epilogue.py  attention.py  mla.py  sampling.py  elementwise.py
                      linear_attention.py
    sm_90.py  sm_100.py  generic.py          the numbers of a device family, each with its origin
    cpu.py            constants of the C++ kernels, a table an instruction set

No kernel file holds a tuned number. This folder imports no kernel.
"""

from fulgurite.kernels.tuning.base import Heuristics
from fulgurite.kernels.tuning.config import LaunchConfig
from fulgurite.kernels.tuning.heuristics import heuristics_for, num_sms, override_heuristics

__all__ = ["Heuristics", "LaunchConfig", "heuristics_for", "num_sms", "override_heuristics"]
