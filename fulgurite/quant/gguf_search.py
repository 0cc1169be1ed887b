"""Quantizing to GGUF's K formats: scales found by search and least squares.

In: blocks [..., count, 256] of float32. Out: codes and scales as `gguf.py` packs them.

    q4_k   x ~ scale * q - minimum, 8 sub-blocks of 32, q in [0, 15], scale and minimum >= 0
    q6_k   x ~ scale * q, 16 sub-blocks of 16, q in [-32, 31], scale of either sign

For each sub-block a few scales around the one its range suggests are tried; for the codes each
gives, least squares finds the best scale (and minimum), and the try with the smallest squared error
is kept. The winners are then rounded to their 6 or 8 bits against the block's float16 scale, and
the codes rounded once more against what was stored, so that the stored scales get the best codes.

- Rounding: codes nearest even, saturating; sub-scales nearest even.
- Zeros: a block of zeros is all zero bytes but for the codes of q6_k, which stand for 0.
- NaN makes the block's float16 scale NaN; an infinity saturates and does not count.
- A float16 scale saturates at 65504.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fulgurite.quant.blocks import divide, split_last

# How far from the range's own step to look, in codes: 15 + shift steps over the range, 32 + shift
# over the largest magnitude. Four times as many tries gain 0.03 dB (q4_k) and 0.06 dB (q6_k) on
# gaussian weights, by signal_to_noise on 1024x2048.
Q4_K_SHIFTS = (-2.0, -1.6, -1.2, -0.8, -0.4, 0.0, 0.4, 0.8)
Q6_K_SHIFTS = (-8.0, -7.0, -6.0, -5.0, -4.0, -3.0, -2.0, -1.0, 0.0)
F16_LARGEST = 65504.0
CHUNK = 1 << 12
"""Blocks worked on at a time: a million elements, which stay in a CPU's cache."""

Fields = tuple[Tensor, dict[str, Tensor]]


def fit_q4_k(blocks: Tensor) -> Fields:
    """Codes uint8 [..., count, 256] and the four levels of scales."""
    return _by_chunks(blocks, _fit_q4_k)


def fit_q6_k(blocks: Tensor) -> Fields:
    """Codes int8 [..., count, 256] and the two levels of scales."""
    return _by_chunks(blocks, _fit_q6_k)


def _by_chunks(blocks: Tensor, fit: Callable[[Tensor], Fields]) -> Fields:
    flat = blocks.reshape(-1, blocks.shape[-1])
    parts = [fit(chunk) for chunk in torch.split(flat, CHUNK)]
    codes = torch.cat([part[0] for part in parts]).reshape(blocks.shape)
    scales = {
        name: torch.cat([part[1][name] for part in parts]).reshape(
            *blocks.shape[:-1], first.shape[-1]
        )
        for name, first in parts[0][1].items()
    }
    return codes, scales


def _fit_q4_k(blocks: Tensor) -> Fields:
    x = split_last(_without_extremes(blocks), 8, 32)
    low, high = x.amin(-1, keepdim=True).clamp_max(0.0), x.amax(-1, keepdim=True)
    extent = high - low
    unit = torch.where(extent > 0, (x - low) / extent, 0.0)
    scale, offset = _best_line(unit, torch.where(extent > 0, -low / extent, 0.0))
    wanted_scale = (scale * extent).squeeze(-1)
    wanted_minimum = -(offset * extent + low).squeeze(-1).clamp_max(0.0)
    block_scale, sub_scale = _six_bits(wanted_scale)
    block_minimum, sub_minimum = _six_bits(wanted_minimum)
    step = (block_scale.float() * sub_scale).unsqueeze(-1)
    minimum = (block_minimum.float() * sub_minimum).unsqueeze(-1)
    steps = torch.where(step > 0, (split_last(blocks, 8, 32) + minimum) / step, 0.0)
    codes = steps.round_().nan_to_num_(nan=0.0).clamp_(0, 15).to(torch.uint8)
    scales = {
        "scale": _poison(block_scale, blocks),
        "minimum_scale": block_minimum,
        "sub_scale": sub_scale.to(torch.uint8),
        "sub_minimum": sub_minimum.to(torch.uint8),
    }
    return codes.flatten(-2), scales


