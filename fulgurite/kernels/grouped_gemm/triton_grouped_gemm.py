# mypy: allow-untyped-defs, allow-incomplete-defs
"""Grouped matmul on a GPU: rows gathered by expert, weights dense or packed, the gate at the end.

    y[s] = gate(factor[s] * (x[row[s]] @ weight[e].T) + bias[e])       rows of expert e

In: the operator's arguments; x in bfloat16, float16 or float32, weights of the same dtype or packed.
Out: [S, N], or [S, N / 2] with a gate; NotImplemented for what only the reference takes.

One program makes a tile of one expert's rows. Which expert, and which rows, it finds from the ends of
the groups on the device: the host never waits, and an expert costs only the tiles it has. Rows of x
are read through the index, so nothing is permuted beforehand. With a gate a program sums the two
halves of its columns side by side, and what goes to memory is gated already. Rows of the weight are
the rows of the tensor cores' tile, as in `matmul.py`: few rows of x don't waste it.

Some kinds of matmul have kernels of their own: dense weights and many rows (`grouped_dense.py`), packed
weights and few rows (`grouped_few.py`), weights of 4 bits and more rows (`grouped_packed.py`), and FP8
times FP8 with enough rows (`grouped_fp8.py`). Other quantized activations run in three steps (`_quantized_activations_gemm`):
rows gathered and quantized, the matmul of 8 bits times 8 bits of `scaled_mm.py`, and the gate.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fulgurite.kernels.common.triton_dequantize import deinterleave_by_4
from fulgurite.kernels.common.triton_epilogue import apply_gate, apply_scales_and_bias
from fulgurite.kernels.common.triton_import import INTERPRETED, tl, triton
from fulgurite.kernels.common.triton_operands import (
    DequantScheme,
    QuantizedOperand,
    dequant_scheme,
    make_operand,
    supports_dtype,
)
from fulgurite.kernels.elementwise.gated_activation import GATE_IDS, NO_GATE
from fulgurite.kernels.gemm import triton_quant_linear
from fulgurite.kernels.gemm.reference import UNQUANTIZED
from fulgurite.kernels.gemm.triton_gemm import find_expert_tile
from fulgurite.kernels.grouped_gemm import triton_dense, triton_fp8
from fulgurite.kernels.grouped_gemm.reference import DENSE
from fulgurite.kernels.grouped_gemm.triton_4bit import try_grouped_gemm_4bit
from fulgurite.kernels.grouped_gemm.triton_mainloop import accumulate_step
from fulgurite.kernels.grouped_gemm.triton_small_m import try_small_m_grouped_gemm
from fulgurite.kernels.grouped_gemm.triton_tile_scheduler import or_placeholder
from fulgurite.kernels.quantize.triton_quantize import quantize
from fulgurite.kernels.tuning.heuristics import heuristics_for
from fulgurite.quant import resolve_format

NATIVE = not INTERPRETED
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
DENSE_SCHEME = DequantScheme("dense", "none")


@triton.jit(do_not_specialize=["S", "experts", "tiles_m", "w_scale_k"])
def grouped_gemm_kernel(
    x_ptr, rows_ptr, factors_ptr, ends_ptr, w_ptr, s_ptr, z_ptr, bias_ptr, out_ptr,
    S, N, K, experts, tiles_m, x_stride, w_expert, w_stride, w_step, s_expert, w_scale_n, w_scale_k,
    z_expert, bias_expert, out_stride, alpha, limit,
    DEQUANT: tl.constexpr, SCALING: tl.constexpr, GROUP: tl.constexpr, W_ROWS: tl.constexpr,
    TENSOR_SCALE: tl.constexpr, ZERO: tl.constexpr, GATHER: tl.constexpr, FACTORS: tl.constexpr,
    BIAS: tl.constexpr, GATE: tl.constexpr, EVEN: tl.constexpr, GROUPS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, ACROSS: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """N columns of the result; with a gate the weight has twice as many rows, up below gate."""
    tile = tl.program_id(0)
    tiles_n = tl.cdiv(N, BN)
    # ACROSS tiles of N share their rows of x in the cache before the next rows are taken
    band = tile // (ACROSS * tiles_m)
    width = tl.minimum(tiles_n - band * ACROSS, ACROSS)
    within = tile - band * ACROSS * tiles_m
    n = (band * ACROSS + within % width) * BN + tl.arange(0, BN)
    expert, start, end = find_expert_tile(ends_ptr, experts, within // width, S, BM, GROUPS)
    live = expert < experts
    expert = tl.minimum(expert, experts - 1).to(tl.int64)
    w_ptr += expert * w_expert
    s_ptr += expert * s_expert
    z_ptr += expert * z_expert
    bias_ptr += expert * bias_expert
    m = start + tl.arange(0, BM)
    inside = m < end
    m_in = tl.where(inside, m, 0)
    row = tl.load(rows_ptr + m_in, inside, 0).to(tl.int64) if GATHER else m_in.to(tl.int64)
    n_in = tl.where(n < N, n, 0).to(tl.int64)
    nibbles: tl.constexpr = DEQUANT == "e2m1" or DEQUANT == "int4" or DEQUANT == "uint4"
    steps = tl.where(live & (start < end), tl.cdiv(K, BK), 0)  # rows of no expert are zero
    acc = tl.zeros([BN, BM], tl.float32)
    up = tl.zeros([BN, BM], tl.float32)
    wide = tl.arange(0, BK)
    for step in range(0, steps):
        x_from = x_ptr + row[:, None] * x_stride + (step * BK + wide)[None, :]
        if EVEN:
            x = tl.load(x_from)
        else:
            x = tl.load(x_from, (step * BK + wide < K)[None, :], 0.0)
        x0, x1, x2, x3 = x, x, x, x
        if nibbles:
            x0, x1, x2, x3 = deinterleave_by_4(x, BM, BK)
        acc = accumulate_step(
            acc, x, x0, x1, x2, x3, w_ptr, s_ptr, z_ptr, n_in, step, K, w_stride, w_step, w_scale_n,
            w_scale_k, DEQUANT, SCALING, GROUP, W_ROWS, ZERO, EVEN, BK, NATIVE,
        )  # fmt: skip
        if GATE > 0:
            up = accumulate_step(
                up, x, x0, x1, x2, x3, w_ptr, s_ptr, z_ptr, n_in + N, step, K, w_stride, w_step,
                w_scale_n, w_scale_k, DEQUANT, SCALING, GROUP, W_ROWS, ZERO, EVEN, BK, NATIVE,
            )  # fmt: skip
    factor = tl.load(factors_ptr + m_in, inside, 0.0) if FACTORS else 1.0
    out = apply_scales_and_bias(
        acc, s_ptr, z_ptr, bias_ptr, n_in, w_scale_n, factor, SCALING, TENSOR_SCALE, FACTORS, BIAS
    )
    if GATE > 0:
        up = apply_scales_and_bias(
            up, s_ptr, z_ptr, bias_ptr, n_in + N, w_scale_n, factor, SCALING, TENSOR_SCALE, FACTORS,
            BIAS,
        )  # fmt: skip
        out = apply_gate(out, up, alpha, limit, GATE)
    out = tl.where(live, out, 0.0)
    into = out_ptr + m.to(tl.int64)[:, None] * out_stride + n[None, :]
    keep = inside[:, None] & (n < N)[None, :]
    tl.store(into, tl.trans(out).to(out_ptr.dtype.element_ty), keep)


def grouped_gemm(
    x: Tensor,
    rows: Tensor | None,
    places: Tensor | None,
    factors: Tensor | None,
    offsets: Tensor,
    data: Tensor,
    scales: list[Tensor],
    format: str,
    bias: Tensor | None,
    activations: str,
    gate: str,
    alpha: float,
    limit: float,
) -> Any:
    """`fulgurite::grouped_matmul`."""
    if x.dtype not in FLOATS or data.numel() == 0 or x.shape[1] == 0:
        return NotImplemented
    after = (factors, offsets, bias, gate, alpha, limit)
    if format == DENSE:
        if data.dtype != x.dtype:
            return NotImplemented
        many = heuristics_for(x.device).grouped_dense_config(
            _num_rows(x, rows), data.shape[0], gate != NO_GATE
        )
        if many is not None and triton_dense.supports_tma(x, data):
            return triton_dense.grouped_gemm_dense(
                x, rows, factors, offsets, data, *after[2:], many
            )
        parts = QuantizedOperand(data, data, data, (0, 0), has_zero_points=False)
        return _fused_gemm(x, rows, parts, DENSE_SCHEME, False, *after)
    entry = resolve_format(format)
    weight = dequant_scheme(entry)
    if weight is None or not supports_dtype(x, weight):
        return NotImplemented
    if activations != UNQUANTIZED:
        return _quantized_activations_gemm(x, rows, data, scales, format, activations, *after)
    parts = make_operand(data, scales, entry, weight)
    return _fused_gemm(x, rows, parts, weight, entry.family == "nvfp4", *after)


def _num_rows(x: Tensor, rows: Tensor | None) -> int:
    return x.shape[0] if rows is None else rows.shape[0]


def _fused_gemm(
    x: Tensor,
    rows: Tensor | None,
    parts: QuantizedOperand,
    weight: DequantScheme,
    tensor_scale: bool,
    factors: Tensor | None,
    offsets: Tensor,
    bias: Tensor | None,
    gate: str,
    alpha: float,
    limit: float,
) -> Tensor:
    experts, data = offsets.shape[0], parts.data
    count, size = _num_rows(x, rows), x.shape[1]
    columns = data.shape[1] // (1 if gate == NO_GATE else 2)
    out = x.new_empty(count, columns)
    if out.numel() == 0:
        return out
    x = x if x.stride(1) == 1 else x.contiguous()
    given = (out, x, rows, parts, weight, tensor_scale, factors, offsets, bias)
    if try_small_m_grouped_gemm(*given, (GATE_IDS[gate], alpha, limit)):
        return out
    if try_grouped_gemm_4bit(*given, (GATE_IDS[gate], alpha, limit)):
        return out
    config = heuristics_for(x.device).grouped_gemm_config(
        count, experts, weight, gate != NO_GATE, x.dtype
    )
    tiles_m = triton.cdiv(count, config.block_m) + min(experts, count) + 1  # last ones may be partial
    dense = weight is DENSE_SCHEME
    grouped_gemm_kernel[(tiles_m * triton.cdiv(columns, config.block_n),)](
        x, or_placeholder(rows, offsets), or_placeholder(factors, x), offsets, data, parts.scale, parts.extra_scale,
        or_placeholder(bias, x), out, count, columns, size, experts, tiles_m, x.stride(0), data.stride(0),
        data.stride(1), data.stride(2), 0 if dense else parts.scale.stride(0), *parts.strides,
        0 if dense else parts.scale.stride(0) if parts.has_zero_points else 1,
        0 if bias is None else bias.stride(0), out.stride(0), alpha, limit,
        DEQUANT=weight.dequant, SCALING=weight.scaling, GROUP=weight.group_size, W_ROWS=weight.scale_rows,
        TENSOR_SCALE=tensor_scale, ZERO=parts.has_zero_points, GATHER=rows is not None,
        FACTORS=factors is not None, BIAS=bias is not None, GATE=GATE_IDS[gate],
        EVEN=size % config.block_k == 0, GROUPS=triton.next_power_of_2(experts + 1),
        BM=config.block_m, BN=config.block_n, BK=config.block_k, ACROSS=8, NATIVE=NATIVE,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return out


# ---- quantized activations -------------------------------------------------------------------------


def _quantized_activations_gemm(
    x: Tensor,
    rows: Tensor | None,
    data: Tensor,
    scales: list[Tensor],
    format: str,
    activations: str,
    factors: Tensor | None,
    offsets: Tensor,
    bias: Tensor | None,
    gate: str,
    alpha: float,
    limit: float,
) -> Any:
    """Rows gathered, quantized and multiplied in 8 bits; then what follows the sums."""
    entry = resolve_format(format)
    config = triton_fp8.select_fp8_config(
        _num_rows(x, rows), data, entry, activations, gate, packed=False
    )
    if config is not None:
        how = (bias, gate, alpha, limit, x.dtype, config)
        parts = quantize(x, activations)
        return triton_fp8.grouped_gemm_fp8(parts, rows, factors, offsets, data, scales[0], *how)[0]
    given = x if rows is None else x[rows]
    sums = triton_quant_linear.grouped_quant_linear(
        given, offsets, data, scales, format, None, activations
    )
    if sums is NotImplemented or (gate == NO_GATE and factors is None and bias is None):
        return sums
    count, columns = sums.shape[0], sums.shape[1] // (1 if gate == NO_GATE else 2)
    out = sums.new_empty(count, columns)
    experts = offsets.shape[0]
    block = min(triton.next_power_of_2(columns), 1024)
    epilogue_kernel[(count, triton.cdiv(columns, block))](
        sums, or_placeholder(factors, sums), offsets, or_placeholder(bias, sums), out, columns, experts, sums.stride(0),
        0 if bias is None else bias.stride(0), alpha, limit, FACTORS=factors is not None,
        BIAS=bias is not None, GATE=GATE_IDS[gate], GROUPS=triton.next_power_of_2(experts),
        BLOCK=block, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["experts"])
def epilogue_kernel(
    sums_ptr, factors_ptr, ends_ptr, bias_ptr, out_ptr, N, experts, stride, bias_expert, alpha, limit,
    FACTORS: tl.constexpr, BIAS: tl.constexpr, GATE: tl.constexpr, GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Factor, bias and gate of one row, a stretch of columns."""
    row = tl.program_id(0)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    keep = n < N
    group = tl.arange(0, GROUPS)
    ends = tl.load(ends_ptr + group, group < experts, 0)
    expert = tl.sum(((ends <= row) & (group < experts)).to(tl.int32), 0)
    live = expert < experts
    bias_ptr += tl.minimum(expert, experts - 1).to(tl.int64) * bias_expert
    factor = tl.load(factors_ptr + row) if FACTORS else 1.0
    from_ptr = sums_ptr + row.to(tl.int64) * stride + n
    left = tl.load(from_ptr, keep, 0.0).to(tl.float32) * factor
    if BIAS:
        left += tl.load(bias_ptr + n, keep, 0.0).to(tl.float32)
    if GATE > 0:
        right = tl.load(from_ptr + N, keep, 0.0).to(tl.float32) * factor
        if BIAS:
            right += tl.load(bias_ptr + N + n, keep, 0.0).to(tl.float32)
        left = apply_gate(left, right, alpha, limit, GATE)
    left = tl.where(live, left, 0.0)
    tl.store(out_ptr + row.to(tl.int64) * N + n, left.to(out_ptr.dtype.element_ty), keep)


