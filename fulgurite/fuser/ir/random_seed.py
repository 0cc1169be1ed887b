"""The seed of a region's random numbers: a symbol, bound once per call.

`SEED` is a symbol of the region, like a dynamic size. Launchers bind it to `draw_seed()`. Triton kernels
get a second symbol, `SEED_ADDRESS`, bound to `seed_address()`. While a CUDA graph captures the kernel, it
is the address of the seed, and `SEED` is 0. Otherwise the address is 0.
"""

from __future__ import annotations

import torch

from fulgurite.cudagraph.seeds import captured_seeds
from fulgurite.fuser.ir.index_atoms import Symbol

SEED = Symbol("random_seed", low=1 << 62, is_64_bit=True)
SEED_ADDRESS = Symbol("random_seed_address", low=0, high=0, is_64_bit=True)


def draw_seed() -> int:
    """Draws a seed from torch's default generator.

    Every seed is odd and has 63 bits. A Triton launcher that specializes on integer arguments
    then compiles one variant for all of them.
    """
    seeds = captured_seeds()
    if seeds is None:
        return _draw()
    seeds.add(_draw)
    return 0


def seed_address() -> int:
    """Returns where the seed of the last `draw_seed` is; 0: it is what `draw_seed` returned."""
    seeds = captured_seeds()
    return 0 if seeds is None else seeds.last_address


def _draw() -> int:
    return int(torch.empty((), dtype=torch.int64).random_()) | (1 << 62) | 1
