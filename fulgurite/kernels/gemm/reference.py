"""Linears with quantized weights in plain torch, and the checks of their arguments.

In: activations and a quantized weight. Out: x @ weight.T + bias: the definition that every kernel is compared with.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fulgurite.errors import FormatError
from fulgurite.quant import PackedData, QuantTensor, resolve_format
from fulgurite.quant import quantize as quantize_plain
from fulgurite.quant.codecs import codec
from fulgurite.quant.format import Format

UNQUANTIZED = "none"


def check_operands(x: Tensor, weight: QuantTensor) -> None:
    """Raises where x and the weight don't fit each other."""
    if weight.dim() != 2:
        raise FormatError(
            f"the weight of a linear has two dimensions, and this one has {weight.dim()}",
            where=f"{weight.format.name} weight {list(weight.shape)}",
            next="take one expert of a stack, or use grouped_gemm",
        )
    if x.dim() == 0 or x.shape[-1] != weight.shape[-1]:
        raise FormatError(
            f"x has {x.shape[-1] if x.dim() else 1} columns, and the weight takes K = "
            f"{weight.shape[-1]}",
            where=f"x {list(x.shape)}, {weight.format.name} weight {list(weight.shape)}",
            next="the last dimensions of both are contracted: check which one is transposed",
        )
    if not x.is_floating_point():
        raise FormatError(
            f"x must be floating point, and is {x.dtype}",
            where=f"x {list(x.shape)}",
            next="two packed operands are multiplied by scaled_mm",
        )


def check_bias(bias: Tensor | None, shape: Sequence[int]) -> None:
    """Raises where a bias is not one number a row of the weight."""
    if bias is not None and tuple(bias.shape) != tuple(shape):
        raise FormatError(
            f"bias {list(bias.shape)} must be {list(shape)}: a number for each row of the weight",
            next="reshape or expand it",
        )


def reference(
    x: Tensor,
    data: Tensor,
    scales: list[Tensor],
    format: str,
    bias: Tensor | None,
    activations: str,
) -> Tensor:
    """Everything dequantized, then one matmul in float32."""
    weight = dequantize_packed(data, scales, resolve_format(format))
    out = F.linear(fake_quantize_activations(x, activations), weight)
    return (out if bias is None else out + bias.float()).to(x.dtype)


def dequantize_packed(data: Tensor, scales: list[Tensor], format: Format) -> Tensor:
    """Packed parts as float32."""
    names = [scale.name for scale in format.separate_scales]
    packed = PackedData(data, dict(zip(names, scales, strict=True)))
    return codec.dequantize_codes(codec.unpack(packed, format), format)


def fake_quantize_activations(x: Tensor, activations: str) -> Tensor:
    """x in float32, as it is after quantizing its rows."""
    if activations == UNQUANTIZED:
        return x.float()
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return quantize_plain(rows, activations).dequantize(torch.float32).reshape(x.shape)
