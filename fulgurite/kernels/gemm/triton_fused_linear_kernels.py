# mypy: allow-untyped-defs, allow-incomplete-defs
"""Kernels of fused linears (`triton_fused_linear.py` has the formulas and launches them).

Up to 16 rows (`fused_small_m_kernel`) a program takes a few rows of the weight and all of K, which
its warps divide among them, as in `triton_small_m.py`. The first blocks, or all, are loaded before
x is ready. The norm needs no pass over x: sums of squares are accumulated with the products,

    rms_norm(x) @ weight.T = ((x * norm) @ weight.T) / sqrt(mean(x^2) + eps)

More rows (`fused_gemm_kernel`) fill the tensor cores, with the weight as the M operand. With
split-K the programs of a tile store partial sums, and the last one adds them in a fixed order.

    W  warps    R  rows of x that are read, up to 16    C  columns of a warp's step
    N  rows of the weight
"""

from __future__ import annotations

from fulgurite.kernels.common.triton_import import tl, triton
from fulgurite.kernels.common.triton_launch import cached_launch
from fulgurite.kernels.common.triton_pdl import (
    CACHE_LINE_BYTES,
    launch_dependents,
    prefetch_l2,
    wait_for_dependencies,
)
from fulgurite.kernels.gemm.triton_gemv import apply_epilogue, load_weight_block
from fulgurite.kernels.gemm.triton_small_m_mainloop import MMA_ROWS, dot_x_major


