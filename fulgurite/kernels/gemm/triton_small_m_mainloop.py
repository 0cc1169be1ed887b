# mypy: allow-untyped-defs, allow-incomplete-defs
"""Device functions: a few rows of a packed weight times a few rows of x, over all of K.

In: pointers to rows of x, of the weight and of its scales. Out: sums in float32 [W, N, T].

A warp multiplies columns of its own (`tl.dot` gives each warp one matrix of a stack). Rows of the
weight are the 16 rows of the tensor cores' tile and rows of x its 8 columns, so a decoded number goes
straight from the register it was decoded in to the tensor cores, and one row of x wastes little.

    W  warps    R  rows of x that are read    T  columns of the tensor cores' tile, 8 or 16
    N  rows of the weight    C  columns of a warp's step    Q  words of four nibbles in them

`DEQUANT`: "e2m1" and "int4" are nibbles, "cast" is 8 bits, "dense" the dtype of x.
`SCALING`: "operand" a step (16 or 32 columns: the decoded weight is scaled), one a "mainloop", at the "epilogue",
or "none"; "group": several float32 scales a step, each for the sum of its group of integers ("int4",
"cast", or "uint4" with minima).

A matmul of the tensor cores is 16 words wide: that is P = 2 groups where they have 32 nibbles. Their sums
come apart in columns of their own: each row of x is there P times, zero outside of one of the groups.
Most of the tile's columns would have held copies anyway.
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

MMA_ROWS = tl.constexpr(16)  # that the tensor cores take


@triton.jit
def dot_x_major(x_WRC, w_WNC, acc_WRN, NATIVE: tl.constexpr):
    """acc + x @ w.T, one matrix a warp; the interpreter needs the numbers widened.

    The tensor cores take 16 rows: fewer are repeated. For weights that need no decoding.
    """
    W: tl.constexpr = x_WRC.shape[0]
    R: tl.constexpr = x_WRC.shape[1]
    C: tl.constexpr = x_WRC.shape[2]
    if R < MMA_ROWS:
        again = tl.broadcast_to(x_WRC[:, None, :, :], [W, MMA_ROWS // R, R, C])
        x_WRC = tl.reshape(again, [W, MMA_ROWS, C])
    w_WCN = tl.permute(w_WNC, (0, 2, 1))
    if NATIVE:
        return tl.dot(x_WRC, w_WCN, acc_WRN)
    else:
        return tl.dot(x_WRC.to(tl.float32), w_WCN.to(tl.float32), acc_WRN, input_precision="ieee")


@triton.jit
def dot_w_major(w_WNC, x_WRC, acc_WNT, NATIVE: tl.constexpr):
    """acc + w @ x.T, one matrix a warp; rows of x are repeated to fill the tile.

    The interpreter needs the numbers widened.
    """
    W: tl.constexpr = x_WRC.shape[0]
    R: tl.constexpr = x_WRC.shape[1]
    C: tl.constexpr = x_WRC.shape[2]
    T: tl.constexpr = acc_WNT.shape[2]
    if R < T:
        again = tl.broadcast_to(x_WRC[:, None, :, :], [W, T // R, R, C])
        x_WRC = tl.reshape(again, [W, T, C])
    x_WCT = tl.permute(x_WRC, (0, 2, 1))
    if NATIVE:
        return tl.dot(w_WNC, x_WCT, acc_WNT)
    else:
        return tl.dot(w_WNC.to(tl.float32), x_WCT.to(tl.float32), acc_WNT, input_precision="ieee")


@triton.jit
def deinterleave_by_4(x_WRC):
    """Columns 0, 4, 8, … of x; 1, 5, 9, …; and so on: what meets the four nibbles of a word."""
    W: tl.constexpr = x_WRC.shape[0]
    R: tl.constexpr = x_WRC.shape[1]
    Q: tl.constexpr = x_WRC.shape[2] // 4
    even, odd = tl.split(tl.reshape(x_WRC, [W, R, Q, 2, 2]))
    zero, two = tl.split(even)
    one, three = tl.split(odd)
    return zero, one, two, three


@triton.jit
def repeat_over_columns(s_WNB, ITEMS: tl.constexpr):
    """Scales of blocks as [W, N, ITEMS], each repeated over its block."""
    W: tl.constexpr = s_WNB.shape[0]
    N: tl.constexpr = s_WNB.shape[1]
    B: tl.constexpr = s_WNB.shape[2]
    return tl.reshape(tl.broadcast_to(s_WNB[:, :, :, None], [W, N, B, ITEMS // B]), [W, N, ITEMS])


@triton.jit
def _load_columns(pointers, column, end, EVEN: tl.constexpr):
    """What lies at the pointers, and zero for columns from `end` on."""
    if EVEN:
        return tl.load(pointers)
    else:
        return tl.load(pointers, column < end, 0.0)


@triton.jit
def dot_4bit(w, s, x, sums, DEQUANT: tl.constexpr, ANY: tl.constexpr, NATIVE: tl.constexpr):
    """Words of four nibbles: four matmuls, each of one nibble of every word."""
    x0, x1, x2, x3 = deinterleave_by_4(x)
    if DEQUANT == "e2m1":
        w0, w1 = dequantize_e2m1(w, s, 0, ANY, NATIVE), dequantize_e2m1(w, s, 1, ANY, NATIVE)
        w2, w3 = dequantize_e2m1(w, s, 2, ANY, NATIVE), dequantize_e2m1(w, s, 3, ANY, NATIVE)
    else:
        LESS: tl.constexpr = 0 if DEQUANT == "uint4" else 8
        w0 = dequantize_int4(w, 0, NATIVE, LESS, x.dtype)
        w1 = dequantize_int4(w, 1, NATIVE, LESS, x.dtype)
        w2 = dequantize_int4(w, 2, NATIVE, LESS, x.dtype)
        w3 = dequantize_int4(w, 3, NATIVE, LESS, x.dtype)
    sums = dot_w_major(w0, x0, sums, NATIVE)
    sums = dot_w_major(w1, x1, sums, NATIVE)
    sums = dot_w_major(w2, x2, sums, NATIVE)
    return dot_w_major(w3, x3, sums, NATIVE)


@triton.jit
def split_columns(y_WRC, M: tl.constexpr):
    """A step's columns as M matrices of their own [M * W, R, C / M]: a warp has M of them then."""
    W: tl.constexpr = y_WRC.shape[0]
    R: tl.constexpr = y_WRC.shape[1]
    C: tl.constexpr = y_WRC.shape[2]
    y_MWRC = tl.permute(tl.reshape(y_WRC, [W, R, M, C // M]), (2, 0, 1, 3))
    return tl.reshape(y_MWRC, [M * W, R, C // M])


@triton.jit
def group_column_mask(R: tl.constexpr, P: tl.constexpr, GROUP: tl.constexpr, C: tl.constexpr):
    """[1, P * R, C]: where each of P times R rows has numbers, in its own group of every P."""
    group = (tl.arange(0, P * R) // R)[None, :, None]
    at = tl.arange(0, C)[None, None, :]
    return at // GROUP - at // (P * GROUP) * P == group  # % as Triton 3.6 sees through it


@triton.jit
def repeat_over_tile(s_BNP, R: tl.constexpr, T: tl.constexpr):
    """Numbers of P groups as [B, N, T]: each where the columns of its group are."""
    B: tl.constexpr = s_BNP.shape[0]
    N: tl.constexpr = s_BNP.shape[1]
    P: tl.constexpr = s_BNP.shape[2]
    wide = tl.broadcast_to(s_BNP[:, :, None, :, None], [B, N, T // (P * R), P, R])
    return tl.reshape(wide, [B, N, T])


@triton.jit
def sum_x(x, sums, NATIVE: tl.constexpr):
    """sums + the sums of x, so that they lie where they are needed; x as `dot_4bit` reads it."""
    x0, x1, x2, x3 = deinterleave_by_4(x)
    ones = tl.full([sums.shape[0], sums.shape[1], x0.shape[2]], 1.0, x.dtype)
    sums = dot_w_major(ones, x0, sums, NATIVE)
    sums = dot_w_major(ones, x1, sums, NATIVE)
    sums = dot_w_major(ones, x2, sums, NATIVE)
    return dot_w_major(ones, x3, sums, NATIVE)


@triton.jit
def dot_grouped_int(
    w, s, z, x, acc, DEQUANT: tl.constexpr, ZERO: tl.constexpr, M: tl.constexpr, P: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """acc + the sums of a step's M times P groups, each times its scale; z are zero points or minima.

    A sum of a group is scaled in float32, so nothing is rounded on the way. With z an infinite x
    gives NaN.
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
    if ZERO:
        z, of_x = repeat_over_tile(split_columns(z, M), R, T), sum_x(x, none, NATIVE)
        sums = sums * s + of_x * z if DEQUANT == "uint4" else (sums + of_x * (8.0 - z)) * s
    else:
        sums = sums * s
    return acc + tl.sum(tl.reshape(sums, [M, W, N, T]), 0)


@triton.jit
def _load_group_values(from_row, begin, K, GROUP: tl.constexpr, C: tl.constexpr):
    """A number of each group of C columns, none past the end."""
    group = begin // GROUP + tl.arange(0, C // GROUP)[None, None, :]
    return tl.load(from_row + group, group < K // GROUP, 0)


@triton.jit
def accumulate_k(
    x_row, x_in, w_row, s_row, z_row, first, K, w_scale_k,
    DEQUANT: tl.constexpr, SCALING: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr,
    ANY: tl.constexpr, EVEN: tl.constexpr, T: tl.constexpr, C: tl.constexpr, STEP: tl.constexpr,
    STAGES: tl.constexpr, NATIVE: tl.constexpr, x_scale_row=0, x_scale_k=0,
    X_CODES: tl.constexpr = False, P: tl.constexpr = 1,
):  # fmt: skip
    """[W, N, T], or [W, N, T / P] of P groups beside each other, with which all rows of x come P times.
    Pointers are [1, rows, 1], or [W, rows, 1] where warps have rows of their own; `x_in` says which
    rows of x there are. A warp begins at column first[W, 1, 1] and goes STEP columns at a time.

    Also returned: the largest e8m0 scale, where not all of them can be lifted (`MAX_BIASED_E8M0`);
    with one above that the sums are wrong, and to be taken again with ANY.
    X_CODES: x is one row a warp, in FP8, with a scale for each step, which is a group of the weight.
    """
    W: tl.constexpr = first.shape[0]
    N: tl.constexpr = w_row.shape[1]
    R: tl.constexpr = x_row.shape[1] // P
    nibbles: tl.constexpr = DEQUANT == "e2m1" or DEQUANT == "int4" or DEQUANT == "uint4"
    PACK: tl.constexpr = 4 if nibbles else 1
    lifted: tl.constexpr = DEQUANT == "e2m1" and GROUP == 32 and not ANY
    if P > 1:
        x_in = x_in & group_column_mask(R, P, GROUP, C)
    acc = tl.zeros([W, N, T], tl.float32)
    top = tl.zeros([W, N, C // GROUP], tl.int32) if lifted else 0
    # Fewer bytes than four no copy brings while others are multiplied: asked for a step ahead.
    ahead: tl.constexpr = SCALING == "group" and ZERO and DEQUANT == "int4" and C // GROUP < 4
    if ahead:
        next_z = _load_group_values(z_row, first, K, GROUP, C)
    for k in tl.range(0, K, STEP, num_stages=STAGES):
        begin = k + first
        item = begin // PACK + tl.arange(0, C // PACK)[None, None, :]
        column = begin + tl.arange(0, C)[None, None, :]
        w = _load_columns(w_row + item, item, K // PACK, EVEN)
        if EVEN:
            x = tl.load(x_row + column, x_in, 0.0)
        else:
            x = tl.load(x_row + column, x_in & (column < K), 0.0)
        s, z, sums = 0, 0, acc
        if X_CODES:
            at = (begin if EVEN else tl.minimum(begin, K - 1)) // GROUP * x_scale_k
            x_scale = tl.load(x_scale_row + at)
            x = cast_8bit(x, tl.bfloat16, NATIVE)
        if SCALING == "operand":
            block = begin // GROUP + tl.arange(0, C // GROUP)[None, None, :]
            s = _load_columns(s_row + block, block, K // GROUP, EVEN)
            if lifted:
                top = tl.maximum(top, s.to(tl.int32))
                s = e8m0_to_biased_bfloat16(s)
            elif GROUP == 16:
                s = (s.to(tl.float32) * E4M3_SCALE_BIAS).to(tl.bfloat16)
            else:
                s = e8m0_to_bfloat16(s)
            s = repeat_over_columns(s, C // PACK)
        elif SCALING == "group":
            block = begin // GROUP + tl.arange(0, C // GROUP)[None, None, :]
            s = _load_columns(s_row + block, block, K // GROUP, EVEN)
            if ahead:
                z = next_z.to(tl.float32)
                next_z = _load_group_values(z_row, begin + STEP, K, GROUP, C)
            elif ZERO:
                z = _load_columns(z_row + block, block, K // GROUP, EVEN).to(tl.float32)
        elif SCALING == "mainloop":
            at = (begin if EVEN else tl.minimum(begin, K - 1)) // GROUP * w_scale_k
            scale = tl.load(s_row + at).to(tl.float32)
            sums = tl.zeros([W, N, T], tl.float32)
        if SCALING == "group":
            sums = dot_grouped_int(w, s, z, x, acc, DEQUANT, ZERO, C // (P * GROUP), P, NATIVE)
        elif nibbles:
            sums = dot_4bit(w, s, x, sums, DEQUANT, ANY, NATIVE)
        elif SCALING == "operand":
            sums = dot_w_major(multiply_bfloat16(w, s), x, sums, NATIVE)
        elif DEQUANT == "cast":
            sums = dot_w_major(cast_8bit(w, x.dtype, NATIVE), x, sums, NATIVE)
        else:
            sums = dot_w_major(w, x, sums, NATIVE)
        if X_CODES:
            acc += sums * (scale * x_scale)
        else:
            acc = acc + sums * scale if SCALING == "mainloop" else sums
    if P > 1:
        acc = tl.sum(tl.reshape(acc, [W, N, T // (P * R), P, R]), 3)
        acc = tl.reshape(acc, [W, N, T // P])
    return acc, tl.max(tl.max(tl.max(top, 2), 1), 0) if lifted else 0


@triton.jit
def accumulate_k_any_scale(
    x_row, x_in, w_row, s_row, z_row, first, K, w_scale_k,
    DEQUANT: tl.constexpr, SCALING: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr,
    EVEN: tl.constexpr, T: tl.constexpr, C: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr,
    NATIVE: tl.constexpr, x_scale_row=0, x_scale_k=0, X_CODES: tl.constexpr = False,
    P: tl.constexpr = 1,
):  # fmt: skip
    """The same, of any scales: MXFP4 weights of 16 and more take a second, slower turn."""
    acc, top = accumulate_k(
        x_row, x_in, w_row, s_row, z_row, first, K, w_scale_k,
        DEQUANT, SCALING, GROUP, ZERO, False, EVEN, T, C, STEP, STAGES, NATIVE,
        x_scale_row, x_scale_k, X_CODES, P,
    )  # fmt: skip
    if DEQUANT == "e2m1" and GROUP == 32:
        if top > MAX_BIASED_E8M0:
            acc, _ = accumulate_k(
                x_row, x_in, w_row, s_row, z_row, first, K, w_scale_k,
                DEQUANT, SCALING, GROUP, ZERO, True, EVEN, T, C, STEP, 2, NATIVE,
            )  # fmt: skip
    return acc
