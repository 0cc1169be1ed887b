# mypy: allow-untyped-defs, allow-incomplete-defs
"""Grouped matmul in FP8 on a GPU: rows in blocks of 1x128 times weights in tiles of 128x128.

    a[s, n] = sum over blocks b of K of (x[r, b] . w[e, n, b]) x_scale[r, b] w_scale[e, n / 128, b]
    y[s]    = gate(factor[s] * a[s] + bias[e])                   rows s of expert e; r = row[s]

In: rows that are quantized already, an index that gathers them, and weights [E, N, K]. Out: [S, N], or
[S, N / 2] with a gate; in 16 or 32 bits, or in FP8 again with a scale for each 1x128, where the
next matmul takes it so: then what is gated is rounded to 16 bits and to FP8 as by two kernels, but
never lies in memory in between.

The products of a step of 128 have sums of their own, scaled by one number of the weight and one of each
row. A program makes two tiles of columns side by side: gate and up, or neighbours. Rows of x are the
rows of the tensor cores' tile, so there have to be enough of them (`grouped_fp8_config`). Weights come
through a tensor descriptor: the copy unit works out their addresses.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fulgurite.kernels.common.triton_epilogue import apply_gate
from fulgurite.kernels.common.triton_import import TensorDescriptor, tl, triton
from fulgurite.kernels.common.triton_numerics import (
    NATIVE,
    compute_scale,
    finite_amax,
    quantize_8bit,
)
from fulgurite.kernels.elementwise.gated_activation import GATE_IDS, NO_GATE, GatedActivation
from fulgurite.kernels.grouped_gemm.triton_tile_scheduler import (
    build_tile_map,
    load_tile_info,
    or_placeholder,
    swizzle_tile,
)
from fulgurite.kernels.quantize.reference import empty_scale
from fulgurite.kernels.quantize.triton_quantize import quantize
from fulgurite.kernels.tuning.config import LaunchConfig
from fulgurite.kernels.tuning.heuristics import heuristics_for
from fulgurite.quant import Format, QuantTensor, resolve_format

ACTIVATION_FORMAT, WEIGHT_FORMAT = "fp8_e4m3_1x128", "fp8_e4m3_128x128"
SCALE_BLOCK = 128  # columns of a scale
ACROSS = 8  # tiles of columns side by side
E4M3_MAX = tl.constexpr(448.0)  # of e4m3
MAX_REGISTERS = 216  # with more the assembler interleaves both tiles' sums, and then they don't fit
DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit
def dot_nt_fp8(x, w, NATIVE: tl.constexpr):
    """x @ w.T of a step; the interpreter knows no products of 8 bits."""
    if NATIVE:
        return tl.dot(x, tl.trans(w), max_num_imprecise_acc=128)
    else:
        return tl.dot(x.to(tl.float32), tl.trans(w.to(tl.float32)), input_precision="ieee")


@triton.jit
def quantize_and_store(
    out, codes_ptr, scales_ptr, m, first, inside, width, stride, row, step,
    DTYPE: tl.constexpr, BN: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """A block of 128 columns: rounded to 16 bits, then to codes by the largest of each row."""
    out = out.to(DTYPE).to(tl.float32)
    scale = compute_scale(finite_amax(out, 1, False, C), E4M3_MAX)
    inverse = tl.div_rn(1.0, scale)[:, None]
    code = quantize_8bit(out, scale[:, None], inverse, E4M3_MAX, codes_ptr.dtype.element_ty, C)
    n = first + tl.arange(0, BN)
    tl.store(scales_ptr + m * row + (first // BN) * step, scale, inside)
    place = m.to(tl.int64)[:, None] * stride + n[None, :]
    tl.store(codes_ptr + place, code, inside[:, None] & (n < width)[None, :])


@triton.jit
def store_tile(out, out_ptr, m, n, inside, width, stride):
    place = m.to(tl.int64)[:, None] * stride + n[None, :]
    tl.store(
        out_ptr + place, out.to(out_ptr.dtype.element_ty), inside[:, None] & (n < width)[None, :]
    )


@triton.jit
def apply_row_weight_and_bias(
    sums, factor, bias_ptr, n, width, FACTORS: tl.constexpr, BIAS: tl.constexpr
):  # fmt: skip
    """What comes before the gate: the row's factor, the bias."""
    if FACTORS:
        sums *= factor[:, None]
    if BIAS:
        sums += tl.load(bias_ptr + n, n < width, 0.0).to(tl.float32)[None, :]
    return sums


