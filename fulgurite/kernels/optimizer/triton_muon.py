# mypy: allow-untyped-defs, allow-incomplete-defs
"""The elementwise parts of Muon, each for many matrices in one launch.

    add_momentum      m = mu m + (1 - mu) g          u = (1 - mu) g + mu m
    apply_updates     w = w (1 - lr * decay) - rate * o

In: gradients (any float), momenta (float32), updates u and o (bfloat16), weights (float32, or bfloat16
with the low bits of their float32 masters, int16), all contiguous. What happens between the two, u -> o,
is `train/optim/muon.py`'s: matrix products. `train/optim/rounding.py` defines the low bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fulgurite.kernels.common.triton_import import tl, triton
from fulgurite.kernels.optimizer.tensor_list import is_aligned, make_tensor_list
from fulgurite.kernels.optimizer.triton_adamw import (
    FLOATS,
    join_low_bits,
    read_pointer,
    read_size,
    split_low_bits,
)
from fulgurite.kernels.tuning.heuristics import heuristics_for


@triton.jit
def momentum_kernel(
    addresses,
    sizes,
    entries,
    starts,
    gradient_like,
    momentum_like,
    update_like,
    momentum,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    entry = tl.load(entries + program)
    start = tl.load(starts + program)
    size = read_size(sizes + entry, ALIGNED)
    gradient = read_pointer(addresses + entry * 3, gradient_like, ALIGNED)
    average = read_pointer(addresses + entry * 3 + 1, momentum_like, ALIGNED)
    update = read_pointer(addresses + entry * 3 + 2, update_like, ALIGNED)
    for block in range(0, tl.minimum(size - start, CHUNK), BLOCK):
        offsets = tl.multiple_of(start, BLOCK) + block + tl.arange(0, BLOCK)
        mask = offsets < size
        g = tl.load(gradient + offsets, mask=mask, other=0.0).to(tl.float32)
        m = tl.load(average + offsets, mask=mask, other=0.0)
        m += (g - m) * (1.0 - momentum)
        tl.store(average + offsets, m, mask=mask)
        u = g + (m - g) * momentum
        tl.store(update + offsets, u.to(update_like.dtype.element_ty), mask=mask)


@triton.jit
def apply_kernel(
    addresses,
    sizes,
    entries,
    starts,
    weight_like,
    low_like,
    update_like,
    shrink,
    rate,
    HAS_LOW: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    entry = tl.load(entries + program)
    start = tl.load(starts + program)
    size = read_size(sizes + entry, ALIGNED)
    weight = read_pointer(addresses + entry * 3, weight_like, ALIGNED)
    low = read_pointer(addresses + entry * 3 + 1, low_like, ALIGNED)
    update = read_pointer(addresses + entry * 3 + 2, update_like, ALIGNED)
    for block in range(0, tl.minimum(size - start, CHUNK), BLOCK):
        offsets = tl.multiple_of(start, BLOCK) + block + tl.arange(0, BLOCK)
        mask = offsets < size
        w = tl.load(weight + offsets, mask=mask, other=0.0)
        o = tl.load(update + offsets, mask=mask, other=0.0).to(tl.float32)
        if HAS_LOW:
            w = join_low_bits(w, tl.load(low + offsets, mask=mask, other=0))
        w = w * shrink - rate * o
        if HAS_LOW:
            w, rest = split_low_bits(w)
            tl.store(low + offsets, rest, mask=mask)
        tl.store(weight + offsets, w, mask=mask)


@dataclass(frozen=True)
class MuonWeight:
    """The matrices of a parameter, in place; `low` are the low bits of a bfloat16 weight."""

    weight: Tensor
    low: Tensor | None
    gradient: Tensor
    momentum: Tensor

    def can_run(self) -> bool:
        """Whether the kernels take it."""
        tensors = [self.weight, self.gradient, self.momentum]
        tensors += [] if self.low is None else [self.low]
        wanted = torch.float32 if self.low is None else torch.bfloat16
        return (
            (self.weight.dtype, self.momentum.dtype) == (wanted, torch.float32)
            and self.gradient.dtype in FLOATS
            and all(x.is_contiguous() for x in tensors)
        )


def add_momentum(weights: Sequence[MuonWeight], updates: Sequence[Tensor], momentum: float) -> None:
    """Change the momenta, and write each weight's update to its tensor of `updates`."""
    lists = [
        (one.gradient, one.momentum, update) for one, update in zip(weights, updates, strict=True)
    ]
    _launch(momentum_kernel, lists, momentum)


def apply_updates(
    weights: Sequence[MuonWeight], updates: Sequence[Tensor], shrink: float, rate: float
) -> None:
    """Change the weights and their low bits."""
    lists = [
        (one.weight, one.weight if one.low is None else one.low, update)
        for one, update in zip(weights, updates, strict=True)
    ]
    has_low = {one.low is not None for one in weights}
    assert len(has_low) <= 1, "weights of one dtype"
    _launch(apply_kernel, lists, shrink, rate, HAS_LOW=True in has_low)


def _launch(
    kernel: Any, lists: Sequence[tuple[Tensor, ...]], *numbers: float, **flags: bool
) -> None:
    """One launch for all tensors of the same dtypes and alignment."""
    kinds: dict[object, list[tuple[Tensor, ...]]] = {}
    for tensors in lists:
        if tensors[0].numel():
            kind = (*(x.dtype for x in tensors), is_aligned(tensors))
            kinds.setdefault(kind, []).append(tensors)
    for group in kinds.values():
        config = heuristics_for(group[0][0].device).elementwise
        table = make_tensor_list(list(zip(*group, strict=True)), config.block_n)
        kernel[(table.num_programs,)](
            *table.tables,
            *group[0],
            *numbers,
            **flags,
            ALIGNED=table.is_aligned,
            CHUNK=table.chunk,
            BLOCK=config.block_n,
            num_warps=config.num_warps,
        )
