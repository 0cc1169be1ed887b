"""Quantizes to the GGUF K-quants Q4_K and Q6_K: scales by search and least squares.

In: blocks [..., count, 256] of float32. Out: codes and scales, which `gguf.py` packs.

    q4_k   x ~ scale * q - minimum, 8 sub-blocks of 32, q in [0, 15], scale and minimum >= 0
    q6_k   x ~ scale * q, 16 sub-blocks of 16, q in [-32, 31], scale of either sign

For each sub-block the search tries several scales near the one that its range suggests. Each
candidate gives codes; least squares gives the best scale (and minimum) for these codes. The
candidate with the smallest squared error wins. Its scale is rounded to 6 or 8 bits relative to the
block's float16 scale. Then the codes are rounded again with the rounded scale.

- Rounding: codes nearest even, saturating; sub-scales nearest even.
- Zeros: a block of zeros is all zero bytes, except the codes of q6_k, which represent 0.
- NaN makes the block's float16 scale NaN. An infinity saturates and does not count.
- A float16 scale saturates at 65504.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fulgurite.quant.codecs.blocks import divide, unflatten_last

# The candidate scales: range / (15 + shift) for q4_k, amax / (32 + shift) for q6_k. Four times as
# many candidates gain 0.03 dB (q4_k) and 0.06 dB (q6_k) of SQNR on gaussian weights, 1024x2048.
Q4_K_STEP_SHIFTS = (-2.0, -1.6, -1.2, -0.8, -0.4, 0.0, 0.4, 0.8)
Q6_K_STEP_SHIFTS = (-8.0, -7.0, -6.0, -5.0, -4.0, -3.0, -2.0, -1.0, 0.0)
F16_MAX = 65504.0
BLOCKS_PER_CHUNK = 1 << 12
"""Blocks per chunk: a million elements, which fit a CPU's cache."""

BlockFields = tuple[Tensor, dict[str, Tensor]]


def quantize_q4_k(blocks: Tensor) -> BlockFields:
    """Codes uint8 [..., count, 256] and the four kinds of scales."""
    return _map_chunks(blocks, _quantize_q4_k_chunk)


def quantize_q6_k(blocks: Tensor) -> BlockFields:
    """Codes int8 [..., count, 256] and the two kinds of scales."""
    return _map_chunks(blocks, _quantize_q6_k_chunk)


def _map_chunks(blocks: Tensor, quantize: Callable[[Tensor], BlockFields]) -> BlockFields:
    flat = blocks.reshape(-1, blocks.shape[-1])
    parts = [quantize(chunk) for chunk in torch.split(flat, BLOCKS_PER_CHUNK)]
    codes = torch.cat([part[0] for part in parts]).reshape(blocks.shape)
    scales = {
        name: torch.cat([part[1][name] for part in parts]).reshape(
            *blocks.shape[:-1], first.shape[-1]
        )
        for name, first in parts[0][1].items()
    }
    return codes, scales


def _quantize_q4_k_chunk(blocks: Tensor) -> BlockFields:
    x = unflatten_last(_clamp_to_finite(blocks), 8, 32)
    low, high = x.amin(-1, keepdim=True).clamp_max(0.0), x.amax(-1, keepdim=True)
    extent = high - low
    unit = torch.where(extent > 0, (x - low) / extent, 0.0)
    scale, offset = _fit_scale_and_offset(unit, torch.where(extent > 0, -low / extent, 0.0))
    best_sub_scale = (scale * extent).squeeze(-1)
    best_sub_minimum = -(offset * extent + low).squeeze(-1).clamp_max(0.0)
    block_scale, sub_scale = _quantize_sub_scales_6bit(best_sub_scale)
    block_minimum, sub_minimum = _quantize_sub_scales_6bit(best_sub_minimum)
    step = (block_scale.float() * sub_scale).unsqueeze(-1)
    minimum = (block_minimum.float() * sub_minimum).unsqueeze(-1)
    steps = torch.where(step > 0, (unflatten_last(blocks, 8, 32) + minimum) / step, 0.0)
    codes = steps.round_().nan_to_num_(nan=0.0).clamp_(0, 15).to(torch.uint8)
    scales = {
        "scale": _propagate_nan(block_scale, blocks),
        "minimum_scale": block_minimum,
        "sub_scale": sub_scale.to(torch.uint8),
        "sub_minimum": sub_minimum.to(torch.uint8),
    }
    return codes.flatten(-2), scales


