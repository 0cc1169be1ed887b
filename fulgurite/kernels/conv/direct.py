"""Packed convolutions and linears, and their gradients, without torch's dispatcher: what final traces call.

In and out: as the operators of `ops.py`. Plain tensors go straight to the C++ kernel; FakeTensors, other
subclasses, and what no kernel supports, to the operator.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fulgurite.kernels.conv import cpu, gradients, ops

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


def conv_weight_gradient(gradient: Tensor, *arguments: Any) -> Tensor:
    """`fulgurite::conv_weight_gradient`."""
    is_plain = type(gradient) in PLAIN
    result: Any = cpu.conv_weight_gradient(gradient, *arguments) if is_plain else NotImplemented
    if result is NotImplemented:
        result = gradients.conv_weight_gradient(gradient, *arguments)
    return result  # type: ignore[no-any-return]


def packed_conv_transpose(x: Tensor, *arguments: Any) -> Tensor:
    """`fulgurite::packed_conv_transpose`."""
    is_plain = type(x) in PLAIN
    result: Any = cpu.packed_conv_transpose(x, *arguments) if is_plain else NotImplemented
    if result is NotImplemented:
        result = gradients.packed_conv_transpose(x, *arguments)
    return result  # type: ignore[no-any-return]


def matmul(a: Tensor, *arguments: Any) -> Tensor:
    """`fulgurite::matmul`."""
    result: Any = cpu.matmul(a, *arguments) if type(a) in PLAIN else NotImplemented
    return gradients.matmul(a, *arguments) if result is NotImplemented else result  # type: ignore[no-any-return]
