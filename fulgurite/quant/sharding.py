"""Cutting and joining packed tensors at block boundaries.

In: a format, packed data with its scales, the logical shape, and a range along one dimension. Out:
the packed parts of exactly that range: its values are the whole tensor's values, bit for bit. A
scale per tensor or row that spans the cut is repeated on both sides, never recomputed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fulgurite.errors import FormatError
from fulgurite.quant.blocks import Packed
from fulgurite.quant.format import WHOLE, Format, Scale


def boundary(format: Format, dim: int, ndim: int) -> int:
    """The multiple at which dimension `dim` (not negative) may be cut."""
    if dim == ndim - 1:
        return max(format.block[1], 1)
    return max(format.block[0], 1) if dim == ndim - 2 else 1


def slice_parts(
    format: Format, packed: Packed, shape: Sequence[int], dim: int, start: int, stop: int
) -> Packed:
    """Elements [start, stop) along `dim`; both must be block boundaries or the end."""
    step = boundary(format, dim, len(shape))
    size = shape[dim]
    stop = max(start, stop)
    inside = [place for place in (start, stop) if place % step and place != size]
    if inside:
        below = inside[0] // step * step
        raise FormatError(
            f"{format.name} can't be cut at {inside[0]}: it falls inside a block of {step}",
            where=f"dimension {dim} of [{', '.join(map(str, shape))}], range {start}:{stop}",
            next=f"cut at a multiple of {step} (near: {below} or {min(below + step, size)}), or "
            "dequantize, cut and quantize again",
        )
    data = _cut(packed.data, dim, start, stop, *_per_item(format, dim, len(shape)))
    scales = {
        scale.name: _cut_scale(packed.scales[scale.name], scale, dim, len(shape), start, stop)
        for scale in format.stored_scales
    }
    return Packed(data, scales)


def _per_item(format: Format, dim: int, ndim: int) -> tuple[int, int]:
    if dim == ndim - 1:
        return format.elements_per_group, format.items_per_group
    return 1, 1


def _cut(tensor: Tensor, dim: int, start: int, stop: int, elements: int, items: int) -> Tensor:
    first, last = start * items // elements, -(-stop * items // elements)
    return tensor.narrow(dim, first, last - first)


def _cut_scale(values: Tensor, scale: Scale, dim: int, ndim: int, start: int, stop: int) -> Tensor:
    block = _block_along(scale, dim, ndim)
    return values if block == WHOLE else _cut(values, dim, start, stop, block, 1)


def _block_along(scale: Scale, dim: int, ndim: int) -> int:
    if dim == ndim - 1:
        return scale.block[1]
    return scale.block[0] if dim == ndim - 2 else 1


def select_parts(
    format: Format, packed: Packed, shape: Sequence[int], dim: int, index: int
) -> Packed:
    """The packed parts of `tensor.select(dim, index)`: an expert, or one row."""
    ndim = len(shape)
    if dim == ndim - 1:
        raise FormatError(
            f"a {format.name} tensor can't be indexed by one element of K",
            where=f"dimension {dim} of [{', '.join(map(str, shape))}]",
            next="dequantize first, or slice K at block boundaries",
        )
    scales = {}
    for scale in format.stored_scales:
        block = _block_along(scale, dim, ndim)
        place = 0 if block == WHOLE else index // block
        scales[scale.name] = packed.scales[scale.name].select(dim, place)
    return Packed(packed.data.select(dim, index), scales)


def join_parts(
    format: Format, parts: Sequence[Packed], shapes: Sequence[Sequence[int]], dim: int
) -> Packed:
    """The inverse of cutting: parts side by side along `dim`.

    Every part but the last must end at a block boundary, and scales that span the join must agree.
    """
    ndim = len(shapes[0])
    step = boundary(format, dim, ndim)
    for index, shape in enumerate(shapes[:-1]):
        if shape[dim] % step:
            raise FormatError(
                f"{format.name} parts can't be joined: part {index} ends inside a block of {step}",
                where=f"dimension {dim} of size {shape[dim]}",
                next="dequantize the parts, join them and quantize again",
            )
    scales = {}
    for scale in format.stored_scales:
        values = [part.scales[scale.name] for part in parts]
        if _block_along(scale, dim, ndim) != WHOLE:
            scales[scale.name] = torch.cat(values, dim=dim)
        elif all(bool((value == values[0]).all()) for value in values):
            scales[scale.name] = values[0]
        else:
            raise FormatError(
                f"{format.name} parts can't be joined: each has its own {scale.name}",
                where=f"dimension {dim}",
                next=f"quantize the parts with one shared {scale.name}, or dequantize, join and "
                "quantize again",
            )
    return Packed(torch.cat([part.data for part in parts], dim=dim), scales)


def shard_range(
    format: Format, shape: Sequence[int], dim: int, index: int, count: int
) -> tuple[int, int]:
    """The `index`-th of `count` equal ranges along `dim`, cut at block boundaries."""
    size = shape[dim]
    if count < 1 or not 0 <= index < count:
        raise FormatError(f"there is no shard {index} of {count}", next="0 <= index < count")
    if size % count:
        raise FormatError(
            f"dimension {dim} of size {size} doesn't divide into {count} equal shards",
            where=f"{format.name} tensor of shape [{', '.join(map(str, shape))}]",
            next=_counts_that_work(size, boundary(format, dim, len(shape))),
        )
    width = size // count
    step = boundary(format, dim, len(shape))
    if count > 1 and width % step:
        raise FormatError(
            f"{count} shards of {width} would cut {format.name} inside a block of {step}",
            where=f"dimension {dim} of [{', '.join(map(str, shape))}]",
            next=_counts_that_work(size, step),
        )
    return index * width, (index + 1) * width


def _counts_that_work(size: int, step: int) -> str:
    blocks = size // step if size % step == 0 else 1
    counts = [str(n) for n in range(1, min(blocks, 256) + 1) if blocks % n == 0]
    return f"shard counts that fall on blocks here: {', '.join(counts)}; or shard another dimension"