@triton.jit(do_not_specialize=["experts", "tiles_m", "xs_step", "scales_step"])
def grouped_gemm_fp8_kernel(
    x_ptr, rows_ptr, factors_ptr, map_ptr, weights, bias_ptr, out_ptr, xs_ptr, ws_ptr, scales_ptr,
    N, K, experts, tiles_m, x_stride, out_stride, bias_expert, xs_row, xs_step, ws_expert, ws_stride,
    scales_row, scales_step, alpha, limit,
    GATHER: tl.constexpr, FACTORS: tl.constexpr, BIAS: tl.constexpr, GATE: tl.constexpr,
    EVEN: tl.constexpr, QUANTIZED: tl.constexpr, DTYPE: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, ACROSS: tl.constexpr, C: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """N columns of the result: BM rows by two tiles of BN columns, gate and up or neighbours."""
    columns: tl.constexpr = BN if GATE > 0 else 2 * BN
    tile_m, tile_n = swizzle_tile(tl.program_id(0), tiles_m, tl.cdiv(N, columns), ACROSS)
    expert, start, end = load_tile_info(map_ptr, tile_m)
    live = (expert < experts) & (start < end)
    expert = tl.minimum(expert, experts - 1)
    m = start + tl.arange(0, BM)
    inside = m < end
    m_in = tl.where(inside, m, 0)
    row = tl.load(rows_ptr + m_in, inside, 0) if GATHER else m_in
    first = tile_n * columns
    further = N if GATE > 0 else BN  # from a column to that of the second tile
    whole = 2 * N if GATE > 0 else N  # columns of the weight
    w_row = expert * whole + first
    x_from = x_ptr + row.to(tl.int64)[:, None] * x_stride
    xs_from = xs_ptr + row * xs_row
    ws_from = ws_ptr + expert.to(tl.int64) * ws_expert + (first // 128) * ws_stride
    # past the last columns there is no scale, and nothing is stored
    ws_second = tl.where(first + further < whole, further // 128, 0) * ws_stride
    wide = tl.arange(0, BK)
    acc = tl.zeros([BM, BN], tl.float32)
    second = tl.zeros([BM, BN], tl.float32)
    steps = tl.where(live, tl.cdiv(K, BK), 0)  # rows of no expert are zero
    xs, ws, ws2 = tl.load(xs_from), tl.load(ws_from), tl.load(ws_from + ws_second)
    for step in range(0, steps):
        after = tl.minimum(step + 1, steps - 1)  # the next step's scales, asked for early
        next_xs, next_ws = tl.load(xs_from + after * xs_step), tl.load(ws_from + after)
        next_ws2 = tl.load(ws_from + ws_second + after)
        k = step * BK
        if EVEN:
            x = tl.load(x_from + (k + wide)[None, :])
        else:
            x = tl.load(x_from + (k + wide)[None, :], (k + wide < K)[None, :], 0.0)
        sums = dot_nt_fp8(x, weights.load([w_row, k]), NATIVE)
        acc += sums * (xs * ws)[:, None]
        sums = dot_nt_fp8(x, weights.load([w_row + further, k]), NATIVE)
        second += sums * (xs * ws2)[:, None]
        xs, ws, ws2 = next_xs, next_ws, next_ws2
    factor = tl.load(factors_ptr + m_in, inside, 0.0) if FACTORS else 1.0
    n = first + tl.arange(0, BN)
    bias_ptr += expert.to(tl.int64) * bias_expert
    out = apply_row_weight_and_bias(acc, factor, bias_ptr, n, N, FACTORS, BIAS)
    width = N if GATE > 0 else N - BN
    other = apply_row_weight_and_bias(second, factor, bias_ptr + further, n, width, FACTORS, BIAS)
    if GATE > 0:
        out = apply_gate(out, other, alpha, limit, GATE)
    out = tl.where(live, out, 0.0)
    if QUANTIZED:
        quantize_and_store(
            out, out_ptr, scales_ptr, m, first, inside, N, out_stride, scales_row, scales_step,
            DTYPE, BN, C,
        )  # fmt: skip
    else:
        store_tile(out, out_ptr, m, n, inside, N, out_stride)
        if GATE == 0:
            store_tile(tl.where(live, other, 0.0), out_ptr, m, n + BN, inside, N, out_stride)


def select_fp8_config(
    count: int, data: Tensor, format: Format, activations: str, gate: str, packed: bool
) -> LaunchConfig | None:
    """The tile for such weights; None where rows are few, or gate and up share a tile of scales.

    `packed`: whether the result is quantized. A gated one that is not asks for more registers.
    """
    rows = resolve_format(activations)
    if (rows.name, format.name) != (ACTIVATION_FORMAT, WEIGHT_FORMAT):
        return None
    if gate != NO_GATE and (data.shape[1] // 2) % SCALE_BLOCK:
        return None
    if data.shape[2] % 16 or data.data_ptr() % 16 or not data.is_contiguous():
        return None
    return heuristics_for(data.device).grouped_fp8_config(
        count, data.shape[0], gate != NO_GATE, packed
    )


def grouped_gemm_fp8(
    parts: list[Tensor],
    rows: Tensor | None,
    factors: Tensor | None,
    offsets: Tensor,
    data: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    gate: str,
    alpha: float,
    limit: float,
    dtype: torch.dtype,
    config: LaunchConfig,
    result: str | None = None,
) -> list[Tensor]:
    """[y] of rows as [codes, scales]; with `result`, a format like theirs, y is that instead."""
    x, x_scale = parts
    count, size = (x.shape[0] if rows is None else rows.shape[0]), x.shape[1]
    experts, columns = data.shape[0], data.shape[1] // (1 if gate == NO_GATE else 2)
    entry = None if result is None else resolve_format(result)
    out = x.new_empty(count, columns, dtype=dtype if entry is None else entry.data_dtype)
    scales = [] if entry is None else [empty_scale(out, entry, entry.separate_scales[0])]
    if out.numel() == 0:
        return [out, *scales]
    map, tiles = build_tile_map(offsets, count, config.block_m)
    weights = TensorDescriptor(
        data, [experts * data.shape[1], size], [size, 1], [SCALE_BLOCK, SCALE_BLOCK]
    )
    grouped_gemm_fp8_kernel[(tiles * triton.cdiv(columns, config.block_n),)](
        x, or_placeholder(rows, offsets), or_placeholder(factors, x_scale), map, weights,
        or_placeholder(bias, x_scale), out, x_scale, scale, scales[0] if scales else x_scale, columns, size, experts, tiles, x.stride(0),
        out.stride(0), 0 if bias is None else bias.stride(0), *x_scale.stride(), scale.stride(0),
        scale.stride(1), *(scales[0].stride() if scales else (0, 0)), alpha, limit,
        GATHER=rows is not None, FACTORS=factors is not None, BIAS=bias is not None,
        GATE=GATE_IDS[gate], EVEN=size % SCALE_BLOCK == 0, QUANTIZED=result is not None,
        DTYPE=DTYPES[dtype], BM=config.block_m, BN=SCALE_BLOCK, BK=SCALE_BLOCK, ACROSS=ACROSS, C=NATIVE,
        NATIVE=NATIVE, num_warps=config.num_warps, num_stages=config.num_stages,
        maxnreg=MAX_REGISTERS if gate == NO_GATE else None,
    )  # fmt: skip
    return [out, *scales]


def run_experts_fp8(
    x: Tensor,
    rows: Tensor | None,
    factors: Tensor | None,
    offsets: Tensor,
    gate_up: QuantTensor,
    down: QuantTensor,
    biases: tuple[Tensor | None, Tensor | None],
    gate: GatedActivation,
    activations: tuple[str, str],
) -> Any:
    """Both matmuls of a layer, what is between them in FP8 too; NotImplemented without a `select_fp8_config`."""
    first, second = activations
    count = x.shape[0] if rows is None else rows.shape[0]
    config = select_fp8_config(count, gate_up.packed, gate_up.format, first, gate.kind, packed=True)
    down_config = select_fp8_config(count, down.packed, down.format, second, NO_GATE, packed=False)
    if config is None or down_config is None or gate.kind == NO_GATE or x.dtype not in DTYPES:
        return NotImplemented
    parts = quantize(x, first)
    (scale,), (down_scale,) = (list(weight.scales.values()) for weight in (gate_up, down))
    how = (gate.kind, gate.alpha, gate.limit, x.dtype, config, second)
    inner = grouped_gemm_fp8(parts, rows, factors, offsets, gate_up.packed, scale, biases[0], *how)
    plain = (NO_GATE, 0.0, 0.0, x.dtype, down_config)
    given = (inner, None, None, offsets, down.packed, down_scale, biases[1])
    return grouped_gemm_fp8(*given, *plain)[0]
