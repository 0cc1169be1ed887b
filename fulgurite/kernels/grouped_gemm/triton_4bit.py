# mypy: allow-untyped-defs, allow-incomplete-defs
"""Grouped matmul with weights of 4 bits and more than a few rows of each expert on a GPU.

    y[s] = gate(factor[s] * (x[row[s]] @ weight[e].T) + bias[e])       rows s of expert e

In: x in bfloat16 and nibbles [E, N, K / 4] in words of four, with scales. Out: [S, N], or [S, N / 2]
with a gate.

A word's nibbles are decoded one after the other, each into a tile of its own (`decode.py`), and tile j
meets columns j, 4 + j, 8 + j, … of x. A kernel before this one gathers the rows and puts those columns
next to each other, a step of K at a time, so that the copy unit brings x to where the tensor cores read
it, and no thread touches it. Rows of the weight are the rows of the tensor cores' tile: what was decoded
goes into them from registers, once for all rows of x in the tile, while the step before is multiplied.
With a gate, eight rows of gate and eight of up take turns in the tile, which puts both halves of a number
into one thread.
"""

from __future__ import annotations

from torch import Tensor

from fulgurite.kernels.common.triton_dequantize import (
    E4M3_SCALE_BIAS,
    MAX_BIASED_E8M0,
    dequantize_e2m1,
    dequantize_int4,
    dequantize_int4_scaled,
    dequantize_int4_zero_point,
    e8m0_to_bfloat16,
    e8m0_to_biased_bfloat16,
    expand_blocks,
)
from fulgurite.kernels.common.triton_epilogue import apply_gate, apply_scales_and_bias
from fulgurite.kernels.common.triton_import import INTERPRETED, TensorDescriptor, tl, triton
from fulgurite.kernels.common.triton_operands import DequantScheme, QuantizedOperand
from fulgurite.kernels.gemm.triton_gemm import dot_nt
from fulgurite.kernels.grouped_gemm.triton_tile_scheduler import (
    build_tile_map,
    expert_major_tile,
    load_tile_info,
    or_placeholder,
)
from fulgurite.kernels.tuning.heuristics import heuristics_for

NATIVE = not INTERPRETED
INTERLEAVE = tl.constexpr(8)  # rows of gate, then as many of up


