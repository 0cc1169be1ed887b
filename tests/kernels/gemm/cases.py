"""What the tests of quantized GEMM kernels share: operands on the device, and exact values."""

from __future__ import annotations

import torch
from torch import Tensor

from fulgurite.kernels.common.triton_operands import (
    DequantScheme,
    QuantizedOperand,
    dequant_scheme,
    make_operand,
)
from fulgurite.quant import QuantTensor
from tests.kernels.triton_support import on_device


def tensors_of(weight: QuantTensor) -> tuple[Tensor, list[Tensor]]:
    """Packed data and scales on the device."""
    data, *scales = on_device(weight.packed, *weight.scales.values())
    return data, scales


def operand_of(weight: QuantTensor) -> tuple[QuantizedOperand, DequantScheme]:
    """The weight on the device as kernels take it."""
    scheme = dequant_scheme(weight.format)
    assert scheme is not None, f"{weight.format.name} has no kernel"
    return make_operand(*tensors_of(weight), weight.format, scheme), scheme


def exact(weight: QuantTensor) -> Tensor:
    return weight.dequantize(torch.float32).double()
