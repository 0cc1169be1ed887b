# mypy: allow-untyped-defs, allow-incomplete-defs
"""Grouped matmul with many rows of 16 bits on a GPU: what bounds it are the tensor cores.

    y[s] = gate(factor[s] * (x[row[s]] @ weight[e].T) + bias[e])       rows s of expert e

In: x and dense weights [E, N, K] of the same dtype, K next to each other. Out: [S, N], or [S, N / 2]
with a gate. Rows of x are the rows of the tensor cores' tile, 64 by 256 at once, which reads least
from shared memory for each product. With a gate the columns of gate and up take turns in it, so that
both halves of a number lie in one thread. Weights come through a tensor descriptor, so that the copy
unit works out their addresses and no registers hold them; so do rows of x that lie together. Others
are gathered.

An expert's rows are cut into tiles of BM and of BM + MORE rows: a tile of the weight is fetched for as
many rows as the registers hold sums of, and few rows of work are spare.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fulgurite.kernels.common.triton_epilogue import apply_gate
from fulgurite.kernels.common.triton_import import INTERPRETED, TensorDescriptor, tl, triton
from fulgurite.kernels.elementwise.gated_activation import GATE_IDS, NO_GATE
from fulgurite.kernels.grouped_gemm.triton_tile_scheduler import (
    build_tile_map,
    load_tile_info,
    or_placeholder,
    swizzle_tile,
)
from fulgurite.kernels.tuning.config import LaunchConfig

NATIVE = not INTERPRETED
EXTRA_ROWS = 64  # rows by which tiles differ: the tensor cores take no fewer
ACROSS = 4  # tiles of columns side by side: H200, DeepSeek-V3's experts, 4% before 8


@triton.jit
def dot_nt(x, w, acc, NATIVE: tl.constexpr):
    """acc + x @ w.T; the interpreter multiplies bfloat16 as if it were integers."""
    if NATIVE:
        return tl.dot(x, tl.trans(w), acc)
    else:
        return tl.dot(x.to(tl.float32), tl.trans(w.to(tl.float32)), acc, input_precision="ieee")


@triton.jit
def apply_epilogue_and_store(
    acc, factors_ptr, bias_ptr, out_ptr, start, end, first, live, N, out_stride, alpha, limit,
    FACTORS: tl.constexpr, BIAS: tl.constexpr, GATE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """What follows the sums of some rows: their factors, the bias, the gate."""
    m = start + tl.arange(0, BM)
    n = first + tl.arange(0, BN)
    inside = m < end
    if FACTORS:
        acc *= tl.load(factors_ptr + m, inside, 0.0)[:, None]
    if GATE > 0:
        out, up = tl.split(tl.reshape(acc, [BM, BN, 2]))
        if BIAS:
            up += tl.load(bias_ptr + N + n, n < N, 0.0).to(tl.float32)[None, :]
    else:
        out, up = acc, acc
    if BIAS:
        out += tl.load(bias_ptr + n, n < N, 0.0).to(tl.float32)[None, :]
    if GATE > 0:
        out = apply_gate(out, up, alpha, limit, GATE)
    out = tl.where(live, out, 0.0).to(out_ptr.dtype.element_ty)
    place = m.to(tl.int64)[:, None] * out_stride + n[None, :]
    tl.store(out_ptr + place, out, inside[:, None] & (n < N)[None, :])


@triton.jit
def gather_row_pointers(
    x_ptr, rows_ptr, start, end, x_stride, GATHER: tl.constexpr, BM: tl.constexpr
):
    """Where each row of x begins; rows past the end are the first."""
    m = start + tl.arange(0, BM)
    row = tl.load(rows_ptr + m, m < end, 0) if GATHER else tl.where(m < end, m, 0)
    return x_ptr + row.to(tl.int64)[:, None] * x_stride


@triton.jit
def load_rows(
    x, x_from, start, k, K, TOGETHER: tl.constexpr, EVEN: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    """A step of K of some rows: each from its place, or, where they lie together, by the copy unit."""
    wide = k + tl.arange(0, BK)
    if TOGETHER:
        return x.load([start, k])
    elif EVEN:
        return tl.load(x_from + wide[None, :])
    else:
        return tl.load(x_from + wide[None, :], (wide < K)[None, :], 0.0)


@triton.jit
def compute_tile(
    x_ptr, x, more, rows_ptr, factors_ptr, weights, bias_ptr, out_ptr, expert, start, end, first, live,
    N, K, x_stride, out_stride, bias_expert, alpha, limit,
    GATHER: tl.constexpr, TOGETHER: tl.constexpr, FACTORS: tl.constexpr, BIAS: tl.constexpr,
    GATE: tl.constexpr, EVEN: tl.constexpr, BM: tl.constexpr, MORE: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """BM rows, and MORE of them, by BN columns of the result."""
    halves: tl.constexpr = 2 if GATE > 0 else 1
    x_from = gather_row_pointers(x_ptr, rows_ptr, start, end, x_stride, GATHER, BM)
    acc = tl.zeros([BM, halves * BN], tl.float32)
    if MORE > 0:
        more_from = gather_row_pointers(x_ptr, rows_ptr, start + BM, end, x_stride, GATHER, MORE)
        more_acc = tl.zeros([MORE, halves * BN], tl.float32)
    steps = tl.where(live, tl.cdiv(K, BK), 0)  # rows of no expert are zero
    for step in tl.range(0, steps, num_stages=STAGES - 1 if MORE > 0 else STAGES):
        k = step * BK
        x_tile = load_rows(x, x_from, start, k, K, TOGETHER, EVEN, BK)
        w = weights.load([expert, first, 0, k]).reshape(halves * BN, BK)
        acc = dot_nt(x_tile, w, acc, NATIVE)
        if MORE > 0:
            x_tile = load_rows(more, more_from, start + BM, k, K, TOGETHER, EVEN, BK)
            more_acc = dot_nt(x_tile, w, more_acc, NATIVE)
    bias_ptr += expert.to(tl.int64) * bias_expert
    apply_epilogue_and_store(
        acc, factors_ptr, bias_ptr, out_ptr, start, end, first, live, N, out_stride, alpha, limit,
        FACTORS, BIAS, GATE, BM, BN,
    )  # fmt: skip
    if MORE > 0:
        apply_epilogue_and_store(
            more_acc, factors_ptr, bias_ptr, out_ptr, start + BM, end, first, live, N, out_stride,
            alpha, limit, FACTORS, BIAS, GATE, MORE, BN,
        )  # fmt: skip


@triton.jit(do_not_specialize=["experts", "tiles_m"])
def grouped_gemm_dense_kernel(
    x_ptr, x, more, rows_ptr, factors_ptr, map_ptr, weights, bias_ptr, out_ptr,
    N, K, experts, tiles_m, x_stride, out_stride, bias_expert, alpha, limit,
    GATHER: tl.constexpr, TOGETHER: tl.constexpr, FACTORS: tl.constexpr, BIAS: tl.constexpr,
    GATE: tl.constexpr, EVEN: tl.constexpr, BM: tl.constexpr, MORE: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, ACROSS: tl.constexpr, STAGES: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """N columns of the result, BN in a program; with a gate the weight has two rows for each."""
    tile_m, tile_n = swizzle_tile(tl.program_id(0), tiles_m, tl.cdiv(N, BN), ACROSS)
    expert, start, end = load_tile_info(map_ptr, tile_m)
    live = (expert < experts) & (start < end)
    expert = tl.minimum(expert, experts - 1)
    first = tile_n * BN
    if end - start > BM:
        compute_tile(
            x_ptr, x, more, rows_ptr, factors_ptr, weights, bias_ptr, out_ptr, expert, start, end,
            first, live, N, K, x_stride, out_stride, bias_expert, alpha, limit, GATHER, TOGETHER,
            FACTORS, BIAS, GATE, EVEN, BM, MORE, BN, BK, STAGES, NATIVE,
        )  # fmt: skip
    else:
        compute_tile(
            x_ptr, x, more, rows_ptr, factors_ptr, weights, bias_ptr, out_ptr, expert, start, end,
            first, live, N, K, x_stride, out_stride, bias_expert, alpha, limit, GATHER, TOGETHER,
            FACTORS, BIAS, GATE, EVEN, BM, 0, BN, BK, STAGES, NATIVE,
        )  # fmt: skip


def supports_tma(x: Tensor, data: Tensor) -> bool:
    """Whether a tensor descriptor takes the weight: rows of whole 16 bytes, one after the other."""
    halves = x.dtype in (torch.bfloat16, torch.float16) and data.dtype == x.dtype
    return halves and data.is_contiguous() and data.shape[2] % 8 == 0 and data.data_ptr() % 16 == 0


def grouped_gemm_dense(
    x: Tensor,
    rows: Tensor | None,
    factors: Tensor | None,
    offsets: Tensor,
    data: Tensor,
    bias: Tensor | None,
    gate: str,
    alpha: float,
    limit: float,
    config: LaunchConfig,
) -> Tensor:
    """The operator for weights that `supports_tma` takes."""
    count, size = (x.shape[0] if rows is None else rows.shape[0]), x.shape[1]
    experts, halves = data.shape[0], 1 if gate == NO_GATE else 2
    columns = data.shape[1] // halves
    out = x.new_empty(count, columns)
    if out.numel() == 0:
        return out
    x = x if x.stride(1) == 1 else x.contiguous()
    more = config.block_m if config.block_m < EXTRA_ROWS else EXTRA_ROWS
    map, tiles = build_tile_map(offsets, count, config.block_m + more, more)
    weights = TensorDescriptor(  # columns of gate and up take turns
        data,
        [experts, columns, halves, size],
        [data.stride(0), size, columns * size, 1],
        [1, config.block_n, halves, config.block_k],
    )
    together = rows is None and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
    blocks: list[TensorDescriptor | None] = [
        TensorDescriptor(x, [count, size], [x.stride(0), 1], [height, config.block_k])
        if together
        else None
        for height in (config.block_m, more)
    ]
    grouped_gemm_dense_kernel[(tiles * triton.cdiv(columns, config.block_n),)](
        x, *blocks, or_placeholder(rows, offsets), or_placeholder(factors, x), map, weights, or_placeholder(bias, x), out,
        columns, size, experts, tiles, x.stride(0), out.stride(0),
        0 if bias is None else bias.stride(0), alpha, limit, GATHER=rows is not None,
        TOGETHER=together, FACTORS=factors is not None, BIAS=bias is not None, GATE=GATE_IDS[gate],
        EVEN=size % config.block_k == 0, BM=config.block_m, MORE=more, BN=config.block_n, BK=config.block_k,
        ACROSS=ACROSS, STAGES=config.num_stages, NATIVE=NATIVE, num_warps=config.num_warps,
        num_stages=config.num_stages,
    )  # fmt: skip
    return out
