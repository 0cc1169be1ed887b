"""Block operations that all codecs share.

In: tensors and block shapes `(rows, columns)` of `format.py`. Out: the amax of each block, scales
computed from it, scales expanded over the elements, 4-bit codes packed into bytes.

All formats share these rules. amax is taken over finite elements, so an infinity never determines a
scale; it saturates. A block of zeros has scale 1. A computed scale is at least 2^-126, the smallest
normal float32. So hardware that flushes subnormals sees the same scale, and the scale of a nonzero
block is never zero.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fulgurite.errors import FormatError
from fulgurite.quant.format import WHOLE_DIM, Block, ScaleSpec
from fulgurite.quant.shapes import count_blocks, scale_shape

MIN_SCALE = 2.0**-126


class Codes(NamedTuple):
    """A quantized tensor with one code per element and all of its scales unpacked."""

    codes: Tensor
    scales: dict[str, Tensor]


class PackedData(NamedTuple):
    """A quantized tensor as stored: packed data and the scales stored separately."""

    data: Tensor
    scales: dict[str, Tensor]


def block_amax(x: Tensor, scale: ScaleSpec, *, keep_nan: bool) -> Tensor:
    """The largest finite |x| of each block, of shape `scale_shape`; zero for an empty block.

    With `keep_nan`, the amax of a block with a NaN is NaN: for element types without NaN. Otherwise
    NaN is skipped: for element types that store the NaN themselves.
    """
    return _block_max(finite_magnitudes(x, keep_nan), scale)


def amax_over_dims(x: Tensor, dims: tuple[int, ...], *, keep_nan: bool) -> Tensor:
    """The largest finite |x| over whole dimensions."""
    return finite_magnitudes(x, keep_nan).amax(dims)


def finite_magnitudes(x: Tensor, keep_nan: bool) -> Tensor:
    """|x|, with infinities (and NaN, unless `keep_nan`) replaced by zero."""
    magnitude = x.abs()
    skipped = magnitude == float("inf") if keep_nan else ~(magnitude < float("inf"))
    return magnitude.masked_fill(skipped, 0.0)


def block_min_max(x: Tensor, scale: ScaleSpec) -> tuple[Tensor, Tensor]:
    """The smallest and largest finite element of each block, widened to include zero.

    The maximum of a block with a NaN is NaN.
    """
    finite = x.masked_fill(x.abs() == float("inf"), 0.0)
    return -_block_max((-finite).clamp_min(0.0), scale), _block_max(finite.clamp_min(0.0), scale)


def _block_max(magnitude: Tensor, scale: ScaleSpec) -> Tensor:
    """The maximum of each block of non-negative values."""
    shape = scale_shape(scale, magnitude.shape)
    if magnitude.numel() == 0:
        return magnitude.new_zeros(shape)
    flat = magnitude.unsqueeze(0) if magnitude.dim() == 1 else magnitude
    blocks = _split_into_blocks(flat, scale.block)
    return blocks.amax(dim=(-3, -1)).reshape(shape)


def _split_into_blocks(x: Tensor, block: Block) -> Tensor:
    """[..., R, K] -> [..., R / rows, rows, K / columns, columns], with zero padding."""
    rows = block[0] if block[0] != WHOLE_DIM else x.shape[-2]
    columns = block[1] if block[1] != WHOLE_DIM else x.shape[-1]
    row_blocks, column_blocks = count_blocks(x.shape[-2], rows), count_blocks(x.shape[-1], columns)
    padding = (row_blocks * rows - x.shape[-2], column_blocks * columns - x.shape[-1])
    if any(padding):
        x = F.pad(x, (0, padding[1], 0, padding[0]))
    return x.reshape(*x.shape[:-2], row_blocks, rows, column_blocks, columns)


def expand_blocks(values: Tensor, block: Block, shape: torch.Size) -> Tensor:
    """Expand one value per block to a tensor that broadcasts over elements of `shape`."""
    if len(shape) == 1:
        return expand_blocks(values.unsqueeze(0), block, torch.Size((1, *shape))).squeeze(0)
    if block[1] not in (WHOLE_DIM, 1):
        values = values.repeat_interleave(block[1], dim=-1).narrow(-1, 0, shape[-1])
    if block[0] not in (WHOLE_DIM, 1):
        values = values.repeat_interleave(block[0], dim=-2).narrow(-2, 0, shape[-2])
    return values


def divide(x: Tensor, number: float) -> Tensor:
    """x / number, correctly rounded on every device (on GPUs torch multiplies by 1 / number)."""
    return x / torch.full((), number, dtype=x.dtype, device=x.device)


def compute_scale(amax: Tensor, max_value: float) -> Tensor:
    """`amax / max_value` in float32, at least 2^-126; 1 where amax is zero. NaN stays NaN."""
    return torch.where(amax == 0, 1.0, divide(amax, max_value).clamp_min(MIN_SCALE))


def check_static_scale(value: Tensor | float, scale: ScaleSpec, x: Tensor) -> Tensor:
    """A static (calibrated) scale in the shape of its spec; raises for zero and NaN."""
    shape = scale_shape(scale, x.shape)
    tensor = torch.as_tensor(value, dtype=torch.float32, device=x.device)
    if not bool(((tensor > 0) & tensor.isfinite()).all()):
        raise FormatError(
            f"the static {scale.name} must be positive and finite",
            where=f"{scale.name} of shape {list(tensor.shape)}",
            next="calibrate on data that is not all zero, or omit it to compute it from the data",
        )
    if tensor.numel() != 1 and tuple(tensor.shape) != shape:
        raise FormatError(
            f"the static {scale.name} has shape {list(tensor.shape)}, expected {list(shape)}",
            where=f"tensor of shape {list(x.shape)}",
            next="pass one number, or one scale per block",
        )
    return tensor.reshape(-1)[0].expand(shape).clone() if tensor.numel() == 1 else tensor


def unflatten_last(x: Tensor, *sizes: int) -> Tensor:
    """Unflatten the last dimension; also works for empty tensors."""
    return x.reshape(*x.shape[:-1], *sizes)


def pack_nibbles(codes: Tensor) -> Tensor:
    """Pack pairs of 4-bit codes along K into bytes, the first of a pair in the low nibble."""
    pairs = unflatten_last(codes.to(torch.uint8), codes.shape[-1] // 2, 2)
    return pairs[..., 0] | (pairs[..., 1] << 4)


def unpack_nibbles(data: Tensor) -> Tensor:
    """The inverse of `pack_nibbles`: uint8 codes 0 to 15."""
    return torch.stack((data & 0xF, data >> 4), dim=-1).flatten(-2)


def find_nonzero_blocks(values: Tensor, scale: ScaleSpec) -> Tensor:
    """Which blocks contain a nonzero value or a NaN: bool of shape `scale_shape`."""
    return _block_max(values.float().abs().nan_to_num(nan=1.0), scale) > 0
