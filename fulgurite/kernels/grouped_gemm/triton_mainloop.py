# mypy: allow-untyped-defs, allow-incomplete-defs
"""Device functions of the grouped matmul: one step over K, and what follows the sums.

In: pointers to an expert's weight and scales, a tile of x, sums in float32. Out: the sums with one step
more; then scaled, biased and gated. How a weight is decoded (`DEQUANT`) and where its scales come in
(`SCALING`) is compiled in, as in `matmul.py`; "dense" weights are multiplied as they are.
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
def _load_dense(w_ptr, n_in, k, K, w_stride, w_step, EVEN: tl.constexpr):
    """A tile of a dense weight."""
    w_from = w_ptr + n_in[:, None] * w_stride + k[None, :].to(tl.int64) * w_step
    if EVEN:
        return tl.load(w_from)
    else:
        return tl.load(w_from, (k < K)[None, :], 0.0)


@triton.jit
def _load_block_scales(
    s_ptr, n_in, step, K, w_scale_n, GROUP: tl.constexpr, WIDTH: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    """Scales of 16 or 32 columns as bfloat16, spread over a step's items."""
    block = step * (BK // GROUP) + tl.arange(0, BK // GROUP)
    s = tl.load(
        s_ptr + n_in[:, None] * w_scale_n + block[None, :], (block * GROUP < K)[None, :], 0.0
    )
    if GROUP == 16:
        s = (s.to(tl.float32) * E4M3_SCALE_BIAS).to(tl.bfloat16)
    else:
        s = e8m0_to_bfloat16(s)
    return expand_blocks(s, n_in.shape[0], BK // GROUP, WIDTH)


@triton.jit
def _load_group_values(
    from_ptr, n_in, step, K, w_scale_n, GROUP: tl.constexpr, WIDTH: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    """Scales, zero points or minima of groups of integers as float32, spread over a step's items."""
    group = step * (BK // GROUP) + tl.arange(0, BK // GROUP)
    place = n_in[:, None] * w_scale_n + group[None, :]
    numbers = tl.load(from_ptr + place, (group * GROUP < K)[None, :], 0)
    return expand_blocks(numbers.to(tl.float32), n_in.shape[0], BK // GROUP, WIDTH)


@triton.jit
def accumulate_step(
    acc, x, x0, x1, x2, x3, w_ptr, s_ptr, z_ptr, n_in, step, K, w_stride, w_step, w_scale_n, w_scale_k,
    DEQUANT: tl.constexpr, SCALING: tl.constexpr, GROUP: tl.constexpr, W_ROWS: tl.constexpr,
    ZERO: tl.constexpr, EVEN: tl.constexpr, BK: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """acc + weight @ x.T over one step of K; nibbles meet the quarters of x."""
    nibbles: tl.constexpr = DEQUANT == "e2m1" or DEQUANT == "int4" or DEQUANT == "uint4"
    width: tl.constexpr = GROUP // 4 if nibbles else GROUP  # words or items of a scale
    k = step * BK
    if DEQUANT == "dense":
        w = _load_dense(w_ptr, n_in, k + tl.arange(0, BK), K, w_stride, w_step, EVEN)
        if w.dtype == tl.float32:
            return tl.dot(w, tl.trans(x), acc, input_precision="ieee")
        else:
            return dot_nt(w, x, acc, NATIVE)
    else:
        WK: tl.constexpr = BK // 4 if nibbles else BK
        item = step * WK + tl.arange(0, WK)
        w_from = w_ptr + n_in[:, None] * w_stride + item[None, :]
        if EVEN:
            w = tl.load(w_from)
        else:
            w = tl.load(w_from, (item < (K // 4 if nibbles else K))[None, :], 0.0)
        if SCALING == "mainloop":
            place = (n_in // W_ROWS) * w_scale_n + (k // GROUP) * w_scale_k
            ws = tl.load(s_ptr + place).to(tl.float32)
        if SCALING == "operand":
            s = _load_block_scales(s_ptr, n_in, step, K, w_scale_n, GROUP, width, BK)
        if SCALING == "group":
            s = _load_group_values(s_ptr, n_in, step, K, w_scale_n, GROUP, width, BK)
            z = _load_group_values(z_ptr, n_in, step, K, w_scale_n, GROUP, width, BK) if ZERO else s
        sums = tl.zeros_like(acc) if SCALING == "mainloop" else acc
        if nibbles:
            if SCALING == "group":
                w0 = dequantize_int4_scaled(w, s, z, 0, DEQUANT, ZERO, x.dtype, NATIVE)
                w1 = dequantize_int4_scaled(w, s, z, 1, DEQUANT, ZERO, x.dtype, NATIVE)
                w2 = dequantize_int4_scaled(w, s, z, 2, DEQUANT, ZERO, x.dtype, NATIVE)
                w3 = dequantize_int4_scaled(w, s, z, 3, DEQUANT, ZERO, x.dtype, NATIVE)
            elif DEQUANT == "e2m1":
                w0 = dequantize_e2m1(w, s, 0, GROUP != 16, NATIVE)
                w1 = dequantize_e2m1(w, s, 1, GROUP != 16, NATIVE)
                w2 = dequantize_e2m1(w, s, 2, GROUP != 16, NATIVE)
                w3 = dequantize_e2m1(w, s, 3, GROUP != 16, NATIVE)
            elif ZERO:
                z = tl.load(z_ptr + place).to(tl.float32)[:, None]
                w0, w1 = (
                    dequantize_int4_zero_point(w, z, 0, NATIVE),
                    dequantize_int4_zero_point(w, z, 1, NATIVE),
                )
                w2, w3 = (
                    dequantize_int4_zero_point(w, z, 2, NATIVE),
                    dequantize_int4_zero_point(w, z, 3, NATIVE),
                )
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
                w = scale_and_round(w, s, s, DEQUANT, ZERO, x.dtype)
            else:
                w = cast_8bit(w, x.dtype, NATIVE)
            sums = dot_nt(w, x, sums, NATIVE)
        if SCALING == "mainloop":
            return acc + sums * ws[:, None]
        else:
            return sums
