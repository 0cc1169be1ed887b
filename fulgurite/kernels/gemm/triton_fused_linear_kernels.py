# mypy: allow-untyped-defs, allow-incomplete-defs
"""The kernels of linears of few rows; `fused_linear.py` says what they compute, and launches them.

Up to 16 rows (`few_kernel`) a program takes a few rows of the weight and all of K, which its warps share among
them, as in `few_rows.py`; the first steps of it, or all, are on their way before x is there. The norm costs no
pass over x: sums of squares grow beside the products,
    rms_norm(x) @ weight.T = ((x * norm) @ weight.T) / sqrt(mean(x^2) + eps)
More rows (`tile_kernel`) fill the tensor cores, the weight on their long side; programs that share a tile
leave their sums in memory, and the last one adds them up in order.

    W  warps    R  rows of x that are read, up to 16    C  columns of a warp's step    N  rows of the weight
"""

from __future__ import annotations

import triton
import triton.language as tl

from fulgurite.kernels.common.triton_launch import prepared
from fulgurite.kernels.common.triton_pdl import LINE, fetch_ahead, let_next_start, wait_for_inputs
from fulgurite.kernels.gemm.triton_gemv import finished, step_weights
from fulgurite.kernels.gemm.triton_small_m_mainloop import ROWS, multiply


