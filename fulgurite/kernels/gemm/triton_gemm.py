# mypy: allow-untyped-defs, allow-incomplete-defs
"""One matmul kernel for packed weights: x @ weight.T, few rows of x or many.

    out[m, n] = (sum over k of x[m, k] * x_scale * w[n, k] * w_scale) + bias[n]

In: x [M, K] as 16-bit floats, or packed in 8 bits with scales; a weight [N, K] packed by any format
with scales beside it. Out: [M, N], summed in float32 (int8 rows in int32) and rounded once.

The rows of the weight are the rows of the tensor cores' tile: they number at least 64 where M may be
1, and decoded weights go from registers straight into the multiplication. How the weight is decoded
(`DEQUANT`) and where its scales come in (`SCALING`) is compiled in:

    same     8 bits times 8 bits          end      per row or tensor: the sum is scaled
    cast     8 bits to 16                 step     each 128 (or group) of K: the step's sum is scaled
    e2m1     nibbles to bfloat16          inside   16 or 32 wide: the decoded weight is scaled, exactly
    int4     nibbles to bfloat16          groups   16 or 32 wide float32 of integers: the decoded weight
    uint4    the same, with minima                 is scaled and rounded, as `weight_as` would

Few rows leave too few tiles for all processors, so K is split among `split` programs. The last of
them to finish a tile adds the others' sums in their order: one launch, and the same result each time.
"""

from __future__ import annotations

