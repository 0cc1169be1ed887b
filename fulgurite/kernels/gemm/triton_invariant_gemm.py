# mypy: allow-untyped-defs, allow-incomplete-defs
"""Batch-invariant GEMM of deterministic mode on GPUs: any strides, 16 or 32 bits, stacks of matrices.

    out[b, m, n] = sum over k of x[b, m, k] * w[b, k, n]  + bias[n]

In: x [B, M, K] and w [B, K, N] of one dtype; optionally a bias [N]. Out: [B, M, N], summed in float32
and rounded once. One launch config for all sizes, and blocks of K in order: a row of the result
depends on that row of x alone. float32 is multiplied as it is (no TF32).

`gemm/triton_gemm.py` is faster for 16-bit weights with contiguous rows; this kernel takes the rest:
the absorbed projections of MLA, float32, weights [K, N], products of modules of transformers.
"""

from __future__ import annotations

import math

from torch import Tensor

from fulgurite.determinism import deterministic
from fulgurite.kernels.common.triton_import import tl
from fulgurite.kernels.common.triton_launch import cached_launch
from fulgurite.kernels.common.triton_numerics import NATIVE
from fulgurite.kernels.integer_math import cdiv
from fulgurite.kernels.tuning import heuristics_for
from fulgurite.kernels.tuning.deterministic import DeterministicHeuristics


@cached_launch(do_not_specialize=["M"])
def invariant_gemm_kernel(
    x_ptr, w_ptr, bias_ptr, out_ptr, M, N, K, x_batch, x_row, x_column, w_batch, w_row, w_column,
    out_batch, out_row,
    BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """One tile of one matrix of the stack. Masks don't depend on whether blocks divide the sizes."""
    tile, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    tiles_n = tl.cdiv(N, BLOCK_N)
    m = (tile // tiles_n * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    n = (tile % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    at_k = tl.arange(0, BLOCK_K)
    x_rows = x_ptr + batch * x_batch + m[:, None] * x_row
    w_columns = w_ptr + batch * w_batch + n[None, :] * w_column
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        k = (start + at_k).to(tl.int64)
        x = tl.load(x_rows + k[None, :] * x_column, (m < M)[:, None] & (k < K)[None, :], 0.0)
        w = tl.load(w_columns + k[:, None] * w_row, (k < K)[:, None] & (n < N)[None, :], 0.0)
        if not NATIVE:  # the interpreter multiplies bfloat16 as integers
            x, w = x.to(tl.float32), w.to(tl.float32)
        acc = tl.dot(x, w, acc, input_precision="ieee")
    if BIAS:
        acc += tl.load(bias_ptr + n, n < N, 0.0).to(tl.float32)[None, :]
    into = out_ptr + batch * out_batch + m[:, None] * out_row + n[None, :]
    tl.store(into, acc.to(out_ptr.dtype.element_ty), (m < M)[:, None] & (n < N)[None, :])


def invariant_bmm(
    x_BMK: Tensor, w_BKN: Tensor, bias_N: Tensor | None = None, out_BMN: Tensor | None = None
) -> Tensor:
    """x @ w + bias for stacks of matrices; `out_BMN` may have any strides but the last."""
    batch, m, k = x_BMK.shape
    n = w_BKN.shape[2]
    out = x_BMK.new_empty((batch, m, n)) if out_BMN is None else out_BMN
    assert out.stride(2) == 1 or n <= 1, "columns of the output are contiguous"
    if not out.numel():
        return out
    with deterministic():
        heuristics = heuristics_for(x_BMK.device)
    assert isinstance(heuristics, DeterministicHeuristics), "heuristics were overridden"
    config = heuristics.invariant_gemm(x_BMK.dtype)
    invariant_gemm_kernel[(cdiv(m, config.block_m) * cdiv(n, config.block_n), batch)](
        x_BMK, w_BKN, out if bias_N is None else bias_N.contiguous(), out, m, n, k,
        *x_BMK.stride(), *w_BKN.stride(), *out.stride()[:2],
        BIAS=bias_N is not None, BLOCK_M=config.block_m, BLOCK_N=config.block_n,
        BLOCK_K=config.block_k, NATIVE=NATIVE,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return out


def invariant_linear(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """x [.., K] @ weight.T + bias."""
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    out = invariant_bmm(rows[None], weight_NK.t()[None], bias_N)[0]
    return out.view(*x.shape[:-1], weight_NK.shape[0])
