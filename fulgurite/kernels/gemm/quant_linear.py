"""`quant_linear`: x @ weight.T + bias with a packed weight.

    y[m, n] = sum over k of x[m, k] * dequantize(weight)[n, k]  + bias[n]

In: x [.., K] in float32, bfloat16 or float16, and a weight [N, K] in any format of the table. Out:
[.., N] in x's dtype, summed in float32 and rounded once. The packed weight is not written out as
floats, except on a GPU from 192 rows on, where decoding it once for the library's matmul is faster: there,
and from 17 rows on with integers in groups under 64, weights are rounded to x's dtype.

`activations` is "none" (x as it is) or a format: then x is quantized on the fly, row by row of
[M, K], and the result is that of the quantized x. On CPUs "q8_0" (int8 in blocks of 32) is the one
that multiplies in integers.

Backward: the gradient of x is that of a plain linear with the dequantized weight (quantizing x
counts as the identity); the packed weight has none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fulgurite.errors import FormatError
from fulgurite.kernels import registry
from fulgurite.op import op
from fulgurite.quant import Packed, QuantTensor, codec, resolve
from fulgurite.quant import quantize as quantize_plain
from fulgurite.quant.format import Format
from fulgurite.quant.shapes import check_shape, logical_shape

PLAIN = "none"

# device type -> function of the operator's arguments; it may return NotImplemented
IMPLEMENTATIONS: dict[str, str] = {
    "cpu": "fulgurite.kernels.gemm.cpu_linear:quant_linear",
    "cuda": "fulgurite.kernels.gemm.triton_quant_linear:quant_linear",
}


def quant_linear(
    x: Tensor, weight: QuantTensor, bias: Tensor | None = None, activations: str = PLAIN
) -> Tensor:
    """x @ weight.T + bias."""
    if activations != PLAIN:
        activations = resolve(activations).name
        check_shape(resolve(activations), x.shape, where=f"x {list(x.shape)}")
    check_operands(x, weight)
    check_bias(bias, weight.shape[:1])
    scales = list(weight.scales.values())
    arguments = (x, weight.packed, scales, weight.format.name, bias, activations)
    if registry.is_plain_call(x, bias):
        return _run(*arguments)
    out: Tensor = quant_linear_parts(*arguments)
    return out


def check_operands(x: Tensor, weight: QuantTensor) -> None:
    """Raises where x and the weight don't fit each other."""
    if weight.dim() != 2:
        raise FormatError(
            f"the weight of a linear has two dimensions, and this one has {weight.dim()}",
            where=f"{weight.format.name} weight {list(weight.shape)}",
            next="take one expert of a stack, or use grouped_quant_linear",
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


@op("fulgurite::quant_linear")
def quant_linear_parts(
    x: Tensor,
    data: Tensor,
    scales: list[Tensor],
    format: str,
    bias: Tensor | None,
    activations: str,
) -> Tensor:
    """The operator: the weight as packed data and its stored scales.

    No parameter has a default: torch leaves defaults out of what backward has to match where there
    are lists of tensors.
    """
    return _run(x, data, scales, format, bias, activations)


def _run(
    x: Tensor,
    data: Tensor,
    scales: list[Tensor],
    format: str,
    bias: Tensor | None,
    activations: str,
) -> Tensor:
    out: Tensor = registry.run(
        IMPLEMENTATIONS, x.device, reference, x, data, scales, format, bias, activations
    )
    return out


def reference(
    x: Tensor,
    data: Tensor,
    scales: list[Tensor],
    format: str,
    bias: Tensor | None,
    activations: str,
) -> Tensor:
    """Everything dequantized, then one matmul in float32."""
    weight = decode_parts(data, scales, resolve(format))
    out = F.linear(rounded_activations(x, activations), weight)
    return (out if bias is None else out + bias.float()).to(x.dtype)


def decode_parts(data: Tensor, scales: list[Tensor], format: Format) -> Tensor:
    """Packed parts as float32."""
    names = [scale.name for scale in format.stored_scales]
    packed = Packed(data, dict(zip(names, scales, strict=True)))
    return codec.decode(codec.unpack(packed, format), format)


def rounded_activations(x: Tensor, activations: str) -> Tensor:
    """x in float32, as it is after quantizing its rows."""
    if activations == PLAIN:
        return x.float()
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return quantize_plain(rows, activations).dequantize(torch.float32).reshape(x.shape)


@quant_linear_parts.fake
def _(
    x: Tensor,
    data: Tensor,
    scales: list[Tensor],
    format: str,
    bias: Tensor | None,
    activations: str,
) -> Tensor:
    rows, columns = logical_shape(resolve(format), data.shape)
    assert x.shape[-1] == columns, f"x {x.shape} does not fit a weight of {columns} columns"
    return x.new_empty((*x.shape[:-1], rows))


@quant_linear_parts.backward
def _(inputs: tuple, output: Tensor, gradient: Tensor) -> tuple:  # type: ignore[type-arg]
    x, data, scales, format, bias, _ = inputs
    weight = decode_parts(data, scales, resolve(format))
    of_x = (gradient.float() @ weight).to(x.dtype)
    of_bias = None
    if bias is not None:
        of_bias = gradient.float().flatten(0, -2).sum(0).to(bias.dtype)
    return of_x, None, [None] * len(scales), None, of_bias, None
