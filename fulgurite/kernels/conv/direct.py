"""Packed convolutions and linears without torch's dispatcher: what final traces call.

In and out: as the operators of `ops.py`. Plain tensors go straight to the C++ kernel; FakeTensors, other
subclasses, and what no kernel supports, to the operator.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fulgurite.kernels.conv import cpu, ops

PLAIN = (Tensor, nn.Parameter)


def packed_conv(x: Tensor, *arguments: Any) -> Tensor:
    """`fulgurite::packed_conv`."""
    result: Any = cpu.packed_conv(x, *arguments) if type(x) in PLAIN else NotImplemented
    out: Tensor = ops.packed_conv(x, *arguments) if result is NotImplemented else result
    return out


def packed_linear(x: Tensor, *arguments: Any) -> Tensor:
    """`fulgurite::packed_linear`."""
    result: Any = cpu.packed_linear(x, *arguments) if type(x) in PLAIN else NotImplemented
    out: Tensor = ops.packed_linear(x, *arguments) if result is NotImplemented else result
    return out
