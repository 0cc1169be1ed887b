# mypy: allow-untyped-defs, allow-incomplete-defs
"""Device functions of the grouped matmul: one step over K, and what follows the sums.

In: pointers to an expert's weight and scales, a tile of x, sums in float32. Out: the sums with one step
more; then scaled, biased and gated. How a weight is decoded (`DECODE`) and where its scales come in
(`SCALING`) is compiled in, as in `matmul.py`; "dense" weights are multiplied as they are.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fulgurite.kernels.common.triton_dequantize import (
    E4M3_DROP,
    E4M3_LIFT,
    cast_tile,
    e2m1_tile,
    e8m0_to_bfloat16,
    int4_less,
    int4_tile,
    rounded,
    rounded_nibbles,
    spread,
    times,
)
from fulgurite.kernels.gemm.triton_gemm import multiply
from fulgurite.kernels.grouped_gemm.ops import CLAMPED, NO_GATE

GATES = {NO_GATE: 0, "silu": 1, "gelu": 2, "gelu_pytorch_tanh": 3, CLAMPED: 4}


@triton.jit
def _dense(w_ptr, n_in, k, K, w_stride, w_step, EVEN: tl.constexpr):
    """A tile of a dense weight."""
    w_from = w_ptr + n_in[:, None] * w_stride + k[None, :].to(tl.int64) * w_step
    if EVEN:
        return tl.load(w_from)
    else:
        return tl.load(w_from, (k < K)[None, :], 0.0)


@triton.jit
def _block_scale(
    s_ptr, n_in, step, K, w_scale_n, GROUP: tl.constexpr, WIDTH: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    """Scales of 16 or 32 columns as bfloat16, spread over a step's items."""
    block = step * (BK // GROUP) + tl.arange(0, BK // GROUP)
    s = tl.load(
        s_ptr + n_in[:, None] * w_scale_n + block[None, :], (block * GROUP < K)[None, :], 0.0
    )
    if GROUP == 16:
        s = (s.to(tl.float32) * E4M3_LIFT).to(tl.bfloat16)
    else:
        s = e8m0_to_bfloat16(s)
    return spread(s, n_in.shape[0], BK // GROUP, WIDTH)


@triton.jit
def _group_numbers(
    from_ptr, n_in, step, K, w_scale_n, GROUP: tl.constexpr, WIDTH: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    """Scales, zero points or minima of groups of integers as float32, spread over a step's items."""
    group = step * (BK // GROUP) + tl.arange(0, BK // GROUP)
    place = n_in[:, None] * w_scale_n + group[None, :]
    numbers = tl.load(from_ptr + place, (group * GROUP < K)[None, :], 0)
    return spread(numbers.to(tl.float32), n_in.shape[0], BK // GROUP, WIDTH)


@triton.jit
def add_step(
    acc, x, x0, x1, x2, x3, w_ptr, s_ptr, z_ptr, n_in, step, K, w_stride, w_step, w_scale_n, w_scale_k,
    DECODE: tl.constexpr, SCALING: tl.constexpr, GROUP: tl.constexpr, W_ROWS: tl.constexpr,
    ZERO: tl.constexpr, EVEN: tl.constexpr, BK: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """acc + weight @ x.T over one step of K; nibbles meet the quarters of x."""
    nibbles: tl.constexpr = DECODE == "e2m1" or DECODE == "int4" or DECODE == "uint4"
    width: tl.constexpr = GROUP // 4 if nibbles else GROUP  # words or items of a scale
    k = step * BK
    if DECODE == "dense":
        w = _dense(w_ptr, n_in, k + tl.arange(0, BK), K, w_stride, w_step, EVEN)
        if w.dtype == tl.float32:
            return tl.dot(w, tl.trans(x), acc, input_precision="ieee")
        else:
            return multiply(w, x, acc, NATIVE)
    else:
        WK: tl.constexpr = BK // 4 if nibbles else BK
        item = step * WK + tl.arange(0, WK)
        w_from = w_ptr + n_in[:, None] * w_stride + item[None, :]
        if EVEN:
            w = tl.load(w_from)
        else:
            w = tl.load(w_from, (item < (K // 4 if nibbles else K))[None, :], 0.0)
        if SCALING == "step":
            place = (n_in // W_ROWS) * w_scale_n + (k // GROUP) * w_scale_k
            ws = tl.load(s_ptr + place).to(tl.float32)
        if SCALING == "inside":
            s = _block_scale(s_ptr, n_in, step, K, w_scale_n, GROUP, width, BK)
        if SCALING == "groups":
            s = _group_numbers(s_ptr, n_in, step, K, w_scale_n, GROUP, width, BK)
            z = _group_numbers(z_ptr, n_in, step, K, w_scale_n, GROUP, width, BK) if ZERO else s
        sums = tl.zeros_like(acc) if SCALING == "step" else acc
        if nibbles:
            if SCALING == "groups":
                w0 = rounded_nibbles(w, s, z, 0, DECODE, ZERO, x.dtype, NATIVE)
                w1 = rounded_nibbles(w, s, z, 1, DECODE, ZERO, x.dtype, NATIVE)
                w2 = rounded_nibbles(w, s, z, 2, DECODE, ZERO, x.dtype, NATIVE)
                w3 = rounded_nibbles(w, s, z, 3, DECODE, ZERO, x.dtype, NATIVE)
            elif DECODE == "e2m1":
                w0 = e2m1_tile(w, s, 0, GROUP != 16, NATIVE)
                w1 = e2m1_tile(w, s, 1, GROUP != 16, NATIVE)
                w2 = e2m1_tile(w, s, 2, GROUP != 16, NATIVE)
                w3 = e2m1_tile(w, s, 3, GROUP != 16, NATIVE)
            elif ZERO:
                z = tl.load(z_ptr + place).to(tl.float32)[:, None]
                w0, w1 = int4_less(w, z, 0, NATIVE), int4_less(w, z, 1, NATIVE)
                w2, w3 = int4_less(w, z, 2, NATIVE), int4_less(w, z, 3, NATIVE)
            else:
                w0, w1 = int4_tile(w, 0, NATIVE), int4_tile(w, 1, NATIVE)
                w2, w3 = int4_tile(w, 2, NATIVE), int4_tile(w, 3, NATIVE)
            sums = multiply(w0, x0, sums, NATIVE)
            sums = multiply(w1, x1, sums, NATIVE)
            sums = multiply(w2, x2, sums, NATIVE)
            sums = multiply(w3, x3, sums, NATIVE)
        else:
            if SCALING == "inside":
                w = times(w, s)
            elif SCALING == "groups":
                w = rounded(w, s, s, DECODE, ZERO, x.dtype)
            else:
                w = cast_tile(w, x.dtype, NATIVE)
            sums = multiply(w, x, sums, NATIVE)
        if SCALING == "step":
            return acc + sums * ws[:, None]
        else:
            return sums


@triton.jit
def finish(
    acc, s_ptr, z_ptr, bias_ptr, n_in, w_scale_n, factor,
    SCALING: tl.constexpr, TENSOR_SCALE: tl.constexpr, FACTORS: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """What comes before the gate: scales, the row's factor, the bias."""
    if SCALING == "end":
        acc *= tl.load(s_ptr + n_in * w_scale_n).to(tl.float32)[:, None]
    if TENSOR_SCALE:
        acc *= tl.load(z_ptr) * E4M3_DROP
    if FACTORS:
        acc *= factor[None, :]
    if BIAS:
        acc += tl.load(bias_ptr + n_in).to(tl.float32)[:, None]
    return acc


@triton.jit
def gated(left, right, alpha, limit, GATE: tl.constexpr):
    """activation(left) * right; 4 is gpt-oss's."""
    if GATE == 1:
        return left / (1 + tl.exp(-left)) * right
    elif GATE == 2:
        return 0.5 * left * (1 + tl.erf(left * 0.7071067811865476)) * right
    elif GATE == 3:  # 0.5 (1 + tanh(u)) = sigmoid(2u)
        u = 1.5957691216057308 * (left + 0.044715 * left * left * left)
        return left / (1 + tl.exp(-u)) * right
    else:
        left = tl.where(left > limit, limit, left)
        right = tl.where(right > limit, limit, tl.where(right < -limit, -limit, right))
        return (right + 1) * left / (1 + tl.exp(-alpha * left))
