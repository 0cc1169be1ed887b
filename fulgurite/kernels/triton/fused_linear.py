"""Linears of few rows with what lies around them: the weight is read once, and nothing else is.

    y = x @ weight.T,          or with a norm      y = rms_norm(x) @ weight.T
    out = y + bias,            or with an up       out = activation(y) * (the same with up)
    out = out + residual

In: x [M, K] and dense weights [N, K] of its dtype. Out: [M, N], summed in float32 and rounded once.
A layer's decode step is then five kernels: norm + query, key and value; heads + attention; output +
residual; norm + gate and up; down + residual.

One row has a kernel of its own (`row_linear.py`). Up to 16 (`few_kernel`) a program takes a few rows of
the weight and all of K, which its warps share among them, as in `few_rows.py`; the first steps of it, or
all, are on their way before x is there. The norm costs no pass over x: sums of squares grow beside the
products,
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
from fulgurite.kernels.triton.early import (
    LINE,
    early,
    fetch_ahead,
    let_next_start,
    wait_for_inputs,
)
from fulgurite.kernels.triton.few_step import ROWS, multiply
from fulgurite.kernels.triton.glue import rms_norm
from fulgurite.kernels.triton.row_linear import finished, row_kernel, row_plan, step_weights
from fulgurite.kernels.triton.sizes import cdiv
from fulgurite.kernels.triton.tiles import FEW, processors

MOST = 128  # rows of x up to which these kernels are meant to beat the library and what follows it
SHARED = (
    160 << 10
)  # bytes of a multiprocessor's shared memory (227 KiB) that tiles on their way may fill
WHOLE_ROW = 3072  # columns of a weight that programs of one row hold all at once
HELD_BYTES = 12 << 10  # of a weight that a warp holds in registers: 96 of each thread's
INTERPRETED = triton.knobs.runtime.interpret


@triton.jit
def _few_step(
    w, v, scale, x_row, is_row, column, K, acc, other, squares, offset,
    NORM: tl.constexpr, GATED: tl.constexpr, EVEN: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Columns of x times those of the weight, and of the other one."""
    if EVEN:
        x = tl.load(x_row + column, is_row, 0.0)
    else:
        x = tl.load(x_row + column, is_row & (column < K), 0.0)
    if NORM:
        wide = x.to(tl.float32)
        squares += tl.sum(wide * wide, 2)
        x = (wide * (scale.to(tl.float32) + offset)).to(x.dtype)
    acc = multiply(x, w, acc, NATIVE)
    if GATED:
        other = multiply(x, v, other, NATIVE)
    return acc, other, squares


