# mypy: allow-untyped-defs, allow-incomplete-defs
"""One row times a weight, with what lies around it: a decode step's linears for a single request.

    y = x @ weight.T,          or with a norm      y = rms_norm(x) @ weight.T
    out = y + bias,            or with an up       out = activation(y) * (the same with up)
    out = out + residual

In: x [1, K] and dense weights [N, K]. Out: [1, N], summed in float32 and rounded once. `fused_linear.py`
launches it, and is the same for more rows; `numbers` and `finished` are what both share.

One row is no work for tensor cores: every thread multiplies what it loads, straight from memory, and sums
meet once, at the end. Most of a program's weight is on its way before x is there.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from fulgurite.kernels.common.integer_math import next_power_of_2
from fulgurite.kernels.common.triton_launch import prepared
from fulgurite.kernels.common.triton_pdl import let_next_start, wait_for_inputs
from fulgurite.kernels.elementwise.triton_elementwise import activate


@triton.jit
def numbers(ptr, at, column, K, EVEN: tl.constexpr):
    """Numbers at `at`, of columns below K."""
    if EVEN:
        return tl.load(ptr + at)
    else:
        return tl.load(ptr + at, column < K, 0.0)


@triton.jit
def step_weights(
    w_ptr, up_ptr, norm_ptr, at_row, column, K,
    GATED: tl.constexpr, NORM: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """A step's numbers of the weight, of the gate's other one and of the norm, as far as there are any."""
    w = numbers(w_ptr, at_row + column, column, K, EVEN)
    up = numbers(up_ptr, at_row + column, column, K, EVEN) if GATED else w
    norm = numbers(norm_ptr, column, column, K, EVEN) if NORM else w
    return w, up, norm


@triton.jit
def finished(
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
def _row_step(
    w, v, scale, x_ptr, column, K, left, right, squares, offset,
    NORM: tl.constexpr, GATED: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """One row of x times columns of the weight, and of the other one; sums stay apart."""
    x = numbers(x_ptr, column, column, K, EVEN).to(tl.float32)
    if NORM:
        squares += x * x
        x *= scale.to(tl.float32) + offset
    left += w.to(tl.float32) * x
    if GATED:
        right += v.to(tl.float32) * x
    return left, right, squares


@prepared
def row_kernel(
    x_ptr, w_ptr, up_ptr, norm_ptr, bias_ptr, up_bias_ptr, residual_ptr, out_ptr,
    N, K, w_stride, eps, offset,
    NORM: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    EVEN: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
    HELD: tl.constexpr, WHOLE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """BN columns of the result of one row, without the tensor cores.

    The weight's first HELD steps, with WHOLE all of it, are on their way before the kernel in front is done.
    """
    GATED: tl.constexpr = GATE != ""
    if EARLY:
        let_next_start()
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    row = tl.where(n < N, n, 0).to(tl.int64)
    at_row = row[:, None] * w_stride
    first = tl.arange(0, BK)[None, :]
    if HELD > 0:
        w0, v0, s0 = step_weights(w_ptr, up_ptr, norm_ptr, at_row, first, K, GATED, NORM, EVEN)
    if HELD > 1:
        second_at = first + BK
        w1, v1, s1 = step_weights(w_ptr, up_ptr, norm_ptr, at_row, second_at, K, GATED, NORM, EVEN)
    if HELD > 2:
        third_at = first + 2 * BK
        w2, v2, s2 = step_weights(w_ptr, up_ptr, norm_ptr, at_row, third_at, K, GATED, NORM, EVEN)
    if EARLY:
        wait_for_inputs()
    left = tl.zeros([BN, BK], tl.float32)
    right = tl.zeros([BN, BK], tl.float32)
    squares = tl.zeros([1, BK], tl.float32)
    if HELD > 0:
        left, right, squares = _row_step(
            w0, v0, s0, x_ptr, first, K, left, right, squares, offset, NORM, GATED, EVEN
        )
    if HELD > 1:
        left, right, squares = _row_step(
            w1, v1, s1, x_ptr, second_at, K, left, right, squares, offset, NORM, GATED, EVEN
        )
    if HELD > 2:
        left, right, squares = _row_step(
            w2, v2, s2, x_ptr, third_at, K, left, right, squares, offset, NORM, GATED, EVEN
        )
    if not WHOLE:
        for k in tl.range(HELD * BK, K, BK, num_stages=STAGES):
            at = k + first
            w, v, scale = step_weights(w_ptr, up_ptr, norm_ptr, at_row, at, K, GATED, NORM, EVEN)
            left, right, squares = _row_step(
                w, v, scale, x_ptr, at, K, left, right, squares, offset, NORM, GATED, EVEN
            )
    factor = tl.rsqrt(tl.sum(tl.sum(squares, 1), 0) / K + eps) if NORM else 1.0
    only = tl.zeros([1], tl.int64)
    out = finished(
        (tl.sum(left, 1) * factor)[None, :], (tl.sum(right, 1) * factor)[None, :], only, n, row,
        (n < N)[None, :], bias_ptr, up_bias_ptr, residual_ptr, 0, GATE, BIAS, RESIDUAL,
    )  # fmt: skip
    into = out_ptr + only[:, None] + n[None, :]
    tl.store(into, out.to(out_ptr.dtype.element_ty), (n < N)[None, :])


# ---- which program -------------------------------------------------------------------------------


@dataclass(frozen=True)
class RowPlan:
    """Rows of the weight in a program, columns of a step, warps, stages, steps held."""

    columns: int
    depth: int
    warps: int
    stages: int
    held: int


def row_plan(n: int, k: int, gated: bool, processors: int) -> RowPlan:
    """Few rows of the weight a program, and of them as much as its registers hold."""
    columns = 8 if not gated and n >= 6 * processors else 4
    depth = min(1024, next_power_of_2(k))
    return RowPlan(columns, depth, 4, 3, min(3, -(-k // depth)))
