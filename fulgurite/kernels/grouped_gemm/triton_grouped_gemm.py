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
times FP8 with enough rows (`grouped_fp8.py`). Other quantized activations run in three steps (`_apart`):
rows gathered and quantized, the matmul of 8 bits times 8 bits of `scaled_mm.py`, and the gate.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fulgurite.kernels.common.triton_dequantize import quarters
from fulgurite.kernels.common.triton_operands import Packed, Weight, packed, takes, weight_of
from fulgurite.kernels.gemm import triton_quant_linear
from fulgurite.kernels.gemm.quant_linear import PLAIN
from fulgurite.kernels.gemm.triton_gemm import find_group
from fulgurite.kernels.grouped_gemm import triton_dense, triton_fp8
from fulgurite.kernels.grouped_gemm.ops import DENSE, NO_GATE
from fulgurite.kernels.grouped_gemm.triton_4bit import fill_packed
from fulgurite.kernels.grouped_gemm.triton_mainloop import GATES, add_step, finish, gated
from fulgurite.kernels.grouped_gemm.triton_small_m import fill_few
from fulgurite.kernels.grouped_gemm.triton_tile_scheduler import or_else
from fulgurite.kernels.quantize.triton_quantize import quantize
from fulgurite.kernels.tuning.grouped_gemm import many_tile, outer_tile, rows_tile
from fulgurite.quant import resolve

NATIVE = not triton.knobs.runtime.interpret
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
PLAIN_WEIGHT = Weight("dense", "none")