@triton.jit
def permute_x_kernel(
    x_ptr, rows_ptr, out_ptr, S, x_stride, K,
    GATHER: tl.constexpr, ROWS: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out[s, BK step + BK / 4 j + i] = x[row[s], BK step + 4 i + j]."""
    s = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = s < S
    row = tl.load(rows_ptr + s, inside, 0) if GATHER else tl.where(inside, s, 0)
    k = tl.program_id(1) * BK + tl.arange(0, BK)
    x = tl.load(x_ptr + row.to(tl.int64)[:, None] * x_stride + k[None, :])
    turned = tl.permute(tl.reshape(x, [ROWS, BK // 4, 4]), (0, 2, 1))
    into = out_ptr + s.to(tl.int64)[:, None] * K + k[None, :]
    tl.store(into, tl.reshape(turned, [ROWS, BK]), inside[:, None])


@triton.jit
def prepare_scale(s, GROUP: tl.constexpr, ANY: tl.constexpr):
    """Scales of 16 or 32 columns as bfloat16, of the kind that `dequantize_e2m1` takes."""
    if GROUP == 16:
        return (s.to(tl.float32) * E4M3_SCALE_BIAS).to(tl.bfloat16)
    elif ANY:
        return e8m0_to_bfloat16(s)
    else:
        return e8m0_to_biased_bfloat16(s)


@triton.jit
def dequantize_nibble(
    w, s, z, NIBBLE: tl.constexpr, DEQUANT: tl.constexpr, SCALING: tl.constexpr, ZERO: tl.constexpr,
    ANY: tl.constexpr, type: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """One nibble of each word; scaled and rounded where its group is shorter than a step."""
    if SCALING == "group":
        return dequantize_int4_scaled(w, s, z, NIBBLE, DEQUANT, ZERO, type, NATIVE)
    elif DEQUANT == "e2m1":
        return dequantize_e2m1(w, s, NIBBLE, ANY, NATIVE)
    elif ZERO:
        return dequantize_int4_zero_point(w, z, NIBBLE, NATIVE)
    else:
        return dequantize_int4(w, NIBBLE, NATIVE)


@triton.jit
def concat_columns(w0, w1, w2, w3):
    """Four tiles as one, in which they are columns after columns: registers just change their names."""
    BN: tl.constexpr = w0.shape[0]
    WIDE: tl.constexpr = w0.shape[1]
    joined = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # nibble 2 i + j at [..., i, j]
    return tl.reshape(tl.permute(joined, (0, 2, 3, 1)), [BN, 4 * WIDE])


@triton.jit
def accumulate_k(
    x, words, s_ptr, z_ptr, at_scale, w_scale_k, start, octet, matrix, steps,
    DEQUANT: tl.constexpr, SCALING: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr,
    ANY: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    STAGES: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """BN rows of the weight by BM rows of x.

    Also returned: the largest e8m0 scale, where not all of them can be lifted (`MAX_BIASED_E8M0`);
    with one above that the sums are wrong, and to be taken again with ANY.
    """
    BLOCKS: tl.constexpr = BK // GROUP
    limited: tl.constexpr = DEQUANT == "e2m1" and GROUP == 32 and not ANY
    acc = tl.zeros([BN, BM], tl.float32)
    top = tl.zeros([BN, BLOCKS], tl.int32) if limited else 0
    for step in tl.range(0, steps, num_stages=STAGES):
        w = words.load([octet, matrix, 0, step * (BK // 4)]).reshape(BN, BK // 4)
        s, z, sums = 0, 0, acc
        if SCALING == "operand":
            s = tl.load(s_ptr + at_scale[:, None] + step * BLOCKS + tl.arange(0, BLOCKS)[None, :])
            if limited:
                top = tl.maximum(top, s.to(tl.int32))
            s = expand_blocks(prepare_scale(s, GROUP, ANY), BN, BLOCKS, GROUP // 4)
        elif SCALING == "group":
            place = at_scale[:, None] + step * BLOCKS + tl.arange(0, BLOCKS)[None, :]
            s = expand_blocks(tl.load(s_ptr + place), BN, BLOCKS, GROUP // 4)
            if ZERO:
                z = expand_blocks(tl.load(z_ptr + place).to(tl.float32), BN, BLOCKS, GROUP // 4)
        else:
            scale = tl.load(s_ptr + at_scale + step * w_scale_k).to(tl.float32)
            if ZERO:
                z = tl.load(z_ptr + at_scale + step * w_scale_k).to(tl.float32)[:, None]
            sums = tl.zeros([BN, BM], tl.float32)
        w = concat_columns(
            dequantize_nibble(w, s, z, 0, DEQUANT, SCALING, ZERO, ANY, x.dtype, NATIVE),
            dequantize_nibble(w, s, z, 1, DEQUANT, SCALING, ZERO, ANY, x.dtype, NATIVE),
            dequantize_nibble(w, s, z, 2, DEQUANT, SCALING, ZERO, ANY, x.dtype, NATIVE),
            dequantize_nibble(w, s, z, 3, DEQUANT, SCALING, ZERO, ANY, x.dtype, NATIVE),
        )
        sums = dot_nt(w, x.load([start, step * BK]), sums, NATIVE)
        acc = acc + sums * scale[:, None] if SCALING == "mainloop" else sums
    return acc, tl.max(tl.max(top, 1), 0) if limited else 0


@triton.jit(do_not_specialize=["experts", "w_scale_k"])
def grouped_gemm_4bit_kernel(
    x, words, map_ptr, s_ptr, z_ptr, factors_ptr, bias_ptr, out_ptr,
    N, K, experts, s_expert, w_scale_n, w_scale_k, z_expert, bias_expert, out_stride, alpha, limit,
    DEQUANT: tl.constexpr, SCALING: tl.constexpr, GROUP: tl.constexpr, TENSOR_SCALE: tl.constexpr,
    ZERO: tl.constexpr, FACTORS: tl.constexpr, BIAS: tl.constexpr, GATE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """BN rows of the weight by BM rows of x; N columns of the result."""
    halves: tl.constexpr = 2 if GATE > 0 else 1
    columns: tl.constexpr = BN // halves
    tile_m, tile_n = expert_major_tile(map_ptr, tl.program_id(0), tl.cdiv(N, columns))
    expert, start, end = load_tile_info(map_ptr, tile_m)
    live = (expert < experts) & (start < end)
    expert = tl.minimum(expert, experts - 1)
    s_ptr += expert.to(tl.int64) * s_expert
    z_ptr += expert.to(tl.int64) * z_expert
    bias_ptr += expert.to(tl.int64) * bias_expert
    first = tile_n * columns
    r = tl.arange(0, BN)
    n = first + r // (halves * INTERLEAVE) * INTERLEAVE + r % INTERLEAVE
    row = (tl.where(n < N, n, 0) + (r // INTERLEAVE % halves) * N).to(tl.int64)
    steps = tl.where(live, K // BK, 0)  # rows of no expert are zero
    acc, top = accumulate_k(
        x, words, s_ptr, z_ptr, row * w_scale_n, w_scale_k, start, first // INTERLEAVE, expert * halves,
        steps, DEQUANT, SCALING, GROUP, ZERO, False, BM, BN, BK, STAGES, NATIVE,
    )  # fmt: skip
    if DEQUANT == "e2m1" and GROUP == 32:
        if top > MAX_BIASED_E8M0:  # weights of 16 and more take a second, slower turn
            acc, _ = accumulate_k(
                x, words, s_ptr, z_ptr, row * w_scale_n, w_scale_k, start, first // INTERLEAVE,
                expert * halves, steps, DEQUANT, SCALING, GROUP, ZERO, True, BM, BN, BK, 2, NATIVE,
            )  # fmt: skip
    m = start + tl.arange(0, BM)
    inside = m < end
    factor = tl.load(factors_ptr + m, inside, 0.0) if FACTORS else 1.0
    out = apply_scales_and_bias(
        acc, s_ptr, z_ptr, bias_ptr, row, w_scale_n, factor, "none", TENSOR_SCALE, FACTORS, BIAS
    )
    if GATE > 0:
        turns = tl.reshape(out, [BN // (2 * INTERLEAVE), 2, INTERLEAVE, BM])
        left, right = tl.split(tl.permute(turns, (0, 2, 3, 1)))
        out = tl.reshape(apply_gate(left, right, alpha, limit, GATE), [columns, BM])
    out = tl.where(live, out, 0.0)
    column = first + tl.arange(0, columns)
    into = out_ptr + m.to(tl.int64)[:, None] * out_stride + column[None, :]
    keep = inside[:, None] & (column < N)[None, :]
    tl.store(into, tl.trans(out).to(out_ptr.dtype.element_ty), keep)


def try_grouped_gemm_4bit(
    out: Tensor,
    x: Tensor,
    rows: Tensor | None,
    parts: QuantizedOperand,
    weight: DequantScheme,
    tensor_scale: bool,
    factors: Tensor | None,
    ends: Tensor,
    bias: Tensor | None,
    gate: tuple[int, float, float],
) -> bool:
    """Whether `out` has been filled: not with other weights, nor with sizes that blocks don't divide."""
    heuristics = heuristics_for(x.device)
    config = heuristics.grouped_4bit_config(len(out), len(ends), weight, gate[0] > 0)
    if config is None or not _supports_tma(x, parts.data, out.shape[1], config.block_k):
        return False
    x = _permute_x(x, rows, len(out), config.block_k)
    (count, columns), (experts, _, items) = out.shape, parts.data.shape
    halves, scale = 2 if gate[0] else 1, parts.scale
    map, tiles = build_tile_map(ends, count, config.block_m)
    words = TensorDescriptor(  # octets of gate and up take turns
        parts.data,
        [columns // 8, experts * halves, 8, items],
        [8 * items, columns * items, items, 1],
        [config.block_n // (8 * halves), halves, 8, config.block_k // 4],
    )
    block = TensorDescriptor(x, list(x.shape), [x.shape[1], 1], [config.block_m, config.block_k])
    grouped_gemm_4bit_kernel[(tiles * triton.cdiv(columns, config.block_n // halves),)](
        block, words, map, scale, parts.extra_scale, or_placeholder(factors, x), or_placeholder(bias, x), out,
        columns, x.shape[1], experts, scale.stride(0), *parts.strides,
        scale.stride(0) if parts.has_zero_points else 1, 0 if bias is None else bias.stride(0),
        out.stride(0), *gate[1:],
        DEQUANT=weight.dequant, SCALING=weight.scaling, GROUP=weight.group_size,
        TENSOR_SCALE=tensor_scale, ZERO=parts.has_zero_points, FACTORS=factors is not None,
        BIAS=bias is not None, GATE=gate[0], BM=config.block_m, BN=config.block_n, BK=config.block_k,
        STAGES=config.num_stages, NATIVE=NATIVE, num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return True


def _supports_tma(x: Tensor, data: Tensor, columns: int, depth: int) -> bool:
    """Whether the copy unit takes the words: whole octets of rows, K in whole steps."""
    whole = columns % 8 == 0 and x.shape[1] % depth == 0 and x.shape[1] % 32 == 0
    return whole and data.is_contiguous() and data.data_ptr() % 16 == 0


def _permute_x(x: Tensor, rows: Tensor | None, count: int, depth: int) -> Tensor:
    """The rows one after the other, columns of a nibble next to each other."""
    out = x.new_empty(count, x.shape[1])
    permute_x_kernel[(triton.cdiv(count, 16), x.shape[1] // depth)](
        x, or_placeholder(rows, x), out, count, x.stride(0), x.shape[1],
        GATHER=rows is not None, ROWS=16, BK=depth, num_warps=4,
    )  # fmt: skip
    return out
