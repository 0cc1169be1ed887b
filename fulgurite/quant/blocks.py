"""Blocks and small bit work that every codec shares.

In: tensors and block shapes `(rows, columns)` of `format.py`. Out: the largest magnitude of each
block, scales spread back over the elements, the scale a magnitude asks for, nibbles in bytes.

Rules kept here so that all formats share them. A magnitude is taken over finite elements, so an
infinity never decides a scale and later saturates. A block of zeros has scale 1. A scale made from
data is never under 2^-126, the smallest normal float32: hardware that flushes subnormals sees the
same scale, and no scale of a block with data in it is zero.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fulgurite.errors import FormatError
from fulgurite.quant.format import WHOLE, Block, Scale
from fulgurite.quant.shapes import blocks_along, scale_shape

SMALLEST_SCALE = 2.0**-126


class Codes(NamedTuple):
    """A quantized tensor, one code an element, with every level of scales unpacked."""

    codes: Tensor
    scales: dict[str, Tensor]


class Packed(NamedTuple):
    """A quantized tensor as it is stored: packed data and the scales that lie beside it."""

    data: Tensor
    scales: dict[str, Tensor]


def block_amax(x: Tensor, scale: Scale, *, keep_nan: bool) -> Tensor:
    """The largest finite |x| of each block, of shape `scale_shape`; zero for an empty block.

    With `keep_nan` a block that holds a NaN has a NaN magnitude, for element types without NaN;
    without it NaN is passed over, for element types that store the NaN themselves.
    """
    return _reduce(_magnitudes(x, keep_nan), scale)


def amax_of(x: Tensor, dims: tuple[int, ...], *, keep_nan: bool) -> Tensor:
    """The same over whole dimensions."""
    return _magnitudes(x, keep_nan).amax(dims)


def _magnitudes(x: Tensor, keep_nan: bool) -> Tensor:
    """|x|, zero where it does not count."""
    magnitude = x.abs()
    skipped = magnitude == float("inf") if keep_nan else ~(magnitude < float("inf"))
    return magnitude.masked_fill(skipped, 0.0)


def block_range(x: Tensor, scale: Scale) -> tuple[Tensor, Tensor]:
    """The least and the largest finite element of each block, both widened to reach zero.

    A block with a NaN in it has a NaN largest element.
    """
    finite = x.masked_fill(x.abs() == float("inf"), 0.0)
    return -_reduce((-finite).clamp_min(0.0), scale), _reduce(finite.clamp_min(0.0), scale)


def _reduce(magnitude: Tensor, scale: Scale) -> Tensor:
    """The maximum of each block of non-negative values."""
    shape = scale_shape(scale, magnitude.shape)
    if magnitude.numel() == 0:
        return magnitude.new_zeros(shape)
    flat = magnitude.unsqueeze(0) if magnitude.dim() == 1 else magnitude
    tiles = _tiles(flat, scale.block)
    return tiles.amax(dim=(-3, -1)).reshape(shape)


def _tiles(x: Tensor, block: Block) -> Tensor:
    """[..., R, K] as [..., R / rows, rows, K / columns, columns]; a partial edge gets zeros."""
    rows = block[0] if block[0] != WHOLE else x.shape[-2]
    columns = block[1] if block[1] != WHOLE else x.shape[-1]
    down, across = blocks_along(x.shape[-2], rows), blocks_along(x.shape[-1], columns)
    missing = (down * rows - x.shape[-2], across * columns - x.shape[-1])
    if any(missing):
        x = F.pad(x, (0, missing[1], 0, missing[0]))
    return x.reshape(*x.shape[:-2], down, rows, across, columns)


def spread(values: Tensor, block: Block, shape: torch.Size) -> Tensor:
    """One value a block as a tensor that broadcasts over elements of `shape`."""
    if len(shape) == 1:
        return spread(values.unsqueeze(0), block, torch.Size((1, *shape))).squeeze(0)
    if block[1] not in (WHOLE, 1):
        values = values.repeat_interleave(block[1], dim=-1).narrow(-1, 0, shape[-1])
    if block[0] not in (WHOLE, 1):
        values = values.repeat_interleave(block[0], dim=-2).narrow(-2, 0, shape[-2])
    return values


def divide(x: Tensor, number: float) -> Tensor:
    """x / number, correctly rounded on every device: torch multiplies by 1 / number on GPUs."""
    return x / torch.full((), number, dtype=x.dtype, device=x.device)


def scale_for(amax: Tensor, largest: float) -> Tensor:
    """`amax / largest` in float32, 1 where amax is zero, at least 2^-126; NaN stays NaN."""
    return torch.where(amax == 0, 1.0, divide(amax, largest).clamp_min(SMALLEST_SCALE))


def given_scale(value: Tensor | float, scale: Scale, x: Tensor) -> Tensor:
    """A scale the caller brings (calibrated, static) in the level's shape; refuses zero and NaN."""
    shape = scale_shape(scale, x.shape)
    tensor = torch.as_tensor(value, dtype=torch.float32, device=x.device)
    if not bool(((tensor > 0) & tensor.isfinite()).all()):
        raise FormatError(
            f"the given {scale.name} has entries that are not positive and finite",
            where=f"{scale.name} of shape {list(tensor.shape)}",
            next="calibrate it again on data that is not all zero, or leave it out to compute it",
        )
    if tensor.numel() != 1 and tuple(tensor.shape) != shape:
        raise FormatError(
            f"the given {scale.name} has shape {list(tensor.shape)} and should have {list(shape)}",
            where=f"tensor of shape {list(x.shape)}",
            next="pass one number, or one scale a block in that shape",
        )
    return tensor.reshape(-1)[0].expand(shape).clone() if tensor.numel() == 1 else tensor


def split_last(x: Tensor, *sizes: int) -> Tensor:
    """The last dimension as several, whose sizes multiply to its own; empty tensors too."""
    return x.reshape(*x.shape[:-1], *sizes)


def pack_nibbles(codes: Tensor) -> Tensor:
    """Pairs of 4-bit codes along K as bytes, the first of a pair in the low half."""
    pairs = split_last(codes.to(torch.uint8), codes.shape[-1] // 2, 2)
    return pairs[..., 0] | (pairs[..., 1] << 4)


def unpack_nibbles(data: Tensor) -> Tensor:
    """The inverse of `pack_nibbles`: uint8 codes 0 to 15, twice as many as bytes."""
    return torch.stack((data & 0xF, data >> 4), dim=-1).flatten(-2)


def nonzero_blocks(values: Tensor, scale: Scale) -> Tensor:
    """Which blocks hold a value that is not zero (NaN counts): bool of shape `scale_shape`."""
    return _reduce(values.float().abs().nan_to_num(nan=1.0), scale) > 0