from fulgurite.kernels.common.triton_dequantize import (
    E4M3_SCALE_BIAS,
    E4M3_SCALE_UNBIAS,
    cast_8bit,
    deinterleave_by_4,
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


@triton.jit
def dot_nt(w, x, acc, NATIVE: tl.constexpr):
    """acc + w @ x.T; float8 products are added up in float32 after each 128 of them.

    The interpreter multiplies bfloat16 as if it were integers, so there the numbers are widened.
    """
    if acc.dtype == tl.int32:
        return tl.dot(w, tl.trans(x), acc, out_dtype=tl.int32)
    elif NATIVE:
        return tl.dot(w, tl.trans(x), acc, max_num_imprecise_acc=128)
    else:
        return tl.dot(w.to(tl.float32), tl.trans(x.to(tl.float32)), acc, input_precision="ieee")


@triton.jit
def find_expert_tile(ends_ptr, experts, tile, rows, BM: tl.constexpr, GROUPS: tl.constexpr):
    """The expert of a tile of rows, its first row, and where its rows end.

    Experts' rows lie one after another, each expert's from a tile of its own; after the last come the
    rows of no expert, as one more group. Read on the device: the host never waits for the ends.
    """
    group = tl.arange(0, GROUPS)
    end = tl.load(ends_ptr + group, group < experts, rows)
    begin = tl.load(ends_ptr + group - 1, (group > 0) & (group <= experts), 0)
    begin = tl.where(group > experts, rows, begin)
    tiles = tl.cdiv(end - begin, BM)
    before = tl.cumsum(tiles, 0) - tiles
    mine = (before <= tile) & (tile < before + tiles)
    expert = tl.sum(tl.where(mine, group, 0), 0)
    found = tl.sum(mine.to(tl.int32), 0) > 0
    start = tl.sum(tl.where(mine, begin + (tile - before) * BM, 0), 0)
    stop = tl.sum(tl.where(mine, end, 0), 0)
    return tl.where(found, expert, experts), tl.where(found, start, rows), tl.where(found, stop, 0)


@triton.jit(do_not_specialize=["M", "split", "x_scale_k", "w_scale_k", "experts", "tiles_m"])
def gemm_kernel(
    x_ptr, w_ptr, out_ptr, x_scale_ptr, w_scale_ptr, tensor_scale_ptr, bias_ptr,
    partial_ptr, count_ptr, ends_ptr,
    M, N, K, split, x_stride, w_stride, out_stride, x_scale_m, x_scale_k, w_scale_n, w_scale_k,
    experts, w_expert, w_scale_expert, tiles_m,
    DEQUANT: tl.constexpr, SCALING: tl.constexpr, GROUP: tl.constexpr, W_ROWS: tl.constexpr,
    X_SCALED: tl.constexpr, FACTOR: tl.constexpr, TENSOR_SCALE: tl.constexpr, ZERO: tl.constexpr,
    BIAS: tl.constexpr, EVEN: tl.constexpr, FULL: tl.constexpr, GROUPS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr,
    ACROSS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    part = tl.program_id(1)
    tiles_n = tl.cdiv(N, BN)
    # ACROSS tiles of N share their rows of x in the cache before the next rows are taken
    band = tile // (ACROSS * tiles_m)
    width = tl.minimum(tiles_n - band * ACROSS, ACROSS)
    within = tile - band * ACROSS * tiles_m
    tile_n = band * ACROSS + within % width
    tile_m = within // width
    n = tile_n * BN + tl.arange(0, BN)
    if GROUPS > 0:
        expert, start, M = find_expert_tile(ends_ptr, experts, tile_m, M, BM, GROUPS)
        m = start + tl.arange(0, BM)
        live = expert < experts
        expert = tl.minimum(expert, experts - 1).to(tl.int64)
        w_ptr += expert * w_expert
        w_scale_ptr += expert * w_scale_expert
        tensor_scale_ptr += expert * (w_scale_expert if ZERO else 1)
        bias_ptr += expert * N
    else:
        m = tile_m * BM + tl.arange(0, BM)
        live = True
    n_in = tl.where(n < N, n, 0).to(tl.int64)
    m_in = tl.where(m < M, m, 0).to(tl.int64)
    nibbles: tl.constexpr = DEQUANT == "e2m1" or DEQUANT == "int4" or DEQUANT == "uint4"
    WK: tl.constexpr = BK // 4 if nibbles else BK  # words of four, or items
    steps = tl.cdiv(K, BK)
    mine = tl.cdiv(steps, split)
    first = part * mine
    last = tl.minimum(first + mine, steps)
    if GROUPS > 0:
        last = tl.where(live & (start < M), last, first)  # rows of no expert are zero
    whole: tl.constexpr = w_ptr.dtype.element_ty == tl.int8 and DEQUANT == "same"
    kind: tl.constexpr = tl.int32 if whole else tl.float32
    acc = tl.zeros([BN, BM], kind)
    item = tl.arange(0, WK)
    wide = tl.arange(0, BK)
    ahead: tl.constexpr = SCALING == "mainloop" and X_SCALED
    if ahead:
        if W_ROWS % BN == 0:  # one scale for all of the tile's rows
            ws_from = w_scale_ptr + (tile_n * BN // W_ROWS).to(tl.int64) * w_scale_n
        else:
            ws_from = w_scale_ptr + (n_in // W_ROWS) * w_scale_n
        xs_from = x_scale_ptr + m.to(tl.int64) * x_scale_m
        begin = tl.minimum(first, steps - 1)  # a part may have no steps
        ws = tl.load(ws_from + begin * w_scale_k)
        xs = tl.load(xs_from + begin.to(tl.int64) * x_scale_k, m < M, 0.0)
    for step in range(first, last):
        k = step * BK
        w_from = w_ptr + n_in[:, None] * w_stride + (step * WK + item)[None, :]
        x_from = x_ptr + m_in[:, None] * x_stride + (k + wide)[None, :]
        if EVEN:
            w = tl.load(w_from)
        else:
            edge = K // 4 if nibbles else K
            w = tl.load(w_from, (step * WK + item < edge)[None, :], 0.0)
        if EVEN and FULL:
            x = tl.load(x_from)
        elif EVEN:  # rows that are not there are not read as another, which all would ask for
            x = tl.load(x_from, (m < M)[:, None], 0.0)
        else:
            x = tl.load(x_from, (m < M)[:, None] & (k + wide < K)[None, :], 0.0)
        if ahead:  # the next step's scales: they take as long to come as a step
            after = tl.minimum(step + 1, steps - 1)
            next_ws = tl.load(ws_from + after * w_scale_k)
            next_xs = tl.load(xs_from + after.to(tl.int64) * x_scale_k, m < M, 0.0)
        elif SCALING == "mainloop":  # asked for here, needed after the multiplication
            ws = tl.load(w_scale_ptr + (n_in // W_ROWS) * w_scale_n + (k // GROUP) * w_scale_k)
        if SCALING == "operand" or SCALING == "group":
            group: tl.constexpr = GROUP // 4 if nibbles else GROUP
            block = step * (BK // GROUP) + tl.arange(0, BK // GROUP)
            s_from = w_scale_ptr + n_in[:, None] * w_scale_n + block[None, :]
            if EVEN:
                s = tl.load(s_from)
            else:
                s = tl.load(s_from, (block * GROUP < K)[None, :], 0.0)
            z = s
            if SCALING == "group":
                if ZERO:
                    z_from = tensor_scale_ptr + n_in[:, None] * w_scale_n + block[None, :]
                    z = tl.load(z_from, (block * GROUP < K)[None, :], 0).to(tl.float32)
                    z = expand_blocks(z, BN, BK // GROUP, group)
            elif GROUP == 16:
                s = (s.to(tl.float32) * E4M3_SCALE_BIAS).to(tl.bfloat16)
            else:
                s = e8m0_to_bfloat16(s)
            s = expand_blocks(s, BN, BK // GROUP, group)
        if nibbles:
            x0, x1, x2, x3 = deinterleave_by_4(x, BM, BK)
            if SCALING == "group":
                w0 = dequantize_int4_scaled(w, s, z, 0, DEQUANT, ZERO, x.dtype, PACKED)
                w1 = dequantize_int4_scaled(w, s, z, 1, DEQUANT, ZERO, x.dtype, PACKED)
                w2 = dequantize_int4_scaled(w, s, z, 2, DEQUANT, ZERO, x.dtype, PACKED)
                w3 = dequantize_int4_scaled(w, s, z, 3, DEQUANT, ZERO, x.dtype, PACKED)
            elif DEQUANT == "e2m1":
                w0 = dequantize_e2m1(w, s, 0, GROUP != 16, PACKED)
                w1 = dequantize_e2m1(w, s, 1, GROUP != 16, PACKED)
                w2 = dequantize_e2m1(w, s, 2, GROUP != 16, PACKED)
                w3 = dequantize_e2m1(w, s, 3, GROUP != 16, PACKED)
            elif ZERO:
                z = tl.load(tensor_scale_ptr + n_in * w_scale_n + (k // GROUP) * w_scale_k)
                z = z.to(tl.float32)[:, None]
                w0, w1 = dequantize_int4_zero_point(w, z, 0, PACKED), dequantize_int4_zero_point(w, z, 1, PACKED)
                w2, w3 = dequantize_int4_zero_point(w, z, 2, PACKED), dequantize_int4_zero_point(w, z, 3, PACKED)
            else:
                w0 = dequantize_int4(w, 0, PACKED)
                w1 = dequantize_int4(w, 1, PACKED)
                w2 = dequantize_int4(w, 2, PACKED)
                w3 = dequantize_int4(w, 3, PACKED)
            sums = dot_nt(w0, x0, tl.zeros([BN, BM], kind) if SCALING == "mainloop" else acc, PACKED)
            sums = dot_nt(w1, x1, sums, PACKED)
            sums = dot_nt(w2, x2, sums, PACKED)
            sums = dot_nt(w3, x3, sums, PACKED)
        else:
            if SCALING == "operand":
                w = multiply_bfloat16(w, s)
            elif SCALING == "group":
                w = scale_and_round(w, s, s, DEQUANT, ZERO, x.dtype)
            elif DEQUANT == "cast":
                w = cast_8bit(w, x.dtype, PACKED)
            sums = dot_nt(w, x, tl.zeros([BN, BM], kind) if SCALING == "mainloop" else acc, PACKED)
        if SCALING == "mainloop":
            if ahead and W_ROWS % BN == 0:
                acc += sums * (ws * xs)[None, :]
            elif ahead:
                acc += sums * (ws[:, None] * xs[None, :])
            else:
                acc += sums * ws[:, None]
            if ahead:
                ws, xs = next_ws, next_xs
        else:
            acc = sums
    finished = True
    if SPLIT:
        tiles = tl.num_programs(0)
        place = tl.arange(0, BN)[:, None] * BM + tl.arange(0, BM)[None, :]
        tl.store(partial_ptr + (part * tiles + tile).to(tl.int64) * (BN * BM) + place, acc)
        tl.debug_barrier()
        finished = tl.atomic_add(count_ptr + tile, 1, sem="acq_rel") == split - 1
        if finished:
            acc = tl.zeros([BN, BM], kind)
            for other in range(split):
                acc += tl.load(
                    partial_ptr + (other * tiles + tile).to(tl.int64) * (BN * BM) + place,
                    cache_modifier=".cg",
                )
            tl.store(count_ptr + tile, 0)
    if finished:
        out = acc.to(tl.float32)
        if SCALING == "epilogue":
            out *= tl.load(w_scale_ptr + n_in * w_scale_n)[:, None]
            if X_SCALED:
                out *= tl.load(x_scale_ptr + m_in * x_scale_m)[None, :]
        if FACTOR:
            out *= tl.load(x_scale_ptr)
        if TENSOR_SCALE:
            out *= tl.load(tensor_scale_ptr) * E4M3_SCALE_UNBIAS
        if BIAS:
            bias = tl.load(bias_ptr + n_in).to(tl.float32)[:, None]
            out += tl.where(live, bias, 0.0)
        into = out_ptr + m.to(tl.int64)[:, None] * out_stride + n[None, :]
        keep = (m < M)[:, None] & (n < N)[None, :]
        tl.store(into, tl.trans(out).to(out_ptr.dtype.element_ty), keep)
