# mypy: allow-untyped-defs, allow-incomplete-defs
"""AdamW of a bfloat16 weight with the low bits of its float32 master, in one kernel, in place.

In: weight (bfloat16), low bits (int16), gradient (any float), moments (float32), all contiguous. Read
and written once: 26 bytes a weight. `train/optim/rounding.py` defines the bits, and
`train/optim/adamw.py` the formula.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fulgurite.kernels.common.triton_import import tl, triton
from fulgurite.kernels.integer_math import cdiv
from fulgurite.kernels.tuning.heuristics import heuristics_for

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class AdamWStep:
    """The numbers of one step; `step` counts from 1."""

    rate: float
    betas: tuple[float, float]
    epsilon: float
    decay: float
    step: int

    @property
    def scalars(self) -> tuple[float, float, float, float, float, float]:
        """What kernels take: shrink, beta1, beta2, root, epsilon, rate, with the bias corrections."""
        beta1, beta2 = self.betas
        root = (1.0 - beta2**self.step) ** 0.5
        rate = self.rate / (1.0 - beta1**self.step)
        return 1.0 - self.rate * self.decay, beta1, beta2, root, self.epsilon, rate


@triton.jit
def adamw_kernel(
    weight,
    low,
    gradient,
    first,
    second,
    size,
    shrink,
    beta1,
    beta2,
    root,
    epsilon,
    rate,
    BLOCK: tl.constexpr,
):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < size
    high = tl.load(weight + offsets, mask=mask, other=0.0).to(tl.int16, bitcast=True)
    rest = tl.load(low + offsets, mask=mask, other=0).to(tl.int32)
    master = ((high.to(tl.int32) << 16) + rest).to(tl.float32, bitcast=True)
    g = tl.load(gradient + offsets, mask=mask, other=0.0).to(tl.float32)
    m = tl.load(first + offsets, mask=mask, other=0.0)
    v = tl.load(second + offsets, mask=mask, other=0.0)
    m += (g - m) * (1.0 - beta1)
    v = v * beta2 + g * g * (1.0 - beta2)
    master = master * shrink - rate * m / (tl.sqrt(v) / root + epsilon)
    tl.store(first + offsets, m, mask=mask)
    tl.store(second + offsets, v, mask=mask)
    bits = master.to(tl.int32, bitcast=True)
    upper = (bits + 0x8000) >> 16
    is_finite = tl.abs(master) < float("inf")
    rounded = upper.to(tl.int16).to(tl.bfloat16, bitcast=True)
    tl.store(weight + offsets, tl.where(is_finite, rounded, master.to(tl.bfloat16)), mask=mask)
    tl.store(low + offsets, tl.where(is_finite, bits - (upper << 16), 0).to(tl.int16), mask=mask)


def can_run(weight: Tensor, low: Tensor, gradient: Tensor, first: Tensor, second: Tensor) -> bool:
    """Whether the kernel takes these tensors."""
    dtypes = (weight.dtype, low.dtype, first.dtype, second.dtype)
    return (
        dtypes == (torch.bfloat16, torch.int16, torch.float32, torch.float32)
        and gradient.dtype in FLOATS
        and all(x.is_contiguous() for x in (weight, low, gradient, first, second))
    )


def adamw_step(
    weight: Tensor, low: Tensor, gradient: Tensor, first: Tensor, second: Tensor, step: AdamWStep
) -> None:
    """Update weight, low bits and moments in place; `can_run` is true."""
    size, config = weight.numel(), heuristics_for(weight.device).elementwise
    if size:
        adamw_kernel[(cdiv(size, config.block_n),)](
            weight,
            low,
            gradient,
            first,
            second,
            size,
            *step.scalars,
            BLOCK=config.block_n,
            num_warps=config.num_warps,
        )
