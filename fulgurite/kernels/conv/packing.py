"""Weights packed for the C++ kernel of `include/conv.h`.

In: a float32 weight [O, I / groups, kh, kw], or of a linear [O, I]. Out: one tensor in panels of output
channels, [group][panel][kh, kw, channel][output channel]. A panel has up to four vectors of sixteen
output channels; the last vector of a group is padded with zeros.

The weight of a depthwise convolution is packed as [vector][kh, kw][channel]; the last vector overlaps
the one before it, so that no channel is padded.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

LANES = 16  # of a vector in include/vec16.h
MAX_PANEL_VECTORS = 4


def pad_channels(channels: int) -> int:
    """Output channels of a group with padding."""
    return -(-channels // LANES) * LANES


def panel_vectors(channels: int) -> int:
    """Vectors of a panel: four, or three where that leaves no small last panel."""
    vectors = -(-channels // LANES)
    if vectors <= MAX_PANEL_VECTORS or vectors % MAX_PANEL_VECTORS == 0:
        return min(vectors, MAX_PANEL_VECTORS)
    return 3 if vectors % 3 == 0 or vectors % MAX_PANEL_VECTORS == 1 else MAX_PANEL_VECTORS


def is_depthwise(out_channels: int, in_channels: int, groups: int) -> bool:
    """Whether every channel has one filter of its own, and there is a vector of channels."""
    return groups >= LANES and out_channels == in_channels == groups


def pack_weight(weight: Tensor, groups: int) -> Tensor:
    """Pack the weight of a convolution [O, I / groups, kh, kw] or of a linear [O, I]."""
    weight = weight.reshape(*weight.shape[:2], -1).float()  # [O, I / groups, taps]
    if is_depthwise(weight.shape[0], weight.shape[1] * groups, groups):
        return _pack_depthwise(weight.reshape(groups, -1))
    return _pack_panels(weight, groups)


def _pack_panels(weight: Tensor, groups: int) -> Tensor:
    """Pack filters [O, I / groups, taps] in panels."""
    rows = weight.shape[0] // groups
    depth = weight.shape[1] * weight.shape[2]
    filters = weight.transpose(1, 2).reshape(groups, rows, depth)
    filters = F.pad(filters, (0, 0, 0, pad_channels(rows) - rows))
    width = panel_vectors(rows) * LANES
    panels = filters.split(width, dim=1)  # [group, output channel, depth]
    packed = [panel.transpose(1, 2).reshape(groups, -1) for panel in panels]
    return torch.cat(packed, dim=1).reshape(-1).contiguous()


def _pack_depthwise(filters: Tensor) -> Tensor:
    channels = filters.shape[0]
    starts = [min(start, channels - LANES) for start in range(0, channels, LANES)]
    return torch.stack([filters[start : start + LANES].t() for start in starts]).reshape(-1)


def pack_transposed(weight: Tensor, groups: int, stride: Sequence[int]) -> Tensor:
    """Pack the weight [I, O / groups, kh, kw] of a transposed convolution: a filter for each phase.

    Positions with the same remainder by the stride read the same rows of the filter, the last first.
    """
    channels, rows = weight.shape[:2]
    filters = weight.float().reshape(groups, channels // groups, rows, *weight.shape[2:])
    filters = filters.transpose(1, 2).reshape(groups * rows, channels // groups, *weight.shape[2:])
    phases = [
        filters[:, :, h :: stride[0], w :: stride[1]].flip(2, 3)
        for h in range(stride[0])
        for w in range(stride[1])
    ]
    packed = [_pack_panels(phase.flatten(2), groups) for phase in phases]
    return torch.cat(packed)


def packed_size(
    out_channels: int, in_channels: int, taps: int, groups: int, can_be_depthwise: bool = True
) -> int:
    """Elements of a packed weight."""
    if can_be_depthwise and is_depthwise(out_channels, in_channels, groups):
        return pad_channels(out_channels) * taps
    return groups * pad_channels(out_channels // groups) * (in_channels // groups) * taps


def bias_groups(out_channels: int, in_channels: int, groups: int) -> int:
    """Groups of a bias: each is padded. That of a depthwise convolution is one."""
    return 1 if is_depthwise(out_channels, in_channels, groups) else groups


def bias_size(out_channels: int, in_channels: int, groups: int) -> int:
    """Elements of a packed bias without scales."""
    groups = bias_groups(out_channels, in_channels, groups)
    return groups * pad_channels(out_channels // groups)


def pack_bias(bias: Tensor, scale: Tensor | None, groups: int) -> Tensor:
    """Pad the bias of each group like the weight; scales, if any, follow in the same form."""
    rows = bias.shape[0] // groups
    given = torch.stack([bias] if scale is None else [bias, scale]).float()
    return F.pad(given.reshape(-1, groups, rows), (0, pad_channels(rows) - rows)).reshape(-1)
