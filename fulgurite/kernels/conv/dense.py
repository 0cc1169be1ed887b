"""The operators of float32 convolutions whose weights change with each call, as in training.

    conv2d             conv2d(x, weight, bias), channels-last
    conv_transpose2d   conv_transpose2d(x, weight, bias), channels-last; also the gradient of a convolution's input

The weight is packed at each call. `transforms/convolutions.py` puts them into training graphs where they are
faster than torch's.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fulgurite.kernels import registry
from fulgurite.kernels.conv import cpu
from fulgurite.kernels.conv.cpu import ConvParameters
from fulgurite.kernels.conv.gradients import transpose_to_size
from fulgurite.op import op

CONV_KERNELS: dict[str, registry.Kernel] = {"cpu": cpu.conv2d}
TRANSPOSE_KERNELS: dict[str, registry.Kernel] = {"cpu": cpu.conv_transpose2d}


@op("fulgurite::conv2d")
def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> Tensor:
    """conv2d(x, weight, bias), weight [O, I / groups, kh, kw]."""
    geometry = (stride, padding, dilation, groups)
    out: Tensor = registry.dispatch(
        CONV_KERNELS, x.device, _reference_conv, x, weight, bias, *geometry
    )
    return out


@conv2d.fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, *geometry: Any) -> Tensor:
    filters = (weight.shape[0], *weight.shape[2:])
    shape = ConvParameters(filters, *geometry).output_shape(x)
    return x.new_empty_strided(shape, cpu.channels_last_strides(shape))


@op("fulgurite::conv_transpose2d")
def conv_transpose2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    size: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> Tensor:
    """conv_transpose2d(x, weight, bias), weight [I, O / groups, kh, kw].

    size   height and width of the output: its output padding decides
    """
    geometry = (stride, padding, dilation, groups)
    out: Tensor = registry.dispatch(
        TRANSPOSE_KERNELS, x.device, _reference_transpose, x, weight, bias, size, *geometry
    )
    return out


@conv_transpose2d.fake
def _(x: Tensor, weight: Tensor, bias: Any, size: list[int], *geometry: Any) -> Tensor:
    shape = (x.shape[0], weight.shape[1] * geometry[-1], *size)
    return x.new_empty_strided(shape, cpu.channels_last_strides(shape))


def _reference_conv(x: Tensor, weight: Tensor, bias: Tensor | None, *geometry: Any) -> Tensor:
    return F.conv2d(x, weight, bias, *geometry).contiguous(memory_format=torch.channels_last)


def _reference_transpose(
    x: Tensor, weight: Tensor, bias: Tensor | None, size: list[int], *geometry: Any
) -> Tensor:
    p = ConvParameters((weight.shape[1] * geometry[-1], *weight.shape[2:]), *geometry)
    out = transpose_to_size(x, weight, bias, size, p)
    return out.contiguous(memory_format=torch.channels_last)
