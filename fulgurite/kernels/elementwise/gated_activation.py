"""Gated activation (GLU): [.., 2I] in, activation(gate) * up of its two halves out.

In: gate_up [.., 2I], gate in front of up. Out: [.., I]. `GatedActivation` is the plain-torch
definition and its gradient; kernels apply it in their epilogue.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fulgurite.errors import ArgumentError
from fulgurite.kernels.elementwise.ops import ACTIVATIONS

NO_GATE = "none"
CLAMPED_SWIGLU = "clamped"
# numbers of the kinds in the Triton and C++ kernels
GATE_IDS = {NO_GATE: 0, "silu": 1, "gelu": 2, "gelu_pytorch_tanh": 3, CLAMPED_SWIGLU: 4}


@dataclass(frozen=True)
class GatedActivation:
    """activation(gate) * up.

    "clamped" is gpt-oss's SwiGLU: (up + 1) * gate * sigmoid(alpha * gate), both clamped to `limit`
    first. "none" leaves its input as it is.
    """

    kind: str = "silu"
    alpha: float = 1.702
    limit: float = 7.0

    def __post_init__(self) -> None:
        allowed = (NO_GATE, *ACTIVATIONS, CLAMPED_SWIGLU)
        if self.kind not in allowed:
            raise ArgumentError(
                f"there is no gated activation {self.kind!r}", next=f"one of {', '.join(allowed)}"
            )

    @property
    def is_gated(self) -> bool:
        return self.kind != NO_GATE

    @property
    def num_inputs(self) -> int:
        """Columns of the input for each column of the output: gate and up, or one."""
        return 2 if self.is_gated else 1

    @property
    def is_in_kernels(self) -> bool:
        """Whether GEMM kernels apply it in their epilogue."""
        return self.kind in GATE_IDS

    @property
    def kernel_id(self) -> int:
        """The number of `kind` in the kernels."""
        return GATE_IDS[self.kind]

    def __call__(self, gate_up: Tensor) -> Tensor:
        """The definition in plain torch."""
        if not self.is_gated:
            return gate_up
        gate, up = gate_up.chunk(2, dim=-1)
        if self.kind != CLAMPED_SWIGLU:
            return ACTIVATIONS[self.kind](gate) * up
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (up + 1) * gate * torch.sigmoid(self.alpha * gate)

    def gradient(self, gate_up: Tensor, grad_out: Tensor) -> Tensor:
        """The gradient of `gate_up`, given that of the output."""
        if not self.is_gated:
            return grad_out
        gate, up = gate_up.chunk(2, dim=-1)
        if self.kind == CLAMPED_SWIGLU:
            return torch.cat(self._clamped_gradient(gate, up, grad_out), dim=-1)
        grad_activation = grad_out * up
        if self.kind == "silu":
            grad_gate = torch.ops.aten.silu_backward(grad_activation, gate)
        else:
            approximate = "tanh" if self.kind == "gelu_pytorch_tanh" else "none"
            grad_gate = torch.ops.aten.gelu_backward(grad_activation, gate, approximate=approximate)
        return torch.cat((grad_gate, grad_out * ACTIVATIONS[self.kind](gate)), dim=-1)

    def _clamped_gradient(
        self, gate: Tensor, up: Tensor, grad_out: Tensor
    ) -> tuple[Tensor, Tensor]:
        low, high = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        sigmoid = torch.sigmoid(self.alpha * low)
        slope = sigmoid + self.alpha * low * sigmoid * (1 - sigmoid)
        grad_gate = grad_out * (high + 1) * slope * (gate <= self.limit)
        return grad_gate, grad_out * low * sigmoid * (up.abs() <= self.limit)


UNGATED = GatedActivation(NO_GATE)
