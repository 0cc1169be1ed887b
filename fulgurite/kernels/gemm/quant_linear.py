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

from torch import Tensor

from fulgurite.kernels import registry
from fulgurite.kernels.gemm import cpu_linear, triton_quant_linear
from fulgurite.kernels.gemm.reference import (
    UNQUANTIZED,
    check_bias,
    check_operands,
    dequantize_packed,
    reference,
)
from fulgurite.op import op
from fulgurite.quant import QuantTensor, resolve_format
from fulgurite.quant.shapes import check_shape, logical_shape

# device type -> function of the operator's arguments; it may return NotImplemented
IMPLEMENTATIONS: dict[str, registry.Kernel] = {
    "cpu": cpu_linear.quant_linear,
    "cuda": triton_quant_linear.quant_linear,
}


def quant_linear(
    x: Tensor, weight: QuantTensor, bias: Tensor | None = None, activations: str = UNQUANTIZED
) -> Tensor:
    """x @ weight.T + bias."""
    if activations != UNQUANTIZED:
        activations = resolve_format(activations).name
        check_shape(resolve_format(activations), x.shape, where=f"x {list(x.shape)}")
    check_operands(x, weight)
    check_bias(bias, weight.shape[:1])
    scales = list(weight.scales.values())
    arguments = (x, weight.packed, scales, weight.format.name, bias, activations)
    if registry.can_skip_dispatcher(x, bias):
        return _run(*arguments)
    out: Tensor = quant_linear_op(*arguments)
    return out


@op("fulgurite::quant_linear")
def quant_linear_op(
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
    out: Tensor = registry.dispatch(
        IMPLEMENTATIONS, x.device, reference, x, data, scales, format, bias, activations
    )
    return out


@quant_linear_op.fake
def _(
    x: Tensor,
    data: Tensor,
    scales: list[Tensor],
    format: str,
    bias: Tensor | None,
    activations: str,
) -> Tensor:
    rows, columns = logical_shape(resolve_format(format), data.shape)
    assert x.shape[-1] == columns, f"x {x.shape} does not fit a weight of {columns} columns"
    return x.new_empty((*x.shape[:-1], rows))


@quant_linear_op.backward
def _(inputs: tuple, output: Tensor, gradient: Tensor) -> tuple:  # type: ignore[type-arg]
    x, data, scales, format, bias, _ = inputs
    weight = dequantize_packed(data, scales, resolve_format(format))
    of_x = (gradient.float() @ weight).to(x.dtype)
    of_bias = None
    if bias is not None:
        of_bias = gradient.float().flatten(0, -2).sum(0).to(bias.dtype)
    return of_x, None, [None] * len(scales), None, of_bias, None