@triton.jit
def _multiply_block(
    w, up, norm, x_row, is_row, column, K, acc, up_acc, squares, offset,
    NORM: tl.constexpr, GATED: tl.constexpr, EVEN: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Multiply-add columns of x with blocks of the weight and of `up`."""
    if EVEN:
        x = tl.load(x_row + column, is_row, 0.0)
    else:
        x = tl.load(x_row + column, is_row & (column < K), 0.0)
    if NORM:
        x_float = x.to(tl.float32)
        squares += tl.sum(x_float * x_float, 2)
        x = (x_float * (norm.to(tl.float32) + offset)).to(x.dtype)
    acc = dot_x_major(x, w, acc, NATIVE)
    if GATED:
        up_acc = dot_x_major(x, up, up_acc, NATIVE)
    return acc, up_acc, squares


@cached_launch(do_not_specialize=["M"])
def fused_small_m_kernel(
    x_ptr, w_ptr, up_ptr, norm_ptr, bias_ptr, up_bias_ptr, residual_ptr, out_ptr,
    M, N, K, x_stride, w_stride, residual_stride, out_stride, eps, offset,
    NORM: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    EVEN: tl.constexpr, R: tl.constexpr, BN: tl.constexpr, C: tl.constexpr, W: tl.constexpr,
    STAGES: tl.constexpr, NATIVE: tl.constexpr, PREFETCH: tl.constexpr, PREFETCH_ALL: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """BN columns of the result. GATE: name of the activation, "" for a single weight.

    The first PREFETCH blocks of the weight (all, with PREFETCH_ALL) are loaded before the previous
    kernel is done.
    """
    GATED: tl.constexpr = GATE != ""
    if PDL:
        launch_dependents()
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    row = tl.where(n < N, n, 0).to(tl.int64)
    row_offset = row[None, :, None] * w_stride
    r = tl.arange(0, R)
    columns0 = (tl.arange(0, W) * C)[:, None, None] + tl.arange(0, C)[None, None, :]
    x_row = x_ptr + r.to(tl.int64)[None, :, None] * x_stride
    is_row = (r < M)[None, :, None]
    STEP: tl.constexpr = W * C
    if PREFETCH > 0:
        w0, up0, norm0 = load_weight_block(
            w_ptr, up_ptr, norm_ptr, row_offset, columns0, K, GATED, NORM, EVEN
        )
    if PREFETCH > 1:
        columns1 = columns0 + STEP
        w1, up1, norm1 = load_weight_block(
            w_ptr, up_ptr, norm_ptr, row_offset, columns1, K, GATED, NORM, EVEN
        )
    if PREFETCH > 2:
        columns2 = columns0 + 2 * STEP
        w2, up2, norm2 = load_weight_block(
            w_ptr, up_ptr, norm_ptr, row_offset, columns2, K, GATED, NORM, EVEN
        )
    if PDL:
        wait_for_dependencies()
    m = tl.arange(0, MMA_ROWS)
    mask = (m < M)[:, None] & (n < N)[None, :]
    acc = tl.zeros([W, MMA_ROWS, BN], tl.float32)
    up_acc = tl.zeros([W, MMA_ROWS, BN], tl.float32)
    squares = tl.zeros([W, R], tl.float32)
    if PREFETCH > 0:
        acc, up_acc, squares = _multiply_block(
            w0, up0, norm0, x_row, is_row, columns0, K, acc, up_acc, squares, offset, NORM, GATED,
            EVEN, NATIVE,
        )  # fmt: skip
    if PREFETCH > 1:
        acc, up_acc, squares = _multiply_block(
            w1, up1, norm1, x_row, is_row, columns1, K, acc, up_acc, squares, offset, NORM, GATED,
            EVEN, NATIVE,
        )  # fmt: skip
    if PREFETCH > 2:
        acc, up_acc, squares = _multiply_block(
            w2, up2, norm2, x_row, is_row, columns2, K, acc, up_acc, squares, offset, NORM, GATED,
            EVEN, NATIVE,
        )  # fmt: skip
    if not PREFETCH_ALL:
        for k in tl.range(PREFETCH * STEP, K, STEP, num_stages=STAGES):
            columns = k + columns0
            w, up, norm = load_weight_block(
                w_ptr, up_ptr, norm_ptr, row_offset, columns, K, GATED, NORM, EVEN
            )
            acc, up_acc, squares = _multiply_block(
                w, up, norm, x_row, is_row, columns, K, acc, up_acc, squares, offset, NORM, GATED,
                EVEN, NATIVE,
            )  # fmt: skip
    out, up_out = tl.sum(acc, 0), tl.sum(up_acc, 0)
    if NORM:
        inv_rms = tl.rsqrt(tl.sum(squares, 0) / K + eps)
        inv_rms = tl.reshape(tl.broadcast_to(inv_rms[None, :], [MMA_ROWS // R, R]), [MMA_ROWS])
        out *= inv_rms[:, None]
        up_out *= inv_rms[:, None]
    out = apply_epilogue(
        out, up_out, m.to(tl.int64), n, row, mask, bias_ptr, up_bias_ptr, residual_ptr,
        residual_stride, GATE, BIAS, RESIDUAL,
    )  # fmt: skip
    out_ptrs = out_ptr + m.to(tl.int64)[:, None] * out_stride + n[None, :]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask)


@triton.jit
def _dot(w, x, acc, NATIVE: tl.constexpr):
    """acc + w @ x.T; the interpreter and float32 need float32 operands."""
    if NATIVE:
        return tl.dot(w, tl.trans(x), acc)
    else:
        return tl.dot(w.to(tl.float32), tl.trans(x).to(tl.float32), acc, input_precision="ieee")


@cached_launch(do_not_specialize=["M", "split_k"])
def fused_gemm_kernel(
    x_ptr, w_ptr, up_ptr, bias_ptr, up_bias_ptr, residual_ptr, out_ptr, partials_ptr, counter_ptr,
    M, N, K, split_k, x_stride, w_stride, residual_stride, out_stride,
    GATE: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, EVEN: tl.constexpr,
    SPLIT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    NATIVE: tl.constexpr, LINES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BN columns of all rows, over one split of K.

    The first LINES cache lines of the weight's rows are prefetched into L2 before the previous
    kernel is done.
    """
    tile, split_index = tl.program_id(0), tl.program_id(1)
    n, m = tile * BN + tl.arange(0, BN), tl.arange(0, BM)
    row = tl.where(n < N, n, 0).to(tl.int64)
    m_in = tl.where(m < M, m, 0).to(tl.int64)
    column = tl.arange(0, BK)
    steps = tl.cdiv(K, BK)
    split_steps = tl.cdiv(steps, split_k)
    if PDL:
        launch_dependents()
        if LINES > 0:
            itemsize = w_ptr.dtype.element_ty.primitive_bitwidth // 8
            last_start = K - LINES * CACHE_LINE_BYTES // itemsize
            start = tl.minimum(split_index * split_steps * BK, last_start)
            prefetch_l2(w_ptr + row * w_stride + start, LINES)
            if GATE != "":
                prefetch_l2(up_ptr + row * w_stride + start, LINES)
        wait_for_dependencies()
    acc = tl.zeros([BN, BM], tl.float32)
    up_acc = tl.zeros([BN, BM], tl.float32)
    first_step = split_index * split_steps
    for step in range(first_step, tl.minimum(first_step + split_steps, steps)):
        columns = step * BK + column
        inside = (columns < (step * BK + BK if EVEN else K))[None, :]
        x = tl.load(x_ptr + m_in[:, None] * x_stride + columns[None, :], inside, 0.0)
        w = tl.load(w_ptr + row[:, None] * w_stride + columns[None, :], inside, 0.0)
        acc = _dot(w, x, acc, NATIVE)
        if GATE != "":
            up = tl.load(up_ptr + row[:, None] * w_stride + columns[None, :], inside, 0.0)
            up_acc = _dot(up, x, up_acc, NATIVE)
    is_last = True
    if SPLIT:
        TILE_SIZE: tl.constexpr = BN * BM
        tile_offset = tl.arange(0, BN)[:, None] * BM + tl.arange(0, BM)[None, :]
        tiles = tl.num_programs(0)
        partial_tile = (split_index * tiles + tile).to(tl.int64)
        partial_ptrs = partials_ptr + partial_tile * (2 * TILE_SIZE) + tile_offset
        tl.store(partial_ptrs, acc)
        if GATE != "":
            tl.store(partial_ptrs + TILE_SIZE, up_acc)
        tl.debug_barrier()
        is_last = tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel") == split_k - 1
        if is_last:
            acc = tl.zeros([BN, BM], tl.float32)
            up_acc = tl.zeros([BN, BM], tl.float32)
            for other_split in range(split_k):
                split_tile = (other_split * tiles + tile).to(tl.int64)
                split_ptrs = partials_ptr + split_tile * (2 * TILE_SIZE) + tile_offset
                acc += tl.load(split_ptrs, cache_modifier=".cg")
                if GATE != "":
                    up_acc += tl.load(split_ptrs + TILE_SIZE, cache_modifier=".cg")
            tl.store(counter_ptr + tile, 0)
    if is_last:
        mask = (m < M)[:, None] & (n < N)[None, :]
        out = apply_epilogue(
            tl.trans(acc), tl.trans(up_acc), m_in, n, row, mask, bias_ptr, up_bias_ptr,
            residual_ptr, residual_stride, GATE, BIAS, RESIDUAL,
        )  # fmt: skip
        out_ptrs = out_ptr + m_in[:, None] * out_stride + n[None, :]
        tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask)
