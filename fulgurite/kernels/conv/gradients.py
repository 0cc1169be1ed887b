"""The operators of transposed convolutions and of gradients of convolutions.

    pack_transposed_weight   weight [I, O / groups, kh, kw] → panels, a filter for each phase
    packed_conv_transpose    activation(conv_transpose2d(x, weight) * scale + bias + residual)
    conv_weight_gradient     the gradient of a weight [O, I / groups, kh, kw]

The gradient of a convolution's input is a transposed convolution with the same weight, whose channels have
changed their roles. `transforms/conv_training.py` puts these operators into training graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fulgurite.kernels import registry
from fulgurite.kernels.conv import cpu, packing
from fulgurite.kernels.conv.cpu import ConvParameters
from fulgurite.kernels.conv.ops import apply_epilogue
from fulgurite.op import op

PACK_KERNELS: dict[str, registry.Kernel] = {"cpu": cpu.pack_transposed_weight}
TRANSPOSE_KERNELS: dict[str, registry.Kernel] = {"cpu": cpu.packed_conv_transpose}
WEIGHT_GRADIENT_KERNELS: dict[str, registry.Kernel] = {"cpu": cpu.conv_weight_gradient}


@op("fulgurite::pack_transposed_weight")
def pack_transposed_weight(weight: Tensor, groups: int, stride: list[int]) -> Tensor:
    """The panels of a transposed convolution's weight."""
    out: Tensor = registry.dispatch(
        PACK_KERNELS, weight.device, packing.pack_transposed, weight, groups, stride
    )
    return out


@pack_transposed_weight.fake
def _(weight: Tensor, groups: int, stride: list[int]) -> Tensor:
    channels, rows, height, width = weight.shape
    size = packing.packed_size(rows * groups, channels, height * width, groups, False)
    return weight.new_empty(size, dtype=torch.float32)


@op("fulgurite::packed_conv_transpose")
def packed_conv_transpose(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    size: list[int],
    filters: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    activation: str,
    parameters: list[float],
    is_scaled: bool,
) -> Tensor:
    """activation(conv_transpose2d(x, weight) * scale + bias + residual).

    weight, bias   packed
    size           height and width of the output: its output padding decides
    filters        [O, kh, kw]
    is_scaled      whether `bias` has scales
    """
    arguments = (x, weight, bias, residual, size, filters, stride, padding, dilation, groups)
    epilogue = (activation, parameters, is_scaled)
    out: Tensor = registry.dispatch(
        TRANSPOSE_KERNELS, x.device, _reference_transpose, *arguments, *epilogue
    )
    return out


@packed_conv_transpose.fake
def _(
    x: Tensor, weight: Tensor, bias: Any, residual: Any, size: list[int], *parameters: Any
) -> Tensor:
    shape = (x.shape[0], ConvParameters(*parameters).filters[0], *size)
    return x.new_empty_strided(shape, cpu.channels_last_strides(shape))


@op("fulgurite::conv_weight_gradient")
def conv_weight_gradient(
    gradient: Tensor,
    x: Tensor,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> Tensor:
    """The gradient of a weight [O, I / groups, kh, kw]; groups is 1, or the number of channels."""
    arguments = (gradient, x, kernel, stride, padding, dilation, groups)
    out: Tensor = registry.dispatch(
        WEIGHT_GRADIENT_KERNELS, x.device, _reference_weight_gradient, *arguments
    )
    return out


@conv_weight_gradient.fake
def _(gradient: Tensor, x: Tensor, kernel: list[int], *geometry: Any) -> Tensor:
    groups = geometry[-1]
    return gradient.new_empty((gradient.shape[1], x.shape[1] // groups, *kernel))


# ---- references --------------------------------------------------------------------------------


def unpack_transposed(
    packed: Tensor, filters: list[int], channels: int, groups: int, stride: list[int]
) -> Tensor:
    """The weight [I, O / groups, kh, kw] of a packed one."""
    numbers = torch.arange(channels * filters[0] // groups * filters[1] * filters[2]) + 1
    shape = (channels, filters[0] // groups, *filters[1:])
    places = packing.pack_transposed(numbers.double().reshape(shape), groups, stride)
    weight = packed.new_empty(numbers.numel())
    is_value = places > 0
    weight[places[is_value].long() - 1] = packed[is_value]
    return weight.reshape(shape)


def _reference_transpose(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    size: Sequence[int],
    *parameters: Any,
) -> Tensor:
    p = ConvParameters(*parameters)
    filters, stride = list(p.filters), list(p.stride)
    dense = unpack_transposed(weight, filters, x.shape[1], p.groups, stride)
    out = transpose_to_size(x, dense, None, size, p)
    return apply_epilogue(out, bias, residual, p, p.groups)


def transpose_to_size(
    x: Tensor, weight: Tensor, bias: Tensor | None, size: Sequence[int], p: ConvParameters
) -> Tensor:
    """The transposed convolution that returns images of a size."""
    least = [
        (x.shape[2 + k] - 1) * p.stride[k]
        - 2 * p.padding[k]
        + p.dilation[k] * (p.filters[1 + k] - 1)
        + 1
        for k in range(2)
    ]
    extra = [wanted - low for wanted, low in zip(size, least, strict=True)]
    return F.conv_transpose2d(
        x,
        weight,
        bias,
        p.stride,
        p.padding,
        extra,
        p.groups,
        p.dilation,  # type: ignore[arg-type]
    )


def _reference_weight_gradient(
    gradient: Tensor, x: Tensor, kernel: list[int], *geometry: Any
) -> Tensor:
    shape = [gradient.shape[1], x.shape[1] // geometry[-1], *kernel]
    return torch.nn.grad.conv2d_weight(x, shape, gradient, *geometry)
