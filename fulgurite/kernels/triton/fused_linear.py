"""Linears of few rows with what lies around them: the weight is read once, and nothing else is.

    y = x @ weight.T,          or with a norm      y = rms_norm(x) @ weight.T
    out = y + bias,            or with an up       out = activation(y) * (the same with up)
    out = out + residual

In: x [M, K] and dense weights [N, K] of its dtype. Out: [M, N], summed in float32 and rounded once.
A layer's decode step is then six kernels: norm + query, key and value; heads (`glue.py`); attention;
output + residual; norm + gate and up; down + residual.

Up to 16 rows (`few_kernel`) a program takes a few rows of the weight and all of K, which its warps share
among them, as in `few_rows.py`. The norm costs no pass over x: sums of squares grow beside the products,
    rms_norm(x) @ weight.T = ((x * norm) @ weight.T) / sqrt(mean(x^2) + eps)
More rows (`tile_kernel`) fill the tensor cores, the weight on their long side; programs that share a tile
leave their sums in memory, and the last one adds them up in order. Their norm is a kernel of its own.

    W  warps    R  rows of x that are read, up to 16    C  columns of a warp's step    N  rows of the weight
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fulgurite.kernels.triton.counters import take_counters
from fulgurite.kernels.triton.few_rows import ROWS, multiply
from fulgurite.kernels.triton.glue import activate, rms_norm
from fulgurite.kernels.triton.tiles import FEW, processors

MOST = 128  # rows of x up to which these kernels are meant to beat the library and what follows it
SHARED = (
    160 << 10
)  # bytes of a multiprocessor's shared memory (227 KiB) that tiles on their way may fill
INTERPRETED = triton.knobs.runtime.interpret


@triton.jit(do_not_specialize=["M"])
def few_kernel(
    x_ptr, w_ptr, up_ptr, norm_ptr, bias_ptr, up_bias_ptr, residual_ptr, out_ptr,
    M, N, K, x_stride, w_stride, residual_stride, out_stride, eps, offset,
    NORM: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    EVEN: tl.constexpr, R: tl.constexpr, BN: tl.constexpr, C: tl.constexpr, W: tl.constexpr,
    STAGES: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """BN columns of the result. GATE: the activation's name, or "" for a single weight."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    row = tl.where(n < N, n, 0).to(tl.int64)
    at_weight = row[None, :, None] * w_stride
    r = tl.arange(0, R)
    column = tl.arange(0, C)[None, None, :]
    first = (tl.arange(0, W) * C)[:, None, None]
    x_row = x_ptr + r.to(tl.int64)[None, :, None] * x_stride
    is_row = (r < M)[None, :, None]
    acc = tl.zeros([W, ROWS, BN], tl.float32)
    other = tl.zeros([W, ROWS, BN], tl.float32)
    squares = tl.zeros([W, R], tl.float32)
    for k in tl.range(0, K, W * C, num_stages=STAGES):
        at = k + first + column
        if EVEN:
            w = tl.load(w_ptr + at_weight + at)
            x = tl.load(x_row + at, is_row, 0.0)
        else:
            w = tl.load(w_ptr + at_weight + at, at < K, 0.0)
            x = tl.load(x_row + at, is_row & (at < K), 0.0)
        if GATE != "":
            if EVEN:
                v = tl.load(up_ptr + at_weight + at)
            else:
                v = tl.load(up_ptr + at_weight + at, at < K, 0.0)
        if NORM:
            wide = x.to(tl.float32)
            squares += tl.sum(wide * wide, 2)
            if EVEN:
                scale = tl.load(norm_ptr + at)
            else:
                scale = tl.load(norm_ptr + at, at < K, 0.0)
            x = (wide * (scale.to(tl.float32) + offset)).to(x.dtype)
        acc = multiply(x, w, acc, NATIVE)
        if GATE != "":
            other = multiply(x, v, other, NATIVE)
    out, second = tl.sum(acc, 0), tl.sum(other, 0)
    if NORM:
        factor = tl.rsqrt(tl.sum(squares, 0) / K + eps)
        factor = tl.reshape(tl.broadcast_to(factor[None, :], [ROWS // R, R]), [ROWS])
        out *= factor[:, None]
        second *= factor[:, None]
    m = tl.arange(0, ROWS)
    keep = (m < M)[:, None] & (n < N)[None, :]
    out = _finished(
        out, second, m.to(tl.int64), n, row, keep, bias_ptr, up_bias_ptr, residual_ptr,
        residual_stride, GATE, BIAS, RESIDUAL,
    )  # fmt: skip
    into = out_ptr + m.to(tl.int64)[:, None] * out_stride + n[None, :]
    tl.store(into, out.to(out_ptr.dtype.element_ty), keep)


@triton.jit
def _finished(
    out, second, m, n, row, keep, bias_ptr, up_bias_ptr, residual_ptr, residual_stride,
    GATE: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Bias, gate and residual."""
    if BIAS:
        out += tl.load(bias_ptr + row).to(tl.float32)[None, :]
        if GATE != "":
            second += tl.load(up_bias_ptr + row).to(tl.float32)[None, :]
    if GATE != "":
        out = activate(out, GATE) * second
    if RESIDUAL:
        from_residual = residual_ptr + m[:, None] * residual_stride + n[None, :]
        out += tl.load(from_residual, keep, 0.0).to(tl.float32)
    return out


@triton.jit
def _product(w, x, acc, NATIVE: tl.constexpr):
    """acc + w @ x.T; the interpreter, and float32, need the numbers widened."""
    if NATIVE:
        return tl.dot(w, tl.trans(x), acc)
    else:
        return tl.dot(
            w.to(tl.float32), tl.trans(x).to(tl.float32), acc, input_precision="ieee"
        )  # fmt: skip


@triton.jit(do_not_specialize=["M", "split"])
def tile_kernel(
    x_ptr, w_ptr, up_ptr, bias_ptr, up_bias_ptr, residual_ptr, out_ptr, partial_ptr, count_ptr,
    M, N, K, split, x_stride, w_stride, residual_stride, out_stride,
    GATE: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, EVEN: tl.constexpr,
    SPLIT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """BN columns of all rows, over one part of K."""
    tile, part = tl.program_id(0), tl.program_id(1)
    n, m = tile * BN + tl.arange(0, BN), tl.arange(0, BM)
    row = tl.where(n < N, n, 0).to(tl.int64)
    m_in = tl.where(m < M, m, 0).to(tl.int64)
    column = tl.arange(0, BK)
    steps = tl.cdiv(K, BK)
    mine = tl.cdiv(steps, split)
    acc = tl.zeros([BN, BM], tl.float32)
    other = tl.zeros([BN, BM], tl.float32)
    for step in range(part * mine, tl.minimum(part * mine + mine, steps)):
        at = step * BK + column
        inside = (at < (step * BK + BK if EVEN else K))[None, :]
        x = tl.load(x_ptr + m_in[:, None] * x_stride + at[None, :], inside, 0.0)
        w = tl.load(w_ptr + row[:, None] * w_stride + at[None, :], inside, 0.0)
        acc = _product(w, x, acc, NATIVE)
        if GATE != "":
            v = tl.load(up_ptr + row[:, None] * w_stride + at[None, :], inside, 0.0)
            other = _product(v, x, other, NATIVE)
    last = True
    if SPLIT:
        SIZE: tl.constexpr = BN * BM
        place = tl.arange(0, BN)[:, None] * BM + tl.arange(0, BM)[None, :]
        tiles = tl.num_programs(0)
        mine_at = partial_ptr + (part * tiles + tile).to(tl.int64) * (2 * SIZE) + place
        tl.store(mine_at, acc)
        if GATE != "":
            tl.store(mine_at + SIZE, other)
        tl.debug_barrier()
        last = tl.atomic_add(count_ptr + tile, 1, sem="acq_rel") == split - 1
        if last:
            acc = tl.zeros([BN, BM], tl.float32)
            other = tl.zeros([BN, BM], tl.float32)
            for one in range(split):
                at_one = partial_ptr + (one * tiles + tile).to(tl.int64) * (2 * SIZE) + place
                acc += tl.load(at_one, cache_modifier=".cg")
                if GATE != "":
                    other += tl.load(at_one + SIZE, cache_modifier=".cg")
            tl.store(count_ptr + tile, 0)
    if last:
        keep = (m < M)[:, None] & (n < N)[None, :]
        out = _finished(
            tl.trans(acc), tl.trans(other), m_in, n, row, keep, bias_ptr, up_bias_ptr,
            residual_ptr, residual_stride, GATE, BIAS, RESIDUAL,
        )  # fmt: skip
        into = out_ptr + m_in[:, None] * out_stride + n[None, :]
        tl.store(into, out.to(out_ptr.dtype.element_ty), keep)


# ---- launching -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class FewPlan:
    """Rows of the weight in a program, columns of a warp's step, warps, stages."""

    columns: int
    depth: int
    warps: int
    stages: int


@dataclass(frozen=True)
class TilePlan:
    """Rows of x and of the weight, columns of a step, programs that share K, warps, stages."""

    rows: int
    columns: int
    depth: int
    split: int
    warps: int
    stages: int


def few_plan(m: int, n: int, k: int, gated: bool, itemsize: int, processors: int) -> FewPlan:
    """Programs for every processor first, then as much of K at once as the warps can hold.

    Not measured yet: `benchmarks/sweep_decode.py` tries the neighbours on a GPU.
    """
    columns = 8 if -(-n // 16) < 3 * processors // 2 else 16
    programs = -(-n // columns)
    warps = 2 if programs >= 4 * processors else 4 if programs >= 2 * processors or k < 1024 else 8
    depth, stages = 128 if k >= 128 * warps else 64, 3 if gated else 4
    numbers = _read_rows(m) + columns * (1 + gated)
    while warps * depth * numbers * itemsize * stages > SHARED and depth > 32:
        depth //= 2
    return FewPlan(columns, depth, warps, stages)


def _read_rows(m: int) -> int:
    """Rows of x that a program of `few_kernel` reads."""
    return FEW if m > 4 else 4 if m > 1 else 1


def tile_plan(m: int, n: int, k: int, gated: bool, itemsize: int, processors: int) -> TilePlan:
    """K is split while that gives processors work, and each program keeps four steps at least."""
    rows = 32 if m <= 32 else 64 if m <= 64 else 128
    depth, stages, split = 64 if gated else 128, 4 if rows < 128 else 3, 1
    while (rows + 64 * (1 + gated)) * depth * itemsize * stages > SHARED and depth > 32:
        depth //= 2
    while -(-n // 64) * split * 2 <= 2 * processors and split * 8 * depth <= k:
        split *= 2
    return TilePlan(rows, 64, depth, split, warps=4, stages=stages)


def linear(
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    up: Tensor | None = None,
    up_bias: Tensor | None = None,
    activation: str = "",
    norm: Tensor | None = None,
    eps: float = 0.0,
    offset: float = 0.0,
    residual: Tensor | None = None,
) -> Any:
    """[M, N], or NotImplemented where the kernels don't take it (too many rows, other layouts)."""
    m, k = x.shape
    n = weight.shape[0]
    if not 0 < m <= MOST or not n or not k or not _fits(x, weight, up, residual):
        return NotImplemented
    if norm is not None and (m > FEW or x.dtype == torch.float16):
        # a kernel of its own: x * norm, not yet divided by its size, may be past float16
        x, norm = rms_norm(x, norm, eps, offset), None
        if x is NotImplemented:
            return x
    out = torch.empty((m, n), dtype=x.dtype, device=x.device)
    native = not INTERPRETED and x.dtype != torch.float32
    shared: dict[str, Any] = {
        "GATE": activation if up is not None else "", "BIAS": bias is not None,
        "RESIDUAL": residual is not None, "NATIVE": native,
    }  # fmt: skip
    others = (_or(bias, out), _or(up_bias, out), _or(residual, out), out)
    strides = (x.stride(0), weight.stride(0), _or(residual, out).stride(0), out.stride(0))
    if m <= FEW:
        few = few_plan(m, n, k, up is not None, x.element_size(), processors(x.device))
        few_kernel[(triton.cdiv(n, few.columns),)](
            x, weight, _or(up, weight), _or(norm, out), *others, m, n, k, *strides, eps, offset,
            NORM=norm is not None, EVEN=k % (few.depth * few.warps) == 0,
            R=_read_rows(m), BN=few.columns, C=few.depth, W=few.warps,
            STAGES=few.stages, num_warps=few.warps, **shared,
        )  # fmt: skip
        return out
    plan = tile_plan(m, n, k, up is not None, x.element_size(), processors(x.device))
    tiles = triton.cdiv(n, plan.columns)
    partial = count = out
    if plan.split > 1:
        size = plan.split * tiles * 2 * plan.rows * plan.columns
        partial = torch.empty(size, dtype=torch.float32, device=x.device)
        count = take_counters(x.device, tiles)
    tile_kernel[(tiles, plan.split)](
        x, weight, _or(up, weight), *others, partial, count, m, n, k, plan.split, *strides,
        EVEN=k % plan.depth == 0, SPLIT=plan.split > 1, BM=plan.rows, BN=plan.columns,
        BK=plan.depth, num_warps=plan.warps, num_stages=plan.stages, **shared,
    )  # fmt: skip
    return out


def _fits(x: Tensor, weight: Tensor, up: Tensor | None, residual: Tensor | None) -> bool:
    tensors = [x, weight, *(t for t in (up, residual) if t is not None)]
    alike = all(t.dtype == x.dtype and t.stride(-1) == 1 for t in tensors)
    if up is not None and up.stride(0) != weight.stride(0):
        return False
    return alike and x.dtype in (torch.bfloat16, torch.float16, torch.float32)


def _or(tensor: Tensor | None, stand_in: Tensor) -> Tensor:
    return stand_in if tensor is None else tensor
