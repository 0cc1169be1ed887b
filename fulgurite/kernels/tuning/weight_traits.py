"""What the heuristics look at in a quantized weight.

`kernels.common.triton_operands.DequantScheme` has these properties. They are declared here so that
this folder imports no kernel.
"""

from __future__ import annotations

from typing import Protocol


class WeightTraits(Protocol):
    """How a weight is dequantized and where its scales are applied."""

    @property
    def dequant(self) -> str:
        """ "cast", "e2m1", "int4", "uint4" or "dense"."""

    @property
    def scaling(self) -> str:
        """ "epilogue", "mainloop", "operand", "group" or "none"."""

    @property
    def small_m_scaling(self) -> str:
        """The same in the small-M kernel."""

    @property
    def group_size(self) -> int:
        """Columns of K that share a scale."""

    @property
    def is_4bit(self) -> bool:
        """Whether two codes share a byte."""