def _best_line(unit: Tensor, ceiling: Tensor) -> tuple[Tensor, Tensor]:
    """The (scale, offset) of the line over codes 0 to 15 nearest to `unit`, offset <= ceiling.

    `unit` [..., 32] lies in [0, 1]; with sums over a sub-block, n = 32 and u the unit value:
    scale = (n*S(uq) - S(u)*S(q)) / (n*S(qq) - S(q)^2), offset = (S(u) - scale*S(q)) / n, and where
    that is over its ceiling, offset = ceiling and scale = (S(uq) - ceiling*S(q)) / S(qq).
    """
    count = unit.shape[-1]
    sum_u = unit.sum(-1, keepdim=True)
    best_error = torch.full_like(sum_u, float("inf"))
    best_scale, best_offset = torch.zeros_like(sum_u), torch.zeros_like(sum_u)
    for shift in Q4_K_SHIFTS:
        codes = (unit * (15 + shift)).round_().clamp_(0, 15)
        sum_q = codes.sum(-1, keepdim=True)
        sum_uq = (unit * codes).sum(-1, keepdim=True)
        sum_qq = codes.square_().sum(-1, keepdim=True)
        spread = count * sum_qq - sum_q * sum_q
        scale = torch.where(spread > 0, (count * sum_uq - sum_u * sum_q) / spread, 0.0)
        offset = (sum_u - scale * sum_q) / count
        over = offset > ceiling
        offset = torch.where(over, ceiling, offset)
        held = torch.where(sum_qq > 0, (sum_uq - ceiling * sum_q) / sum_qq, 0.0)
        scale = torch.where(over, held, scale)
        # The squared error, less the sum of u^2 that every try shares.
        error = scale * (scale * sum_qq - 2 * sum_uq + 2 * offset * sum_q)
        error += offset * (count * offset - 2 * sum_u)
        better = (error < best_error) & (scale >= 0)
        best_error = torch.where(better, error, best_error)
        best_scale = torch.where(better, scale, best_scale)
        best_offset = torch.where(better, offset, best_offset)
    return best_scale, best_offset


def _six_bits(wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Non-negative [..., 8] as a float16 block scale [..., 1] and whole numbers 0 to 63."""
    block = divide(wanted.amax(-1, keepdim=True), 63).clamp_max(F16_LARGEST).half()
    whole = torch.where(block > 0, wanted / block.float(), 0.0)
    return block, whole.round_().clamp_(0, 63)


def _fit_q6_k(blocks: Tensor) -> Fields:
    x = split_last(_without_extremes(blocks), 16, 16)
    largest = x.gather(-1, x.abs().argmax(-1, keepdim=True))
    unit = torch.where(largest != 0, x / largest, 0.0)
    wanted = (_best_multiple(unit) * largest).squeeze(-1)
    top = wanted.gather(-1, wanted.abs().argmax(-1, keepdim=True))
    block_scale = (top / -128).clamp(-F16_LARGEST, F16_LARGEST).half()
    sub = torch.where(block_scale != 0, wanted / block_scale.float(), 0.0)
    sub_scale = sub.round_().clamp_(-128, 127)
    step = (block_scale.float() * sub_scale).unsqueeze(-1)
    steps = torch.where(step != 0, split_last(blocks, 16, 16) / step, 0.0)
    codes = steps.round_().nan_to_num_(nan=0.0).clamp_(-32, 31).to(torch.int8)
    scales = {"scale": _poison(block_scale, blocks), "sub_scale": sub_scale.to(torch.int8)}
    return codes.flatten(-2), scales


def _best_multiple(unit: Tensor) -> Tensor:
    """The scale whose multiples -32 to 31 lie nearest to `unit` [..., 16], which lies in [-1, 1].

    For given codes the best scale is S(uq) / S(qq), and it takes S(uq)^2 / S(qq) off the error.
    """
    best_gain = torch.full_like(unit[..., :1], -1.0)
    best_scale = torch.zeros_like(best_gain)
    for shift in Q6_K_SHIFTS:
        codes = (unit * -(32 + shift)).round_().clamp_(-32, 31)
        sum_uq = (unit * codes).sum(-1, keepdim=True)
        sum_qq = codes.square_().sum(-1, keepdim=True)
        scale = torch.where(sum_qq > 0, sum_uq / sum_qq, 0.0)
        gain = scale * sum_uq
        better = gain > best_gain
        best_gain = torch.where(better, gain, best_gain)
        best_scale = torch.where(better, scale, best_scale)
    return best_scale


def _without_extremes(blocks: Tensor) -> Tensor:
    """NaN and infinities as 0, and the rest within 2^40, beyond anything either format can hold."""
    return blocks.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).clamp(-(2.0**40), 2.0**40)


def _poison(scale: Tensor, blocks: Tensor) -> Tensor:
    return scale.masked_fill(blocks.isnan().any(-1, keepdim=True), float("nan"))
