"""Integer functions of launch code: sizes in, numbers of blocks out.

Triton has functions of these names, which also work inside kernels. They cost microseconds a call
on the host, and a prefill step makes hundreds of calls.
"""

from __future__ import annotations


def cdiv(size: int, block: int) -> int:
    """Number of blocks that cover `size`."""
    return -(-size // block)


def next_power_of_2(size: int) -> int:
    """The smallest power of two that is at least `size`."""
    return 1 << max(size - 1, 0).bit_length()
