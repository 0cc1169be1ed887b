# mypy: allow-untyped-defs, allow-incomplete-defs
"""Device functions: one step over K of the grouped GEMM's main loop.

In: pointers to an expert's weight and scales, a tile of x, accumulators in float32. Out: the
accumulators after one more step. DEQUANT and SCALING are those of `gemm/triton_gemm.py`; "dense"
weights are multiplied as they are.
"""

from __future__ import annotations

from fulgurite.kernels.common.triton_dequantize import (
    E4M3_SCALE_BIAS,
    cast_8bit,
    dequantize_e2m1,
    dequantize_int4,
    dequantize_int4_scaled,
    dequantize_int4_zero_point,
    e8m0_to_bfloat16,
    expand_blocks,
    multiply_bfloat16,
    scale_and_round,
)
from fulgurite.kernels.common.triton_import import tl, triton
from fulgurite.kernels.gemm.triton_gemm import dot_nt


@triton.jit
def _load_dense(w_ptr, n_in, k, K, w_stride, w_step, EVEN_K: tl.constexpr):
    """A tile of a dense weight."""
    w_from = w_ptr + n_in[:, None] * w_stride + k[None, :].to(tl.int64) * w_step
    if EVEN_K:
        return tl.load(w_from)
    else:
        return tl.load(w_from, (k < K)[None, :], 0.0)


@triton.jit
def _load_block_scales(
    s_ptr, n_in, step, K, w_scale_n,
    GROUP_SIZE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Scales of 16 or 32 columns as bfloat16, expanded over the codes of a step."""
    block = step * (BLOCK_K // GROUP_SIZE) + tl.arange(0, BLOCK_K // GROUP_SIZE)
    s = tl.load(
        s_ptr + n_in[:, None] * w_scale_n + block[None, :], (block * GROUP_SIZE < K)[None, :], 0.0
    )
    if GROUP_SIZE == 16:
        s = (s.to(tl.float32) * E4M3_SCALE_BIAS).to(tl.bfloat16)
    else:
        s = e8m0_to_bfloat16(s)
    return expand_blocks(s, n_in.shape[0], BLOCK_K // GROUP_SIZE, WIDTH)


@triton.jit
def _load_group_values(
    from_ptr, n_in, step, K, w_scale_n,
    GROUP_SIZE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Scales, zero points or minima of groups as float32, expanded over the codes of a step."""
    group = step * (BLOCK_K // GROUP_SIZE) + tl.arange(0, BLOCK_K // GROUP_SIZE)
    at = n_in[:, None] * w_scale_n + group[None, :]
    values = tl.load(from_ptr + at, (group * GROUP_SIZE < K)[None, :], 0)
    return expand_blocks(values.to(tl.float32), n_in.shape[0], BLOCK_K // GROUP_SIZE, WIDTH)


@triton.jit
def accumulate_step(
    acc, x, x0, x1, x2, x3, w_ptr, s_ptr, z_ptr, n_in, step, K, w_stride, w_step, w_scale_n,
    w_scale_k, DEQUANT: tl.constexpr, SCALING: tl.constexpr, GROUP_SIZE: tl.constexpr,
    SCALE_ROWS: tl.constexpr, ZERO_POINTS: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_K: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """acc + weight @ x.T over one step of K; x0 to x3 are the operands of the nibbles of a word."""
    is_4bit: tl.constexpr = DEQUANT == "e2m1" or DEQUANT == "int4" or DEQUANT == "uint4"
    # words or codes that share a scale
    width: tl.constexpr = GROUP_SIZE // 4 if is_4bit else GROUP_SIZE
    k = step * BLOCK_K
    if DEQUANT == "dense":
        w = _load_dense(w_ptr, n_in, k + tl.arange(0, BLOCK_K), K, w_stride, w_step, EVEN_K)
        if w.dtype == tl.float32:
            return tl.dot(w, tl.trans(x), acc, input_precision="ieee")
        else:
            return dot_nt(w, x, acc, NATIVE)
    else:
        WK: tl.constexpr = BLOCK_K // 4 if is_4bit else BLOCK_K
        item = step * WK + tl.arange(0, WK)
        w_from = w_ptr + n_in[:, None] * w_stride + item[None, :]
        if EVEN_K:
            w = tl.load(w_from)
        else:
            w = tl.load(w_from, (item < (K // 4 if is_4bit else K))[None, :], 0.0)
        if SCALING == "mainloop":
            at = (n_in // SCALE_ROWS) * w_scale_n + (k // GROUP_SIZE) * w_scale_k
            ws = tl.load(s_ptr + at).to(tl.float32)
        if SCALING == "operand":
            s = _load_block_scales(s_ptr, n_in, step, K, w_scale_n, GROUP_SIZE, width, BLOCK_K)
        if SCALING == "group":
            s = _load_group_values(s_ptr, n_in, step, K, w_scale_n, GROUP_SIZE, width, BLOCK_K)
            z = s
            if ZERO_POINTS:
                z = _load_group_values(z_ptr, n_in, step, K, w_scale_n, GROUP_SIZE, width, BLOCK_K)
        sums = tl.zeros_like(acc) if SCALING == "mainloop" else acc
        if is_4bit:
            if SCALING == "group":
                w0 = dequantize_int4_scaled(w, s, z, 0, DEQUANT, ZERO_POINTS, x.dtype, NATIVE)
                w1 = dequantize_int4_scaled(w, s, z, 1, DEQUANT, ZERO_POINTS, x.dtype, NATIVE)
                w2 = dequantize_int4_scaled(w, s, z, 2, DEQUANT, ZERO_POINTS, x.dtype, NATIVE)
                w3 = dequantize_int4_scaled(w, s, z, 3, DEQUANT, ZERO_POINTS, x.dtype, NATIVE)
            elif DEQUANT == "e2m1":
                w0 = dequantize_e2m1(w, s, 0, GROUP_SIZE != 16, NATIVE)
                w1 = dequantize_e2m1(w, s, 1, GROUP_SIZE != 16, NATIVE)
                w2 = dequantize_e2m1(w, s, 2, GROUP_SIZE != 16, NATIVE)
                w3 = dequantize_e2m1(w, s, 3, GROUP_SIZE != 16, NATIVE)
            elif ZERO_POINTS:
                z = tl.load(z_ptr + at).to(tl.float32)[:, None]
                w0 = dequantize_int4_zero_point(w, z, 0, NATIVE)
                w1 = dequantize_int4_zero_point(w, z, 1, NATIVE)
                w2 = dequantize_int4_zero_point(w, z, 2, NATIVE)
                w3 = dequantize_int4_zero_point(w, z, 3, NATIVE)
            else:
                w0, w1 = dequantize_int4(w, 0, NATIVE), dequantize_int4(w, 1, NATIVE)
                w2, w3 = dequantize_int4(w, 2, NATIVE), dequantize_int4(w, 3, NATIVE)
            sums = dot_nt(w0, x0, sums, NATIVE)
            sums = dot_nt(w1, x1, sums, NATIVE)
            sums = dot_nt(w2, x2, sums, NATIVE)
            sums = dot_nt(w3, x3, sums, NATIVE)
        else:
            if SCALING == "operand":
                w = multiply_bfloat16(w, s)
            elif SCALING == "group":
                w = scale_and_round(w, s, s, DEQUANT, ZERO_POINTS, x.dtype)
            else:
                w = cast_8bit(w, x.dtype, NATIVE)
            sums = dot_nt(w, x, sums, NATIVE)
        if SCALING == "mainloop":
            return acc + sums * ws[:, None]
        else:
            return sums
