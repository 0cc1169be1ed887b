# mypy: allow-untyped-defs, allow-incomplete-defs
"""Grouped GEMM with 4-bit weights and more than a few rows of each expert on a GPU.

    y[s] = gate(row_weights[s] * (x[row_indices[s]] @ weight[e].T) + bias[e])       rows s of expert e

In: x in bfloat16 and nibbles [E, N, K / 4] in words of four, with scales. Out: [S, N], or [S, N /
2] with a gate.

The nibbles of a word are dequantized one after the other, each into a tile of its own
(`triton_dequantize.py`), and tile j multiplies columns j, 4 + j, 8 + j, … of x. A kernel before
this one gathers the rows and makes those columns contiguous, a step of K at a time. So x comes by
tensor descriptor (TMA) and no thread touches it.

Rows of the weight are the rows of the tensor cores' tile: dequantized values go from registers into
the MMA, once for all rows of x in the tile, while the step before is multiplied. With a gate, eight
rows of gate and eight of up alternate in the tile, so that both are in one thread.
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
from fulgurite.kernels.common.triton_import import TensorDescriptor, tl, triton
from fulgurite.kernels.common.triton_launch import cached_launch
from fulgurite.kernels.common.triton_numerics import NATIVE
from fulgurite.kernels.common.triton_operands import DequantScheme, QuantizedOperand
from fulgurite.kernels.gemm.triton_gemm import dot_nt
from fulgurite.kernels.grouped_gemm.args import GroupedGemmArgs
from fulgurite.kernels.grouped_gemm.triton_tile_scheduler import (
    build_tile_map,
    expert_major_tile,
    load_tile_info,
    or_placeholder,
)
from fulgurite.kernels.integer_math import cdiv
from fulgurite.kernels.tuning import heuristics_for

INTERLEAVE = tl.constexpr(8)  # rows of gate, then as many of up


@cached_launch
def permute_x_kernel(
    x_ptr, row_indices_ptr, out_ptr, S, x_stride, K,
    GATHER: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out[s, BLOCK_K step + BLOCK_K / 4 j + i] = x[row[s], BLOCK_K step + 4 i + j]."""
    s = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = s < S
    row = tl.load(row_indices_ptr + s, inside, 0) if GATHER else tl.where(inside, s, 0)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    x = tl.load(x_ptr + row.to(tl.int64)[:, None] * x_stride + k[None, :])
    permuted = tl.permute(tl.reshape(x, [BLOCK_M, BLOCK_K // 4, 4]), (0, 2, 1))
    into = out_ptr + s.to(tl.int64)[:, None] * K + k[None, :]
    tl.store(into, tl.reshape(permuted, [BLOCK_M, BLOCK_K]), inside[:, None])


@triton.jit
def prepare_scale(s, GROUP_SIZE: tl.constexpr, FULL_RANGE: tl.constexpr):
    """Scales of 16 or 32 columns as bfloat16, as `dequantize_e2m1` takes them."""
    if GROUP_SIZE == 16:
        return (s.to(tl.float32) * E4M3_SCALE_BIAS).to(tl.bfloat16)
    elif FULL_RANGE:
        return e8m0_to_bfloat16(s)
    else:
        return e8m0_to_biased_bfloat16(s)


@triton.jit
def dequantize_nibble(
    w, s, z, NIBBLE: tl.constexpr, DEQUANT: tl.constexpr, SCALING: tl.constexpr,
    ZERO_POINTS: tl.constexpr, FULL_RANGE: tl.constexpr, type: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """One nibble of each word; scaled and rounded if its group is shorter than a step."""
    if SCALING == "group":
        return dequantize_int4_scaled(w, s, z, NIBBLE, DEQUANT, ZERO_POINTS, type, NATIVE)
    elif DEQUANT == "e2m1":
        return dequantize_e2m1(w, s, NIBBLE, FULL_RANGE, NATIVE)
    elif ZERO_POINTS:
        return dequantize_int4_zero_point(w, z, NIBBLE, NATIVE)
    else:
        return dequantize_int4(w, NIBBLE, NATIVE)


@triton.jit
def concat_columns(w0, w1, w2, w3):
    """[w0, w1, w2, w3] as one tile, by renaming registers only."""
    BLOCK_N: tl.constexpr = w0.shape[0]
    WIDE: tl.constexpr = w0.shape[1]
    nibbles = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # nibble 2 i + j at [..., i, j]
    return tl.reshape(tl.permute(nibbles, (0, 2, 3, 1)), [BLOCK_N, 4 * WIDE])


@triton.jit
def accumulate_k(
    x, words, s_ptr, z_ptr, at_scale, w_scale_k, start, octet, matrix, steps,
    DEQUANT: tl.constexpr, SCALING: tl.constexpr, GROUP_SIZE: tl.constexpr,
    ZERO_POINTS: tl.constexpr, FULL_RANGE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NUM_STAGES: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """BLOCK_N rows of the weight by BLOCK_M rows of x.

    Also returns the largest e8m0 scale, if scales are biased: with one above `MAX_BIASED_E8M0` the
    sums are wrong and must be computed again with FULL_RANGE.
    """
    BLOCKS: tl.constexpr = BLOCK_K // GROUP_SIZE
    WIDTH: tl.constexpr = GROUP_SIZE // 4
    is_biased: tl.constexpr = DEQUANT == "e2m1" and GROUP_SIZE == 32 and not FULL_RANGE
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    max_scale = tl.zeros([BLOCK_N, BLOCKS], tl.int32) if is_biased else 0
    for step in tl.range(0, steps, num_stages=NUM_STAGES):
        w = words.load([octet, matrix, 0, step * (BLOCK_K // 4)]).reshape(BLOCK_N, BLOCK_K // 4)
        s, z, sums = 0, 0, acc
        if SCALING == "operand":
            s = tl.load(s_ptr + at_scale[:, None] + step * BLOCKS + tl.arange(0, BLOCKS)[None, :])
            if is_biased:
                max_scale = tl.maximum(max_scale, s.to(tl.int32))
            s = prepare_scale(s, GROUP_SIZE, FULL_RANGE)
            s = expand_blocks(s, BLOCK_N, BLOCKS, WIDTH)
        elif SCALING == "group":
            at = at_scale[:, None] + step * BLOCKS + tl.arange(0, BLOCKS)[None, :]
            s = expand_blocks(tl.load(s_ptr + at), BLOCK_N, BLOCKS, WIDTH)
            if ZERO_POINTS:
                z = expand_blocks(tl.load(z_ptr + at).to(tl.float32), BLOCK_N, BLOCKS, WIDTH)
        else:
            scale = tl.load(s_ptr + at_scale + step * w_scale_k).to(tl.float32)
            if ZERO_POINTS:
                z = tl.load(z_ptr + at_scale + step * w_scale_k).to(tl.float32)[:, None]
            sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        w = concat_columns(
            dequantize_nibble(
                w, s, z, 0, DEQUANT, SCALING, ZERO_POINTS, FULL_RANGE, x.dtype, NATIVE
            ),
            dequantize_nibble(
                w, s, z, 1, DEQUANT, SCALING, ZERO_POINTS, FULL_RANGE, x.dtype, NATIVE
            ),
            dequantize_nibble(
                w, s, z, 2, DEQUANT, SCALING, ZERO_POINTS, FULL_RANGE, x.dtype, NATIVE
            ),
            dequantize_nibble(
                w, s, z, 3, DEQUANT, SCALING, ZERO_POINTS, FULL_RANGE, x.dtype, NATIVE
            ),
        )
        sums = dot_nt(w, x.load([start, step * BLOCK_K]), sums, NATIVE)
        acc = acc + sums * scale[:, None] if SCALING == "mainloop" else sums
    return acc, tl.max(tl.max(max_scale, 1), 0) if is_biased else 0


@cached_launch(do_not_specialize=["experts", "w_scale_k"])
def grouped_gemm_4bit_kernel(
    x, words, map_ptr, s_ptr, z_ptr, row_weights_ptr, bias_ptr, out_ptr,
    N, K, experts, s_expert, w_scale_n, w_scale_k, z_expert, bias_expert, out_stride, alpha, limit,
    DEQUANT: tl.constexpr, SCALING: tl.constexpr, GROUP_SIZE: tl.constexpr,
    TENSOR_SCALE: tl.constexpr, ZERO_POINTS: tl.constexpr, ROW_WEIGHTS: tl.constexpr, BIAS: tl.constexpr, GATE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NUM_STAGES: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """BLOCK_N rows of the weight by BLOCK_M rows of x; N columns of the output."""
    halves: tl.constexpr = 2 if GATE > 0 else 1
    columns: tl.constexpr = BLOCK_N // halves
    tile_m, tile_n = expert_major_tile(map_ptr, tl.program_id(0), tl.cdiv(N, columns))
    expert, start, end = load_tile_info(map_ptr, tile_m)
    live = (expert < experts) & (start < end)
    expert = tl.minimum(expert, experts - 1)
    s_ptr += expert.to(tl.int64) * s_expert
    z_ptr += expert.to(tl.int64) * z_expert
    bias_ptr += expert.to(tl.int64) * bias_expert
    first = tile_n * columns
    r = tl.arange(0, BLOCK_N)
    n = first + r // (halves * INTERLEAVE) * INTERLEAVE + r % INTERLEAVE
    row = (tl.where(n < N, n, 0) + (r // INTERLEAVE % halves) * N).to(tl.int64)
    steps = tl.where(live, K // BLOCK_K, 0)  # rows without an expert are zero
    acc, max_scale = accumulate_k(
        x, words, s_ptr, z_ptr, row * w_scale_n, w_scale_k, start, first // INTERLEAVE,
        expert * halves, steps, DEQUANT, SCALING, GROUP_SIZE, ZERO_POINTS, False, BLOCK_M, BLOCK_N,
        BLOCK_K, NUM_STAGES, NATIVE,
    )  # fmt: skip
    if DEQUANT == "e2m1" and GROUP_SIZE == 32:
        if max_scale > MAX_BIASED_E8M0:  # a second, slower pass
            acc, _ = accumulate_k(
                x, words, s_ptr, z_ptr, row * w_scale_n, w_scale_k, start, first // INTERLEAVE,
                expert * halves, steps, DEQUANT, SCALING, GROUP_SIZE, ZERO_POINTS, True, BLOCK_M,
                BLOCK_N, BLOCK_K, 2, NATIVE,
            )  # fmt: skip
    m = start + tl.arange(0, BLOCK_M)
    inside = m < end
    row_weight = tl.load(row_weights_ptr + m, inside, 0.0) if ROW_WEIGHTS else 1.0
    out = apply_scales_and_bias(
        acc, s_ptr, z_ptr, bias_ptr, row, w_scale_n, row_weight, "none", TENSOR_SCALE, ROW_WEIGHTS,
        BIAS,
    )  # fmt: skip
    if GATE > 0:
        octets = tl.reshape(out, [BLOCK_N // (2 * INTERLEAVE), 2, INTERLEAVE, BLOCK_M])
        gate, up = tl.split(tl.permute(octets, (0, 2, 3, 1)))
        out = tl.reshape(apply_gate(gate, up, alpha, limit, GATE), [columns, BLOCK_M])
    out = tl.where(live, out, 0.0)
    column = first + tl.arange(0, columns)
    into = out_ptr + m.to(tl.int64)[:, None] * out_stride + column[None, :]
    keep = inside[:, None] & (column < N)[None, :]
    tl.store(into, tl.trans(out).to(out_ptr.dtype.element_ty), keep)


def try_grouped_gemm_4bit(
    out: Tensor, args: GroupedGemmArgs, weight: QuantizedOperand, scheme: DequantScheme
) -> bool:
    """Whether `out` has been filled; False for other weights and for sizes that blocks don't
    divide."""
    gate, bias = args.gate, args.bias
    config = heuristics_for(out.device).grouped_gemm_4bit(
        len(out), args.num_experts, scheme, gate.is_gated
    )
    if config is None or not _supports_tma(args.x, weight.data, out.shape[1], config.block_k):
        return False
    x = _permute_x(args.x, args.row_indices, len(out), config.block_k)
    (rows, columns), (experts, _, items) = out.shape, weight.data.shape
    halves, (_, s_expert, z_expert) = gate.num_inputs, weight.expert_strides
    tile_map, tiles = build_tile_map(args.offsets, rows, config.block_m)
    words = TensorDescriptor(  # octets of gate and up alternate
        weight.data,
        [columns // 8, experts * halves, 8, items],
        [8 * items, columns * items, items, 1],
        [config.block_n // (8 * halves), halves, 8, config.block_k // 4],
    )
    x_block = TensorDescriptor(x, list(x.shape), [x.shape[1], 1], [config.block_m, config.block_k])
    grouped_gemm_4bit_kernel[(tiles * cdiv(columns, config.block_n // halves),)](
        x_block, words, tile_map, weight.scale, weight.aux, or_placeholder(args.row_weights, x),
        or_placeholder(bias, x), out, columns, x.shape[1], experts, s_expert,
        *weight.scale_strides, z_expert, 0 if bias is None else bias.stride(0), out.stride(0),
        gate.alpha, gate.limit,
        DEQUANT=scheme.dequant, SCALING=scheme.scaling, GROUP_SIZE=scheme.group_size,
        TENSOR_SCALE=weight.has_tensor_scale, ZERO_POINTS=weight.has_zero_points,
        ROW_WEIGHTS=args.row_weights is not None, BIAS=bias is not None, GATE=gate.kernel_id,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k,
        NUM_STAGES=config.num_stages, NATIVE=NATIVE, num_warps=config.num_warps,
        num_stages=config.num_stages,
    )  # fmt: skip
    return True


def _supports_tma(x: Tensor, data: Tensor, columns: int, block_k: int) -> bool:
    """Whether a tensor descriptor takes the words: a multiple of 8 rows, K a multiple of
    block_k."""
    divides = columns % 8 == 0 and x.shape[1] % block_k == 0 and x.shape[1] % 32 == 0
    return divides and data.is_contiguous() and data.data_ptr() % 16 == 0


def _permute_x(x: Tensor, row_indices: Tensor | None, rows: int, block_k: int) -> Tensor:
    """The gathered rows, with the columns of each nibble contiguous."""
    out = x.new_empty(rows, x.shape[1])
    config = heuristics_for(x.device).permute_x
    permute_x_kernel[(cdiv(rows, config.block_m), x.shape[1] // block_k)](
        x, or_placeholder(row_indices, x), out, rows, x.stride(0), x.shape[1],
        GATHER=row_indices is not None, BLOCK_M=config.block_m, BLOCK_K=block_k,
        num_warps=config.num_warps,
    )  # fmt: skip
    return out
