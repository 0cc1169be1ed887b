# mypy: allow-untyped-defs, allow-incomplete-defs
"""AdamW of bfloat16 weights with the low bits of their float32 masters, in one kernel, in place.

In: lists of weights (bfloat16), low bits (int16), gradients (any float), moments (float32), all
contiguous. Read and written once: 26 bytes a weight. `train/optim/rounding.py` defines the bits, and
`train/optim/adamw.py` the formula.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fulgurite.kernels.common.triton_import import tl, triton
from fulgurite.kernels.optimizer.tensor_list import is_aligned, make_tensor_list
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
def read_size(table, ALIGNED: tl.constexpr):
    size = tl.load(table)
    if ALIGNED:
        size = tl.multiple_of(size, 16)
    return size


@triton.jit
def read_pointer(table, like, ALIGNED: tl.constexpr):
    """The pointer whose address is in a table, with the type of another one."""
    pointer = tl.load(table).to(like.dtype)
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def join_low_bits(weight, low):
    """The float32 master weight of a bfloat16 weight and its low bits."""
    high = weight.to(tl.int16, bitcast=True).to(tl.int32) << 16
    return (high + low.to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit
def split_low_bits(master):
    """The bfloat16 weight, rounded to nearest, and its low bits; infinities and NaNs keep their kind."""
    bits = master.to(tl.int32, bitcast=True)
    upper = (bits + 0x8000) >> 16
    is_finite = tl.abs(master) < float("inf")
    rounded = upper.to(tl.int16).to(tl.bfloat16, bitcast=True)
    weight = tl.where(is_finite, rounded, master.to(tl.bfloat16))
    return weight, tl.where(is_finite, bits - (upper << 16), 0).to(tl.int16)


@triton.jit
def adamw_kernel(
    addresses,
    sizes,
    entries,
    starts,
    weight_like,
    low_like,
    gradient_like,
    moment_like,
    shrink,
    beta1,
    beta2,
    root,
    epsilon,
    rate,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    entry = tl.load(entries + program)
    start = tl.load(starts + program)
    size = read_size(sizes + entry, ALIGNED)
    weight = read_pointer(addresses + entry * 5, weight_like, ALIGNED)
    low = read_pointer(addresses + entry * 5 + 1, low_like, ALIGNED)
    gradient = read_pointer(addresses + entry * 5 + 2, gradient_like, ALIGNED)
    first = read_pointer(addresses + entry * 5 + 3, moment_like, ALIGNED)
    second = read_pointer(addresses + entry * 5 + 4, moment_like, ALIGNED)
    for block in range(0, tl.minimum(size - start, CHUNK), BLOCK):
        offsets = tl.multiple_of(start, BLOCK) + block + tl.arange(0, BLOCK)
        mask = offsets < size
        stored = tl.load(weight + offsets, mask=mask, other=0.0)
        master = join_low_bits(stored, tl.load(low + offsets, mask=mask, other=0))
        g = tl.load(gradient + offsets, mask=mask, other=0.0).to(tl.float32)
        m = tl.load(first + offsets, mask=mask, other=0.0)
        v = tl.load(second + offsets, mask=mask, other=0.0)
        m += (g - m) * (1.0 - beta1)
        v = v * beta2 + g * g * (1.0 - beta2)
        master = master * shrink - rate * m / (tl.sqrt(v) / root + epsilon)
        tl.store(first + offsets, m, mask=mask)
        tl.store(second + offsets, v, mask=mask)
        stored, rest = split_low_bits(master)
        tl.store(weight + offsets, stored, mask=mask)
        tl.store(low + offsets, rest, mask=mask)


@dataclass(frozen=True)
class MasterWeight:
    """A weight of the kernel, in place."""

    weight: Tensor
    low: Tensor
    gradient: Tensor
    first: Tensor
    second: Tensor

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return self.weight, self.low, self.gradient, self.first, self.second

    def can_run(self) -> bool:
        """Whether the kernel takes it."""
        dtypes = (self.weight.dtype, self.low.dtype, self.first.dtype, self.second.dtype)
        return (
            dtypes == (torch.bfloat16, torch.int16, torch.float32, torch.float32)
            and self.gradient.dtype in FLOATS
            and all(x.is_contiguous() for x in self.tensors)
        )


def adamw_step(weights: Sequence[MasterWeight], step: AdamWStep) -> None:
    """Update weights, low bits and moments in place; all are on one device, and `can_run` is true."""
    kinds: dict[tuple[torch.dtype, bool], list[MasterWeight]] = {}
    for weight in weights:
        if weight.weight.numel():
            kind = weight.gradient.dtype, is_aligned(weight.tensors)
            kinds.setdefault(kind, []).append(weight)
    for group in kinds.values():
        config = heuristics_for(group[0].weight.device).elementwise
        table = make_tensor_list(
            list(zip(*(x.tensors for x in group), strict=True)), config.block_n
        )
        adamw_kernel[(table.num_programs,)](
            *table.tables,
            *group[0].tensors[:4],
            *step.scalars,
            ALIGNED=table.is_aligned,
            CHUNK=table.chunk,
            BLOCK=config.block_n,
            num_warps=config.num_warps,
        )
