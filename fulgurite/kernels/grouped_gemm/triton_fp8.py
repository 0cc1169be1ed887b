# mypy: allow-untyped-defs, allow-incomplete-defs
"""Grouped GEMM in FP8 on a GPU: rows in 1x128 blocks times weights in 128x128 blocks.

    a[s, n] = sum over blocks b of K of (x[r, b] . w[e, n, b]) x_scale[r, b] w_scale[e, n / 128, b]
    y[s]    = gate(row_weights[s] * a[s] + bias[e])              rows s of expert e; r = row_indices[s]

In: quantized rows, an index that gathers them, and weights [E, N, K]. Out: [S, N], or [S, N / 2]
with a gate; in 16 or 32 bits, or in FP8 again with a scale for each 1x128, if the next GEMM takes
it so. Then the gated output is rounded to 16 bits and to FP8 as by two kernels, but never goes to
memory in between.

Sums of 128 products are scaled by one scale of the weight and one of each row. A program computes
two tiles of columns side by side: gate and up, or neighbours. Rows of x are the rows of the tensor
cores' tile, so there have to be enough of them (`Heuristics.grouped_gemm_fp8`). Weights come by
tensor descriptor (TMA).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fulgurite.kernels.common.triton_epilogue import apply_gate
from fulgurite.kernels.common.triton_import import TensorDescriptor, tl, triton
from fulgurite.kernels.common.triton_launch import cached_launch
from fulgurite.kernels.common.triton_numerics import (
    NATIVE,
    compute_scale,
    finite_amax,
    quantize_8bit,
)
from fulgurite.kernels.elementwise.gated_activation import UNGATED, GatedActivation
from fulgurite.kernels.grouped_gemm.triton_tile_scheduler import (
    build_tile_map,
    load_tile_info,
    or_placeholder,
    swizzle_tile,
)
from fulgurite.kernels.integer_math import cdiv
from fulgurite.kernels.quantize.scale_layout import empty_scale
from fulgurite.kernels.quantize.triton_quantize import quantize
from fulgurite.kernels.tuning import LaunchConfig, heuristics_for
from fulgurite.quant import Format, QuantTensor, resolve_format

ACTIVATION_FORMAT, WEIGHT_FORMAT = "fp8_e4m3_1x128", "fp8_e4m3_128x128"
SCALE_BLOCK = 128  # columns of a scale
E4M3_MAX = tl.constexpr(448.0)
DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit
def dot_nt_fp8(x, w, NATIVE: tl.constexpr):
    """x @ w.T of a step. The interpreter has no 8-bit products, so it needs float32."""
    if NATIVE:
        return tl.dot(x, tl.trans(w), max_num_imprecise_acc=128)
    else:
        return tl.dot(x.to(tl.float32), tl.trans(w.to(tl.float32)), input_precision="ieee")


@triton.jit
def quantize_and_store(
    out, codes_ptr, scales_ptr, m, first, inside, width, stride, row, step,
    DTYPE: tl.constexpr, BLOCK_N: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """A block of 128 columns: rounded to DTYPE, then quantized with a scale for each row."""
    out = out.to(DTYPE).to(tl.float32)
    scale = compute_scale(finite_amax(out, 1, False, NATIVE), E4M3_MAX)
    inverse = tl.div_rn(1.0, scale)[:, None]
    code = quantize_8bit(out, scale[:, None], inverse, E4M3_MAX, codes_ptr.dtype.element_ty, NATIVE)
    n = first + tl.arange(0, BLOCK_N)
    tl.store(scales_ptr + m * row + (first // BLOCK_N) * step, scale, inside)
    into = codes_ptr + m.to(tl.int64)[:, None] * stride + n[None, :]
    tl.store(into, code, inside[:, None] & (n < width)[None, :])


@triton.jit
def store_tile(out, out_ptr, m, n, inside, width, stride):
    into = out_ptr + m.to(tl.int64)[:, None] * stride + n[None, :]
    tl.store(into, out.to(out_ptr.dtype.element_ty), inside[:, None] & (n < width)[None, :])


@triton.jit
def apply_row_weight_and_bias(
    sums, row_weight, bias_ptr, n, width, ROW_WEIGHTS: tl.constexpr, BIAS: tl.constexpr
):  # fmt: skip
    """Everything in front of the gate: the row's weight, the bias."""
    if ROW_WEIGHTS:
        sums *= row_weight[:, None]
    if BIAS:
        sums += tl.load(bias_ptr + n, n < width, 0.0).to(tl.float32)[None, :]
    return sums


