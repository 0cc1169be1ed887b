"""The operators of packed convolutions and linears.

    pack_weight     weight [O, I / groups, kh, kw] or [O, I] → panels
    pack_bias       bias [O] → padded like the panels, with scales of the channels after it
    packed_conv     activation(conv2d(x, weight) * scale + bias + residual), channels-last
    packed_linear   activation(x @ weight.T + bias + residual), x [M, I]

`transforms/library_calls.py` puts them into traces. A packed weight is computed once
(`executors/frozen.py`), as long as the module's weight does not change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fulgurite.kernels import registry
from fulgurite.kernels.conv import cpu, packing
from fulgurite.kernels.conv.activations import apply_activation
from fulgurite.kernels.conv.cpu import ConvParameters
from fulgurite.op import op

PACK_KERNELS: dict[str, registry.Kernel] = {"cpu": cpu.pack_weight}
PACKED_CONV_KERNELS: dict[str, registry.Kernel] = {"cpu": cpu.packed_conv}
PACKED_LINEAR_KERNELS: dict[str, registry.Kernel] = {"cpu": cpu.packed_linear}


@op("fulgurite::pack_weight")
def pack_weight(weight: Tensor, groups: int) -> Tensor:
    """The panels of a weight."""
    out: Tensor = registry.dispatch(
        PACK_KERNELS, weight.device, packing.pack_weight, weight, groups
    )
    return out


@pack_weight.fake
def _(weight: Tensor, groups: int) -> Tensor:
    taps = weight[0, 0].numel()
    size = packing.packed_size(weight.shape[0], weight.shape[1] * groups, taps, groups)
    return weight.new_empty(size, dtype=torch.float32)


@op("fulgurite::pack_bias")
def pack_bias(bias: Tensor, scale: Tensor | None, groups: int) -> Tensor:
    """The padded bias, and after it the padded scales of output channels."""
    return packing.pack_bias(bias, scale, groups)


@pack_bias.fake
def _(bias: Tensor, scale: Tensor | None, groups: int) -> Tensor:
    size = groups * packing.pad_channels(bias.shape[0] // groups)
    return bias.new_empty(size if scale is None else 2 * size, dtype=torch.float32)


@op("fulgurite::packed_conv")
def packed_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    filters: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    activation: str,
    parameters: list[float],
    is_scaled: bool,
) -> Tensor:
    """activation(conv2d(x, weight) * scale + bias + residual).

    weight, bias   packed
    filters        [O, kh, kw]
    is_scaled      whether `bias` has scales
    """
    arguments = (x, weight, bias, residual, filters, stride, padding, dilation, groups)
    epilogue = (activation, parameters, is_scaled)
    out: Tensor = registry.dispatch(
        PACKED_CONV_KERNELS, x.device, _reference_conv, *arguments, *epilogue
    )
    return out


@packed_conv.fake
def _(x: Tensor, weight: Tensor, bias: Any, residual: Any, *parameters: Any) -> Tensor:
    shape = ConvParameters(*parameters).output_shape(x)
    return x.new_empty_strided(shape, cpu.channels_last_strides(shape))


@op("fulgurite::packed_linear")
def packed_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    features: int,
    activation: str,
    parameters: list[float],
) -> Tensor:
    """activation(x @ weight.T + bias + residual), x [M, I]; weight and bias are packed.

    features   O
    """
    arguments = (x, weight, bias, residual, features, activation, parameters)
    out: Tensor = registry.dispatch(PACKED_LINEAR_KERNELS, x.device, _reference_linear, *arguments)
    return out


@packed_linear.fake
def _(x: Tensor, weight: Tensor, bias: Any, residual: Any, features: int, *rest: Any) -> Tensor:
    return x.new_empty((x.shape[0], features))


# ---- references: from the packed weight --------------------------------------------------------


def unpack_weight(packed: Tensor, filters: list[int], channels: int, groups: int) -> Tensor:
    """The weight [O, I / groups, kh, kw] of a packed one."""
    rows, taps = filters[0] // groups, filters[1] * filters[2]
    if packing.is_depthwise(filters[0], channels * groups, groups):
        starts = range(0, groups, packing.LANES)
        vectors = packed.reshape(len(starts), taps, packing.LANES).transpose(1, 2)
        weight = packed.new_empty(groups, taps)
        for start, vector in zip(starts, vectors, strict=True):
            first = min(start, groups - packing.LANES)
            weight[first : first + packing.LANES] = vector
        return weight.reshape(groups, 1, *filters[1:])
    depth = taps * channels
    width, padded = packing.panel_vectors(rows) * packing.LANES, packing.pad_channels(rows)
    sizes = [min(width, padded - start) for start in range(0, padded, width)]
    panels = packed.reshape(groups, -1).split([size * depth for size in sizes], dim=1)
    parts = [
        panel.reshape(groups, depth, size).transpose(1, 2)
        for panel, size in zip(panels, sizes, strict=True)
    ]
    weight = torch.cat(parts, dim=1)[:, :rows]
    weight = weight.reshape(filters[0], taps, channels).transpose(1, 2)
    return weight.reshape(filters[0], channels, *filters[1:])


def unpack_bias(packed: Tensor, channels: int, groups: int) -> Tensor:
    return packed.reshape(groups, -1)[:, : channels // groups].reshape(channels)


def _reference_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, *parameters: Any
) -> Tensor:
    p = ConvParameters(*parameters)
    dense = unpack_weight(weight, list(p.filters), x.shape[1] // p.groups, p.groups)
    out = F.conv2d(x, dense, None, p.stride, p.padding, p.dilation, p.groups)  # type: ignore[arg-type]
    groups = packing.bias_groups(p.filters[0], x.shape[1], p.groups)
    return apply_epilogue(out, bias, residual, p, groups)


def apply_epilogue(
    out: Tensor, bias: Tensor | None, residual: Tensor | None, p: ConvParameters, bias_groups: int
) -> Tensor:
    """Scale, bias, residual and activation of a convolution; its result is channels-last."""
    if bias is not None:
        shift, *scale = bias.chunk(2) if p.is_scaled else (bias,)
        for part in scale:
            out = out * unpack_bias(part, p.filters[0], bias_groups)[:, None, None]
        out = out + unpack_bias(shift, p.filters[0], bias_groups)[:, None, None]
    out = out if residual is None else out + residual
    out = apply_activation(out, p.activation, p.parameters)
    return out.contiguous(memory_format=torch.channels_last)


def _reference_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    features: int,
    activation: str,
    parameters: Sequence[float],
) -> Tensor:
    dense = unpack_weight(weight, [features, 1, 1], x.shape[1], 1).reshape(features, -1)
    out = F.linear(x, dense, None if bias is None else unpack_bias(bias, features, 1))
    out = out if residual is None else out + residual
    return apply_activation(out, activation, parameters)
