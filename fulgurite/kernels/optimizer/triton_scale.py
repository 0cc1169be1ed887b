# mypy: allow-untyped-defs, allow-incomplete-defs
"""x * factor in place, in float32 and rounded once; the factor is a float32 scalar on the device.

torch's own product of a 16-bit tensor and a float32 scalar rounds the scalar to 16 bits first.
"""

from __future__ import annotations

from torch import Tensor

from fulgurite.kernels.common.triton_import import tl, triton
from fulgurite.kernels.integer_math import cdiv
from fulgurite.kernels.tuning.heuristics import heuristics_for


@triton.jit
def scale_kernel(x, factor, size, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < size
    value = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(x + offsets, (value * tl.load(factor)).to(x.dtype.element_ty), mask=mask)


def scale_in_place(x: Tensor, factor: Tensor) -> None:
    """Multiply a contiguous tensor by a scalar."""
    assert x.is_contiguous(), "elements are read in order"
    config = heuristics_for(x.device).elementwise
    scale_kernel[(cdiv(x.numel(), config.block_n),)](
        x, factor, x.numel(), BLOCK=config.block_n, num_warps=config.num_warps
    )
