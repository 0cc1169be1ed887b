"""Slicing and concatenation of packed tensors at block boundaries.

In: a format, packed data with its scales, the logical shape, and a range along one dimension. Out:
the packed data of exactly that range. Its values are bit-identical to the whole tensor's. A scale
per tensor or row that spans the cut is repeated on both sides, never recomputed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fulgurite.errors import FormatError
from fulgurite.quant.codecs.blocks import PackedData
from fulgurite.quant.format import WHOLE_DIM, Format, ScaleSpec


def shard_alignment(format: Format, dim: int, ndim: int) -> int:
    """The alignment of slices along dimension `dim` (not negative): the block size."""
    if dim == ndim - 1:
        return max(format.block[1], 1)
    return max(format.block[0], 1) if dim == ndim - 2 else 1


def slice_packed(
    format: Format, packed: PackedData, shape: Sequence[int], dim: int, start: int, stop: int
) -> PackedData:
    """Slice [start, stop) along `dim`; both must be at block boundaries or at the end."""
    align = shard_alignment(format, dim, len(shape))
    size = shape[dim]
    stop = max(start, stop)
    unaligned = [end for end in (start, stop) if end % align and end != size]
    if unaligned:
        below = unaligned[0] // align * align
        raise FormatError(
            f"cannot slice {format.name} at {unaligned[0]}: it is inside a block of {align}",
            where=f"dimension {dim} of [{', '.join(map(str, shape))}], range {start}:{stop}",
            next=f"slice at a multiple of {align} (nearest: {below} or {min(below + align, size)}), "
            "or dequantize, slice and quantize again",
        )
    data = _narrow_packed(packed.data, dim, start, stop, *_packing_along(format, dim, len(shape)))
    scales = {
        scale.name: _narrow_scale(packed.scales[scale.name], scale, dim, len(shape), start, stop)
        for scale in format.separate_scales
    }
    return PackedData(data, scales)


def _packing_along(format: Format, dim: int, ndim: int) -> tuple[int, int]:
    if dim == ndim - 1:
        return format.elements_per_pack, format.items_per_pack
    return 1, 1


def _narrow_packed(
    tensor: Tensor, dim: int, start: int, stop: int, elements: int, items: int
) -> Tensor:
    first, last = start * items // elements, -(-stop * items // elements)
    return tensor.narrow(dim, first, last - first)


def _narrow_scale(
    values: Tensor, scale: ScaleSpec, dim: int, ndim: int, start: int, stop: int
) -> Tensor:
    block = _scale_block_along(scale, dim, ndim)
    return values if block == WHOLE_DIM else _narrow_packed(values, dim, start, stop, block, 1)


def _scale_block_along(scale: ScaleSpec, dim: int, ndim: int) -> int:
    if dim == ndim - 1:
        return scale.block[1]
    return scale.block[0] if dim == ndim - 2 else 1


def select_packed(
    format: Format, packed: PackedData, shape: Sequence[int], dim: int, index: int
) -> PackedData:
    """The packed data of `tensor.select(dim, index)`: one expert, or one row."""
    ndim = len(shape)
    if dim == ndim - 1:
        raise FormatError(
            f"cannot select a single element of K in a {format.name} tensor",
            where=f"dimension {dim} of [{', '.join(map(str, shape))}]",
            next="dequantize first, or slice K at block boundaries",
        )
    scales = {}
    for scale in format.separate_scales:
        block = _scale_block_along(scale, dim, ndim)
        block_index = 0 if block == WHOLE_DIM else index // block
        scales[scale.name] = packed.scales[scale.name].select(dim, block_index)
    return PackedData(packed.data.select(dim, index), scales)


def concat_packed(
    format: Format, parts: Sequence[PackedData], shapes: Sequence[Sequence[int]], dim: int
) -> PackedData:
    """Concatenate packed tensors along `dim`.

    All parts but the last must end at a block boundary. Scales that span several parts must be
    equal; on the meta device they have no values and count as equal.
    """
    ndim = len(shapes[0])
    align = shard_alignment(format, dim, ndim)
    for index, shape in enumerate(shapes[:-1]):
        if shape[dim] % align:
            raise FormatError(
                f"cannot concatenate {format.name} tensors: "
                f"part {index} ends inside a block of {align}",
                where=f"dimension {dim} of size {shape[dim]}",
                next="dequantize the parts, concatenate them and quantize again",
            )
    scales = {}
    for scale in format.separate_scales:
        values = [part.scales[scale.name] for part in parts]
        if _scale_block_along(scale, dim, ndim) != WHOLE_DIM:
            scales[scale.name] = torch.cat(values, dim=dim)
        elif values[0].is_meta or all(bool((value == values[0]).all()) for value in values):
            scales[scale.name] = values[0]
        else:
            raise FormatError(
                f"cannot concatenate {format.name} tensors: their {scale.name} values differ",
                where=f"dimension {dim}",
                next=f"quantize the parts with one common {scale.name}, or dequantize, "
                "concatenate and quantize again",
            )
    return PackedData(torch.cat([part.data for part in parts], dim=dim), scales)


def shard_range(
    format: Format, shape: Sequence[int], dim: int, index: int, count: int
) -> tuple[int, int]:
    """The range of shard `index` of `count` equal shards along `dim`, at block boundaries."""
    size = shape[dim]
    if count < 1 or not 0 <= index < count:
        raise FormatError(f"shard {index} of {count} does not exist", next="use 0 <= index < count")
    if size % count:
        raise FormatError(
            f"dimension {dim} of size {size} is not divisible into {count} equal shards",
            where=f"{format.name} tensor of shape [{', '.join(map(str, shape))}]",
            next=_describe_valid_counts(size, shard_alignment(format, dim, len(shape))),
        )
    width = size // count
    align = shard_alignment(format, dim, len(shape))
    if count > 1 and width % align:
        raise FormatError(
            f"{count} shards of {width} would split a {format.name} block of {align}",
            where=f"dimension {dim} of [{', '.join(map(str, shape))}]",
            next=_describe_valid_counts(size, align),
        )
    return index * width, (index + 1) * width


def _describe_valid_counts(size: int, align: int) -> str:
    blocks = size // align if size % align == 0 else 1
    counts = [str(n) for n in range(1, min(blocks, 256) + 1) if blocks % n == 0]
    return f"use {', '.join(counts)} shards, or shard another dimension"
