"""The seed of a region's random numbers: a symbol, bound once per call.

`SEED` is a symbol of the region, like a dynamic size. Launchers bind it to `draw_seed()`.
"""

from __future__ import annotations

import torch

from fulgurite.fuser.ir.index_atoms import Symbol

SEED = Symbol("random_seed", low=1 << 62, is_64_bit=True)


def draw_seed() -> int:
    """Draws a seed from torch's default generator.

    Every seed is odd and has 63 bits. A Triton launcher that specializes on integer arguments
    then compiles one variant for all of them.
    """
    return int(torch.empty((), dtype=torch.int64).random_()) | (1 << 62) | 1
