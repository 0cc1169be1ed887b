"""`GroupedGemmArgs`: the arguments that every grouped GEMM kernel takes.

In: the operator's flat arguments. Out: one value with the sizes that kernels ask for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from fulgurite.kernels.elementwise.gated_activation import GatedActivation

DENSE = "dense"  # the format of a weight that is not quantized


@dataclass(frozen=True)
class GroupedGemmArgs:
    """y[s] = gate((x[row_indices[s]] @ weight[e].T) * row_weights[s] + bias[e])

    x            [R, K]
    row_indices  int32 [S], the row of x of each sorted row; None: x is sorted itself
    row_weights  float32 [S], or None
    offsets      int32 [E], the ends of the experts' rows
    data         [E, N, K] in x's dtype (format "dense"), or packed, with `scales`
    activations  "none", or the format that rows of x are quantized to
    """

    x: Tensor
    row_indices: Tensor | None
    row_weights: Tensor | None
    offsets: Tensor
    data: Tensor
    scales: list[Tensor]
    format: str
    bias: Tensor | None
    activations: str
    gate: GatedActivation

    @property
    def num_rows(self) -> int:
        """S, rows of the output."""
        return (self.x if self.row_indices is None else self.row_indices).shape[0]

    @property
    def num_experts(self) -> int:
        return self.offsets.shape[0]

    @property
    def out_columns(self) -> int:
        """N, or half of it with a gate."""
        return self.data.shape[1] // self.gate.num_inputs

    def with_contiguous_rows(self) -> GroupedGemmArgs:
        """The same with K contiguous in x."""
        return self if self.x.stride(1) == 1 else replace(self, x=self.x.contiguous())