def _fit_scale_and_offset(unit: Tensor, ceiling: Tensor) -> tuple[Tensor, Tensor]:
    """The (scale, offset) that minimizes |unit - (scale * q + offset)|^2, with offset <= ceiling.

    `unit` [..., 32] is in [0, 1]. With S() the sum over a sub-block, n = 32 and u the unit value:
    scale = (n*S(uq) - S(u)*S(q)) / (n*S(qq) - S(q)^2), offset = (S(u) - scale*S(q)) / n. If the
    offset exceeds its ceiling: offset = ceiling, scale = (S(uq) - ceiling*S(q)) / S(qq).
    """
    count = unit.shape[-1]
    sum_u = unit.sum(-1, keepdim=True)
    best_error = torch.full_like(sum_u, float("inf"))
    best_scale, best_offset = torch.zeros_like(sum_u), torch.zeros_like(sum_u)
    for shift in Q4_K_STEP_SHIFTS:
        codes = (unit * (15 + shift)).round_().clamp_(0, 15)
        sum_q = codes.sum(-1, keepdim=True)
        sum_uq = (unit * codes).sum(-1, keepdim=True)
        sum_qq = codes.square_().sum(-1, keepdim=True)
        variance = count * sum_qq - sum_q * sum_q
        scale = torch.where(variance > 0, (count * sum_uq - sum_u * sum_q) / variance, 0.0)
        offset = (sum_u - scale * sum_q) / count
        over = offset > ceiling
        offset = torch.where(over, ceiling, offset)
        clamped_scale = torch.where(sum_qq > 0, (sum_uq - ceiling * sum_q) / sum_qq, 0.0)
        scale = torch.where(over, clamped_scale, scale)
        # The squared error minus the sum of u^2, which all candidates share.
        error = scale * (scale * sum_qq - 2 * sum_uq + 2 * offset * sum_q)
        error += offset * (count * offset - 2 * sum_u)
        better = (error < best_error) & (scale >= 0)
        best_error = torch.where(better, error, best_error)
        best_scale = torch.where(better, scale, best_scale)
        best_offset = torch.where(better, offset, best_offset)
    return best_scale, best_offset


def _quantize_sub_scales_6bit(scales: Tensor) -> tuple[Tensor, Tensor]:
    """Non-negative scales [..., 8] -> a float16 block scale [..., 1] and integers 0 to 63."""
    block_scale = divide(scales.amax(-1, keepdim=True), 63).clamp_max(F16_MAX).half()
    sub_scales = torch.where(block_scale > 0, scales / block_scale.float(), 0.0)
    return block_scale, sub_scales.round_().clamp_(0, 63)


def _quantize_q6_k_chunk(blocks: Tensor) -> BlockFields:
    x = unflatten_last(_clamp_to_finite(blocks), 16, 16)
    largest = x.gather(-1, x.abs().argmax(-1, keepdim=True))
    unit = torch.where(largest != 0, x / largest, 0.0)
    best_scale = (_fit_scale(unit) * largest).squeeze(-1)
    largest_scale = best_scale.gather(-1, best_scale.abs().argmax(-1, keepdim=True))
    block_scale = (largest_scale / -128).clamp(-F16_MAX, F16_MAX).half()
    sub = torch.where(block_scale != 0, best_scale / block_scale.float(), 0.0)
    sub_scale = sub.round_().clamp_(-128, 127)
    step = (block_scale.float() * sub_scale).unsqueeze(-1)
    steps = torch.where(step != 0, unflatten_last(blocks, 16, 16) / step, 0.0)
    codes = steps.round_().nan_to_num_(nan=0.0).clamp_(-32, 31).to(torch.int8)
    scales = {"scale": _propagate_nan(block_scale, blocks), "sub_scale": sub_scale.to(torch.int8)}
    return codes.flatten(-2), scales


def _fit_scale(unit: Tensor) -> Tensor:
    """The scale that minimizes |unit - scale * q|^2, q in [-32, 31]; `unit` [..., 16] is in [-1,
    1].

    For given codes the best scale is S(uq) / S(qq); it reduces the squared error by S(uq)^2 /
    S(qq).
    """
    best_gain = torch.full_like(unit[..., :1], -1.0)
    best_scale = torch.zeros_like(best_gain)
    for shift in Q6_K_STEP_SHIFTS:
        codes = (unit * -(32 + shift)).round_().clamp_(-32, 31)
        sum_uq = (unit * codes).sum(-1, keepdim=True)
        sum_qq = codes.square_().sum(-1, keepdim=True)
        scale = torch.where(sum_qq > 0, sum_uq / sum_qq, 0.0)
        gain = scale * sum_uq
        better = gain > best_gain
        best_gain = torch.where(better, gain, best_gain)
        best_scale = torch.where(better, scale, best_scale)
    return best_scale


def _clamp_to_finite(blocks: Tensor) -> Tensor:
    """Replace NaN and infinities by 0 and clamp to 2^40, beyond the range of both formats."""
    return blocks.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).clamp(-(2.0**40), 2.0**40)


def _propagate_nan(scale: Tensor, blocks: Tensor) -> Tensor:
    return scale.masked_fill(blocks.isnan().any(-1, keepdim=True), float("nan"))
