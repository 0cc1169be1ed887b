"""`SmallBatchArgs`: a layer of experts for a few tokens, as the small-batch kernels take it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fulgurite.kernels.elementwise.gated_activation import GatedActivation
from fulgurite.kernels.gemm.reference import UNQUANTIZED
from fulgurite.kernels.moe.router_config import RmsNormArgs, Routes


@dataclass(frozen=True)
class SmallBatchArgs:
    """out[t] = residual[t] + sum over j of weights[t, j] * down[e](gate(gate_up[e](norm(x[t]))))

    gate_up is [E, 2I, D] and down [E, D, I]; both are dense or both quantized.
    """

    x_TD: Tensor
    routes: Routes
    gate_up: Tensor
    down: Tensor
    gate: GatedActivation
    norm: RmsNormArgs | None = None
    residual_TD: Tensor | None = None
    activations: tuple[str, str] = (UNQUANTIZED, UNQUANTIZED)
