# mypy: allow-untyped-defs, allow-incomplete-defs
"""Store of new latents into the MLA cache on GPUs: one program per token.

    c -> c / sqrt(mean(c^2) + eps) * weight      r -> rope(r)      both rounded once

An FP8 cache stores the latent divided by a scale that maps its largest number to 448, that scale,
and the rotary key in bfloat16. `load_rope` is also used for the queries of MLA.

    C  rank of the latent    R  numbers of a rotary key    I  R / 2 pairs
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fulgurite.kernels.common.triton_import import INTERPRETED, tl, triton
from fulgurite.kernels.common.triton_launch import cached_launch
from fulgurite.kernels.common.triton_numerics import to_float8
from fulgurite.kernels.common.triton_pdl import (
    launch_dependents,
    pdl_options,
    wait_for_dependencies,
)
from fulgurite.kernels.integer_math import next_power_of_2
from fulgurite.kernels.mla.reference import split_latent_cache
from fulgurite.kernels.tuning.heuristics import heuristics_for

SUPPORTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FP8_MAX = tl.constexpr(448.0)
MIN_SCALE = tl.constexpr(2.0**-126)


@triton.jit
def load_rope(
    x_ptr, rows, cos_ptr, sin_ptr, tokens, is_row, R: tl.constexpr, BR: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """[rows, BR] in float32: RoPE of the R numbers at x_ptr + rows, by the angles of their tokens.

    Number i and its partner are a pair: (a, b) -> (a cos - b sin, b cos + a sin).
    """
    PAIRS: tl.constexpr = max(R // 2, 1)
    i = tl.arange(0, BR)
    if INTERLEAVED:
        pair, partner, is_second = i // 2, i ^ 1, i % 2 == 1
    else:
        pair, partner, is_second = i % PAIRS, (i + PAIRS) % max(R, 1), i >= PAIRS
    mask = is_row[:, None] & (i < R)[None, :]
    x = tl.load(x_ptr + rows[:, None] + i[None, :], mask, 0.0).to(tl.float32)
    y = tl.load(x_ptr + rows[:, None] + partner[None, :], mask, 0.0).to(tl.float32)
    angle = tokens[:, None] * (R // 2) + pair[None, :]
    cos, sin = tl.load(cos_ptr + angle, mask, 0.0), tl.load(sin_ptr + angle, mask, 0.0)
    return x * cos + tl.where(is_second[None, :], y, -y) * sin


@cached_launch
def store_mla_cache_kernel(
    kv_a_ptr, norm_ptr, cos_ptr, sin_ptr, latents_ptr, ropes_ptr, scales_ptr, slot_mapping_ptr,
    eps, token_stride, latent_block_stride, latent_slot_stride, rope_block_stride,
    rope_slot_stride, scale_block_stride, scale_slot_stride,
    C: tl.constexpr, BC: tl.constexpr, R: tl.constexpr, BR: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, FP8: tl.constexpr, INTERLEAVED: tl.constexpr, NATIVE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One token into its slot."""
    if PDL:
        launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BC)
    weight = tl.load(norm_ptr + column, column < C, 0.0).to(tl.float32)
    if PDL:
        wait_for_dependencies()
    cache_slot = tl.load(slot_mapping_ptr + token)
    if cache_slot < 0:
        return
    block, slot = cache_slot // BLOCK_SIZE, cache_slot % BLOCK_SIZE
    c = tl.load(kv_a_ptr + token * token_stride + column, column < C, 0.0).to(tl.float32)
    c = c * (1.0 / tl.sqrt(tl.sum(c * c, 0) / C + eps)) * weight
    latent_ptrs = latents_ptr + block * latent_block_stride + slot * latent_slot_stride + column
    if FP8:
        is_finite = tl.min(tl.where(tl.abs(c) < float("inf"), 1, 0), 0) > 0  # a NaN compares false
        amax = tl.max(tl.abs(c), 0)
        scale = tl.where(amax == 0.0, 1.0, tl.maximum(tl.div_rn(amax, FP8_MAX), MIN_SCALE))
        scale = tl.where(is_finite, scale, float("nan"))
        tl.store(scales_ptr + block * scale_block_stride + slot * scale_slot_stride, scale)
        code = tl.clamp(tl.div_rn(c, scale), -FP8_MAX, FP8_MAX)
        tl.store(latent_ptrs, to_float8(code, latents_ptr.dtype.element_ty, NATIVE), column < C)
    else:
        tl.store(latent_ptrs, c.to(latents_ptr.dtype.element_ty), column < C)
    if R > 0:
        one = tl.arange(0, 1)
        rows, tokens = one.to(tl.int64) + token * token_stride + C, one.to(tl.int64) + token
        r = load_rope(kv_a_ptr, rows, cos_ptr, sin_ptr, tokens, one == 0, R, BR, INTERLEAVED)
        i = tl.arange(0, BR)[None, :]
        rope_ptrs = ropes_ptr + block * rope_block_stride + slot * rope_slot_stride + i
        tl.store(rope_ptrs, r.to(ropes_ptr.dtype.element_ty), i < R)


def store_mla_cache(
    kv_a: Tensor,
    norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    eps: float,
    interleaved: bool,
) -> Any:
    """`mla.ops.store_mla_cache`."""
    if kv_a.dtype not in SUPPORTED_DTYPES or norm.dtype not in SUPPORTED_DTYPES:
        return NotImplemented
    if slot_mapping.dtype != torch.int64 or not is_rope_supported(cos, sin):
        return NotImplemented
    if any(x.stride(-1) != 1 for x in (kv_a, norm, cache, slot_mapping)):
        return NotImplemented
    rank = norm.shape[0]
    rope_dim = kv_a.shape[1] - rank
    views = split_latent_cache(cache, rank, rope_dim)
    is_fp8 = views.scales_PB is not None
    scales = cos if views.scales_PB is None else views.scales_PB
    if kv_a.shape[0] == 0:
        return None
    store_mla_cache_kernel[(kv_a.shape[0],)](
        kv_a, norm, cos, sin, views.latents_PBC, views.ropes_PBR, scales, slot_mapping, eps,
        kv_a.stride(0), *views.latents_PBC.stride()[:2], *views.ropes_PBR.stride()[:2],
        *(scales.stride() if is_fp8 else (0, 0)),
        C=rank, BC=next_power_of_2(rank), R=rope_dim, BR=max(16, next_power_of_2(rope_dim)),
        BLOCK_SIZE=cache.shape[1], FP8=is_fp8, INTERLEAVED=interleaved, NATIVE=not INTERPRETED,
        num_warps=heuristics_for(kv_a.device).mla_store_num_warps(rank),
        **pdl_options(kv_a.device),
    )  # fmt: skip
    return None


def is_rope_supported(cos: Tensor, sin: Tensor) -> bool:
    return all(x.dtype == torch.float32 and x.is_contiguous() for x in (cos, sin))
