# mypy: allow-untyped-defs, allow-incomplete-defs
"""Gradients of grouped weights on a GPU.

    out[e] = a.T @ b over the rows of expert e                                  a [S, N], b [S, K]

In: both operands of the same dtype, sorted by expert; the ends of the experts' rows, on the device.
Out: [E, N, K]; zeros for an expert without rows.

A program computes a tile of one expert's gradient, over its rows in order. Whole blocks of rows come
by tensor descriptor (TMA) where the operands allow it. The last block is masked: the rows after it
are another expert's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fulgurite.kernels.common.triton_import import TensorDescriptor, tl, triton
from fulgurite.kernels.common.triton_launch import cached_launch
from fulgurite.kernels.common.triton_numerics import NATIVE
from fulgurite.kernels.integer_math import cdiv
from fulgurite.kernels.tuning import heuristics_for

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@triton.jit
def dot_tn(a, b, acc, NATIVE: tl.constexpr):
    """acc + a.T @ b. The interpreter multiplies bfloat16 as integers, so it needs float32."""
    if not NATIVE:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(tl.trans(a), b, acc, input_precision="ieee")


@triton.jit
def load_columns(from_ptr, s, column, end, columns, stride):
    """Some columns of some rows; zeros past the end of both."""
    keep = (s < end)[:, None] & (column < columns)[None, :]
    return tl.load(from_ptr + s.to(tl.int64)[:, None] * stride + column[None, :], keep, 0.0)


@cached_launch
def grouped_wgrad_kernel(
    a_ptr, b_ptr, a_blocks, b_blocks, offsets_ptr, out_ptr, N, K, a_stride, b_stride,
    TMA: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """One tile of the gradient of one expert."""
    expert = tl.program_id(2)
    first_n, first_k = tl.program_id(0) * BLOCK_N, tl.program_id(1) * BLOCK_K
    n, k = first_n + tl.arange(0, BLOCK_N), first_k + tl.arange(0, BLOCK_K)
    start = tl.load(offsets_ptr + expert - 1, expert > 0, 0)
    end = tl.load(offsets_ptr + expert)
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    if TMA:
        whole = (end - start) // BLOCK_M * BLOCK_M
        for first in range(start, start + whole, BLOCK_M):
            a, b = a_blocks.load([first, first_n]), b_blocks.load([first, first_k])
            acc = dot_tn(a, b, acc, NATIVE)
        start += whole
    for first in range(start, end, BLOCK_M):
        s = first + tl.arange(0, BLOCK_M)
        a = load_columns(a_ptr, s, n, end, N, a_stride)
        b = load_columns(b_ptr, s, k, end, K, b_stride)
        acc = dot_tn(a, b, acc, NATIVE)
    into = out_ptr + expert.to(tl.int64) * N * K + n.to(tl.int64)[:, None] * K + k[None, :]
    keep = (n < N)[:, None] & (k < K)[None, :]
    tl.store(into, acc.to(out_ptr.dtype.element_ty), keep)


def grouped_wgrad(a: Tensor, b: Tensor, offsets: Tensor) -> Any:
    """`fulgurite::grouped_wgrad`."""
    if a.dtype not in DTYPES or a.dtype != b.dtype:
        return NotImplemented
    a, b = (t if t.stride(1) == 1 else t.contiguous() for t in (a, b))
    out = a.new_empty(offsets.shape[0], a.shape[1], b.shape[1])
    if out.numel() == 0:
        return out
    config = heuristics_for(a.device).grouped_wgrad(b.shape[1], a.dtype)
    tma = a.shape[0] > 0 and all(supports_tma(t) for t in (a, b))
    blocks = [
        TensorDescriptor(t, list(t.shape), list(t.stride()), [config.block_m, width])
        if tma
        else None
        for t, width in ((a, config.block_n), (b, config.block_k))
    ]
    grid = (
        cdiv(a.shape[1], config.block_n),
        cdiv(b.shape[1], config.block_k),
        offsets.shape[0],
    )
    grouped_wgrad_kernel[grid](
        a, b, *blocks, offsets, out, a.shape[1], b.shape[1], a.stride(0), b.stride(0), TMA=tma,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, NATIVE=NATIVE,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return out


def supports_tma(operand: Tensor) -> bool:
    """Whether a tensor descriptor takes the operand: 16 bits, rows of a multiple of 16 bytes."""
    is_aligned = operand.stride(0) % 8 == 0 and operand.data_ptr() % 16 == 0
    return operand.dtype != torch.float32 and operand.shape[1] >= 8 and is_aligned
