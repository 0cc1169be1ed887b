# mypy: allow-untyped-defs, allow-incomplete-defs
"""Device functions: the main loop of the small-M GEMM, a few rows of a weight times a few rows of
x.

In: pointers to rows of x, of the weight and of its scales. Out: accumulators in float32 [W, N, T].

Each warp multiplies columns of its own: `tl.dot` of a stack gives each warp one matrix. Rows of the
weight are the 16 rows of the tensor cores' tile, and rows of x its 8 columns. So a dequantized
value goes from its register straight into the MMA, and one row of x wastes little.

    W  warps    R  rows of x that are read    T  columns of the tensor cores' tile, 8 or 16
    N  rows of the weight    C  columns of a warp's step    Q  words of four nibbles in them
    P  groups in one MMA     B  stacked matrices

DEQUANT: "e2m1" and "int4" are nibbles, "cast" is 8 bits, "dense" is the dtype of x. SCALING: as in
`triton_gemm.py`, except that "group" scales the sum of each group in float32 and rounds nothing.

An MMA is 16 words wide: P = 2 groups of 32 nibbles. To keep their sums apart, each row of x comes P
times, zero outside of one of the groups. Most columns of the tile would have held copies anyway.
"""

from __future__ import annotations

from fulgurite.kernels.common.triton_dequantize import (
    E4M3_SCALE_BIAS,
    MAX_BIASED_E8M0,
    cast_8bit,
    dequantize_e2m1,
    dequantize_int4,
    e8m0_to_bfloat16,
    e8m0_to_biased_bfloat16,
    multiply_bfloat16,
)
from fulgurite.kernels.common.triton_import import tl, triton

MMA_ROWS = tl.constexpr(16)  # of an operand of the tensor cores


