# mypy: allow-untyped-defs, allow-incomplete-defs
"""GEMM with a quantized weight: x @ weight.T + bias, for few or many rows of x.

    out[m, n] = (sum over k of x[m, k] * x_scale * w[n, k] * w_scale) + bias[n]

In: x [M, K] in 16-bit floats, or in codes of 8 bits with scales; a weight [N, K] in any format with
separate scales. Out: [M, N], summed in float32 (int8 rows: int32) and rounded once.

The kernel computes out.T: rows of the weight are the rows of the tensor cores' tile. They number at
least 64 where M may be 1, and dequantized weights go from registers straight into the MMA. Two
compile-time options say how the weight is dequantized and where its scales are applied:

    DEQUANT                          SCALING
    none   8 bits times 8 bits       epilogue  per row or tensor: the accumulator is scaled
    cast   8 bits to 16              mainloop  every 128 (or group) of K: a step's sum is scaled
    e2m1   nibbles to bfloat16       operand   16 or 32 columns: the weight is scaled, exactly
    int4   nibbles to bfloat16       group     16 or 32 columns of integers: the weight is scaled
    uint4  the same, with minima               and rounded, as by `dequantize_weight`

Few rows leave too few tiles for all multiprocessors. Then K is split among `split_k` programs. The
last program to finish a tile adds the partial sums in order: one launch, and deterministic.

In deterministic mode partial sums have a fixed number of columns (PART_STEPS), whatever the rows are.
One program that has all of K adds the same partial sums in the same order in its registers, so
the number of programs does not change a bit of the result.
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
from fulgurite.kernels.common.triton_launch import cached_launch
from fulgurite.kernels.common.triton_pdl import launch_dependents, wait_for_dependencies


@triton.jit
def dot_nt(w, x, acc, NATIVE: tl.constexpr):
    """acc + w @ x.T. Sums of float8 products go to float32 after every 128 of them.

    The interpreter multiplies bfloat16 as integers, so operands are upcast there.
    """
    if acc.dtype == tl.int32:
        return tl.dot(w, tl.trans(x), acc, out_dtype=tl.int32)
    elif NATIVE:
        return tl.dot(w, tl.trans(x), acc, max_num_imprecise_acc=128)
    else:
        return tl.dot(w.to(tl.float32), tl.trans(x.to(tl.float32)), acc, input_precision="ieee")


@triton.jit
def find_expert_tile(
    offsets_ptr, experts, tile, rows, BLOCK_M: tl.constexpr, EXPERTS_POW2: tl.constexpr
):
    """The expert of a tile of rows, the tile's first row, and the end of the expert's rows.

    Rows are sorted by expert, and every expert starts a new tile. Rows without an expert come last,
    as one more group. Offsets are read on the device, so the host never waits for them.
    """
    group = tl.arange(0, EXPERTS_POW2)
    end = tl.load(offsets_ptr + group, group < experts, rows)
    begin = tl.load(offsets_ptr + group - 1, (group > 0) & (group <= experts), 0)
    begin = tl.where(group > experts, rows, begin)
    tiles = tl.cdiv(end - begin, BLOCK_M)
    first_tile = tl.cumsum(tiles, 0) - tiles
    is_mine = (first_tile <= tile) & (tile < first_tile + tiles)
    expert = tl.sum(tl.where(is_mine, group, 0), 0)
    found = tl.sum(is_mine.to(tl.int32), 0) > 0
    start = tl.sum(tl.where(is_mine, begin + (tile - first_tile) * BLOCK_M, 0), 0)
    stop = tl.sum(tl.where(is_mine, end, 0), 0)
    return tl.where(found, expert, experts), tl.where(found, start, rows), tl.where(found, stop, 0)


@triton.jit
def sum_products(
    first, last, steps, x_ptr, w_ptr, x_scale_ptr, w_scale_ptr, tensor_scale_ptr,
    tile_n, n_in, m, m_in, M, K, x_stride, w_stride, x_scale_m, x_scale_k, w_scale_n, w_scale_k,
    DEQUANT: tl.constexpr, SCALING: tl.constexpr, GROUP_SIZE: tl.constexpr,
    SCALE_ROWS: tl.constexpr, X_SCALED: tl.constexpr, ZERO_POINTS: tl.constexpr,
    EVEN_K: tl.constexpr, EVEN_M: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """The sum over steps first .. last of K: [BLOCK_N, BLOCK_M]."""
    is_4bit: tl.constexpr = DEQUANT == "e2m1" or DEQUANT == "int4" or DEQUANT == "uint4"
    WK: tl.constexpr = BLOCK_K // 4 if is_4bit else BLOCK_K  # words of four codes, or codes
    is_int8: tl.constexpr = w_ptr.dtype.element_ty == tl.int8 and DEQUANT == "none"
    acc_dtype: tl.constexpr = tl.int32 if is_int8 else tl.float32
    acc = tl.zeros([BLOCK_N, BLOCK_M], acc_dtype)
    item = tl.arange(0, WK)
    wide = tl.arange(0, BLOCK_K)
    prefetch_scales: tl.constexpr = SCALING == "mainloop" and X_SCALED
    if prefetch_scales:
        if SCALE_ROWS % BLOCK_N == 0:  # one scale for all of the tile's rows
            ws_from = w_scale_ptr + (tile_n * BLOCK_N // SCALE_ROWS).to(tl.int64) * w_scale_n
        else:
            ws_from = w_scale_ptr + (n_in // SCALE_ROWS) * w_scale_n
        xs_from = x_scale_ptr + m.to(tl.int64) * x_scale_m
        begin = tl.minimum(first, steps - 1)  # a split may have no steps
        ws = tl.load(ws_from + begin * w_scale_k)
        xs = tl.load(xs_from + begin.to(tl.int64) * x_scale_k, m < M, 0.0)
    for step in range(first, last):
        k = step * BLOCK_K
        w_from = w_ptr + n_in[:, None] * w_stride + (step * WK + item)[None, :]
        x_from = x_ptr + m_in[:, None] * x_stride + (k + wide)[None, :]
        if EVEN_K:
            w = tl.load(w_from)
        else:
            edge = K // 4 if is_4bit else K
            w = tl.load(w_from, (step * WK + item < edge)[None, :], 0.0)
        if EVEN_K and EVEN_M:
            x = tl.load(x_from)
        elif EVEN_K:  # rows past M are masked: reading one row in their place would be a hot spot
            x = tl.load(x_from, (m < M)[:, None], 0.0)
        else:
            x = tl.load(x_from, (m < M)[:, None] & (k + wide < K)[None, :], 0.0)
        if prefetch_scales:  # scales of the next step: their latency is that of a step
            after = tl.minimum(step + 1, steps - 1)
            next_ws = tl.load(ws_from + after * w_scale_k)
            next_xs = tl.load(xs_from + after.to(tl.int64) * x_scale_k, m < M, 0.0)
        elif SCALING == "mainloop":  # loaded here, used after the MMA
            ws_at = (n_in // SCALE_ROWS) * w_scale_n + (k // GROUP_SIZE) * w_scale_k
            ws = tl.load(w_scale_ptr + ws_at)
        if SCALING == "operand" or SCALING == "group":
            group: tl.constexpr = GROUP_SIZE // 4 if is_4bit else GROUP_SIZE
            block = step * (BLOCK_K // GROUP_SIZE) + tl.arange(0, BLOCK_K // GROUP_SIZE)
            s_from = w_scale_ptr + n_in[:, None] * w_scale_n + block[None, :]
            if EVEN_K:
                s = tl.load(s_from)
            else:
                s = tl.load(s_from, (block * GROUP_SIZE < K)[None, :], 0.0)
            z = s
            if SCALING == "group":
                if ZERO_POINTS:
                    z_from = tensor_scale_ptr + n_in[:, None] * w_scale_n + block[None, :]
                    z = tl.load(z_from, (block * GROUP_SIZE < K)[None, :], 0).to(tl.float32)
                    z = expand_blocks(z, BLOCK_N, BLOCK_K // GROUP_SIZE, group)
            elif GROUP_SIZE == 16:
                s = (s.to(tl.float32) * E4M3_SCALE_BIAS).to(tl.bfloat16)
            else:
                s = e8m0_to_bfloat16(s)
            s = expand_blocks(s, BLOCK_N, BLOCK_K // GROUP_SIZE, group)
        if is_4bit:
            x0, x1, x2, x3 = deinterleave_by_4(x, BLOCK_M, BLOCK_K)
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
                z = tl.load(tensor_scale_ptr + n_in * w_scale_n + (k // GROUP_SIZE) * w_scale_k)
                z = z.to(tl.float32)[:, None]
                w0 = dequantize_int4_zero_point(w, z, 0, NATIVE)
                w1 = dequantize_int4_zero_point(w, z, 1, NATIVE)
                w2 = dequantize_int4_zero_point(w, z, 2, NATIVE)
                w3 = dequantize_int4_zero_point(w, z, 3, NATIVE)
            else:
                w0 = dequantize_int4(w, 0, NATIVE)
                w1 = dequantize_int4(w, 1, NATIVE)
                w2 = dequantize_int4(w, 2, NATIVE)
                w3 = dequantize_int4(w, 3, NATIVE)
            sums = tl.zeros([BLOCK_N, BLOCK_M], acc_dtype) if SCALING == "mainloop" else acc
            sums = dot_nt(w0, x0, sums, NATIVE)
            sums = dot_nt(w1, x1, sums, NATIVE)
            sums = dot_nt(w2, x2, sums, NATIVE)
            sums = dot_nt(w3, x3, sums, NATIVE)
        else:
            if SCALING == "operand":
                w = multiply_bfloat16(w, s)
            elif SCALING == "group":
                w = scale_and_round(w, s, s, DEQUANT, ZERO_POINTS, x.dtype)
            elif DEQUANT == "cast":
                w = cast_8bit(w, x.dtype, NATIVE)
            sums = tl.zeros([BLOCK_N, BLOCK_M], acc_dtype) if SCALING == "mainloop" else acc
            sums = dot_nt(w, x, sums, NATIVE)
        if SCALING == "mainloop":
            if prefetch_scales and SCALE_ROWS % BLOCK_N == 0:
                acc += sums * (ws * xs)[None, :]
            elif prefetch_scales:
                acc += sums * (ws[:, None] * xs[None, :])
            else:
                acc += sums * ws[:, None]
            if prefetch_scales:
                ws, xs = next_ws, next_xs
        else:
            acc = sums
    return acc


@cached_launch(do_not_specialize=["M", "split_k", "x_scale_k", "w_scale_k", "experts", "tiles_m"])
def gemm_kernel(
    x_ptr, w_ptr, out_ptr, x_scale_ptr, w_scale_ptr, tensor_scale_ptr, bias_ptr,
    partial_ptr, counter_ptr, offsets_ptr,
    M, N, K, split_k, x_stride, w_stride, out_stride, x_scale_m, x_scale_k, w_scale_n, w_scale_k,
    experts, w_expert, w_scale_expert, tiles_m,
    DEQUANT: tl.constexpr, SCALING: tl.constexpr, GROUP_SIZE: tl.constexpr,
    SCALE_ROWS: tl.constexpr, X_SCALED: tl.constexpr, X_FACTOR: tl.constexpr,
    TENSOR_SCALE: tl.constexpr, ZERO_POINTS: tl.constexpr, BIAS: tl.constexpr,
    EVEN_K: tl.constexpr, EVEN_M: tl.constexpr, EXPERTS_POW2: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr,
    PART_STEPS: tl.constexpr, GROUP_N: tl.constexpr, NATIVE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One tile of the output, or one of `split_k` partial sums of it.

    tensor_scale_ptr   the tensor scale of NVFP4, or zero points or minima of integers
    EXPERTS_POW2       0: one weight; otherwise a stack, and a power of two above the experts
    EVEN_K, EVEN_M     blocks divide K, M
    PART_STEPS         steps of a partial sum; 0: those of a program
    """
    if PDL:
        wait_for_dependencies()
    tile = tl.program_id(0)
    split = tl.program_id(1)
    tiles_n = tl.cdiv(N, BLOCK_N)
    # L2 swizzle: GROUP_N tiles of N share rows of x before the next rows
    band = tile // (GROUP_N * tiles_m)
    width = tl.minimum(tiles_n - band * GROUP_N, GROUP_N)
    within = tile - band * GROUP_N * tiles_m
    tile_n = band * GROUP_N + within % width
    tile_m = within // width
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    if EXPERTS_POW2 > 0:
        expert, start, M = find_expert_tile(offsets_ptr, experts, tile_m, M, BLOCK_M, EXPERTS_POW2)
        m = start + tl.arange(0, BLOCK_M)
        live = expert < experts
        expert = tl.minimum(expert, experts - 1).to(tl.int64)
        w_ptr += expert * w_expert
        w_scale_ptr += expert * w_scale_expert
        tensor_scale_ptr += expert * (w_scale_expert if ZERO_POINTS else 1)
        bias_ptr += expert * N
    else:
        m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
        live = True
    n_in = tl.where(n < N, n, 0).to(tl.int64)
    m_in = tl.where(m < M, m, 0).to(tl.int64)
    SIZE: tl.constexpr = BLOCK_N * BLOCK_M
    tiles = tl.num_programs(0)
    at = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
    partial_ptr += tile.to(tl.int64) * SIZE + at
    steps = tl.cdiv(K, BLOCK_K)
    has_rows = True
    if EXPERTS_POW2 > 0:
        has_rows = live & (start < M)  # rows without an expert are zero
    if PART_STEPS == 0:  # a program has one partial sum
        parts = split_k
        steps_per_split = tl.cdiv(steps, split_k)
        first = split * steps_per_split
        last = tl.minimum(first + steps_per_split, steps)
        if EXPERTS_POW2 > 0:
            last = tl.where(has_rows, last, first)
        acc = sum_products(
            first, last, steps, x_ptr, w_ptr, x_scale_ptr, w_scale_ptr, tensor_scale_ptr, tile_n,
            n_in, m, m_in, M, K, x_stride, w_stride, x_scale_m, x_scale_k, w_scale_n, w_scale_k,
            DEQUANT, SCALING, GROUP_SIZE, SCALE_ROWS, X_SCALED, ZERO_POINTS, EVEN_K, EVEN_M,
            BLOCK_M, BLOCK_N, BLOCK_K, NATIVE,
        )  # fmt: skip
        if SPLIT_K:
            tl.store(partial_ptr + (split * tiles).to(tl.int64) * SIZE, acc)
    else:  # partial sums of PART_STEPS steps, however many programs share them
        parts = tl.cdiv(steps, PART_STEPS)
        parts_per_program = tl.cdiv(parts, split_k)
        first = split * parts_per_program
        last = tl.minimum(first + parts_per_program, parts)
        if EXPERTS_POW2 > 0:
            last = tl.where(has_rows, last, first)
            parts = tl.where(has_rows, parts, 0)
        is_int8: tl.constexpr = w_ptr.dtype.element_ty == tl.int8 and DEQUANT == "none"
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.int32 if is_int8 else tl.float32)
        for part in range(first, last):
            sums = sum_products(
                part * PART_STEPS, tl.minimum((part + 1) * PART_STEPS, steps), steps, x_ptr, w_ptr,
                x_scale_ptr, w_scale_ptr, tensor_scale_ptr, tile_n, n_in, m, m_in, M, K, x_stride,
                w_stride, x_scale_m, x_scale_k, w_scale_n, w_scale_k, DEQUANT, SCALING, GROUP_SIZE,
                SCALE_ROWS, X_SCALED, ZERO_POINTS, EVEN_K, EVEN_M, BLOCK_M, BLOCK_N, BLOCK_K, NATIVE,
            )  # fmt: skip
            if SPLIT_K:
                tl.store(partial_ptr + (part * tiles).to(tl.int64) * SIZE, sums)
            else:
                acc += sums
    if PDL:  # only now: programs that wait would take the place of those that multiply
        launch_dependents()
    is_last = True
    if SPLIT_K:
        tl.debug_barrier()
        is_last = tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel") == split_k - 1
        if is_last:
            acc = tl.zeros_like(acc)
            for other in range(parts):
                from_ptr = partial_ptr + (other * tiles).to(tl.int64) * SIZE
                acc += tl.load(from_ptr, cache_modifier=".cg")
            tl.store(counter_ptr + tile, 0)
    if is_last:
        out = acc.to(tl.float32)
        if SCALING == "epilogue":
            out *= tl.load(w_scale_ptr + n_in * w_scale_n)[:, None]
            if X_SCALED:
                out *= tl.load(x_scale_ptr + m_in * x_scale_m)[None, :]
        if X_FACTOR:
            out *= tl.load(x_scale_ptr)
        if TENSOR_SCALE:
            out *= tl.load(tensor_scale_ptr) * E4M3_SCALE_UNBIAS
        if BIAS:
            bias = tl.load(bias_ptr + n_in).to(tl.float32)[:, None]
            out += tl.where(live, bias, 0.0)
        into = out_ptr + m.to(tl.int64)[:, None] * out_stride + n[None, :]
        keep = (m < M)[:, None] & (n < N)[None, :]
        tl.store(into, tl.trans(out).to(out_ptr.dtype.element_ty), keep)
