# mypy: allow-untyped-defs, allow-incomplete-defs
"""Grouped GEMM with dense weights and many rows on a GPU, bound by the tensor cores.

    y[s] = gate(row_weights[s] * (x[row_indices[s]] @ weight[e].T) + bias[e])       rows s of expert e

In: x and dense weights [E, N, K] of the same 16-bit dtype, K contiguous, or without a gate N (the
gradient of x multiplies by the transposed weight). Out: [S, N], or [S, N / 2] with a gate.

Rows of x are the rows of the tensor cores' tile, 64 by 256 at once, which reads least from shared
memory for each product. With a gate, columns of gate and up alternate in the tile, so that both are
in one thread. Weights come by tensor descriptor (TMA), so no registers hold their addresses; so may
rows of x that are not gathered.

An expert's rows are divided into tiles of BLOCK_M and of BLOCK_M + EXTRA_M rows. So a tile of the
weight is loaded for as many rows as the registers hold accumulators for, and few rows are padding.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fulgurite.kernels.common.triton_epilogue import apply_gate
from fulgurite.kernels.common.triton_import import TensorDescriptor, tl, triton
from fulgurite.kernels.common.triton_launch import cached_launch
from fulgurite.kernels.common.triton_numerics import NATIVE
from fulgurite.kernels.grouped_gemm.args import GroupedGemmArgs
from fulgurite.kernels.grouped_gemm.triton_tile_scheduler import (
    build_tile_map,
    load_tile_info,
    or_placeholder,
    swizzle_tile,
)
from fulgurite.kernels.integer_math import cdiv
from fulgurite.kernels.tuning import LaunchConfig, heuristics_for


@triton.jit
def dot(x, w, acc, N_CONTIGUOUS: tl.constexpr, NATIVE: tl.constexpr):
    """acc + x @ w, or w.T. The interpreter multiplies bfloat16 as integers, so it needs float32."""
    w = w if N_CONTIGUOUS else tl.trans(w)
    if NATIVE:
        return tl.dot(x, w, acc)
    else:
        return tl.dot(x.to(tl.float32), w.to(tl.float32), acc, input_precision="ieee")


@triton.jit
def load_weight(
    weights, expert, first, k, HALVES: tl.constexpr, N_CONTIGUOUS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A tile of an expert's weight, [BLOCK_K, BLOCK_N] if N is contiguous, else transposed."""
    if N_CONTIGUOUS:
        return weights.load([expert, k, first]).reshape(BLOCK_K, BLOCK_N)
    elif HALVES == 1:
        return weights.load([expert, first, k]).reshape(BLOCK_N, BLOCK_K)
    else:
        return weights.load([expert, first, 0, k]).reshape(HALVES * BLOCK_N, BLOCK_K)


