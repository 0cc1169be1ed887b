"""`Heuristics`: all launch heuristics of the hand-written GPU kernels in one overridable class.

In: what the device has (multiprocessors, shared memory). Out: launch configs, by the methods of one
mixin an operator family. A subclass sets the numbers of a device family (`sm_90.py`) and may
override any method.
"""

from __future__ import annotations

from fulgurite.kernels.tuning.attention import AttentionHeuristics
from fulgurite.kernels.tuning.dispatch import DispatchHeuristics
from fulgurite.kernels.tuning.elementwise import ElementwiseHeuristics
from fulgurite.kernels.tuning.fused_linear import FusedLinearHeuristics
from fulgurite.kernels.tuning.gemm_epilogue import GemmEpilogueHeuristics
from fulgurite.kernels.tuning.grouped_gemm import GroupedGemmHeuristics
from fulgurite.kernels.tuning.linear_attention import LinearAttentionHeuristics
from fulgurite.kernels.tuning.mla import MlaHeuristics
from fulgurite.kernels.tuning.moe import MoeHeuristics
from fulgurite.kernels.tuning.quantize import QuantizeHeuristics
from fulgurite.kernels.tuning.sampling import SamplingHeuristics


class Heuristics(
    AttentionHeuristics,
    MlaHeuristics,
    LinearAttentionHeuristics,
    SamplingHeuristics,
    ElementwiseHeuristics,
    FusedLinearHeuristics,
    GemmEpilogueHeuristics,
    GroupedGemmHeuristics,
    MoeHeuristics,
    QuantizeHeuristics,
    DispatchHeuristics,
):
    """The heuristics of one GPU. The defaults are an H200's, for Triton's interpreter."""

    def __init__(self, num_sms: int = 132, shared_memory_bytes: int = 227 << 10) -> None:
        self.num_sms = num_sms
        self.shared_memory_bytes = shared_memory_bytes
