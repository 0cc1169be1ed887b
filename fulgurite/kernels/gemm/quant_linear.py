"""`quant_linear`: x @ weight.T + bias with a quantized weight.

    y[m, n] = sum over k of x[m, k] * dequantize(weight)[n, k]  + bias[n]

In: x [.., K] in float32, bfloat16 or float16, and a weight [N, K] in any format of `FORMATS`. Out:
[.., N] in x's dtype, summed in float32 and rounded once.

Kernels dequantize the weight in registers. GPUs have an exception: from 192 rows on, the weight is
dequantized once for the library's GEMM, which is faster. There, and from 17 rows on with integers
in groups under 64, dequantized weights are rounded to x's dtype.

`activations` is "none" (x as it is) or a format. With a format, x is quantized on the fly, row by
row of [M, K], and the result is that of the quantized x. On CPUs only "q8_0" (int8 in blocks of 32)
multiplies in integers.

Backward: the gradient of x is that of a linear with the dequantized weight; quantizing x counts as
the identity. A quantized weight has no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fulgurite.errors import FormatError
from fulgurite.kernels import registry
from fulgurite.kernels.gemm import cpu_linear, reference, triton_quant_linear
from fulgurite.kernels.gemm.reference import UNQUANTIZED, dequantize_packed
from fulgurite.op import op
from fulgurite.quant import QuantTensor, resolve_format
from fulgurite.quant.shapes import check_shape, logical_shape

# device type -> kernel with the operator's arguments; it may return NotImplemented
QUANT_LINEAR_KERNELS = {
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


def check_operands(x: Tensor, weight: QuantTensor) -> None:
    """Raise if x can't be multiplied by the weight."""
    if weight.dim() != 2:
        raise FormatError(
            f"the weight of a linear must have two dimensions, and this one has {weight.dim()}",
            where=f"{weight.format.name} weight {list(weight.shape)}",
            next="take one expert of a stack, or use grouped_gemm",
        )
    if x.dim() == 0 or x.shape[-1] != weight.shape[-1]:
        raise FormatError(
            f"x has {x.shape[-1] if x.dim() else 1} columns, and the weight has K = "
            f"{weight.shape[-1]}",
            where=f"x {list(x.shape)}, {weight.format.name} weight {list(weight.shape)}",
            next="the last dimensions of both are contracted: check which one is transposed",
        )
    if not x.is_floating_point():
        raise FormatError(
            f"x must be floating point, and is {x.dtype}",
            where=f"x {list(x.shape)}",
            next="multiply two quantized operands with scaled_mm",
        )


def check_bias(bias: Tensor | None, shape: Sequence[int]) -> None:
    """Raise unless a bias has one value for each row of the weight."""
    if bias is not None and tuple(bias.shape) != tuple(shape):
        raise FormatError(
            f"bias {list(bias.shape)} must be {list(shape)}: one value for each row of the weight",
            next="reshape or expand it",
        )


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

    No parameter has a default: in operators with lists of tensors, torch leaves defaults out of the
    arguments that backward must match.
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
    arguments = (x, data, scales, format, bias, activations)
    out: Tensor = registry.dispatch(
        QUANT_LINEAR_KERNELS, x.device, reference.quant_linear, *arguments
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
def _(inputs: tuple, output: Tensor, grad_out: Tensor) -> tuple:  # type: ignore[type-arg]
    x, data, scales, format, bias, _ = inputs
    weight = dequantize_packed(data, scales, resolve_format(format))
    grad_x = (grad_out.float() @ weight).to(x.dtype)
    grad_bias = None
    if bias is not None:
        grad_bias = grad_out.float().flatten(0, -2).sum(0).to(bias.dtype)
    return grad_x, None, [None] * len(scales), None, grad_bias, None