# ---- gradients of weights --------------------------------------------------------------------------


@triton.jit
def grouped_wgrad_kernel(
    a_ptr, b_ptr, ends_ptr, out_ptr, N, K, a_stride, b_stride,
    BS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """out[e] = a.T @ b over the expert's rows, which are walked in order."""
    expert = tl.program_id(2)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.program_id(1) * BK + tl.arange(0, BK)
    start = tl.load(ends_ptr + expert - 1, expert > 0, 0)
    end = tl.load(ends_ptr + expert)
    acc = tl.zeros([BN, BK], tl.float32)
    for first in range(start, end, BS):
        s = first + tl.arange(0, BS)
        row = s.to(tl.int64)[:, None]
        inside = (s < end)[:, None]
        a = tl.load(a_ptr + row * a_stride + n[None, :], inside & (n < N)[None, :], 0.0)
        b = tl.load(b_ptr + row * b_stride + k[None, :], inside & (k < K)[None, :], 0.0)
        if NATIVE:
            acc = tl.dot(tl.trans(a), b, acc, input_precision="ieee")
        else:
            a, b = a.to(tl.float32), b.to(tl.float32)
            acc = tl.dot(tl.trans(a), b, acc, input_precision="ieee")
    place = expert.to(tl.int64) * N * K + n.to(tl.int64)[:, None] * K + k[None, :]
    keep = (n < N)[:, None] & (k < K)[None, :]
    tl.store(out_ptr + place, acc.to(out_ptr.dtype.element_ty), keep)


def grouped_wgrad(a: Tensor, b: Tensor, offsets: Tensor) -> Any:
    """`fulgurite::grouped_outer`."""
    if a.dtype not in FLOATS or a.dtype != b.dtype:
        return NotImplemented
    a, b = (t if t.stride(1) == 1 else t.contiguous() for t in (a, b))
    out = a.new_empty(offsets.shape[0], a.shape[1], b.shape[1])
    if out.numel() == 0:
        return out
    config = heuristics_for(a.device).grouped_wgrad_config(b.shape[1], a.dtype)
    grid = (
        triton.cdiv(a.shape[1], config.block_n),
        triton.cdiv(b.shape[1], config.block_k),
        offsets.shape[0],
    )
    grouped_wgrad_kernel[grid](
        a, b, offsets, out, a.shape[1], b.shape[1], a.stride(0), b.stride(0),
        BS=config.block_m, BN=config.block_n, BK=config.block_k, NATIVE=NATIVE,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return out
