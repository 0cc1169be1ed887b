# mypy: allow-untyped-defs, allow-incomplete-defs
"""AdamW with states in 8 or 16 bit, or weights that are rounded stochastically: one kernel, in place.

    m = b1 m + (1 - b1) g        v = b2 v + (1 - b2) g^2
    w = w (1 - lr * decay) - lr / (1 - b1^t) * m / (sqrt(v / (1 - b2^t)) + eps)

    weight    float32; bfloat16 with low bits (int16); or bfloat16, rounded stochastically
    m, v      float32; bfloat16, rounded stochastically; or int8: a code (uint8) and a scale for each
              128 elements of a row. v is stored as its root.

A program has blocks of 128 elements, so it finds their scales itself. The 8-bit code is a table of 256
values with edges between them. The place in it is computed from the decade of an element and then
moved by at most one, by the edges: the result is that of a search. Random bits are a hash of a key and
the indices of an element in the whole tensor. `train/optim/states.py` and `train/optim/rounding.py`
define both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fulgurite.kernels.common.triton_import import tl, triton
from fulgurite.kernels.integer_math import cdiv
from fulgurite.kernels.optimizer.triton_adamw import (
    FLOATS,
    AdamWStep,
    join_low_bits,
    split_low_bits,
)
from fulgurite.kernels.tuning.heuristics import heuristics_for

BLOCK = 128  # elements of a row that share a scale
MAX_DIMS = 3  # of a weight: random bits are mixed from the indices of its dimensions
STATE_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.uint8: 2}
PLAIN, MASTER, STOCHASTIC = 0, 1, 2  # weights: float32; with low bits; rounded stochastically


@dataclass(frozen=True)
class PackedState:
    """A moment: its values or codes, and for codes the scales and the table of the code.

    Attributes:
        key: of the random bits that round bfloat16 values.
    """

    values: Tensor
    key: int = 0
    scales: Tensor | None = None
    code: Tensor | None = None
    edges: Tensor | None = None


@dataclass(frozen=True)
class PackedWeight:
    """A weight; `low` are the low bits of a bfloat16 one, None rounds it stochastically.

    Attributes:
        key: of the random bits.
        offset: where this shard starts in the whole tensor.
    """

    values: Tensor
    low: Tensor | None = None
    key: int = 0
    offset: tuple[int, ...] = ()


@triton.jit
def mix_bits(x):
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D
    x = (x ^ ((x >> 15) & 0x1FFFF)) * -0x7B935975
    return x ^ ((x >> 16) & 0xFFFF)


@triton.jit
def hash_indices(key, row, column, middle, start0, start1, start2, DIMS: tl.constexpr):
    """Random bits of elements: each dimension's index is mixed in, one after the other."""
    bits = (row * 0 + key).to(tl.int32)
    if DIMS == 3:
        bits = mix_bits(bits + (start0 + row // middle).to(tl.int32) * -0x61C88647)
        bits = mix_bits(bits + (start1 + row % middle).to(tl.int32) * -0x61C88647)
    if DIMS == 2:
        bits = mix_bits(bits + (start1 + row).to(tl.int32) * -0x61C88647)
    return mix_bits(bits + (start2 + column).to(tl.int32) * -0x61C88647)


@triton.jit
def round_to_bfloat16(x, bits):
    """float32 -> bfloat16, up with the probability of the dropped part."""
    moved = x.to(tl.int32, bitcast=True) + (bits & 0xFFFF)
    rounded = (moved >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return tl.where(tl.abs(x) < float("inf"), rounded, x.to(tl.bfloat16))


@triton.jit
def find_code(x, edges, SIGNED: tl.constexpr):
    """How many of the 255 edges are below x, which is between -1 and 1."""
    size = tl.abs(x)
    decade = tl.zeros_like(x).to(tl.int32)
    scaled = size * 1e6
    for _decade in tl.static_range(6):
        is_above = scaled > 1.0
        decade += is_above.to(tl.int32)
        scaled = tl.where(is_above, scaled * 0.1, scaled)
    one = tl.full(decade.shape, 1, tl.int32)
    count = one << (decade if SIGNED else decade + 1)
    place = ((scaled - 0.1) / 0.9 * count.to(tl.float32)).to(tl.int32)
    place = tl.minimum(tl.maximum(place, 0), count - 1)
    if SIGNED:
        place += count - 1
        guess = tl.where(x < 0, 126 - place, 128 + place)
    else:
        guess = 1 + count - 2 + place
    guess = tl.minimum(tl.maximum(guess, 0), 255)
    upper = tl.load(edges + tl.minimum(guess, 254))
    lower = tl.load(edges + tl.maximum(guess - 1, 0))
    guess += ((guess < 255) & (x > upper)).to(tl.int32)
    guess -= ((guess > 0) & (x <= lower)).to(tl.int32)
    return guess


@triton.jit
def read_moment(values, scales, code, offsets, blocks, mask, KIND: tl.constexpr):
    x = tl.load(values + offsets, mask=mask, other=0)
    if KIND == 2:
        scale = tl.load(scales + blocks, mask=tl.max(mask.to(tl.int32), 1) > 0, other=0.0)
        x = tl.load(code + x.to(tl.int32)) * scale[:, None]
    return x.to(tl.float32)


@triton.jit
def write_moment(
    values, scales, edges, offsets, blocks, mask, x, bits, SIGNED: tl.constexpr, KIND: tl.constexpr
):
    if KIND == 2:
        x = tl.where(mask, x, 0.0)
        scale = tl.max(tl.abs(x), 1)
        relative = x / tl.where(scale > 0, scale, 1.0)[:, None]
        tl.store(values + offsets, find_code(relative, edges, SIGNED).to(tl.uint8), mask=mask)
        tl.store(scales + blocks, scale, mask=tl.max(mask.to(tl.int32), 1) > 0)
    elif KIND == 1:
        tl.store(values + offsets, round_to_bfloat16(x, bits), mask=mask)
    else:
        tl.store(values + offsets, x, mask=mask)


@triton.jit(
    do_not_specialize=["key", "first_key", "second_key", "start0", "start1", "start2", "middle"]
)
def packed_adamw_kernel(
    weight,
    low,
    gradient,
    first,
    first_scales,
    first_code,
    first_edges,
    second,
    second_scales,
    second_code,
    second_edges,
    rows,
    columns,
    shrink,
    beta1,
    beta2,
    root,
    epsilon,
    rate,
    key,
    first_key,
    second_key,
    middle,
    start0,
    start1,
    start2,
    DIMS: tl.constexpr,
    WEIGHT: tl.constexpr,
    STATES: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    blocks = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    in_row = tl.cdiv(columns, BLOCK)
    row = (blocks // in_row)[:, None]
    column = ((blocks % in_row) * BLOCK)[:, None] + tl.arange(0, BLOCK)[None, :]
    mask = (row < rows) & (column < columns)
    offsets = row * columns + column
    row = tl.broadcast_to(row, (BLOCKS, BLOCK))

    g = tl.load(gradient + offsets, mask=mask, other=0.0).to(tl.float32)
    m = read_moment(first, first_scales, first_code, offsets, blocks, mask, STATES)
    v = read_moment(second, second_scales, second_code, offsets, blocks, mask, STATES)
    if STATES == 2:
        v = v * v
    m += (g - m) * (1.0 - beta1)
    v = v * beta2 + g * g * (1.0 - beta2)

    stored = tl.load(weight + offsets, mask=mask, other=0.0)
    w = stored.to(tl.float32)
    if WEIGHT == 1:
        w = join_low_bits(stored, tl.load(low + offsets, mask=mask, other=0))
    w = w * shrink - rate * m / (tl.sqrt(v) / root + epsilon)
    if WEIGHT == 0:
        tl.store(weight + offsets, w, mask=mask)
    elif WEIGHT == 1:
        stored, rest = split_low_bits(w)
        tl.store(weight + offsets, stored, mask=mask)
        tl.store(low + offsets, rest, mask=mask)
    else:
        bits = hash_indices(key, row, column, middle, start0, start1, start2, DIMS)
        tl.store(weight + offsets, round_to_bfloat16(w, bits), mask=mask)

    first_bits = row
    second_bits = row
    if STATES == 1:
        first_bits = hash_indices(first_key, row, column, middle, start0, start1, start2, DIMS)
        second_bits = hash_indices(second_key, row, column, middle, start0, start1, start2, DIMS)
    write_moment(
        first, first_scales, first_edges, offsets, blocks, mask, m, first_bits, True, STATES
    )
    v = tl.sqrt(v) if STATES == 2 else v
    write_moment(
        second, second_scales, second_edges, offsets, blocks, mask, v, second_bits, False, STATES
    )


def can_run(
    weight: PackedWeight, gradient: Tensor, first: PackedState, second: PackedState
) -> bool:
    """Whether the kernel takes these tensors."""
    x = weight.values
    tensors = [x, gradient, first.values, second.values]
    tensors += [t for t in (weight.low, first.scales, second.scales) if t is not None]
    is_known = x.dtype == torch.bfloat16 or (x.dtype == torch.float32 and weight.low is None)
    return (
        is_known
        and 1 <= x.dim() <= MAX_DIMS
        and first.values.dtype == second.values.dtype
        and first.values.dtype in STATE_KINDS
        and gradient.dtype in FLOATS
        and all(t.is_contiguous() for t in tensors)
    )


def packed_adamw_step(
    weight: PackedWeight, gradient: Tensor, first: PackedState, second: PackedState, step: AdamWStep
) -> None:
    """Update weight and moments in place; `can_run` is true."""
    x = weight.values
    if not x.numel():
        return
    columns, config = x.shape[-1], heuristics_for(x.device).elementwise
    rows = x.numel() // columns
    blocks = max(1, config.block_n // BLOCK)
    middle = x.shape[1] if x.dim() == 3 else 1
    offset = weight.offset or (0,) * x.dim()
    starts = (0,) * (MAX_DIMS - x.dim()) + tuple(offset)
    kind = PLAIN if x.dtype == torch.float32 else MASTER if weight.low is not None else STOCHASTIC
    packed_adamw_kernel[(cdiv(rows * cdiv(columns, BLOCK), blocks),)](
        x,
        x if weight.low is None else weight.low,
        gradient,
        *_pointers(first),
        *_pointers(second),
        rows,
        columns,
        *step.scalars,
        weight.key,
        first.key,
        second.key,
        middle,
        *starts,
        DIMS=x.dim(),
        WEIGHT=kind,
        STATES=STATE_KINDS[first.values.dtype],
        BLOCKS=blocks,
        BLOCK=BLOCK,
        num_warps=config.num_warps,
    )


def _pointers(state: PackedState) -> Sequence[Tensor]:
    """Values, scales, code and edges; the kernel reads the last three of 8-bit states only."""
    others = (state.scales, state.code, state.edges)
    return [state.values, *(state.values if other is None else other for other in others)]
