# mypy: allow-untyped-defs, allow-incomplete-defs
"""New latents into pages on GPUs: one program a token.

    c -> c / sqrt(mean(c^2) + eps) * weight      r -> r turned by its position      both rounded once

FP8 pages take the latent divided by a scale that brings its largest number to 448, that scale, and the rotary
key in bfloat16. `turned` is what queries of latent attention are turned by as well.

    C  latent rank    R  numbers of a rotary key    I  R / 2 pairs
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fulgurite.kernels.common.triton_numerics import to_float8
from fulgurite.kernels.mla.reference import parts

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NATIVE = not triton.knobs.runtime.interpret
LARGEST = tl.constexpr(448.0)
SMALLEST_SCALE = tl.constexpr(2.0**-126)


@triton.jit
def turned(
    x_ptr, rows, cos_ptr, sin_ptr, tokens, is_row, R: tl.constexpr, BR: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """[rows, BR] in float32: the R numbers at x_ptr + rows, turned by the angles of their tokens.

    Number i and its partner make a pair: (a, b) -> (a cos - b sin, b cos + a sin).
    """
    PAIRS: tl.constexpr = max(R // 2, 1)
    i = tl.arange(0, BR)
    if INTERLEAVED:
        pair, partner, is_second = i // 2, i ^ 1, i % 2 == 1
    else:
        pair, partner, is_second = i % PAIRS, (i + PAIRS) % max(R, 1), i >= PAIRS
    there = is_row[:, None] & (i < R)[None, :]
    x = tl.load(x_ptr + rows[:, None] + i[None, :], there, 0.0).to(tl.float32)
    y = tl.load(x_ptr + rows[:, None] + partner[None, :], there, 0.0).to(tl.float32)
    angle = tokens[:, None] * (R // 2) + pair[None, :]
    cos, sin = tl.load(cos_ptr + angle, there, 0.0), tl.load(sin_ptr + angle, there, 0.0)
    return x * cos + tl.where(is_second[None, :], y, -y) * sin


@triton.jit
def write_kernel(
    latent_ptr, norm_ptr, cos_ptr, sin_ptr, latents_ptr, ropes_ptr, scales_ptr, slots_ptr, eps,
    token_step, latent_page, latent_slot, rope_page, rope_slot, scale_page, scale_slot,
    C: tl.constexpr, BC: tl.constexpr, R: tl.constexpr, BR: tl.constexpr, PAGE: tl.constexpr,
    PACKED: tl.constexpr, INTERLEAVED: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """One token into its slot."""
    token = tl.program_id(0).to(tl.int64)
    where = tl.load(slots_ptr + token)
    if where < 0:
        return
    page, slot = where // PAGE, where % PAGE
    column = tl.arange(0, BC)
    c = tl.load(latent_ptr + token * token_step + column, column < C, 0.0).to(tl.float32)
    weight = tl.load(norm_ptr + column, column < C, 0.0).to(tl.float32)
    c = c * (1.0 / tl.sqrt(tl.sum(c * c, 0) / C + eps)) * weight
    to = latents_ptr + page * latent_page + slot * latent_slot + column
    if PACKED:
        finite = tl.min(tl.where(tl.abs(c) < float("inf"), 1, 0), 0) > 0  # a NaN compares false
        most = tl.max(tl.abs(c), 0)
        scale = tl.where(most == 0.0, 1.0, tl.maximum(tl.div_rn(most, LARGEST), SMALLEST_SCALE))
        scale = tl.where(finite, scale, float("nan"))
        tl.store(scales_ptr + page * scale_page + slot * scale_slot, scale)
        code = tl.clamp(tl.div_rn(c, scale), -LARGEST, LARGEST)
        tl.store(to, to_float8(code, latents_ptr.dtype.element_ty, NATIVE), column < C)
    else:
        tl.store(to, c.to(latents_ptr.dtype.element_ty), column < C)
    if R > 0:
        first = tl.arange(0, 1)
        rows, tokens = first.to(tl.int64) + token * token_step + C, first.to(tl.int64) + token
        r = turned(latent_ptr, rows, cos_ptr, sin_ptr, tokens, first == 0, R, BR, INTERLEAVED)
        i = tl.arange(0, BR)[None, :]
        to_rope = ropes_ptr + page * rope_page + slot * rope_slot + i
        tl.store(to_rope, r.to(ropes_ptr.dtype.element_ty), i < R)


def write_latent(
    latent: Tensor,
    norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    pages: Tensor,
    slots: Tensor,
    eps: float,
    interleaved: bool,
) -> Any:
    """`kernels.mla.write_latent`."""
    if latent.dtype not in DTYPES or norm.dtype not in DTYPES or slots.dtype != torch.int64:
        return NotImplemented
    if any(x.stride(-1) != 1 for x in (latent, norm, pages, slots)) or not plain_angles(cos, sin):
        return NotImplemented
    rank = norm.shape[0]
    rope = latent.shape[1] - rank
    into = parts(pages, rank, rope)
    scales = cos if into.scales_PB is None else into.scales_PB
    if latent.shape[0] == 0:
        return None
    write_kernel[(latent.shape[0],)](
        latent, norm, cos, sin, into.latents_PBC, into.ropes_PBR, scales, slots, eps,
        latent.stride(0), *into.latents_PBC.stride()[:2], *into.ropes_PBR.stride()[:2],
        *(scales.stride() if into.scales_PB is not None else (0, 0)),
        C=rank, BC=triton.next_power_of_2(rank), R=rope, BR=max(16, triton.next_power_of_2(rope)),
        PAGE=pages.shape[1], PACKED=into.scales_PB is not None, INTERLEAVED=interleaved,
        NATIVE=NATIVE, num_warps=4 if rank >= 256 else 1,
    )  # fmt: skip
    return None


def plain_angles(cos: Tensor, sin: Tensor) -> bool:
    return all(x.dtype == torch.float32 and x.is_contiguous() for x in (cos, sin))
