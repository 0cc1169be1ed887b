"""Scale factors in the swizzled layout of Blackwell's block-scaled MMAs (128x4 blocks).

In: scale factors of one byte, [.., rows, columns], row-major: a column is a block of K. Out: the same
bytes in the order that `torch.nn.functional.scaled_mm` calls `SWIZZLE_32_4_4`, and back.

Rows are padded with zeros to a multiple of 128, columns to a multiple of 4. Blocks of 128x4 follow
each other row by row. Inside a block, element (r, c) is at byte

    (r % 32) * 16 + (r // 32) * 4 + c

Grouped forms swizzle each group on its own, padded to whole blocks, one after the other: groups of
rows (an expert's tokens) or of columns (the weight gradient, which contracts over tokens), and back.
Everything is index arithmetic in plain torch, so compiled functions fuse it with the cast before it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fulgurite.errors import ArgumentError

BLOCK_ROWS, BLOCK_COLUMNS = 128, 4
BLOCK_BYTES = BLOCK_ROWS * BLOCK_COLUMNS


def swizzle_scales(scales: Tensor) -> Tensor:
    """Row-major [.., rows, columns] to swizzled, [.., padded rows, padded columns] in memory."""
    _check_scales(scales)
    *batch, rows, columns = scales.shape
    padded_rows, padded_columns = padded_scale_shape(rows, columns)
    padding = (0, padded_columns - columns, 0, padded_rows - rows)
    bytes_ = torch.nn.functional.pad(scales.view(torch.uint8), padding)
    blocks = bytes_.reshape(*batch, padded_rows // 128, 4, 32, padded_columns // 4, 4)
    order = blocks.movedim(-2, -4).transpose(
        -3, -2
    )  # .., row block, column block, r % 32, r // 32, c
    return order.reshape(*batch, padded_rows, padded_columns).view(scales.dtype)


def unswizzle_scales(swizzled: Tensor, rows: int, columns: int) -> Tensor:
    """Swizzled [.., bytes] or [.., padded rows, padded columns] to row-major [.., rows, columns]."""
    padded_rows, padded_columns = padded = padded_scale_shape(rows, columns)
    flat = swizzled.view(torch.uint8)
    batch = flat.shape[:-2] if flat.shape[-2:] == padded else flat.shape[:-1]
    expected = padded_rows * padded_columns * batch.numel()
    if flat.numel() != expected:
        raise ArgumentError(
            f"{flat.numel()} swizzled scales, and {rows}x{columns} need {expected}",
            where=f"swizzled scales of shape {list(swizzled.shape)}",
            next=f"pad rows to {padded_rows} and columns to {padded_columns}",
        )
    blocks = flat.reshape(*batch, padded_rows // 128, padded_columns // 4, 32, 4, 4)
    order = blocks.transpose(-3, -2).movedim(-4, -2)
    row_major = order.reshape(*batch, padded_rows, padded_columns)
    return row_major[..., :rows, :columns].contiguous().view(swizzled.dtype)


def swizzle_grouped_scales(scales: Tensor, offsets: Tensor, dim: int = 0) -> Tensor:
    """Scales of groups along `dim`, each group swizzled and padded on its own; a flat tensor.

    `offsets` are the ends of the groups, as `grouped_mm` takes them. The size of the result does not
    depend on them: it has room for every group's padding, and zeros at the end.
    """
    _check_scales(scales)
    if scales.dim() != 2 or dim not in (0, 1) or offsets.dim() != 1 or offsets.numel() == 0:
        raise ArgumentError(
            f"scales {list(scales.shape)} in groups along dim {dim}, offsets {list(offsets.shape)}",
            next="scales [rows, columns], dim 0 or 1, and at least one offset",
        )
    groups = _GroupedBlocks.of(offsets, scales.shape[0], scales.shape[1], dim)
    position = torch.arange(_grouped_bytes(scales.shape, len(offsets), dim), device=scales.device)
    group = torch.searchsorted(groups.padded_ends * groups.other, position, right=True)
    is_padding = group >= len(offsets)
    group = group.clamp(max=len(offsets) - 1)
    within = position - groups.padded_starts[group] * groups.other
    columns = groups.padded[group] if dim == 1 else torch.full_like(within, groups.other)
    row, column = _element_at(within, columns.clamp(min=BLOCK_COLUMNS))
    start, limit = groups.starts[group], groups.ends[group]
    row, column = (row + start, column) if dim == 0 else (row, column + start)
    limits = (limit, scales.shape[1]) if dim == 0 else (scales.shape[0], limit)
    is_scale = ~is_padding & (row < limits[0]) & (column < limits[1])
    row, column = (torch.where(is_scale, index, 0) for index in (row, column))
    values = scales.view(torch.uint8)[row, column] if scales.numel() else torch.zeros_like(row)
    return torch.where(is_scale, values, 0).to(torch.uint8).view(scales.dtype)


def unswizzle_grouped_scales(
    swizzled: Tensor, offsets: Tensor, rows: int, columns: int, dim: int = 0
) -> Tensor:
    """What `swizzle_grouped_scales` made, as row-major [rows, columns]; zero outside of all groups."""
    if dim not in (0, 1) or offsets.dim() != 1 or offsets.numel() == 0:
        raise ArgumentError(
            f"groups along dim {dim}, offsets {list(offsets.shape)}",
            next="dim 0 or 1, and at least one offset",
        )
    groups = _GroupedBlocks.of(offsets, rows, columns, dim)
    flat = swizzled.contiguous().view(torch.uint8).flatten()
    row = torch.arange(rows, device=flat.device)[:, None]
    column = torch.arange(columns, device=flat.device)[None, :]
    along = row if dim == 0 else column
    group = torch.searchsorted(groups.ends, along, right=True)
    is_scale = (group < len(offsets)).expand(rows, columns)
    group = group.clamp(max=len(offsets) - 1)
    first = groups.padded_starts[group] * groups.other
    local = along - groups.starts[group]
    if dim == 0:
        byte = first + _byte_of(local, column, groups.other)
    else:
        byte = first + _byte_of(row, local, groups.padded[group])
    if not flat.numel():
        return swizzled.new_zeros(rows, columns)
    values = flat[torch.where(is_scale, byte, 0)]
    return torch.where(is_scale, values, 0).to(torch.uint8).view(swizzled.dtype)


@dataclass(frozen=True)
class _GroupedBlocks:
    """Where groups start and end, in scales and padded to whole blocks.

    other   padded extent of the other dimension: bytes of a padded row, or column, of a group
    """

    starts: Tensor
    ends: Tensor
    padded: Tensor
    padded_ends: Tensor
    other: int

    @classmethod
    def of(cls, offsets: Tensor, rows: int, columns: int, dim: int) -> _GroupedBlocks:
        unit = BLOCK_ROWS if dim == 0 else BLOCK_COLUMNS
        ends = offsets.to(torch.int64)
        starts = ends - torch.diff(ends, prepend=ends.new_zeros(1))
        padded = (ends - starts + unit - 1) // unit * unit
        other = padded_scale_shape(rows, columns)[1 - dim]
        return cls(starts, ends, padded, padded.cumsum(0), other)

    @property
    def padded_starts(self) -> Tensor:
        return self.padded_ends - self.padded


def padded_scale_shape(rows: int, columns: int) -> tuple[int, int]:
    """Rows and columns of whole 128x4 blocks."""
    return -(-rows // BLOCK_ROWS) * BLOCK_ROWS, -(-columns // BLOCK_COLUMNS) * BLOCK_COLUMNS


def _grouped_bytes(shape: torch.Size, groups: int, dim: int) -> int:
    """Room for any division into groups: each is padded by less than a block."""
    unit = BLOCK_ROWS if dim == 0 else BLOCK_COLUMNS
    extent = (shape[dim] + groups * (unit - 1)) // unit * unit
    return extent * padded_scale_shape(shape[0], shape[1])[1 - dim]


def _element_at(position: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """Row and column of the element at a byte of a swizzled matrix with `columns` columns."""
    row_block, rest = position // (BLOCK_ROWS * columns), position % (BLOCK_ROWS * columns)
    column_block, byte = rest // BLOCK_BYTES, rest % BLOCK_BYTES
    row = row_block * BLOCK_ROWS + byte // 4 % 4 * 32 + byte // 16
    return row, column_block * BLOCK_COLUMNS + byte % 4


def _byte_of(row: Tensor, column: Tensor, columns: Tensor | int) -> Tensor:
    """The byte of an element in a swizzled matrix with `columns` columns; inverse of `_element_at`."""
    block = row // BLOCK_ROWS * (BLOCK_ROWS * columns) + column // BLOCK_COLUMNS * BLOCK_BYTES
    return block + row % 32 * 16 + row % BLOCK_ROWS // 32 * 4 + column % BLOCK_COLUMNS


def _check_scales(scales: Tensor) -> None:
    if scales.dim() < 2 or scales.dtype.itemsize != 1:
        raise ArgumentError(
            f"{scales.dtype} scales of shape {list(scales.shape)} can't be swizzled",
            next="scales of one byte (float8_e8m0fnu, float8_e4m3fn, uint8), [.., rows, columns]",
        )
