"""Whole numbers that launches are made of.

In: sizes. Out: how many blocks cover them, and the power of two a block needs. Triton's own functions of
these names work inside kernels, too, and cost microseconds a call for it; a prompt's step calls them
hundreds of times.
"""

from __future__ import annotations


def cdiv(size: int, block: int) -> int:
    """Blocks that cover `size`."""
    return -(-size // block)


def next_power_of_2(size: int) -> int:
    """The least power of two that is no smaller."""
    return 1 << max(size - 1, 0).bit_length()