@triton.jit
def _few_step(
    w, v, scale, x_row, is_row, column, K, acc, other, squares, offset,
    NORM: tl.constexpr, GATED: tl.constexpr, EVEN: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Columns of x times those of the weight, and of the other one."""
    if EVEN:
        x = tl.load(x_row + column, is_row, 0.0)
    else:
        x = tl.load(x_row + column, is_row & (column < K), 0.0)
    if NORM:
        wide = x.to(tl.float32)
        squares += tl.sum(wide * wide, 2)
        x = (wide * (scale.to(tl.float32) + offset)).to(x.dtype)
    acc = multiply(x, w, acc, NATIVE)
    if GATED:
        other = multiply(x, v, other, NATIVE)
    return acc, other, squares


@prepared(do_not_specialize=["M"])
def few_kernel(
    x_ptr, w_ptr, up_ptr, norm_ptr, bias_ptr, up_bias_ptr, residual_ptr, out_ptr,
    M, N, K, x_stride, w_stride, residual_stride, out_stride, eps, offset,
    NORM: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    EVEN: tl.constexpr, R: tl.constexpr, BN: tl.constexpr, C: tl.constexpr, W: tl.constexpr,
    STAGES: tl.constexpr, NATIVE: tl.constexpr, HELD: tl.constexpr, WHOLE: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """BN columns of the result. GATE: the activation's name, or "" for a single weight.

    The weight's first HELD steps, with WHOLE all of it, are on their way before the kernel in front is done.
    """
    GATED: tl.constexpr = GATE != ""
    if EARLY:
        let_next_start()
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    row = tl.where(n < N, n, 0).to(tl.int64)
    at_weight = row[None, :, None] * w_stride
    r = tl.arange(0, R)
    first = (tl.arange(0, W) * C)[:, None, None] + tl.arange(0, C)[None, None, :]
    x_row = x_ptr + r.to(tl.int64)[None, :, None] * x_stride
    is_row = (r < M)[None, :, None]
    STEP: tl.constexpr = W * C
    if HELD > 0:
        w0, v0, s0 = step_weights(w_ptr, up_ptr, norm_ptr, at_weight, first, K, GATED, NORM, EVEN)
    if HELD > 1:
        second_at = first + STEP
        w1, v1, s1 = step_weights(
            w_ptr, up_ptr, norm_ptr, at_weight, second_at, K, GATED, NORM, EVEN
        )
    if HELD > 2:
        third_at = first + 2 * STEP
        w2, v2, s2 = step_weights(
            w_ptr, up_ptr, norm_ptr, at_weight, third_at, K, GATED, NORM, EVEN
        )
    if EARLY:
        wait_for_inputs()
    m = tl.arange(0, ROWS)
    keep = (m < M)[:, None] & (n < N)[None, :]
    acc = tl.zeros([W, ROWS, BN], tl.float32)
    other = tl.zeros([W, ROWS, BN], tl.float32)
    squares = tl.zeros([W, R], tl.float32)
    if HELD > 0:
        acc, other, squares = _few_step(
            w0, v0, s0, x_row, is_row, first, K, acc, other, squares, offset, NORM, GATED, EVEN, NATIVE
        )  # fmt: skip
    if HELD > 1:
        acc, other, squares = _few_step(
            w1, v1, s1, x_row, is_row, second_at, K, acc, other, squares, offset, NORM, GATED, EVEN, NATIVE
        )  # fmt: skip
    if HELD > 2:
        acc, other, squares = _few_step(
            w2, v2, s2, x_row, is_row, third_at, K, acc, other, squares, offset, NORM, GATED, EVEN, NATIVE
        )  # fmt: skip
    if not WHOLE:
        for k in tl.range(HELD * STEP, K, STEP, num_stages=STAGES):
            at = k + first
            w, v, scale = step_weights(w_ptr, up_ptr, norm_ptr, at_weight, at, K, GATED, NORM, EVEN)
            acc, other, squares = _few_step(
                w, v, scale, x_row, is_row, at, K, acc, other, squares, offset, NORM, GATED, EVEN, NATIVE
            )  # fmt: skip
    out, second = tl.sum(acc, 0), tl.sum(other, 0)
    if NORM:
        factor = tl.rsqrt(tl.sum(squares, 0) / K + eps)
        factor = tl.reshape(tl.broadcast_to(factor[None, :], [ROWS // R, R]), [ROWS])
        out *= factor[:, None]
        second *= factor[:, None]
    out = finished(
        out, second, m.to(tl.int64), n, row, keep, bias_ptr, up_bias_ptr, residual_ptr,
        residual_stride, GATE, BIAS, RESIDUAL,
    )  # fmt: skip
    into = out_ptr + m.to(tl.int64)[:, None] * out_stride + n[None, :]
    tl.store(into, out.to(out_ptr.dtype.element_ty), keep)


@triton.jit
def _product(w, x, acc, NATIVE: tl.constexpr):
    """acc + w @ x.T; the interpreter, and float32, need the numbers widened."""
    if NATIVE:
        return tl.dot(w, tl.trans(x), acc)
    else:
        return tl.dot(
            w.to(tl.float32), tl.trans(x).to(tl.float32), acc, input_precision="ieee"
        )  # fmt: skip


@prepared(do_not_specialize=["M", "split"])
def tile_kernel(
    x_ptr, w_ptr, up_ptr, bias_ptr, up_bias_ptr, residual_ptr, out_ptr, partial_ptr, count_ptr,
    M, N, K, split, x_stride, w_stride, residual_stride, out_stride,
    GATE: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, EVEN: tl.constexpr,
    SPLIT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    NATIVE: tl.constexpr, LINES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """BN columns of all rows, over one part of K.

    The first LINES lines of the weight's rows are fetched before the kernel in front is done.
    """
    tile, part = tl.program_id(0), tl.program_id(1)
    n, m = tile * BN + tl.arange(0, BN), tl.arange(0, BM)
    row = tl.where(n < N, n, 0).to(tl.int64)
    m_in = tl.where(m < M, m, 0).to(tl.int64)
    column = tl.arange(0, BK)
    steps = tl.cdiv(K, BK)
    mine = tl.cdiv(steps, split)
    if EARLY:
        let_next_start()
        if LINES > 0:
            start = tl.minimum(
                part * mine * BK,
                K - LINES * LINE // (w_ptr.dtype.element_ty.primitive_bitwidth // 8),
            )
            fetch_ahead(w_ptr + row * w_stride + start, LINES)
            if GATE != "":
                fetch_ahead(up_ptr + row * w_stride + start, LINES)
        wait_for_inputs()
    acc = tl.zeros([BN, BM], tl.float32)
    other = tl.zeros([BN, BM], tl.float32)
    for step in range(part * mine, tl.minimum(part * mine + mine, steps)):
        at = step * BK + column
        inside = (at < (step * BK + BK if EVEN else K))[None, :]
        x = tl.load(x_ptr + m_in[:, None] * x_stride + at[None, :], inside, 0.0)
        w = tl.load(w_ptr + row[:, None] * w_stride + at[None, :], inside, 0.0)
        acc = _product(w, x, acc, NATIVE)
        if GATE != "":
            v = tl.load(up_ptr + row[:, None] * w_stride + at[None, :], inside, 0.0)
            other = _product(v, x, other, NATIVE)
    last = True
    if SPLIT:
        SIZE: tl.constexpr = BN * BM
        place = tl.arange(0, BN)[:, None] * BM + tl.arange(0, BM)[None, :]
        tiles = tl.num_programs(0)
        mine_at = partial_ptr + (part * tiles + tile).to(tl.int64) * (2 * SIZE) + place
        tl.store(mine_at, acc)
        if GATE != "":
            tl.store(mine_at + SIZE, other)
        tl.debug_barrier()
        last = tl.atomic_add(count_ptr + tile, 1, sem="acq_rel") == split - 1
        if last:
            acc = tl.zeros([BN, BM], tl.float32)
            other = tl.zeros([BN, BM], tl.float32)
            for one in range(split):
                at_one = partial_ptr + (one * tiles + tile).to(tl.int64) * (2 * SIZE) + place
                acc += tl.load(at_one, cache_modifier=".cg")
                if GATE != "":
                    other += tl.load(at_one + SIZE, cache_modifier=".cg")
            tl.store(count_ptr + tile, 0)
    if last:
        keep = (m < M)[:, None] & (n < N)[None, :]
        out = finished(
            tl.trans(acc), tl.trans(other), m_in, n, row, keep, bias_ptr, up_bias_ptr,
            residual_ptr, residual_stride, GATE, BIAS, RESIDUAL,
        )  # fmt: skip
        into = out_ptr + m_in[:, None] * out_stride + n[None, :]
        tl.store(into, out.to(out_ptr.dtype.element_ty), keep)