@triton.jit(do_not_specialize=["S", "experts", "tiles_m", "w_scale_k"])
def grouped_matmul_kernel(
    x_ptr, rows_ptr, factors_ptr, ends_ptr, w_ptr, s_ptr, z_ptr, bias_ptr, out_ptr,
    S, N, K, experts, tiles_m, x_stride, w_expert, w_stride, w_step, s_expert, w_scale_n, w_scale_k,
    z_expert, bias_expert, out_stride, alpha, limit,
    DECODE: tl.constexpr, SCALING: tl.constexpr, GROUP: tl.constexpr, W_ROWS: tl.constexpr,
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
    expert, start, end = find_group(ends_ptr, experts, within // width, S, BM, GROUPS)
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
    nibbles: tl.constexpr = DECODE == "e2m1" or DECODE == "int4" or DECODE == "uint4"
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
            x0, x1, x2, x3 = quarters(x, BM, BK)
        acc = add_step(
            acc, x, x0, x1, x2, x3, w_ptr, s_ptr, z_ptr, n_in, step, K, w_stride, w_step, w_scale_n,
            w_scale_k, DECODE, SCALING, GROUP, W_ROWS, ZERO, EVEN, BK, NATIVE,
        )  # fmt: skip
        if GATE > 0:
            up = add_step(
                up, x, x0, x1, x2, x3, w_ptr, s_ptr, z_ptr, n_in + N, step, K, w_stride, w_step,
                w_scale_n, w_scale_k, DECODE, SCALING, GROUP, W_ROWS, ZERO, EVEN, BK, NATIVE,
            )  # fmt: skip
    factor = tl.load(factors_ptr + m_in, inside, 0.0) if FACTORS else 1.0
    out = finish(
        acc, s_ptr, z_ptr, bias_ptr, n_in, w_scale_n, factor, SCALING, TENSOR_SCALE, FACTORS, BIAS
    )
    if GATE > 0:
        up = finish(
            up, s_ptr, z_ptr, bias_ptr, n_in + N, w_scale_n, factor, SCALING, TENSOR_SCALE, FACTORS,
            BIAS,
        )  # fmt: skip
        out = gated(out, up, alpha, limit, GATE)
    out = tl.where(live, out, 0.0)
    into = out_ptr + m.to(tl.int64)[:, None] * out_stride + n[None, :]
    keep = inside[:, None] & (n < N)[None, :]
    tl.store(into, tl.trans(out).to(out_ptr.dtype.element_ty), keep)


def grouped_matmul(
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
        many = many_tile(_count(x, rows), data.shape[0], gate != NO_GATE)
        if many is not None and triton_dense.takes(x, data):
            return triton_dense.grouped_dense(x, rows, factors, offsets, data, *after[2:], many)
        parts = Packed(data, data, data, (0, 0), zero=False)
        return _fused(x, rows, parts, PLAIN_WEIGHT, False, *after)
    entry = resolve(format)
    weight = weight_of(entry)
    if weight is None or not takes(x, weight):
        return NotImplemented
    if activations != PLAIN:
        return _apart(x, rows, data, scales, format, activations, *after)
    parts = packed(data, scales, entry, weight)
    return _fused(x, rows, parts, weight, entry.family == "nvfp4", *after)


def _count(x: Tensor, rows: Tensor | None) -> int:
    return x.shape[0] if rows is None else rows.shape[0]


def _fused(
    x: Tensor,
    rows: Tensor | None,
    parts: Packed,
    weight: Weight,
    tensor_scale: bool,
    factors: Tensor | None,
    offsets: Tensor,
    bias: Tensor | None,
    gate: str,
    alpha: float,
    limit: float,
) -> Tensor:
    experts, data = offsets.shape[0], parts.data
    count, size = _count(x, rows), x.shape[1]
    columns = data.shape[1] // (1 if gate == NO_GATE else 2)
    out = x.new_empty(count, columns)
    if out.numel() == 0:
        return out
    x = x if x.stride(1) == 1 else x.contiguous()
    given = (out, x, rows, parts, weight, tensor_scale, factors, offsets, bias)
    if fill_few(*given, (GATES[gate], alpha, limit)):
        return out
    if fill_packed(*given, (GATES[gate], alpha, limit)):
        return out
    tile = rows_tile(count, experts, columns, size, weight, gate != NO_GATE, x.dtype)
    tiles_m = triton.cdiv(count, tile.rows) + min(experts, count) + 1  # last ones may be partial
    dense = weight is PLAIN_WEIGHT
    grouped_matmul_kernel[(tiles_m * triton.cdiv(columns, tile.columns),)](
        x, or_else(rows, offsets), or_else(factors, x), offsets, data, parts.scale, parts.second,
        or_else(bias, x), out, count, columns, size, experts, tiles_m, x.stride(0), data.stride(0),
        data.stride(1), data.stride(2), 0 if dense else parts.scale.stride(0), *parts.strides,
        0 if dense else parts.scale.stride(0) if parts.zero else 1,
        0 if bias is None else bias.stride(0), out.stride(0), alpha, limit,
        DECODE=weight.decode, SCALING=weight.scaling, GROUP=weight.group, W_ROWS=weight.rows,
        TENSOR_SCALE=tensor_scale, ZERO=parts.zero, GATHER=rows is not None,
        FACTORS=factors is not None, BIAS=bias is not None, GATE=GATES[gate],
        EVEN=size % tile.depth == 0, GROUPS=triton.next_power_of_2(experts + 1),
        BM=tile.rows, BN=tile.columns, BK=tile.depth, ACROSS=8, NATIVE=NATIVE,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


# ---- quantized activations -------------------------------------------------------------------------


def _apart(
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
    entry = resolve(format)
    tile = triton_fp8.plan(_count(x, rows), data, entry, activations, gate, packed=False)
    if tile is not None:
        how = (bias, gate, alpha, limit, x.dtype, tile)
        parts = quantize(x, activations)
        return triton_fp8.grouped_fp8(parts, rows, factors, offsets, data, scales[0], *how)[0]
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
    finish_kernel[(count, triton.cdiv(columns, block))](
        sums, or_else(factors, sums), offsets, or_else(bias, sums), out, columns, experts, sums.stride(0),
        0 if bias is None else bias.stride(0), alpha, limit, FACTORS=factors is not None,
        BIAS=bias is not None, GATE=GATES[gate], GROUPS=triton.next_power_of_2(experts),
        BLOCK=block, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["experts"])
def finish_kernel(
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
        left = gated(left, right, alpha, limit, GATE)
    left = tl.where(live, left, 0.0)
    tl.store(out_ptr + row.to(tl.int64) * N + n, left.to(out_ptr.dtype.element_ty), keep)


# ---- gradients of weights --------------------------------------------------------------------------


@triton.jit
def grouped_outer_kernel(
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


def grouped_outer(a: Tensor, b: Tensor, offsets: Tensor) -> Any:
    """`fulgurite::grouped_outer`."""
    if a.dtype not in FLOATS or a.dtype != b.dtype:
        return NotImplemented
    a, b = (t if t.stride(1) == 1 else t.contiguous() for t in (a, b))
    out = a.new_empty(offsets.shape[0], a.shape[1], b.shape[1])
    if out.numel() == 0:
        return out
    tile = outer_tile(a.shape[1], b.shape[1], a.dtype)
    grid = (
        triton.cdiv(a.shape[1], tile.columns),
        triton.cdiv(b.shape[1], tile.depth),
        offsets.shape[0],
    )
    grouped_outer_kernel[grid](
        a, b, offsets, out, a.shape[1], b.shape[1], a.stride(0), b.stride(0),
        BS=tile.rows, BN=tile.columns, BK=tile.depth, NATIVE=NATIVE,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out
