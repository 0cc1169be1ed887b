# mypy: allow-untyped-defs, allow-incomplete-defs
"""Grouped GEMM on a GPU: rows gathered by expert, weights dense or quantized, the gate in the
epilogue.

    y[s] = gate(row_weights[s] * (x[row_indices[s]] @ weight[e].T) + bias[e])       rows s of expert e

In: `GroupedGemmArgs`; x in bfloat16, float16 or float32, weights of the same dtype or quantized.
Out: [S, N], or [S, N / 2] with a gate; NotImplemented for what only the reference takes.

A program computes a tile of one expert's rows. It finds the expert and the rows from the offsets on
the device: the host never waits, and an expert costs only the tiles it has. Rows of x are read
through the index, so nothing is permuted beforehand. With a gate a program has two accumulators,
gate and up, and only the gated output goes to memory. Rows of the weight are the rows of the tensor
cores' tile, as in `gemm/triton_gemm.py`: few rows of x don't waste it.

Some GEMMs have kernels of their own: dense weights and many rows (`triton_dense.py`), quantized
weights and few rows (`triton_small_m.py`), 4-bit weights and more rows (`triton_4bit.py`), and FP8
times FP8 with enough rows (`triton_fp8.py`). Other quantized activations take three steps: gather
and quantize rows, multiply 8 bits by 8 bits (`gemm/triton_scaled_mm.py`), apply the epilogue.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fulgurite.kernels.common.triton_dequantize import deinterleave_by_4
from fulgurite.kernels.common.triton_epilogue import apply_gate, apply_scales_and_bias
from fulgurite.kernels.common.triton_import import tl
from fulgurite.kernels.common.triton_launch import cached_launch
from fulgurite.kernels.common.triton_numerics import NATIVE
from fulgurite.kernels.common.triton_operands import (
    DequantScheme,
    QuantizedOperand,
    dense_operand,
    dequant_scheme,
    make_operand,
    supports_dtype,
)
from fulgurite.kernels.gemm.reference import UNQUANTIZED
from fulgurite.kernels.gemm.triton_gemm import find_expert_tile
from fulgurite.kernels.gemm.triton_quant_linear import grouped_quant_linear
from fulgurite.kernels.grouped_gemm import triton_dense, triton_fp8
from fulgurite.kernels.grouped_gemm.args import DENSE, GroupedGemmArgs
from fulgurite.kernels.grouped_gemm.triton_4bit import try_grouped_gemm_4bit
from fulgurite.kernels.grouped_gemm.triton_mainloop import accumulate_step
from fulgurite.kernels.grouped_gemm.triton_small_m import try_small_m_grouped_gemm
from fulgurite.kernels.grouped_gemm.triton_tile_scheduler import or_placeholder, swizzle_tile
from fulgurite.kernels.integer_math import cdiv, next_power_of_2
from fulgurite.kernels.quantize.triton_quantize import quantize
from fulgurite.kernels.tuning import heuristics_for
from fulgurite.quant import resolve_format

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
DENSE_SCHEME = DequantScheme("dense", "none")


@cached_launch(do_not_specialize=["S", "experts", "tiles_m", "w_scale_k"])
def grouped_gemm_kernel(
    x_ptr, row_indices_ptr, row_weights_ptr, offsets_ptr, w_ptr, s_ptr, z_ptr, bias_ptr, out_ptr,
    S, N, K, experts, tiles_m, x_stride, w_expert, w_stride, w_step, s_expert, w_scale_n, w_scale_k,
    z_expert, bias_expert, out_stride, alpha, limit,
    DEQUANT: tl.constexpr, SCALING: tl.constexpr, GROUP_SIZE: tl.constexpr,
    SCALE_ROWS: tl.constexpr, TENSOR_SCALE: tl.constexpr, ZERO_POINTS: tl.constexpr,
    GATHER: tl.constexpr, ROW_WEIGHTS: tl.constexpr, BIAS: tl.constexpr, GATE: tl.constexpr,
    EVEN_K: tl.constexpr, EXPERTS_POW2: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP_N: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """One tile of the output [S, N]; with a gate the weight has twice as many rows, up below
    gate."""
    tile_m, tile_n = swizzle_tile(tl.program_id(0), tiles_m, tl.cdiv(N, BLOCK_N), GROUP_N)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    expert, start, end = find_expert_tile(offsets_ptr, experts, tile_m, S, BLOCK_M, EXPERTS_POW2)
    live = expert < experts
    expert = tl.minimum(expert, experts - 1).to(tl.int64)
    w_ptr += expert * w_expert
    s_ptr += expert * s_expert
    z_ptr += expert * z_expert
    bias_ptr += expert * bias_expert
    m = start + tl.arange(0, BLOCK_M)
    inside = m < end
    m_in = tl.where(inside, m, 0)
    row = tl.load(row_indices_ptr + m_in, inside, 0).to(tl.int64) if GATHER else m_in.to(tl.int64)
    n_in = tl.where(n < N, n, 0).to(tl.int64)
    is_4bit: tl.constexpr = DEQUANT == "e2m1" or DEQUANT == "int4" or DEQUANT == "uint4"
    # rows without an expert are zero
    steps = tl.where(live & (start < end), tl.cdiv(K, BLOCK_K), 0)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    wide = tl.arange(0, BLOCK_K)
    for step in range(0, steps):
        x_from = x_ptr + row[:, None] * x_stride + (step * BLOCK_K + wide)[None, :]
        if EVEN_K:
            x = tl.load(x_from)
        else:
            x = tl.load(x_from, (step * BLOCK_K + wide < K)[None, :], 0.0)
        x0, x1, x2, x3 = x, x, x, x
        if is_4bit:
            x0, x1, x2, x3 = deinterleave_by_4(x, BLOCK_M, BLOCK_K)
        acc = accumulate_step(
            acc, x, x0, x1, x2, x3, w_ptr, s_ptr, z_ptr, n_in, step, K, w_stride, w_step,
            w_scale_n, w_scale_k, DEQUANT, SCALING, GROUP_SIZE, SCALE_ROWS, ZERO_POINTS, EVEN_K,
            BLOCK_K, NATIVE,
        )  # fmt: skip
        if GATE > 0:
            up = accumulate_step(
                up, x, x0, x1, x2, x3, w_ptr, s_ptr, z_ptr, n_in + N, step, K, w_stride, w_step,
                w_scale_n, w_scale_k, DEQUANT, SCALING, GROUP_SIZE, SCALE_ROWS, ZERO_POINTS, EVEN_K,
                BLOCK_K, NATIVE,
            )  # fmt: skip
    row_weight = tl.load(row_weights_ptr + m_in, inside, 0.0) if ROW_WEIGHTS else 1.0
    out = apply_scales_and_bias(
        acc, s_ptr, z_ptr, bias_ptr, n_in, w_scale_n, row_weight, SCALING, TENSOR_SCALE,
        ROW_WEIGHTS, BIAS,
    )  # fmt: skip
    if GATE > 0:
        up = apply_scales_and_bias(
            up, s_ptr, z_ptr, bias_ptr, n_in + N, w_scale_n, row_weight, SCALING, TENSOR_SCALE,
            ROW_WEIGHTS, BIAS,
        )  # fmt: skip
        out = apply_gate(out, up, alpha, limit, GATE)
    out = tl.where(live, out, 0.0)
    into = out_ptr + m.to(tl.int64)[:, None] * out_stride + n[None, :]
    keep = inside[:, None] & (n < N)[None, :]
    tl.store(into, tl.trans(out).to(out_ptr.dtype.element_ty), keep)


def grouped_gemm(args: GroupedGemmArgs) -> Any:
    """`fulgurite::grouped_gemm`."""
    x, data = args.x, args.data
    if x.dtype not in FLOATS or data.numel() == 0 or x.shape[1] == 0:
        return NotImplemented
    if args.format == DENSE:
        if data.dtype != x.dtype:
            return NotImplemented
        config = heuristics_for(x.device).grouped_gemm_dense(
            args.num_rows, data.shape[0], args.gate.is_gated
        )
        if config is not None and triton_dense.supports_tma(x, data, args.gate.is_gated):
            return triton_dense.grouped_gemm_dense(args, config)
        return _fused_gemm(args, dense_operand(data), DENSE_SCHEME)
    format = resolve_format(args.format)
    scheme = dequant_scheme(format)
    if scheme is None or not supports_dtype(x, scheme):
        return NotImplemented
    if args.activations != UNQUANTIZED:
        return _quantized_activations_gemm(args)
    return _fused_gemm(args, make_operand(data, args.scales, format, scheme), scheme)


def _fused_gemm(args: GroupedGemmArgs, weight: QuantizedOperand, scheme: DequantScheme) -> Tensor:
    """x in 16 or 32 bits: gather, GEMM and epilogue in one kernel."""
    rows, columns, size = args.num_rows, args.out_columns, args.x.shape[1]
    out = args.x.new_empty(rows, columns)
    if out.numel() == 0:
        return out
    args = args.with_contiguous_rows()
    if try_small_m_grouped_gemm(out, args, weight, scheme):
        return out
    if try_grouped_gemm_4bit(out, args, weight, scheme):
        return out
    x, bias, gate, experts = args.x, args.bias, args.gate, args.num_experts
    config = heuristics_for(x.device).grouped_gemm(rows, experts, scheme, gate.is_gated, x.dtype)
    tiles_m = cdiv(rows, config.block_m) + min(experts, rows) + 1  # last tiles may be partial
    w_expert, s_expert, z_expert = weight.expert_strides
    grouped_gemm_kernel[(tiles_m * cdiv(columns, config.block_n),)](
        x, or_placeholder(args.row_indices, args.offsets), or_placeholder(args.row_weights, x),
        args.offsets, weight.data, weight.scale, weight.aux, or_placeholder(bias, x), out,
        rows, columns, size, experts, tiles_m, x.stride(0), w_expert, weight.data.stride(1),
        weight.data.stride(2), s_expert, *weight.scale_strides, z_expert,
        0 if bias is None else bias.stride(0), out.stride(0), gate.alpha, gate.limit,
        DEQUANT=scheme.dequant, SCALING=scheme.scaling, GROUP_SIZE=scheme.group_size,
        SCALE_ROWS=scheme.scale_rows, TENSOR_SCALE=weight.has_tensor_scale,
        ZERO_POINTS=weight.has_zero_points, GATHER=args.row_indices is not None,
        ROW_WEIGHTS=args.row_weights is not None, BIAS=bias is not None, GATE=gate.kernel_id,
        EVEN_K=size % config.block_k == 0, EXPERTS_POW2=next_power_of_2(experts + 1),
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k,
        GROUP_N=config.group_n, NATIVE=NATIVE,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return out


# ---- quantized activations -------------------------------------------------------------------------


def _quantized_activations_gemm(args: GroupedGemmArgs) -> Any:
    """Rows in 8 bits: one kernel if FP8 has a config, else gather, quantize, GEMM and epilogue."""
    x, offsets, bias, gate = args.x, args.offsets, args.bias, args.gate
    format = resolve_format(args.format)
    config = triton_fp8.select_fp8_config(
        args.num_rows, args.data, format, args.activations, gate, is_quantized=False
    )
    if config is not None:
        codes, scale = quantize(x, args.activations)
        inputs = triton_fp8.Fp8Inputs(
            codes, scale, args.data, args.scales[0], offsets, x.dtype, args.row_indices,
            args.row_weights, bias, gate,
        )  # fmt: skip
        return triton_fp8.grouped_gemm_fp8(inputs, config)[0]
    rows = x if args.row_indices is None else x[args.row_indices]
    sums = grouped_quant_linear(
        rows, offsets, args.data, args.scales, args.format, None, args.activations
    )
    has_epilogue = gate.is_gated or args.row_weights is not None or bias is not None
    if sums is NotImplemented or not has_epilogue:
        return sums
    columns, experts = args.out_columns, args.num_experts
    out = sums.new_empty(sums.shape[0], columns)
    epilogue = heuristics_for(x.device).grouped_epilogue
    block_n = min(next_power_of_2(columns), epilogue.block_n)
    epilogue_kernel[(sums.shape[0], cdiv(columns, block_n))](
        sums, or_placeholder(args.row_weights, sums), offsets, or_placeholder(bias, sums), out,
        columns, experts, sums.stride(0), 0 if bias is None else bias.stride(0), gate.alpha,
        gate.limit, ROW_WEIGHTS=args.row_weights is not None, BIAS=bias is not None,
        GATE=gate.kernel_id, EXPERTS_POW2=next_power_of_2(experts), BLOCK_N=block_n,
        num_warps=epilogue.num_warps,
    )  # fmt: skip
    return out


@cached_launch(do_not_specialize=["experts"])
def epilogue_kernel(
    sums_ptr, row_weights_ptr, offsets_ptr, bias_ptr, out_ptr, N, experts, stride, bias_expert,
    alpha, limit, ROW_WEIGHTS: tl.constexpr, BIAS: tl.constexpr, GATE: tl.constexpr,
    EXPERTS_POW2: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """out[row] = gate(row_weight * sums[row] + bias[e]), BLOCK_N columns of one row."""
    row = tl.program_id(0)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    keep = n < N
    group = tl.arange(0, EXPERTS_POW2)
    ends = tl.load(offsets_ptr + group, group < experts, 0)
    expert = tl.sum(((ends <= row) & (group < experts)).to(tl.int32), 0)
    live = expert < experts
    bias_ptr += tl.minimum(expert, experts - 1).to(tl.int64) * bias_expert
    row_weight = tl.load(row_weights_ptr + row) if ROW_WEIGHTS else 1.0
    from_ptr = sums_ptr + row.to(tl.int64) * stride + n
    out = tl.load(from_ptr, keep, 0.0).to(tl.float32) * row_weight
    if BIAS:
        out += tl.load(bias_ptr + n, keep, 0.0).to(tl.float32)
    if GATE > 0:
        up = tl.load(from_ptr + N, keep, 0.0).to(tl.float32) * row_weight
        if BIAS:
            up += tl.load(bias_ptr + N + n, keep, 0.0).to(tl.float32)
        out = apply_gate(out, up, alpha, limit, GATE)
    out = tl.where(live, out, 0.0)
    tl.store(out_ptr + row.to(tl.int64) * N + n, out.to(out_ptr.dtype.element_ty), keep)
