"""x @ weight.T for up to 16 rows of x: the weight is read once, and decoded on the way.

    out[m, n] = (sum over k of x[m, k] * w[n, k] * w_scale) + bias[n]

In: x [M, K] in bfloat16 (float16 for weights of 8 bits), a packed weight [N, K], or a stack of them
for experts. Out: [M, N] (of experts: their rows), summed in float32 and rounded once.

A program takes a few rows of the weight and all of K. Its warps share K among them: tile w of a step
is warp w's (`tl.dot` gives each warp one matrix of a stack), so that warps never wait for each other's
numbers, many loads are under way at once, and the sums meet once, at the end.

    W  warps    R  rows of x that are read, up to 16    C  columns of a warp's step
    N  rows of the weight in a program
"""

from __future__ import annotations

import triton
import triton.language as tl

from fulgurite.kernels.triton.decode import (
    E4M3_DROP,
    E4M3_LIFT,
    cast_tile,
    e2m1_tile,
    e8m0_to_bfloat16,
    int4_tile,
    plus,
    times,
)
from fulgurite.kernels.triton.matmul import find_group

ROWS = tl.constexpr(16)


@triton.jit
def multiply(x_WRC, w_WNC, acc_WRN, NATIVE: tl.constexpr):
    """acc + x @ w.T, one matrix a warp; the interpreter needs the numbers widened.

    The tensor cores take 16 rows: fewer are repeated.
    """
    W: tl.constexpr = x_WRC.shape[0]
    R: tl.constexpr = x_WRC.shape[1]
    C: tl.constexpr = x_WRC.shape[2]
    if R < ROWS:
        again = tl.broadcast_to(x_WRC[:, None, :, :], [W, ROWS // R, R, C])
        x_WRC = tl.reshape(again, [W, ROWS, C])
    w_WCN = tl.permute(w_WNC, (0, 2, 1))
    if NATIVE:
        return tl.dot(x_WRC, w_WCN, acc_WRN)
    else:
        return tl.dot(x_WRC.to(tl.float32), w_WCN.to(tl.float32), acc_WRN, input_precision="ieee")


@triton.jit
def quarters(x_WRC, W: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """Columns 0, 4, 8, … of x; 1, 5, 9, …; and so on: what meets the four nibbles of a word."""
    even, odd = tl.split(tl.reshape(x_WRC, [W, R, C // 4, 2, 2]))
    zero, two = tl.split(even)
    one, three = tl.split(odd)
    return zero, one, two, three


@triton.jit(do_not_specialize=["M", "w_scale_k", "experts", "tiles_m"])
def few_rows_kernel(
    x_ptr, w_ptr, out_ptr, w_scale_ptr, second_ptr, factor_ptr, bias_ptr, ends_ptr,
    M, N, K, x_stride, w_stride, out_stride, w_scale_n, w_scale_k,
    experts, w_expert, w_scale_expert, tiles_m,
    DECODE: tl.constexpr, SCALING: tl.constexpr, GROUP: tl.constexpr, W_ROWS: tl.constexpr,
    FACTOR: tl.constexpr, TENSOR_SCALE: tl.constexpr, ZERO: tl.constexpr, BIAS: tl.constexpr,
    EVEN: tl.constexpr, GROUPS: tl.constexpr, R: tl.constexpr, BN: tl.constexpr, C: tl.constexpr,
    W: tl.constexpr,
    STAGES: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """`second_ptr`: the tensor scale of NVFP4, or the zero points of asymmetric integers."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    live = True
    if GROUPS > 0:
        expert, start, M = find_group(ends_ptr, experts, tl.program_id(1), M, ROWS, GROUPS)
        live = expert < experts
        expert = tl.minimum(expert, experts - 1).to(tl.int64)
        w_ptr += expert * w_expert
        w_scale_ptr += expert * w_scale_expert
        second_ptr += expert * (w_scale_expert if ZERO else 1)
        bias_ptr += expert * N
        K = tl.where(live & (start < M), K, 0)  # rows of no expert are zero
    else:
        start = tl.program_id(1) * ROWS
    m = start + tl.arange(0, ROWS)
    row = tl.where(n < N, n, 0).to(tl.int64)
    n_in = row[None, :, None]
    nibbles: tl.constexpr = DECODE == "e2m1" or DECODE == "int4"
    ITEMS: tl.constexpr = C // 4 if nibbles else C  # words of four, or bytes
    item = tl.arange(0, ITEMS)[None, None, :]
    column = tl.arange(0, C)[None, None, :]
    warp = tl.arange(0, W)
    w_row = w_ptr + n_in * w_stride
    r = start + tl.arange(0, R)
    x_row = x_ptr + r.to(tl.int64)[None, :, None] * x_stride
    inside = (r < M)[None, :, None]
    acc = tl.zeros([W, ROWS, BN], tl.float32)
    for k in tl.range(0, K, W * C, num_stages=STAGES):
        first = k + warp * C
        begin = first[:, None, None]
        at = begin // (C // ITEMS) + item
        if EVEN:
            w = tl.load(w_row + at)
            x = tl.load(x_row + begin + column, inside, 0.0)
        else:
            w = tl.load(w_row + at, at < K // (C // ITEMS), 0.0)
            x = tl.load(x_row + begin + column, inside & (begin + column < K), 0.0)
        if SCALING == "inside":
            block = begin // GROUP + tl.arange(0, C // GROUP)[None, None, :]
            if EVEN:
                s = tl.load(w_scale_ptr + n_in * w_scale_n + block)
            else:
                s = tl.load(w_scale_ptr + n_in * w_scale_n + block, block < K // GROUP, 0.0)
            if GROUP == 16:
                s = (s.to(tl.float32) * E4M3_LIFT).to(tl.bfloat16)
            else:
                s = e8m0_to_bfloat16(s)
            wide: tl.constexpr = GROUP * ITEMS // C
            s = tl.broadcast_to(s[:, :, :, None], [W, BN, C // GROUP, wide])
            s = tl.reshape(s, [W, BN, ITEMS])
        if SCALING == "step":
            of_step = first // GROUP if EVEN else tl.minimum(first, K - 1) // GROUP
            place = (row[None, :] // W_ROWS) * w_scale_n + of_step[:, None] * w_scale_k
            ws = tl.load(w_scale_ptr + place)
            sums = tl.zeros([W, ROWS, BN], tl.float32)
        else:
            sums = acc
        if nibbles:
            x0, x1, x2, x3 = quarters(x, W, R, C)
            if DECODE == "e2m1":
                w0 = e2m1_tile(w, s, 0, GROUP != 16, PACKED)
                w1 = e2m1_tile(w, s, 1, GROUP != 16, PACKED)
                w2 = e2m1_tile(w, s, 2, GROUP != 16, PACKED)
                w3 = e2m1_tile(w, s, 3, GROUP != 16, PACKED)
            else:
                w0 = int4_tile(w, 0, PACKED)
                w1 = int4_tile(w, 1, PACKED)
                w2 = int4_tile(w, 2, PACKED)
                w3 = int4_tile(w, 3, PACKED)
                if ZERO:
                    z = 8.0 - tl.load(second_ptr + place).to(tl.float32)[:, :, None]
                    w0, w1, w2, w3 = plus(w0, z), plus(w1, z), plus(w2, z), plus(w3, z)
            sums = multiply(x0, w0, sums, PACKED)
            sums = multiply(x1, w1, sums, PACKED)
            sums = multiply(x2, w2, sums, PACKED)
            sums = multiply(x3, w3, sums, PACKED)
        else:
            if SCALING == "inside":
                w = times(w, s)
            else:
                w = cast_tile(w, x.dtype, PACKED)
            sums = multiply(x, w, sums, PACKED)
        if SCALING == "step":
            acc += sums * ws[:, None, :]
        else:
            acc = sums
    out = tl.sum(acc, 0)
    if SCALING == "end":
        out *= tl.load(w_scale_ptr + row * w_scale_n)[None, :]
    if FACTOR:
        out *= tl.load(factor_ptr)
    if TENSOR_SCALE:
        out *= tl.load(second_ptr) * E4M3_DROP
    if BIAS:
        bias = tl.load(bias_ptr + n, n < N, 0.0).to(tl.float32)[None, :]
        out += tl.where(live, bias, 0.0)
    into = out_ptr + m.to(tl.int64)[:, None] * out_stride + n[None, :]
    tl.store(into, out.to(out_ptr.dtype.element_ty), (m < M)[:, None] & (n < N)[None, :])
