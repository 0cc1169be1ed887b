"""Shapes of packed data and scales.

In: a format and a logical shape, K last. Out: the shapes of its packed data and scales, or a
`FormatError` that says what does not divide, where, and what to do.
"""

from __future__ import annotations

from collections.abc import Sequence

from fulgurite.errors import FormatError
from fulgurite.quant.format import WHOLE_DIM, Format, ScaleSpec


def check_shape(format: Format, shape: Sequence[int], where: str | None = None) -> None:
    """Raise if a tensor of this shape does not divide into the format's blocks."""
    text = f"[{', '.join(map(str, shape))}]"
    if len(shape) == 0:
        raise FormatError(
            f"{format.name} needs at least one dimension, and this tensor is a scalar",
            where=where,
            next="reshape it to [1, K], with K a multiple of the block size",
        )
    columns = format.block[1]
    if columns == WHOLE_DIM or format.allows_partial_blocks or shape[-1] % columns == 0:
        return
    below = shape[-1] // columns * columns
    raise FormatError(
        f"{format.name} has blocks of {columns} along K, "
        f"and K={shape[-1]} is not a multiple of {columns}",
        where=where or f"the last dimension of {text}",
        next=f"zero-pad K to {below + columns}, skip this tensor, or use a format without blocks "
        "along K (fp8_e4m3_row, int8)",
    )


def count_blocks(size: int, block: int) -> int:
    """The number of blocks along a dimension; 1 for `WHOLE_DIM`."""
    return 1 if block == WHOLE_DIM else -(-size // block)


def data_shape(format: Format, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of the packed data of a tensor of this logical shape."""
    groups = shape[-1] // format.elements_per_pack
    return (*shape[:-1], groups * format.items_per_pack)


def logical_shape(format: Format, packed: Sequence[int]) -> tuple[int, ...]:
    """The logical shape of a tensor whose packed data has shape `packed`."""
    if packed[-1] % format.items_per_pack:
        raise FormatError(
            f"{format.name} stores {format.items_per_pack} bytes per block of "
            f"{format.elements_per_pack}, and a row of {packed[-1]} bytes is not a multiple of "
            f"{format.items_per_pack}",
            where=f"packed data of shape [{', '.join(map(str, packed))}]",
            next="check that the data has this format and that rows are complete",
        )
    return (*packed[:-1], packed[-1] // format.items_per_pack * format.elements_per_pack)


def scale_shape(scale: ScaleSpec, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of a scale tensor: one entry per block. A 1-D tensor has no row dimension."""
    rows, columns = scale.block
    last = count_blocks(shape[-1], columns)
    if len(shape) == 1:
        return (last,)
    return (*shape[:-2], count_blocks(shape[-2], rows), last)