@triton.jit(do_not_specialize=["M"])
def few_kernel(
    x_ptr, w_ptr, up_ptr, norm_ptr, bias_ptr, up_bias_ptr, residual_ptr, out_ptr,
    M, N, K, x_stride, w_stride, residual_stride, out_stride, eps, offset,
    NORM: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    EVEN: tl.constexpr, R: tl.constexpr, BN: tl.constexpr, C: tl.constexpr, W: tl.constexpr,
    STAGES: tl.constexpr, NATIVE: tl.constexpr, HELD: tl.constexpr, WHOLE: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """BN columns of the result. GATE: the activation's name, or "" for a single weight.

    The weight's first HELD steps, with WHOLE all of it, are on their way before the kernel in front is done.
    """
    GATED: tl.constexpr = GATE != ""
    if EARLY:
        let_next_start()
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    row = tl.where(n < N, n, 0).to(tl.int64)
    at_weight = row[None, :, None] * w_stride
    r = tl.arange(0, R)
    first = (tl.arange(0, W) * C)[:, None, None] + tl.arange(0, C)[None, None, :]
    x_row = x_ptr + r.to(tl.int64)[None, :, None] * x_stride
    is_row = (r < M)[None, :, None]
    STEP: tl.constexpr = W * C
    if HELD > 0:
        w0, v0, s0 = step_weights(w_ptr, up_ptr, norm_ptr, at_weight, first, K, GATED, NORM, EVEN)
    if HELD > 1:
        second_at = first + STEP
        w1, v1, s1 = step_weights(
            w_ptr, up_ptr, norm_ptr, at_weight, second_at, K, GATED, NORM, EVEN
        )
    if HELD > 2:
        third_at = first + 2 * STEP
        w2, v2, s2 = step_weights(
            w_ptr, up_ptr, norm_ptr, at_weight, third_at, K, GATED, NORM, EVEN
        )
    if EARLY:
        wait_for_inputs()
    m = tl.arange(0, ROWS)
    keep = (m < M)[:, None] & (n < N)[None, :]
    acc = tl.zeros([W, ROWS, BN], tl.float32)
    other = tl.zeros([W, ROWS, BN], tl.float32)
    squares = tl.zeros([W, R], tl.float32)
    if HELD > 0:
        acc, other, squares = _few_step(
            w0, v0, s0, x_row, is_row, first, K, acc, other, squares, offset, NORM, GATED, EVEN, NATIVE
        )  # fmt: skip
    if HELD > 1:
        acc, other, squares = _few_step(
            w1, v1, s1, x_row, is_row, second_at, K, acc, other, squares, offset, NORM, GATED, EVEN, NATIVE
        )  # fmt: skip
    if HELD > 2:
        acc, other, squares = _few_step(
            w2, v2, s2, x_row, is_row, third_at, K, acc, other, squares, offset, NORM, GATED, EVEN, NATIVE
        )  # fmt: skip
    if not WHOLE:
        for k in tl.range(HELD * STEP, K, STEP, num_stages=STAGES):
            at = k + first
            w, v, scale = step_weights(w_ptr, up_ptr, norm_ptr, at_weight, at, K, GATED, NORM, EVEN)
            acc, other, squares = _few_step(
                w, v, scale, x_row, is_row, at, K, acc, other, squares, offset, NORM, GATED, EVEN, NATIVE
            )  # fmt: skip
    out, second = tl.sum(acc, 0), tl.sum(other, 0)
    if NORM:
        factor = tl.rsqrt(tl.sum(squares, 0) / K + eps)
        factor = tl.reshape(tl.broadcast_to(factor[None, :], [ROWS // R, R]), [ROWS])
        out *= factor[:, None]
        second *= factor[:, None]
    out = finished(
        out, second, m.to(tl.int64), n, row, keep, bias_ptr, up_bias_ptr, residual_ptr,
        residual_stride, GATE, BIAS, RESIDUAL,
    )  # fmt: skip
    into = out_ptr + m.to(tl.int64)[:, None] * out_stride + n[None, :]
    tl.store(into, out.to(out_ptr.dtype.element_ty), keep)


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
    NATIVE: tl.constexpr, LINES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """BN columns of all rows, over one part of K.

    The first LINES lines of the weight's rows are fetched before the kernel in front is done.
    """
    tile, part = tl.program_id(0), tl.program_id(1)
    n, m = tile * BN + tl.arange(0, BN), tl.arange(0, BM)
    row = tl.where(n < N, n, 0).to(tl.int64)
    m_in = tl.where(m < M, m, 0).to(tl.int64)
    column = tl.arange(0, BK)
    steps = tl.cdiv(K, BK)
    mine = tl.cdiv(steps, split)
    if EARLY:
        let_next_start()
        if LINES > 0:
            start = tl.minimum(
                part * mine * BK,
                K - LINES * LINE // (w_ptr.dtype.element_ty.primitive_bitwidth // 8),
            )
            fetch_ahead(w_ptr + row * w_stride + start, LINES)
            if GATE != "":
                fetch_ahead(up_ptr + row * w_stride + start, LINES)
        wait_for_inputs()
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
        out = finished(
            tl.trans(acc), tl.trans(other), m_in, n, row, keep, bias_ptr, up_bias_ptr,
            residual_ptr, residual_stride, GATE, BIAS, RESIDUAL,
        )  # fmt: skip
        into = out_ptr + m_in[:, None] * out_stride + n[None, :]
        tl.store(into, out.to(out_ptr.dtype.element_ty), keep)


# ---- launching -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class FewPlan:
    """Rows of the weight in a program, columns of a warp's step, warps, stages, steps held."""

    columns: int
    depth: int
    warps: int
    stages: int
    held: int = 0


@dataclass(frozen=True)
class TilePlan:
    """Rows of x and of the weight, columns of a step, programs that share K, warps, stages, lines."""

    rows: int
    columns: int
    depth: int
    split: int
    warps: int
    stages: int
    lines: int = 0


def few_plan(m: int, n: int, k: int, gated: bool, itemsize: int, processors: int) -> FewPlan:
    """Programs for every processor first; then all of a program's weight at once, or as much of K as fits.

    Measured on an H200 with 16 rows (`benchmarks/sweep_decode.py`).
    """
    columns = 8 if -(-n // 16) < 3 * processors // 2 else 16
    programs = -(-n // columns)
    warps = 2 if programs >= 4 * processors else 4 if programs >= 2 * processors or k <= 1024 else 8
    depth, stages = 128 if k >= 128 * warps else 64, 3 if gated else 4
    each = columns * (1 + gated)
    steps, most = -(-k // (warps * depth)), min(3, HELD_BYTES // (each * depth * itemsize))
    if steps <= most:
        return FewPlan(columns, depth, warps, stages, steps)
    while warps * depth * (_read_rows(m) + each) * itemsize * stages > SHARED and depth > 32:
        depth //= 2
    return FewPlan(columns, depth, warps, stages, 1)


def _read_rows(m: int) -> int:
    """Rows of x that a program of `few_kernel` reads."""
    return FEW if m > 4 else 4 if m > 1 else 1


def tile_plan(m: int, n: int, k: int, gated: bool, itemsize: int, processors: int) -> TilePlan:
    """K is split while that gives processors work, and each program keeps four steps at least."""
    rows = 32 if m <= 32 else 64 if m <= 64 else 128
    narrow = gated and -(-n // 64) < processors
    columns, depth = (32, 128) if narrow else (64, 64 if gated else 128)
    stages, split = 4 if rows < 128 else 3, 1
    while (rows + columns * (1 + gated)) * depth * itemsize * stages > SHARED and depth > 32:
        depth //= 2
    while -(-n // columns) * split * 2 <= 2 * processors and split * 8 * depth <= k:
        split *= 2
    lines = 4 if k * itemsize >= 4 * 128 else 0
    return TilePlan(rows, columns, depth, split, 4, stages, lines)


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
        "RESIDUAL": residual is not None, "NATIVE": native, **early(x.device),
    }  # fmt: skip
    others = (_or(bias, out), _or(up_bias, out), _or(residual, out), out)
    strides = (x.stride(0), weight.stride(0), _or(residual, out).stride(0), out.stride(0))
    if m == 1 and k <= WHOLE_ROW:
        one = row_plan(n, k, up is not None, processors(x.device))
        del shared["NATIVE"]
        row_kernel[(cdiv(n, one.columns),)](
            x, weight, _or(up, weight), _or(norm, out), *others, n, k, weight.stride(0), eps, offset,
            NORM=norm is not None, EVEN=k % one.depth == 0, BN=one.columns, BK=one.depth,
            STAGES=one.stages, **_held(one.held, one.depth, k),
            num_warps=one.warps, **shared,
        )  # fmt: skip
        return out
    if m <= FEW:
        few = few_plan(m, n, k, up is not None, x.element_size(), processors(x.device))
        few_kernel[(cdiv(n, few.columns),)](
            x, weight, _or(up, weight), _or(norm, out), *others, m, n, k, *strides, eps, offset,
            NORM=norm is not None, EVEN=k % (few.depth * few.warps) == 0,
            R=_read_rows(m), BN=few.columns, C=few.depth, W=few.warps,
            STAGES=few.stages, **_held(few.held, few.depth * few.warps, k), num_warps=few.warps, **shared,
        )  # fmt: skip
        return out
    plan = tile_plan(m, n, k, up is not None, x.element_size(), processors(x.device))
    tiles = cdiv(n, plan.columns)
    partial = count = out
    if plan.split > 1:
        size = plan.split * tiles * 2 * plan.rows * plan.columns
        partial = torch.empty(size, dtype=torch.float32, device=x.device)
        count = take_counters(x.device, tiles)
    tile_kernel[(tiles, plan.split)](
        x, weight, _or(up, weight), *others, partial, count, m, n, k, plan.split, *strides,
        EVEN=k % plan.depth == 0, SPLIT=plan.split > 1, BM=plan.rows, BN=plan.columns,
        BK=plan.depth, LINES=plan.lines, num_warps=plan.warps, num_stages=plan.stages, **shared,
    )  # fmt: skip
    return out


def _held(held: int, step: int, k: int) -> dict[str, Any]:
    """How many steps are held: no more than there are; and whether that is all."""
    steps = -(-k // step)
    return {"HELD": min(held, steps), "WHOLE": held >= steps}


def _fits(x: Tensor, weight: Tensor, up: Tensor | None, residual: Tensor | None) -> bool:
    tensors = [x, weight, *(t for t in (up, residual) if t is not None)]
    alike = all(t.dtype == x.dtype and t.stride(-1) == 1 for t in tensors)
    if up is not None and up.stride(0) != weight.stride(0):
        return False
    return alike and x.dtype in (torch.bfloat16, torch.float16, torch.float32)


def _or(tensor: Tensor | None, stand_in: Tensor) -> Tensor:
    return stand_in if tensor is None else tensor