@cached_launch(do_not_specialize=["experts", "tiles_m", "xs_step", "scales_step"])
def grouped_gemm_fp8_kernel(
    x_ptr, row_indices_ptr, row_weights_ptr, map_ptr, weights, bias_ptr, out_ptr, xs_ptr, ws_ptr,
    scales_ptr, N, K, experts, tiles_m, x_stride, out_stride, bias_expert, xs_row, xs_step, ws_expert,
    ws_stride, scales_row, scales_step, alpha, limit,
    GATHER: tl.constexpr, ROW_WEIGHTS: tl.constexpr, BIAS: tl.constexpr, GATE: tl.constexpr,
    EVEN_K: tl.constexpr, QUANTIZED: tl.constexpr, DTYPE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_N: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """BLOCK_M rows by two tiles of BLOCK_N columns of the output: gate and up, or neighbours."""
    columns: tl.constexpr = BLOCK_N if GATE > 0 else 2 * BLOCK_N
    tile_m, tile_n = swizzle_tile(tl.program_id(0), tiles_m, tl.cdiv(N, columns), GROUP_N)
    expert, start, end = load_tile_info(map_ptr, tile_m)
    live = (expert < experts) & (start < end)
    expert = tl.minimum(expert, experts - 1)
    m = start + tl.arange(0, BLOCK_M)
    inside = m < end
    m_in = tl.where(inside, m, 0)
    row = tl.load(row_indices_ptr + m_in, inside, 0) if GATHER else m_in
    first = tile_n * columns
    distance = N if GATE > 0 else BLOCK_N  # from the first tile to the second
    w_rows = 2 * N if GATE > 0 else N
    w_row = expert * w_rows + first
    x_from = x_ptr + row.to(tl.int64)[:, None] * x_stride
    xs_from = xs_ptr + row * xs_row
    ws_from = ws_ptr + expert.to(tl.int64) * ws_expert + (first // 128) * ws_stride
    # past the last columns there is no scale, and nothing is stored
    ws_second = tl.where(first + distance < w_rows, distance // 128, 0) * ws_stride
    wide = tl.arange(0, BLOCK_K)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    second = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    steps = tl.where(live, tl.cdiv(K, BLOCK_K), 0)  # rows without an expert are zero
    xs, ws, ws2 = tl.load(xs_from), tl.load(ws_from), tl.load(ws_from + ws_second)
    for step in range(0, steps):
        after = tl.minimum(step + 1, steps - 1)  # prefetch the scales of the next step
        next_xs, next_ws = tl.load(xs_from + after * xs_step), tl.load(ws_from + after)
        next_ws2 = tl.load(ws_from + ws_second + after)
        k = step * BLOCK_K
        if EVEN_K:
            x = tl.load(x_from + (k + wide)[None, :])
        else:
            x = tl.load(x_from + (k + wide)[None, :], (k + wide < K)[None, :], 0.0)
        sums = dot_nt_fp8(x, weights.load([w_row, k]), NATIVE)
        acc += sums * (xs * ws)[:, None]
        sums = dot_nt_fp8(x, weights.load([w_row + distance, k]), NATIVE)
        second += sums * (xs * ws2)[:, None]
        xs, ws, ws2 = next_xs, next_ws, next_ws2
    row_weight = tl.load(row_weights_ptr + m_in, inside, 0.0) if ROW_WEIGHTS else 1.0
    n = first + tl.arange(0, BLOCK_N)
    bias_ptr += expert.to(tl.int64) * bias_expert
    out = apply_row_weight_and_bias(acc, row_weight, bias_ptr, n, N, ROW_WEIGHTS, BIAS)
    width = N if GATE > 0 else N - BLOCK_N
    up = apply_row_weight_and_bias(
        second, row_weight, bias_ptr + distance, n, width, ROW_WEIGHTS, BIAS
    )
    if GATE > 0:
        out = apply_gate(out, up, alpha, limit, GATE)
    out = tl.where(live, out, 0.0)
    if QUANTIZED:
        quantize_and_store(
            out, out_ptr, scales_ptr, m, first, inside, N, out_stride, scales_row, scales_step,
            DTYPE, BLOCK_N, NATIVE,
        )  # fmt: skip
    else:
        store_tile(out, out_ptr, m, n, inside, N, out_stride)
        if GATE == 0:
            store_tile(tl.where(live, up, 0.0), out_ptr, m, n + BLOCK_N, inside, N, out_stride)


def select_fp8_config(
    rows: int,
    data: Tensor,
    format: Format,
    activations: str,
    gate: GatedActivation,
    is_quantized: bool,
) -> LaunchConfig | None:
    """The config for such weights; None for few rows, or if gate and up share a block of scales.

    `is_quantized`: the output is quantized. A gated one that is not needs more registers.
    """
    if (resolve_format(activations).name, format.name) != (ACTIVATION_FORMAT, WEIGHT_FORMAT):
        return None
    if gate.is_gated and (data.shape[1] // 2) % SCALE_BLOCK:
        return None
    if data.shape[2] % 16 or data.data_ptr() % 16 or not data.is_contiguous():
        return None
    heuristics = heuristics_for(data.device)
    return heuristics.grouped_gemm_fp8(rows, data.shape[0], gate.is_gated, is_quantized)


@dataclass(frozen=True)
class Fp8Inputs:
    """x and weights in FP8.

    y[s] = gate(row_weights[s] * (x[row_indices[s]] @ weight[e].T) + bias[e])

    codes, x_scale   rows of x as `quantize` returns them
    data, scale      the weights [E, N, K]
    out_format       the format of y, or None: y is in `out_dtype`
    """

    codes: Tensor
    x_scale: Tensor
    data: Tensor
    scale: Tensor
    offsets: Tensor
    out_dtype: torch.dtype
    row_indices: Tensor | None = None
    row_weights: Tensor | None = None
    bias: Tensor | None = None
    gate: GatedActivation = UNGATED
    out_format: str | None = None


def grouped_gemm_fp8(inputs: Fp8Inputs, config: LaunchConfig) -> list[Tensor]:
    """[y], or [codes, scales] of y with an `out_format`."""
    x, x_scale, data, scale = inputs.codes, inputs.x_scale, inputs.data, inputs.scale
    indices, bias, gate = inputs.row_indices, inputs.bias, inputs.gate
    rows, size = (x if indices is None else indices).shape[0], x.shape[1]
    experts, columns = data.shape[0], data.shape[1] // gate.num_inputs
    format = None if inputs.out_format is None else resolve_format(inputs.out_format)
    out = x.new_empty(
        rows, columns, dtype=inputs.out_dtype if format is None else format.data_dtype
    )
    scales = [] if format is None else [empty_scale(out, format, format.separate_scales[0])]
    if out.numel() == 0:
        return [out, *scales]
    tile_map, tiles = build_tile_map(inputs.offsets, rows, config.block_m)
    block = [SCALE_BLOCK, SCALE_BLOCK]
    weights = TensorDescriptor(data, [experts * data.shape[1], size], [size, 1], block)
    grouped_gemm_fp8_kernel[(tiles * cdiv(columns, config.block_n),)](
        x, or_placeholder(indices, inputs.offsets), or_placeholder(inputs.row_weights, x_scale),
        tile_map, weights, or_placeholder(bias, x_scale), out, x_scale, scale,
        scales[0] if scales else x_scale, columns, size, experts, tiles, x.stride(0), out.stride(0),
        0 if bias is None else bias.stride(0), *x_scale.stride(), scale.stride(0),
        scale.stride(1), *(scales[0].stride() if scales else (0, 0)), gate.alpha, gate.limit,
        GATHER=indices is not None, ROW_WEIGHTS=inputs.row_weights is not None,
        BIAS=bias is not None, GATE=gate.kernel_id, EVEN_K=size % SCALE_BLOCK == 0,
        QUANTIZED=format is not None, DTYPE=DTYPES[inputs.out_dtype], BLOCK_M=config.block_m,
        BLOCK_N=SCALE_BLOCK, BLOCK_K=SCALE_BLOCK, GROUP_N=config.group_n, NATIVE=NATIVE,
        num_warps=config.num_warps, num_stages=config.num_stages, maxnreg=config.max_registers,
    )  # fmt: skip
    return [out, *scales]


def run_experts_fp8(
    x: Tensor,
    row_indices: Tensor | None,
    row_weights: Tensor | None,
    offsets: Tensor,
    gate_up: QuantTensor,
    down: QuantTensor,
    biases: tuple[Tensor | None, Tensor | None],
    gate: GatedActivation,
    activations: tuple[str, str],
) -> Any:
    """Both GEMMs of a layer, with the rows between them in FP8; NotImplemented without a config.

    x may be in FP8 already: rows that another rank has quantized.
    """
    first, second = activations
    rows = (x if row_indices is None else row_indices).shape[0]
    up_config = select_fp8_config(rows, gate_up.packed, gate_up.format, first, gate, True)
    down_config = select_fp8_config(rows, down.packed, down.format, second, UNGATED, False)
    if up_config is None or down_config is None or not gate.is_gated or x.dtype not in DTYPES:
        return NotImplemented
    (up_scale,), (down_scale,) = (list(weight.scales.values()) for weight in (gate_up, down))
    if isinstance(x, QuantTensor):
        assert x.format.name == ACTIVATION_FORMAT, f"rows are in {x.format.name}"
        codes, (scale,) = x.packed, x.scales.values()
    else:
        codes, scale = quantize(x, first)
    up_inputs = Fp8Inputs(
        codes, scale, gate_up.packed, up_scale, offsets, x.dtype, row_indices, row_weights,
        biases[0], gate, out_format=second,
    )  # fmt: skip
    codes, scale = grouped_gemm_fp8(up_inputs, up_config)
    down_inputs = Fp8Inputs(codes, scale, down.packed, down_scale, offsets, x.dtype, bias=biases[1])
    return grouped_gemm_fp8(down_inputs, down_config)[0]
