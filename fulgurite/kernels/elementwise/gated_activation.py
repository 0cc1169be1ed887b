"""The gated activation of an MLP or expert: activation(gate) * up.

In: the two halves of a [.., 2I] tensor. Out: [.., I], and its gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fulgurite.errors import ArgumentError
from fulgurite.kernels.elementwise import ops

NO_GATE = "none"


CLAMPED_SWIGLU = "clamped"


@dataclass(frozen=True)
class GatedActivation:
    """activation(left) * right, of the two halves of a [.., 2I] tensor.

    "clamped" is that of gpt-oss: (up + 1) * gate * sigmoid(alpha * gate), with both clamped first.
    """

    kind: str = "silu"
    alpha: float = 1.702
    limit: float = 7.0

    def __post_init__(self) -> None:
        allowed = (NO_GATE, *ops.ACTIVATIONS, CLAMPED_SWIGLU)
        if self.kind not in allowed:
            raise ArgumentError(
                f"there is no gate {self.kind!r}", next=f"one of {', '.join(allowed)}"
            )

    def __call__(self, gate_up: Tensor) -> Tensor:
        """In plain torch."""
        if self.kind == NO_GATE:
            return gate_up
        gate, up = gate_up.chunk(2, dim=-1)
        if self.kind != CLAMPED_SWIGLU:
            return ops.ACTIVATIONS[self.kind](gate) * up
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (up + 1) * gate * torch.sigmoid(self.alpha * gate)

    def gradient(self, gate_up: Tensor, of_result: Tensor) -> Tensor:
        """The gradient of `gate_up`."""
        if self.kind == NO_GATE:
            return of_result
        gate, up = gate_up.chunk(2, dim=-1)
        if self.kind == CLAMPED_SWIGLU:
            return torch.cat(self._clamped_gradient(gate, up, of_result), dim=-1)
        of_activation = of_result * up
        if self.kind == "silu":
            of_gate = torch.ops.aten.silu_backward(of_activation, gate)
        else:
            how = "tanh" if self.kind == "gelu_pytorch_tanh" else "none"
            of_gate = torch.ops.aten.gelu_backward(of_activation, gate, approximate=how)
        return torch.cat((of_gate, of_result * ops.ACTIVATIONS[self.kind](gate)), dim=-1)

    def _clamped_gradient(
        self, gate: Tensor, up: Tensor, of_result: Tensor
    ) -> tuple[Tensor, Tensor]:
        low, high = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        chance = torch.sigmoid(self.alpha * low)
        slope = chance + self.alpha * low * chance * (1 - chance)
        of_gate = of_result * (high + 1) * slope * (gate <= self.limit)
        return of_gate, of_result * low * chance * (up.abs() <= self.limit)


GATE_IDS = {NO_GATE: 0, "silu": 1, "gelu": 2, "gelu_pytorch_tanh": 3, CLAMPED_SWIGLU: 4}