@triton.jit
def dot_x_major(x_WRC, w_WNC, acc_WRN, NATIVE: tl.constexpr):
    """acc + x @ w.T, one matrix a warp, for weights that are not dequantized.

    The tensor cores take 16 rows: fewer are repeated. The interpreter needs float32.
    """
    W: tl.constexpr = x_WRC.shape[0]
    R: tl.constexpr = x_WRC.shape[1]
    C: tl.constexpr = x_WRC.shape[2]
    if R < MMA_ROWS:
        repeated = tl.broadcast_to(x_WRC[:, None, :, :], [W, MMA_ROWS // R, R, C])
        x_WRC = tl.reshape(repeated, [W, MMA_ROWS, C])
    w_WCN = tl.permute(w_WNC, (0, 2, 1))
    if NATIVE:
        return tl.dot(x_WRC, w_WCN, acc_WRN)
    else:
        return tl.dot(x_WRC.to(tl.float32), w_WCN.to(tl.float32), acc_WRN, input_precision="ieee")


@triton.jit
def dot_w_major(w_WNC, x_WRC, acc_WNT, NATIVE: tl.constexpr):
    """acc + w @ x.T, one matrix a warp; rows of x are repeated to fill the tile.

    The interpreter needs float32.
    """
    W: tl.constexpr = x_WRC.shape[0]
    R: tl.constexpr = x_WRC.shape[1]
    C: tl.constexpr = x_WRC.shape[2]
    T: tl.constexpr = acc_WNT.shape[2]
    if R < T:
        repeated = tl.broadcast_to(x_WRC[:, None, :, :], [W, T // R, R, C])
        x_WRC = tl.reshape(repeated, [W, T, C])
    x_WCT = tl.permute(x_WRC, (0, 2, 1))
    if NATIVE:
        return tl.dot(w_WNC, x_WCT, acc_WNT)
    else:
        return tl.dot(w_WNC.to(tl.float32), x_WCT.to(tl.float32), acc_WNT, input_precision="ieee")


@triton.jit
def deinterleave_by_4(x_WRC):
    """Columns 0, 4, 8, … of x; 1, 5, 9, …; and so on: the operands of the four nibbles of a
    word."""
    W: tl.constexpr = x_WRC.shape[0]
    R: tl.constexpr = x_WRC.shape[1]
    Q: tl.constexpr = x_WRC.shape[2] // 4
    even, odd = tl.split(tl.reshape(x_WRC, [W, R, Q, 2, 2]))
    zero, two = tl.split(even)
    one, three = tl.split(odd)
    return zero, one, two, three


@triton.jit
def repeat_over_columns(s_WNB, ITEMS: tl.constexpr):
    """Scales of blocks [W, N, B] as [W, N, ITEMS], each repeated over its block."""
    W: tl.constexpr = s_WNB.shape[0]
    N: tl.constexpr = s_WNB.shape[1]
    B: tl.constexpr = s_WNB.shape[2]
    return tl.reshape(tl.broadcast_to(s_WNB[:, :, :, None], [W, N, B, ITEMS // B]), [W, N, ITEMS])


@triton.jit
def _load_columns(pointers, column, end, EVEN_K: tl.constexpr):
    """Load, with zeros for columns from `end` on."""
    if EVEN_K:
        return tl.load(pointers)
    else:
        return tl.load(pointers, column < end, 0.0)


@triton.jit
def dot_4bit(w, s, x, sums, DEQUANT: tl.constexpr, FULL_RANGE: tl.constexpr, NATIVE: tl.constexpr):
    """sums + w @ x.T of words of four nibbles: four MMAs, each with one nibble of every word."""
    x0, x1, x2, x3 = deinterleave_by_4(x)
    if DEQUANT == "e2m1":
        w0 = dequantize_e2m1(w, s, 0, FULL_RANGE, NATIVE)
        w1 = dequantize_e2m1(w, s, 1, FULL_RANGE, NATIVE)
        w2 = dequantize_e2m1(w, s, 2, FULL_RANGE, NATIVE)
        w3 = dequantize_e2m1(w, s, 3, FULL_RANGE, NATIVE)
    else:
        OFFSET: tl.constexpr = 0 if DEQUANT == "uint4" else 8
        w0 = dequantize_int4(w, 0, NATIVE, OFFSET, x.dtype)
        w1 = dequantize_int4(w, 1, NATIVE, OFFSET, x.dtype)
        w2 = dequantize_int4(w, 2, NATIVE, OFFSET, x.dtype)
        w3 = dequantize_int4(w, 3, NATIVE, OFFSET, x.dtype)
    sums = dot_w_major(w0, x0, sums, NATIVE)
    sums = dot_w_major(w1, x1, sums, NATIVE)
    sums = dot_w_major(w2, x2, sums, NATIVE)
    return dot_w_major(w3, x3, sums, NATIVE)


@triton.jit
def split_columns(y_WRC, M: tl.constexpr):
    """The columns of a step as M matrices of their own [M * W, R, C / M]: M for each warp."""
    W: tl.constexpr = y_WRC.shape[0]
    R: tl.constexpr = y_WRC.shape[1]
    C: tl.constexpr = y_WRC.shape[2]
    y_MWRC = tl.permute(tl.reshape(y_WRC, [W, R, M, C // M]), (2, 0, 1, 3))
    return tl.reshape(y_MWRC, [M * W, R, C // M])


@triton.jit
def group_column_mask(R: tl.constexpr, P: tl.constexpr, GROUP_SIZE: tl.constexpr, C: tl.constexpr):
    """[1, P * R, C]: which columns each of the P copies of R rows keeps, its own group of every
    P."""
    group = (tl.arange(0, P * R) // R)[None, :, None]
    at = tl.arange(0, C)[None, None, :]
    return (
        at // GROUP_SIZE - at // (P * GROUP_SIZE) * P == group
    )  # a modulo that Triton 3.6 can analyse


@triton.jit
def repeat_over_tile(s_BNP, R: tl.constexpr, T: tl.constexpr):
    """Values of P groups [B, N, P] as [B, N, T]: each in the columns of its group."""
    B: tl.constexpr = s_BNP.shape[0]
    N: tl.constexpr = s_BNP.shape[1]
    P: tl.constexpr = s_BNP.shape[2]
    wide = tl.broadcast_to(s_BNP[:, :, None, :, None], [B, N, T // (P * R), P, R])
    return tl.reshape(wide, [B, N, T])


@triton.jit
def sum_x(x, sums, NATIVE: tl.constexpr):
    """sums + the row sums of x, in the layout of the accumulator; x is read as by `dot_4bit`."""
    x0, x1, x2, x3 = deinterleave_by_4(x)
    ones = tl.full([sums.shape[0], sums.shape[1], x0.shape[2]], 1.0, x.dtype)
    sums = dot_w_major(ones, x0, sums, NATIVE)
    sums = dot_w_major(ones, x1, sums, NATIVE)
    sums = dot_w_major(ones, x2, sums, NATIVE)
    return dot_w_major(ones, x3, sums, NATIVE)


@triton.jit
def dot_grouped_int(
    w, s, z, x, acc, DEQUANT: tl.constexpr, ZERO_POINTS: tl.constexpr, M: tl.constexpr,
    P: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """acc + the sums of the M times P groups of a step, each times its scale.

    z: zero points or minima. The sum of a group is scaled in float32, so nothing is rounded on the
    way. With z, an infinite x gives NaN.
    """
    W: tl.constexpr = acc.shape[0]
    N: tl.constexpr = acc.shape[1]
    T: tl.constexpr = acc.shape[2]
    R: tl.constexpr = x.shape[1] // P
    x, w, s = split_columns(x, M), split_columns(w, M), repeat_over_tile(split_columns(s, M), R, T)
    none = tl.zeros([M * W, N, T], tl.float32)
    if DEQUANT == "cast":
        sums = dot_w_major(cast_8bit(w, x.dtype, NATIVE), x, none, NATIVE)
    else:
        sums = dot_4bit(w, s, x, none, DEQUANT, False, NATIVE)
    if ZERO_POINTS:
        z, of_x = repeat_over_tile(split_columns(z, M), R, T), sum_x(x, none, NATIVE)
        sums = sums * s + of_x * z if DEQUANT == "uint4" else (sums + of_x * (8.0 - z)) * s
    else:
        sums = sums * s
    return acc + tl.sum(tl.reshape(sums, [M, W, N, T]), 0)


@triton.jit
def _load_group_values(from_row, begin, K, GROUP_SIZE: tl.constexpr, C: tl.constexpr):
    """One value of each group of C columns; 0 past the end."""
    group = begin // GROUP_SIZE + tl.arange(0, C // GROUP_SIZE)[None, None, :]
    return tl.load(from_row + group, group < K // GROUP_SIZE, 0)


@triton.jit
def accumulate_k(
    x_row, x_in, w_row, s_row, z_row, first, K, w_scale_k,
    DEQUANT: tl.constexpr, SCALING: tl.constexpr, GROUP_SIZE: tl.constexpr,
    ZERO_POINTS: tl.constexpr, FULL_RANGE: tl.constexpr, EVEN_K: tl.constexpr, T: tl.constexpr,
    C: tl.constexpr, STEP: tl.constexpr, NUM_STAGES: tl.constexpr, NATIVE: tl.constexpr, x_scale_row=0, x_scale_k=0,
    X_IS_FP8: tl.constexpr = False, P: tl.constexpr = 1,
):  # fmt: skip
    """[W, N, T], or [W, N, T / P] if P groups share an MMA, and each row of x comes P times.

    Pointers are [1, rows, 1], or [W, rows, 1] if warps have rows of their own. `x_in` masks rows of
    x. A warp starts at column first[W, 1, 1] and advances STEP columns at a time.

    Also returns the largest e8m0 scale, if scales are biased: with one above `MAX_BIASED_E8M0` the
    sums are wrong and must be computed again with FULL_RANGE. X_IS_FP8: one row of x a warp, in
    FP8, with a scale for each step, which is a group of the weight.
    """
    W: tl.constexpr = first.shape[0]
    N: tl.constexpr = w_row.shape[1]
    R: tl.constexpr = x_row.shape[1] // P
    is_4bit: tl.constexpr = DEQUANT == "e2m1" or DEQUANT == "int4" or DEQUANT == "uint4"
    PACK: tl.constexpr = 4 if is_4bit else 1
    is_biased: tl.constexpr = DEQUANT == "e2m1" and GROUP_SIZE == 32 and not FULL_RANGE
    if P > 1:
        x_in = x_in & group_column_mask(R, P, GROUP_SIZE, C)
    acc = tl.zeros([W, N, T], tl.float32)
    max_scale = tl.zeros([W, N, C // GROUP_SIZE], tl.int32) if is_biased else 0
    # An asynchronous copy takes four bytes or more. Fewer zero points are loaded a step ahead.
    few_zero_points: tl.constexpr = ZERO_POINTS and DEQUANT == "int4" and C // GROUP_SIZE < 4
    prefetch_zero_points: tl.constexpr = SCALING == "group" and few_zero_points
    if prefetch_zero_points:
        next_z = _load_group_values(z_row, first, K, GROUP_SIZE, C)
    for k in tl.range(0, K, STEP, num_stages=NUM_STAGES):
        begin = k + first
        item = begin // PACK + tl.arange(0, C // PACK)[None, None, :]
        column = begin + tl.arange(0, C)[None, None, :]
        w = _load_columns(w_row + item, item, K // PACK, EVEN_K)
        if EVEN_K:
            x = tl.load(x_row + column, x_in, 0.0)
        else:
            x = tl.load(x_row + column, x_in & (column < K), 0.0)
        s, z, sums = 0, 0, acc
        if X_IS_FP8:
            at = (begin if EVEN_K else tl.minimum(begin, K - 1)) // GROUP_SIZE * x_scale_k
            x_scale = tl.load(x_scale_row + at)
            x = cast_8bit(x, tl.bfloat16, NATIVE)
        if SCALING == "operand":
            block = begin // GROUP_SIZE + tl.arange(0, C // GROUP_SIZE)[None, None, :]
            s = _load_columns(s_row + block, block, K // GROUP_SIZE, EVEN_K)
            if is_biased:
                max_scale = tl.maximum(max_scale, s.to(tl.int32))
                s = e8m0_to_biased_bfloat16(s)
            elif GROUP_SIZE == 16:
                s = (s.to(tl.float32) * E4M3_SCALE_BIAS).to(tl.bfloat16)
            else:
                s = e8m0_to_bfloat16(s)
            s = repeat_over_columns(s, C // PACK)
        elif SCALING == "group":
            block = begin // GROUP_SIZE + tl.arange(0, C // GROUP_SIZE)[None, None, :]
            s = _load_columns(s_row + block, block, K // GROUP_SIZE, EVEN_K)
            if prefetch_zero_points:
                z = next_z.to(tl.float32)
                next_z = _load_group_values(z_row, begin + STEP, K, GROUP_SIZE, C)
            elif ZERO_POINTS:
                z = _load_columns(z_row + block, block, K // GROUP_SIZE, EVEN_K).to(tl.float32)
        elif SCALING == "mainloop":
            at = (begin if EVEN_K else tl.minimum(begin, K - 1)) // GROUP_SIZE * w_scale_k
            scale = tl.load(s_row + at).to(tl.float32)
            sums = tl.zeros([W, N, T], tl.float32)
        if SCALING == "group":
            M: tl.constexpr = C // (P * GROUP_SIZE)
            sums = dot_grouped_int(w, s, z, x, acc, DEQUANT, ZERO_POINTS, M, P, NATIVE)
        elif is_4bit:
            sums = dot_4bit(w, s, x, sums, DEQUANT, FULL_RANGE, NATIVE)
        elif SCALING == "operand":
            sums = dot_w_major(multiply_bfloat16(w, s), x, sums, NATIVE)
        elif DEQUANT == "cast":
            sums = dot_w_major(cast_8bit(w, x.dtype, NATIVE), x, sums, NATIVE)
        else:
            sums = dot_w_major(w, x, sums, NATIVE)
        if X_IS_FP8:
            acc += sums * (scale * x_scale)
        else:
            acc = acc + sums * scale if SCALING == "mainloop" else sums
    if P > 1:
        acc = tl.sum(tl.reshape(acc, [W, N, T // (P * R), P, R]), 3)
        acc = tl.reshape(acc, [W, N, T // P])
    return acc, tl.max(tl.max(tl.max(max_scale, 2), 1), 0) if is_biased else 0


@triton.jit
def accumulate_k_any_scale(
    x_row, x_in, w_row, s_row, z_row, first, K, w_scale_k,
    DEQUANT: tl.constexpr, SCALING: tl.constexpr, GROUP_SIZE: tl.constexpr,
    ZERO_POINTS: tl.constexpr, EVEN_K: tl.constexpr, T: tl.constexpr, C: tl.constexpr,
    STEP: tl.constexpr, NUM_STAGES: tl.constexpr, NATIVE: tl.constexpr, x_scale_row=0, x_scale_k=0,
    X_IS_FP8: tl.constexpr = False, P: tl.constexpr = 1,
):  # fmt: skip
    """`accumulate_k` for any scales: MXFP4 scales above the biased range take a second, slower
    pass."""
    acc, max_scale = accumulate_k(
        x_row, x_in, w_row, s_row, z_row, first, K, w_scale_k,
        DEQUANT, SCALING, GROUP_SIZE, ZERO_POINTS, False, EVEN_K, T, C, STEP, NUM_STAGES, NATIVE,
        x_scale_row, x_scale_k, X_IS_FP8, P,
    )  # fmt: skip
    if DEQUANT == "e2m1" and GROUP_SIZE == 32:
        if max_scale > MAX_BIASED_E8M0:
            acc, _ = accumulate_k(
                x_row, x_in, w_row, s_row, z_row, first, K, w_scale_k,
                DEQUANT, SCALING, GROUP_SIZE, ZERO_POINTS, True, EVEN_K, T, C, STEP, 2, NATIVE,
            )  # fmt: skip
    return acc