@triton.jit
def apply_epilogue_and_store(
    acc, row_weights_ptr, bias_ptr, out_ptr, start, end, first, live, N, out_stride, alpha, limit,
    ROW_WEIGHTS: tl.constexpr, BIAS: tl.constexpr, GATE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The epilogue of some rows: row weights, bias, gate."""
    m = start + tl.arange(0, BLOCK_M)
    n = first + tl.arange(0, BLOCK_N)
    inside = m < end
    if ROW_WEIGHTS:
        acc *= tl.load(row_weights_ptr + m, inside, 0.0)[:, None]
    if GATE > 0:
        out, up = tl.split(tl.reshape(acc, [BLOCK_M, BLOCK_N, 2]))
        if BIAS:
            up += tl.load(bias_ptr + N + n, n < N, 0.0).to(tl.float32)[None, :]
    else:
        out, up = acc, acc
    if BIAS:
        out += tl.load(bias_ptr + n, n < N, 0.0).to(tl.float32)[None, :]
    if GATE > 0:
        out = apply_gate(out, up, alpha, limit, GATE)
    out = tl.where(live, out, 0.0).to(out_ptr.dtype.element_ty)
    into = out_ptr + m.to(tl.int64)[:, None] * out_stride + n[None, :]
    tl.store(into, out, inside[:, None] & (n < N)[None, :])


@triton.jit
def gather_row_pointers(
    x_ptr, row_indices_ptr, start, end, x_stride, GATHER: tl.constexpr, BLOCK_M: tl.constexpr
):
    """A pointer to each row of x; rows past the end are the first row."""
    m = start + tl.arange(0, BLOCK_M)
    row = tl.load(row_indices_ptr + m, m < end, 0) if GATHER else tl.where(m < end, m, 0)
    return x_ptr + row.to(tl.int64)[:, None] * x_stride


@triton.jit
def load_rows(
    x, x_from, start, k, K, X_TMA: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    """BLOCK_K columns of some rows: gathered, or by tensor descriptor if the rows are
    contiguous."""
    wide = k + tl.arange(0, BLOCK_K)
    if X_TMA:
        return x.load([start, k])
    elif EVEN_K:
        return tl.load(x_from + wide[None, :])
    else:
        return tl.load(x_from + wide[None, :], (wide < K)[None, :], 0.0)


@triton.jit
def compute_tile(
    x_ptr, x, extra_x, row_indices_ptr, row_weights_ptr, weights, bias_ptr, out_ptr,
    expert, start, end, first, live, N, K, x_stride, out_stride, bias_expert, alpha, limit,
    GATHER: tl.constexpr, X_TMA: tl.constexpr, ROW_WEIGHTS: tl.constexpr, BIAS: tl.constexpr,
    GATE: tl.constexpr, EVEN_K: tl.constexpr, N_CONTIGUOUS: tl.constexpr, BLOCK_M: tl.constexpr,
    EXTRA_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NUM_STAGES: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """BLOCK_M rows, and EXTRA_M more, by BLOCK_N columns of the output."""
    halves: tl.constexpr = 2 if GATE > 0 else 1
    x_from = gather_row_pointers(x_ptr, row_indices_ptr, start, end, x_stride, GATHER, BLOCK_M)
    acc = tl.zeros([BLOCK_M, halves * BLOCK_N], tl.float32)
    if EXTRA_M > 0:
        extra_from = gather_row_pointers(
            x_ptr, row_indices_ptr, start + BLOCK_M, end, x_stride, GATHER, EXTRA_M
        )
        extra_acc = tl.zeros([EXTRA_M, halves * BLOCK_N], tl.float32)
    steps = tl.where(live, tl.cdiv(K, BLOCK_K), 0)  # rows without an expert are zero
    for step in tl.range(0, steps, num_stages=NUM_STAGES - 1 if EXTRA_M > 0 else NUM_STAGES):
        k = step * BLOCK_K
        x_tile = load_rows(x, x_from, start, k, K, X_TMA, EVEN_K, BLOCK_K)
        w = load_weight(weights, expert, first, k, halves, N_CONTIGUOUS, BLOCK_N, BLOCK_K)
        acc = dot(x_tile, w, acc, N_CONTIGUOUS, NATIVE)
        if EXTRA_M > 0:
            x_tile = load_rows(extra_x, extra_from, start + BLOCK_M, k, K, X_TMA, EVEN_K, BLOCK_K)
            extra_acc = dot(x_tile, w, extra_acc, N_CONTIGUOUS, NATIVE)
    bias_ptr += expert.to(tl.int64) * bias_expert
    apply_epilogue_and_store(
        acc, row_weights_ptr, bias_ptr, out_ptr, start, end, first, live, N, out_stride, alpha,
        limit, ROW_WEIGHTS, BIAS, GATE, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    if EXTRA_M > 0:
        apply_epilogue_and_store(
            extra_acc, row_weights_ptr, bias_ptr, out_ptr, start + BLOCK_M, end, first, live, N,
            out_stride, alpha, limit, ROW_WEIGHTS, BIAS, GATE, EXTRA_M, BLOCK_N,
        )  # fmt: skip


@cached_launch(do_not_specialize=["experts", "tiles_m"])
def grouped_gemm_dense_kernel(
    x_ptr, x, extra_x, row_indices_ptr, row_weights_ptr, map_ptr, weights, bias_ptr, out_ptr,
    N, K, experts, tiles_m, x_stride, out_stride, bias_expert, alpha, limit,
    GATHER: tl.constexpr, X_TMA: tl.constexpr, ROW_WEIGHTS: tl.constexpr, BIAS: tl.constexpr,
    GATE: tl.constexpr, EVEN_K: tl.constexpr, N_CONTIGUOUS: tl.constexpr, BLOCK_M: tl.constexpr,
    EXTRA_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_N: tl.constexpr,
    NUM_STAGES: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """One tile of the output [S, N]; with a gate the weight has two rows for each column."""
    tile_m, tile_n = swizzle_tile(tl.program_id(0), tiles_m, tl.cdiv(N, BLOCK_N), GROUP_N)
    expert, start, end = load_tile_info(map_ptr, tile_m)
    live = (expert < experts) & (start < end)
    expert = tl.minimum(expert, experts - 1)
    first = tile_n * BLOCK_N
    if end - start > BLOCK_M:
        compute_tile(
            x_ptr, x, extra_x, row_indices_ptr, row_weights_ptr, weights, bias_ptr, out_ptr, expert,
            start, end, first, live, N, K, x_stride, out_stride, bias_expert, alpha, limit, GATHER, X_TMA,
            ROW_WEIGHTS, BIAS, GATE, EVEN_K, N_CONTIGUOUS, BLOCK_M, EXTRA_M, BLOCK_N, BLOCK_K, NUM_STAGES,
            NATIVE,
        )  # fmt: skip
    else:
        compute_tile(
            x_ptr, x, extra_x, row_indices_ptr, row_weights_ptr, weights, bias_ptr, out_ptr, expert,
            start, end, first, live, N, K, x_stride, out_stride, bias_expert, alpha, limit, GATHER, X_TMA,
            ROW_WEIGHTS, BIAS, GATE, EVEN_K, N_CONTIGUOUS, BLOCK_M, 0, BLOCK_N, BLOCK_K, NUM_STAGES,
            NATIVE,
        )  # fmt: skip


def supports_tma(x: Tensor, data: Tensor, is_gated: bool) -> bool:
    """Whether a tensor descriptor takes the weight: rows of a multiple of 16 bytes, along K or N.

    Columns of gate and up alternate in a tile, for which K has to be contiguous.
    """
    if x.dtype not in (torch.bfloat16, torch.float16) or data.dtype != x.dtype:
        return False
    stored = data.transpose(1, 2) if is_n_contiguous(data) else data
    is_aligned = stored.shape[2] % 8 == 0 and data.data_ptr() % 16 == 0
    return stored.is_contiguous() and is_aligned and not (is_gated and stored is not data)


def is_n_contiguous(data: Tensor) -> bool:
    """Whether the weight [E, N, K] is a view of [E, K, N]."""
    return data.stride(2) != 1


def grouped_gemm_dense(args: GroupedGemmArgs, config: LaunchConfig) -> Tensor:
    """The operator for weights that `supports_tma` accepts."""
    args = args.with_contiguous_rows()
    if not _is_aligned(args.x) and args.x.shape[1] % 8 == 0:
        args = replace(args, x=args.x.clone(memory_format=torch.contiguous_format))
    x, data, bias, gate = args.x, args.data, args.bias, args.gate
    rows, columns, size = args.num_rows, args.out_columns, x.shape[1]
    out = x.new_empty(rows, columns)
    if out.numel() == 0:
        return out
    extra_m = min(config.block_m, heuristics_for(x.device).dense_extra_rows)
    tile_map, tiles = build_tile_map(args.offsets, rows, config.block_m + extra_m, extra_m)
    n_contiguous = is_n_contiguous(data)
    weights = _describe_weights(data, gate.num_inputs, config)
    # With K contiguous in both operands and no gate, pointers are a tenth faster on an H200.
    prefers_tma = gate.is_gated or n_contiguous
    x_tma = args.row_indices is None and _is_aligned(x) and prefers_tma
    x_blocks = [
        TensorDescriptor(x, [rows, size], [x.stride(0), 1], [height, config.block_k])
        if x_tma
        else None
        for height in (config.block_m, extra_m)
    ]
    grouped_gemm_dense_kernel[(tiles * cdiv(columns, config.block_n),)](
        x, *x_blocks, or_placeholder(args.row_indices, args.offsets),
        or_placeholder(args.row_weights, x), tile_map, weights, or_placeholder(bias, x), out,
        columns, size, data.shape[0], tiles, x.stride(0), out.stride(0),
        0 if bias is None else bias.stride(0), gate.alpha, gate.limit,
        GATHER=args.row_indices is not None, X_TMA=x_tma, ROW_WEIGHTS=args.row_weights is not None,
        BIAS=bias is not None, GATE=gate.kernel_id, EVEN_K=size % config.block_k == 0,
        N_CONTIGUOUS=n_contiguous, BLOCK_M=config.block_m, EXTRA_M=extra_m, BLOCK_N=config.block_n,
        BLOCK_K=config.block_k, GROUP_N=config.group_n, NUM_STAGES=config.num_stages, NATIVE=NATIVE,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return out


def _is_aligned(x: Tensor) -> bool:
    """Whether rows start at multiples of 16 bytes. Loads of others take six times as long."""
    return x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0


def _describe_weights(data: Tensor, halves: int, config: LaunchConfig) -> TensorDescriptor:
    """Blocks of an expert's weight; with a gate, columns of gate and up alternate."""
    block_n, block_k = config.block_n, config.block_k
    if halves == 1:
        n_contiguous = is_n_contiguous(data)
        stored = data.transpose(1, 2) if n_contiguous else data
        block = [1, block_k, block_n] if n_contiguous else [1, block_n, block_k]
        return TensorDescriptor(stored, list(stored.shape), list(stored.stride()), block)
    experts, rows, size = data.shape
    shape, strides = [experts, rows // 2, 2, size], [data.stride(0), size, rows // 2 * size, 1]
    return TensorDescriptor(data, shape, strides, [1, block_n, 2, block_k])
