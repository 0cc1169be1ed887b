"""GEMM with quantized operands in plain torch: the references that kernels are tested against.

In: the arguments of the operators `quant_linear` and `scaled_mm`. Out: their results: everything is
dequantized, then multiplied in float32. They run on every device and take every format. In
deterministic mode a GPU multiplies by the batch-invariant kernel instead of the library's.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from fulgurite.determinism import is_deterministic
from fulgurite.kernels.gemm.triton_invariant_gemm import invariant_linear
from fulgurite.quant import PackedData, resolve_format
from fulgurite.quant import quantize as quantize_reference
from fulgurite.quant.codecs import codec
from fulgurite.quant.format import Format

UNQUANTIZED = "none"  # the format of activations that are not quantized


def quant_linear(
    x: Tensor,
    data: Tensor,
    scales: list[Tensor],
    format: str,
    bias: Tensor | None,
    activations: str,
) -> Tensor:
    """x @ weight.T + bias, x as it is or quantized to `activations` first."""
    weight = dequantize_packed(data, scales, resolve_format(format))
    out = multiply(fake_quantize_activations(x, activations), weight)
    return (out if bias is None else out + bias.float()).to(x.dtype)


def scaled_mm(
    a: Tensor,
    a_scales: list[Tensor],
    a_format: str,
    b: Tensor,
    b_scales: list[Tensor],
    b_format: str,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """a @ b.T + bias, both quantized."""
    left = dequantize_packed(a, a_scales, resolve_format(a_format))
    right = dequantize_packed(b, b_scales, resolve_format(b_format))
    out = multiply(left, right)
    return (out if bias is None else out + bias.float()).to(out_dtype)


def multiply(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T."""
    if x.is_cuda and x.dtype == torch.float32 and is_deterministic():
        return invariant_linear(x, weight)
    return F.linear(x, weight)


def dequantize_packed(data: Tensor, scales: list[Tensor], format: Format) -> Tensor:
    """Packed data and its stored scales as float32."""
    names = [scale.name for scale in format.separate_scales]
    packed = PackedData(data, dict(zip(names, scales, strict=True)))
    return codec.dequantize_codes(codec.unpack(packed, format), format)


def fake_quantize_activations(x: Tensor, activations: str) -> Tensor:
    """x in float32, rounded to the values of a format row by row."""
    if activations == UNQUANTIZED:
        return x.float()
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return quantize_reference(rows, activations).dequantize(torch.float32).reshape(x.shape)


def upcast(x: Tensor) -> Tensor:
    """x in float32, or as it is in float64."""
    return x if x.dtype == torch.float64 else x.float()
