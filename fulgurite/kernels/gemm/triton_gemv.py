# mypy: allow-untyped-defs, allow-incomplete-defs
"""Fused GEMV: one row times a weight, with norm, gated activation and residual.

    y = x @ weight.T,          with a norm      y = rms_norm(x) @ weight.T
    out = y + bias,            with `up`        out = activation(y) * (rms_norm(x) @ up.T)
    out = out + residual

In: x [1, K] and dense weights [N, K]. Out: [1, N], summed in float32 and rounded once.
`triton_fused_linear.py` launches it. `load_columns`, `load_weight_block` and `apply_epilogue` are
shared with the kernels for more rows.

One row is no work for tensor cores: every thread multiplies what it loads, and sums are reduced
once at the end. Most of a program's weight is loaded before the previous kernel is done (PDL).
"""

from __future__ import annotations

from fulgurite.kernels.common.triton_import import tl, triton
from fulgurite.kernels.common.triton_launch import cached_launch
from fulgurite.kernels.common.triton_pdl import launch_dependents, wait_for_dependencies
from fulgurite.kernels.elementwise.triton_elementwise import apply_activation


@triton.jit
def load_columns(ptr, offsets, column, K, EVEN: tl.constexpr):
    """Load at `offsets`; columns from K on are zero."""
    if EVEN:
        return tl.load(ptr + offsets)
    else:
        return tl.load(ptr + offsets, column < K, 0.0)


@triton.jit
def load_weight_block(
    w_ptr, up_ptr, norm_ptr, row_offset, column, K,
    GATED: tl.constexpr, NORM: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """One block of the weight, of the `up` weight and of the norm, where there are any."""
    w = load_columns(w_ptr, row_offset + column, column, K, EVEN)
    up = load_columns(up_ptr, row_offset + column, column, K, EVEN) if GATED else w
    norm = load_columns(norm_ptr, column, column, K, EVEN) if NORM else w
    return w, up, norm


@triton.jit
def apply_epilogue(
    out, up_out, m, n, row, mask, bias_ptr, up_bias_ptr, residual_ptr, residual_stride,
    GATE: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Bias, gated activation and residual."""
    if BIAS:
        out += tl.load(bias_ptr + row).to(tl.float32)[None, :]
        if GATE != "":
            up_out += tl.load(up_bias_ptr + row).to(tl.float32)[None, :]
    if GATE != "":
        out = apply_activation(out, GATE) * up_out
    if RESIDUAL:
        residual_ptrs = residual_ptr + m[:, None] * residual_stride + n[None, :]
        out += tl.load(residual_ptrs, mask, 0.0).to(tl.float32)
    return out


@triton.jit
def _multiply_block(
    w, up, norm, x_ptr, column, K, acc, up_acc, squares, offset,
    NORM: tl.constexpr, GATED: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Multiply-add one row of x with blocks of the weight and `up`; lanes are not reduced yet."""
    x = load_columns(x_ptr, column, column, K, EVEN).to(tl.float32)
    if NORM:
        squares += x * x
        x *= norm.to(tl.float32) + offset
    acc += w.to(tl.float32) * x
    if GATED:
        up_acc += up.to(tl.float32) * x
    return acc, up_acc, squares


@cached_launch
def fused_gemv_kernel(
    x_ptr, w_ptr, up_ptr, norm_ptr, bias_ptr, up_bias_ptr, residual_ptr, out_ptr,
    N, K, w_stride, eps, offset,
    NORM: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    EVEN: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
    PREFETCH: tl.constexpr, PREFETCH_ALL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BN columns of the result of one row, without tensor cores.

    The first PREFETCH blocks of the weight (all, with PREFETCH_ALL) are loaded before the previous
    kernel is done. GATE: name of the activation, "" for a single weight.
    """
    GATED: tl.constexpr = GATE != ""
    if PDL:
        launch_dependents()
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    row = tl.where(n < N, n, 0).to(tl.int64)
    row_offset = row[:, None] * w_stride
    columns0 = tl.arange(0, BK)[None, :]
    if PREFETCH > 0:
        w0, up0, norm0 = load_weight_block(
            w_ptr, up_ptr, norm_ptr, row_offset, columns0, K, GATED, NORM, EVEN
        )
    if PREFETCH > 1:
        columns1 = columns0 + BK
        w1, up1, norm1 = load_weight_block(
            w_ptr, up_ptr, norm_ptr, row_offset, columns1, K, GATED, NORM, EVEN
        )
    if PREFETCH > 2:
        columns2 = columns0 + 2 * BK
        w2, up2, norm2 = load_weight_block(
            w_ptr, up_ptr, norm_ptr, row_offset, columns2, K, GATED, NORM, EVEN
        )
    if PDL:
        wait_for_dependencies()
    acc = tl.zeros([BN, BK], tl.float32)
    up_acc = tl.zeros([BN, BK], tl.float32)
    squares = tl.zeros([1, BK], tl.float32)
    if PREFETCH > 0:
        acc, up_acc, squares = _multiply_block(
            w0, up0, norm0, x_ptr, columns0, K, acc, up_acc, squares, offset, NORM, GATED, EVEN
        )
    if PREFETCH > 1:
        acc, up_acc, squares = _multiply_block(
            w1, up1, norm1, x_ptr, columns1, K, acc, up_acc, squares, offset, NORM, GATED, EVEN
        )
    if PREFETCH > 2:
        acc, up_acc, squares = _multiply_block(
            w2, up2, norm2, x_ptr, columns2, K, acc, up_acc, squares, offset, NORM, GATED, EVEN
        )
    if not PREFETCH_ALL:
        for k in tl.range(PREFETCH * BK, K, BK, num_stages=STAGES):
            columns = k + columns0
            w, up, norm = load_weight_block(
                w_ptr, up_ptr, norm_ptr, row_offset, columns, K, GATED, NORM, EVEN
            )
            acc, up_acc, squares = _multiply_block(
                w, up, norm, x_ptr, columns, K, acc, up_acc, squares, offset, NORM, GATED, EVEN
            )
    inv_rms = tl.rsqrt(tl.sum(tl.sum(squares, 1), 0) / K + eps) if NORM else 1.0
    row0 = tl.zeros([1], tl.int64)
    out = apply_epilogue(
        (tl.sum(acc, 1) * inv_rms)[None, :], (tl.sum(up_acc, 1) * inv_rms)[None, :], row0, n, row,
        (n < N)[None, :], bias_ptr, up_bias_ptr, residual_ptr, 0, GATE, BIAS, RESIDUAL,
    )  # fmt: skip
    out_ptrs = out_ptr + row0[:, None] + n[None, :]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), (n < N)[None, :])
