# mypy: allow-untyped-defs, allow-incomplete-defs
"""Queries of absorbed MLA on GPUs: in latent space, in the form the decode kernels read.

    q_c = W_uk^T q_nope of each head, by `multiply_heads`      q_r = rope(q_rope)

For FP8 latents queries are float16, which holds e4m3 exactly and is one conversion instruction
away. Each row, both parts, is divided by a power of two that brings its largest number to 1 or
below; the power is stored with it.

    T  tokens    N  heads    D  part without RoPE    R  rotary part    C  rank of the latent
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fulgurite.determinism import is_deterministic
from fulgurite.kernels.common.triton_import import INTERPRETED, tl
from fulgurite.kernels.common.triton_launch import cached_launch
from fulgurite.kernels.common.triton_pdl import (
    launch_dependents,
    pdl_options,
    wait_for_dependencies,
)
from fulgurite.kernels.gemm.triton_invariant_gemm import invariant_bmm
from fulgurite.kernels.integer_math import cdiv, next_power_of_2
from fulgurite.kernels.mla.triton_store_kv import load_rope
from fulgurite.kernels.tuning.heuristics import heuristics_for

# rotary keys of an FP8 cache are bfloat16, which the interpreter can't multiply
ROPE_DTYPE = torch.float16 if INTERPRETED else torch.bfloat16
MIN_AMAX = tl.constexpr(2.0**-100)  # of a row, so that a row of zeros has a power, too


class AbsorbedQueries(NamedTuple):
    """What the decode kernels read."""

    latent_TNC: Tensor
    rope_TNR: Tensor
    powers_TN: Tensor | None  # divisors of the rows, for FP8 latents


@cached_launch
def absorb_queries_kernel(
    projected_ptr, q_ptr, cos_ptr, sin_ptr, latent_ptr, rope_ptr, powers_ptr, rows,
    q_token_stride, q_head_stride,
    HEADS: tl.constexpr, D: tl.constexpr, R: tl.constexpr, BR: tl.constexpr, C: tl.constexpr,
    BC: tl.constexpr, INTERLEAVED: tl.constexpr, FP8: tl.constexpr, BM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """BM (token, head) pairs: RoPE, and for FP8 latents the scaling of both parts."""
    if PDL:
        launch_dependents()
        wait_for_dependencies()
    row = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)
    is_row = row < rows
    token, head = row // HEADS, row % HEADS
    rope_rows = token * q_token_stride + head * q_head_stride + D
    rope = load_rope(q_ptr, rope_rows, cos_ptr, sin_ptr, token, is_row, R, BR, INTERLEAVED)
    if FP8:
        column = tl.arange(0, BC)
        offsets = row[:, None] * C + column[None, :]
        mask = is_row[:, None] & (column < C)[None, :]
        projected = tl.load(projected_ptr + offsets, mask, 0.0).to(tl.float32)
        amax = tl.maximum(tl.max(tl.abs(projected), 1), tl.max(tl.abs(rope), 1))
        power = tl.exp2(tl.ceil(tl.log2(tl.maximum(amax, MIN_AMAX))))
        projected, rope = projected / power[:, None], rope / power[:, None]
        tl.store(powers_ptr + row, power, is_row)
        tl.store(latent_ptr + offsets, projected.to(latent_ptr.dtype.element_ty), mask)
    i = tl.arange(0, BR)
    rope_ptrs = rope_ptr + row[:, None] * R + i[None, :]
    tl.store(rope_ptrs, rope.to(rope_ptr.dtype.element_ty), is_row[:, None] & (i < R)[None, :])


def query_dtypes(query: torch.dtype, cache: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
    """Dtypes of absorbed queries and their rotary parts: 16 bits where operands are exact in it."""
    if cache.itemsize == 1 and query != torch.float32:
        return torch.float16, ROPE_DTYPE
    dtype = query if query == cache else torch.float32
    return dtype, dtype


def absorb_queries(
    q_TNH: Tensor,
    w_uk_NDC: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    cache_dtype: torch.dtype,
) -> AbsorbedQueries:
    """Queries for latents of `cache_dtype`."""
    tokens, heads, size = q_TNH.shape
    nope_dim, rank = w_uk_NDC.shape[1:]
    rope_dim, is_fp8 = size - nope_dim, cache_dtype.itemsize == 1
    latent_dtype, rope_dtype = query_dtypes(q_TNH.dtype, cache_dtype)
    projected = q_TNH.new_empty((tokens, heads, rank))
    multiply_heads(q_TNH[..., :nope_dim], w_uk_NDC, projected)
    if is_fp8:
        latent = torch.empty_like(projected, dtype=latent_dtype)
    else:
        latent = projected.to(latent_dtype)
    ropes = torch.empty((tokens, heads, rope_dim), dtype=rope_dtype, device=q_TNH.device)
    powers = torch.empty((tokens, heads), device=q_TNH.device) if is_fp8 else None
    heuristics = heuristics_for(q_TNH.device)
    config = heuristics.mla_absorb_fp8 if is_fp8 else heuristics.mla_absorb
    absorb_queries_kernel[(cdiv(tokens * heads, config.block_m),)](
        projected, q_TNH, cos, sin, latent, ropes, cos if powers is None else powers,
        tokens * heads, *q_TNH.stride()[:2], HEADS=heads, D=nope_dim, R=rope_dim,
        BR=max(16, next_power_of_2(rope_dim)), C=rank, BC=max(16, next_power_of_2(rank)),
        INTERLEAVED=interleaved, FP8=is_fp8, BM=config.block_m,
        num_warps=config.num_warps, **pdl_options(q_TNH.device),
    )  # fmt: skip
    return AbsorbedQueries(latent, ropes, powers)


def multiply_heads(x_TNK: Tensor, weight_NKM: Tensor, out_TNM: Tensor) -> None:
    """out[t, n] = x[t, n] @ weight[n]: by the library, in deterministic mode by a kernel of ours."""
    x_NTK, out_NTM = x_TNK.transpose(0, 1), out_TNM.transpose(0, 1)
    if is_deterministic():
        invariant_bmm(x_NTK, weight_NKM, out_BMN=out_NTM)
    else:
        torch.bmm(x_NTK, weight_NKM, out=out_NTM)
