"""The shapes a format gives a tensor: of its packed data, and of each level of scales.

In: a format and a logical shape, K last. Out: shapes, or a `FormatError` that says what doesn't
divide, where, and what to do.
"""

from __future__ import annotations

from collections.abc import Sequence

from fulgurite.errors import FormatError
from fulgurite.quant.format import WHOLE, Format, Scale


def check_shape(format: Format, shape: Sequence[int], where: str | None = None) -> None:
    """Raises unless a tensor of this shape can be cut into the format's blocks."""
    text = f"[{', '.join(map(str, shape))}]"
    if len(shape) == 0:
        raise FormatError(
            f"{format.name} needs at least one dimension, and this tensor is a single number",
            where=where,
            next="reshape it to [1, K] with K a multiple of the block",
        )
    columns = format.block[1]
    if columns == WHOLE or format.may_end_early or shape[-1] % columns == 0:
        return
    below = shape[-1] // columns * columns
    raise FormatError(
        f"{format.name} cuts K into blocks of {columns}, and K = {shape[-1]} is no multiple of it",
        where=where or f"the last dimension of {text}",
        next=f"pad K to {below + columns} with zeros, skip this tensor, or use a format without "
        "blocks along K (fp8_e4m3_row, int8)",
    )


def blocks_along(size: int, block: int) -> int:
    """How many blocks a dimension is cut into; a whole-dimension block is always one."""
    return 1 if block == WHOLE else -(-size // block)


def data_shape(format: Format, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of the packed data of a tensor of this shape."""
    groups = shape[-1] // format.elements_per_group
    return (*shape[:-1], groups * format.items_per_group)


def logical_shape(format: Format, packed: Sequence[int]) -> tuple[int, ...]:
    """The shape of the tensor whose packed data has shape `packed`."""
    if packed[-1] % format.items_per_group:
        raise FormatError(
            f"{format.name} stores {format.items_per_group} bytes a block of "
            f"{format.elements_per_group}, and a row of {packed[-1]} bytes is no multiple of it",
            where=f"packed data of shape [{', '.join(map(str, packed))}]",
            next="check that the bytes are of this format and that rows were not cut",
        )
    return (*packed[:-1], packed[-1] // format.items_per_group * format.elements_per_group)


def scale_shape(scale: Scale, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of one level's tensor: the tensor's own, counted in blocks; 1-D has no rows."""
    rows, columns = scale.block
    last = blocks_along(shape[-1], columns)
    if len(shape) == 1:
        return (last,)
    return (*shape[:-2], blocks_along(shape[-2], rows), last)
