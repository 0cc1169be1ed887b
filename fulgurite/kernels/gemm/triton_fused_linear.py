# mypy: allow-untyped-defs, allow-incomplete-defs
"""Linears of few rows with what lies around them: the weight is read once, and nothing else is.

    y = x @ weight.T,          or with a norm      y = rms_norm(x) @ weight.T
    out = y + bias,            or with an up       out = activation(y) * (the same with up)
    out = out + residual

In: x [M, K] and dense weights [N, K] of its dtype. Out: [M, N], summed in float32 and rounded once.
A layer's decode step is then five kernels: norm + query, key and value; heads + attention; output +
residual; norm + gate and up; down + residual.

One row has a kernel of its own (`row_linear.py`); up to 16, and more, have theirs in `fused_linear_kernels.py`.
Here their tiles are chosen. Past 16 rows the norm is a kernel of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from fulgurite.kernels.common.integer_math import cdiv
from fulgurite.kernels.common.triton_counters import take_counters
from fulgurite.kernels.common.triton_pdl import early
from fulgurite.kernels.elementwise.triton_elementwise import rms_norm
from fulgurite.kernels.gemm.fused_projections import MOST_FUSED
from fulgurite.kernels.gemm.triton_fused_linear_kernels import few_kernel, tile_kernel
from fulgurite.kernels.gemm.triton_gemv import row_kernel, row_plan
from fulgurite.kernels.tuning.gemm import FEW, processors

SHARED = (
    160 << 10
)  # bytes of a multiprocessor's shared memory (227 KiB) that tiles on their way may fill
WHOLE_ROW = 3072  # columns of a weight that programs of one row hold all at once
HELD_BYTES = 12 << 10  # of a weight that a warp holds in registers: 96 of each thread's
INTERPRETED = triton.knobs.runtime.interpret


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
    if not 0 < m <= MOST_FUSED or not n or not k or not _fits(x, weight, up, residual):
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
