"""Rows of packed weights: a `QuantTensor` [.., N, K] and row positions in, those rows out.

A weight mapping converts dense tensors. A conversion that only selects or reorders rows also
applies to packed data: `find_selected_rows` finds the rows, `select_rows` takes them from the
packed data and from each scale. A scale per tensor is repeated, a scale per row is selected. Rows
that share a scale (128x128 blocks) can only be selected in whole blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from fulgurite.errors import FormatError
from fulgurite.quant import WHOLE_DIM, Format, QuantTensor
from fulgurite.quant.sharding import shard_alignment


def find_selected_rows(convert: Callable[[Tensor], Tensor], rows: int, ndim: int) -> Tensor | None:
    """The rows of [.., rows, K] that a conversion selects, in order; None if it does more.

    The conversion is applied to a tensor of positions with two columns.
    """
    shape = (1,) * (ndim - 2) + (rows, 2)
    positions = torch.arange(2 * rows).view(shape)
    try:
        selected = convert(positions)
    except (RuntimeError, IndexError):  # a view that this shape does not allow
        return None
    if selected.dim() != ndim or selected.shape[-1] != 2 or selected.dtype != torch.int64:
        return None
    pairs = selected.reshape(-1, 2)
    index = pairs[:, 0] // 2
    is_selection = torch.equal(pairs, torch.stack((2 * index, 2 * index + 1), dim=1))
    return index if is_selection else None


def can_select_rows(format: Format, size: int, index: Tensor) -> bool:
    """Whether rows `index` of a packed weight with `size` rows can be taken without unpacking."""
    found = _as_range(index)
    if found is not None:
        align = max(1, format.block[0])
        return all(end % align == 0 or end == size for end in found)
    blocks = {scale.block[0] for scale in format.separate_scales} - {WHOLE_DIM}
    return all(_find_blocks(index, size, block) is not None for block in blocks)


def select_rows(weight: QuantTensor, index: Tensor) -> QuantTensor:
    """Rows of a packed weight [.., N, K]; a contiguous range is a view."""
    dim = weight.dim() - 2
    found = _as_range(index)
    if found is not None:
        return weight if found == (0, weight.shape[dim]) else _narrow(weight, dim, *found)
    align = max(1, weight.format.block[0])
    first = int(index.min()) // align * align
    last = min(-(-(int(index.max()) + 1) // align) * align, weight.shape[dim])
    part, local = _narrow(weight, dim, first, last), index - first
    scales = {}
    for scale in weight.format.separate_scales:
        values = part.scales[scale.name]
        if scale.block[0] != WHOLE_DIM:
            blocks = _find_blocks(local, last - first, scale.block[0])
            if blocks is None:
                raise FormatError(
                    f"rows of {weight.format.name} share scales, so they can't be reordered",
                    where=f"weight {list(weight.shape)}, blocks of {scale.block[0]} rows",
                    next="dequantize first",
                )
            values = _take(values, dim, blocks)
        scales[scale.name] = values
    return QuantTensor(weight.format, _take(part.packed, dim, local), scales, weight.dtype)


def _find_blocks(index: Tensor, size: int, block: int) -> Tensor | None:
    """The blocks that rows consist of, in order; None if a block is split or in another order."""
    if block == 1:
        return index
    if index.numel() % block or size % block:
        return None
    runs = index.view(-1, block)
    starts = runs[:, :1]
    if not torch.equal(runs, starts + torch.arange(block)) or bool((starts % block).any()):
        return None
    return starts.flatten() // block


def dequantize_slices(weight: QuantTensor, slices: tuple[slice, ...], where: str) -> Tensor:
    """`weight.dequantize()[slices]`; only the blocks that contain the slices are read."""
    result, inner = weight, []
    for dim, (wanted, size) in enumerate(zip(slices, weight.shape, strict=True)):
        align = shard_alignment(weight.format, dim, weight.dim())
        first = wanted.start // align * align
        last = min(-(-wanted.stop // align) * align, size)
        result = _narrow(result, dim, first, last)
        inner.append(slice(wanted.start - first, wanted.stop - first, wanted.step))
    return result.check_scales(where).dequantize()[tuple(inner)]


def _narrow(weight: QuantTensor, dim: int, start: int, stop: int) -> QuantTensor:
    part = weight[(slice(None),) * dim + (slice(start, stop),)]
    assert isinstance(part, QuantTensor), "slices of a QuantTensor are QuantTensors"
    return part


def _as_range(index: Tensor) -> tuple[int, int] | None:
    """(first, last + 1) if the rows are contiguous and in order."""
    if index.numel() == 0:
        return (0, 0)
    first, count = int(index[0]), index.numel()
    is_range = torch.equal(index, _arange(first, count))
    return (first, first + count) if is_range else None


@lru_cache(maxsize=32)
def _arange(first: int, count: int) -> Tensor:
    return torch.arange(first, first + count)


def _take(part: Tensor, dim: int, index: Tensor) -> Tensor:
    """`index_select`, for one-byte float types as well."""
    index = index.to(part.device)
    if part.element_size() == 1:
        return part.view(torch.uint8).index_select(dim, index).view(part.dtype)
    return part.index_select(dim, index)
