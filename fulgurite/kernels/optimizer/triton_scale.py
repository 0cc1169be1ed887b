# mypy: allow-untyped-defs, allow-incomplete-defs
"""x * factor in place, in float32 and rounded once, for many tensors in one kernel.

The factor is a float32 scalar on the device. torch's own product of a 16-bit tensor and a float32 scalar
rounds the scalar to 16 bits first.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fulgurite.kernels.common.triton_import import tl, triton
from fulgurite.kernels.optimizer.tensor_list import is_aligned, make_tensor_list
from fulgurite.kernels.optimizer.triton_adamw import read_pointer, read_size
from fulgurite.kernels.tuning.heuristics import heuristics_for


@triton.jit
def scale_kernel(
    addresses,
    sizes,
    entries,
    starts,
    like,
    factor,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    entry = tl.load(entries + program)
    start = tl.load(starts + program)
    size = read_size(sizes + entry, ALIGNED)
    x = read_pointer(addresses + entry, like, ALIGNED)
    scale = tl.load(factor)
    for block in range(0, tl.minimum(size - start, CHUNK), BLOCK):
        offsets = tl.multiple_of(start, BLOCK) + block + tl.arange(0, BLOCK)
        mask = offsets < size
        value = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
        tl.store(x + offsets, (value * scale).to(like.dtype.element_ty), mask=mask)


def scale_in_place(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply contiguous tensors of one device and dtype by a scalar."""
    assert all(x.is_contiguous() for x in tensors), "elements are read in order"
    for aligned in (True, False):
        group = [x for x in tensors if x.numel() and is_aligned([x]) == aligned]
        if group:
            _launch(group, factor)


def _launch(tensors: Sequence[Tensor], factor: Tensor) -> None:
    config = heuristics_for(tensors[0].device).elementwise
    table = make_tensor_list([tensors], config.block_n)
    scale_kernel[(table.num_programs,)](
        *table.tables,
        tensors[0],
        factor,
        ALIGNED=table.is_aligned,
        CHUNK=table.chunk,
        BLOCK=config.block_n,
        num_warps=config.num_warps,
    )
