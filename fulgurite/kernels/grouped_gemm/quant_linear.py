"""Linears of experts: rows of x sorted by expert, one packed weight an expert.

    y[t] = x[t] @ weight[e].T + bias[e]      for offsets[e-1] <= t < offsets[e]

In: x [T, K], `offsets` int32 [E], the ends of the groups, on x's device (no kernel reads them on the
host), and weights [E, N, K]. Out: [T, N]. Rows at and past `offsets[-1]` are zero.

`grouped_quant_linear` takes float x, or quantizes its rows on the fly; `grouped_scaled_mm` takes x
packed. The padding and the order of scales that a kernel wants are its own business.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fulgurite.errors import FormatError
from fulgurite.kernels import registry
from fulgurite.kernels.gemm.quant_linear import PLAIN, check_bias, decode_parts, rounded_activations
from fulgurite.op import op
from fulgurite.quant import QuantTensor, resolve
from fulgurite.quant.shapes import check_shape, logical_shape

# device type -> function of the operator's arguments; it may return NotImplemented
LINEAR_IMPLEMENTATIONS: dict[str, str] = {
    "cpu": "fulgurite.kernels.gemm.cpu_scaled_mm:grouped_quant_linear",
    "cuda": "fulgurite.kernels.gemm.triton_quant_linear:grouped_quant_linear",
}
SCALED_IMPLEMENTATIONS: dict[str, str] = {
    "cpu": "fulgurite.kernels.gemm.cpu_scaled_mm:grouped_scaled_mm",
    "cuda": "fulgurite.kernels.gemm.triton_scaled_mm:grouped_scaled_mm",
}


def grouped_quant_linear(
    x: Tensor,
    offsets: Tensor,
    weight: QuantTensor,
    bias: Tensor | None = None,
    activations: str = PLAIN,
) -> Tensor:
    """Each group of rows times its expert's weight; x float, `activations` as in quant_linear."""
    if activations != PLAIN:
        activations = resolve(activations).name
        check_shape(resolve(activations), x.shape, where=f"x {list(x.shape)}")
    _check(x.shape, offsets, weight, bias)
    scales = list(weight.scales.values())
    out: Tensor = grouped_quant_linear_parts(
        x, offsets, weight.packed, scales, weight.format.name, bias, activations
    )
    return out


def grouped_scaled_mm(
    a: QuantTensor,
    offsets: Tensor,
    weight: QuantTensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The same with packed rows."""
    _check(a.shape, offsets, weight, bias)
    out: Tensor = grouped_scaled_mm_parts(
        a.packed,
        list(a.scales.values()),
        a.format.name,
        offsets,
        weight.packed,
        list(weight.scales.values()),
        weight.format.name,
        bias,
        out_dtype or a.dtype,
    )
    return out


def _check(rows: torch.Size, offsets: Tensor, weight: QuantTensor, bias: Tensor | None) -> None:
    if weight.dim() != 3 or len(rows) != 2 or rows[-1] != weight.shape[-1]:
        raise FormatError(
            f"rows {list(rows)} can't be multiplied by experts {list(weight.shape)}",
            where=f"{weight.format.name} weight",
            next="rows are [T, K] and the weight [E, N, K], both with K last",
        )
    if offsets.dtype != torch.int32 or tuple(offsets.shape) != (weight.shape[0],):
        raise FormatError(
            f"offsets must be int32[{weight.shape[0]}], the end of each expert's rows, and is "
            f"{str(offsets.dtype).removeprefix('torch.')}{list(offsets.shape)}",
            next="counts.cumsum(0).to(torch.int32)",
        )
    check_bias(bias, weight.shape[:2])


@op("fulgurite::grouped_quant_linear")
def grouped_quant_linear_parts(
    x: Tensor,
    offsets: Tensor,
    data: Tensor,
    scales: list[Tensor],
    format: str,
    bias: Tensor | None,
    activations: str,
) -> Tensor:
    """The operator: the experts' weights as packed data and their stored scales."""
    arguments = (x, offsets.contiguous(), data, scales, format, bias, activations)
    out: Tensor = registry.run(LINEAR_IMPLEMENTATIONS, x.device, linear_reference, *arguments)
    return out


def linear_reference(
    x: Tensor,
    offsets: Tensor,
    data: Tensor,
    scales: list[Tensor],
    format: str,
    bias: Tensor | None,
    activations: str,
) -> Tensor:
    """Every expert on all rows, keeping its own: no offset is read on the host."""
    rows = rounded_activations(x, activations)
    return _grouped(rows, offsets, data, scales, format, bias).to(x.dtype)


def _grouped(
    rows: Tensor,
    offsets: Tensor,
    data: Tensor,
    scales: list[Tensor],
    format: str,
    bias: Tensor | None,
) -> Tensor:
    entry = resolve(format)
    position = torch.arange(rows.shape[0], device=rows.device, dtype=torch.int32)
    expert = torch.searchsorted(offsets, position, right=True)
    out = rows.new_zeros(rows.shape[0], data.shape[1])
    for index in range(data.shape[0]):
        weight = decode_parts(data[index], [scale[index] for scale in scales], entry)
        product = F.linear(rows, weight, None if bias is None else bias[index].float())
        out = torch.where((expert == index)[:, None], product, out)
    return out


@op("fulgurite::grouped_scaled_mm")
def grouped_scaled_mm_parts(
    a: Tensor,
    a_scales: list[Tensor],
    a_format: str,
    offsets: Tensor,
    b: Tensor,
    b_scales: list[Tensor],
    b_format: str,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """The operator: rows and weights as packed data and their stored scales."""
    arguments = (
        a,
        a_scales,
        a_format,
        offsets.contiguous(),
        b,
        b_scales,
        b_format,
        bias,
        out_dtype,
    )
    out: Tensor = registry.run(SCALED_IMPLEMENTATIONS, a.device, scaled_reference, *arguments)
    return out


def scaled_reference(
    a: Tensor,
    a_scales: list[Tensor],
    a_format: str,
    offsets: Tensor,
    b: Tensor,
    b_scales: list[Tensor],
    b_format: str,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """As `linear_reference`, on the dequantized rows."""
    rows = decode_parts(a, a_scales, resolve(a_format))
    return _grouped(rows, offsets, b, b_scales, b_format, bias).to(out_dtype)


@grouped_quant_linear_parts.fake
def _(
    x: Tensor,
    offsets: Tensor,
    data: Tensor,
    scales: list[Tensor],
    format: str,
    bias: Tensor | None,
    activations: str,
) -> Tensor:
    return x.new_empty(x.shape[0], data.shape[1])


@grouped_scaled_mm_parts.fake
def _(
    a: Tensor,
    a_scales: list[Tensor],
    a_format: str,
    offsets: Tensor,
    b: Tensor,
    b_scales: list[Tensor],
    b_format: str,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    return a.new_empty(logical_shape(resolve(a_format), a.shape)[0], b.shape[1], dtype=out_dtype)
