# mypy: allow-untyped-defs, allow-incomplete-defs
"""Linears of few rows, fused with norm, gated activation and residual: the weight is read once.

    y = x @ weight.T,          with a norm      y = rms_norm(x) @ weight.T
    out = y + bias,            with `up`        out = activation(y) * (rms_norm(x) @ up.T)
    out = out + residual

In: x [M, K] and dense weights [N, K] of its dtype. Out: [M, N], summed in float32 and rounded once.
A layer's decode step is then five kernels: norm + qkv_proj; QK norm + RoPE + attention; o_proj +
residual; norm + gate_up_proj; down_proj + residual.

One row has a GEMV kernel (`triton_gemv.py`). Up to 16 rows, and more, have the small-M and GEMM
kernels of `triton_fused_linear_kernels.py`. Above 16 rows the norm is a separate kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fulgurite.kernels.common.triton_counters import acquire_counters
from fulgurite.kernels.common.triton_import import INTERPRETED
from fulgurite.kernels.common.triton_pdl import pdl_options
from fulgurite.kernels.elementwise.triton_elementwise import rms_norm
from fulgurite.kernels.gemm.triton_fused_linear_kernels import (
    fused_gemm_kernel,
    fused_small_m_kernel,
)
from fulgurite.kernels.gemm.triton_gemv import fused_gemv_kernel
from fulgurite.kernels.integer_math import cdiv
from fulgurite.kernels.tuning.fused_linear import SMALL_M
from fulgurite.kernels.tuning.heuristics import heuristics_for


def fused_linear(
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
    """[M, N], or NotImplemented where the kernels don't support rows, layouts or dtypes."""
    m, k = x.shape
    n = weight.shape[0]
    heuristics, is_gated = heuristics_for(x.device), up is not None
    if not 0 < m <= heuristics.fused_linear_max_rows or not n or not k:
        return NotImplemented
    if not _is_supported(x, weight, up, residual):
        return NotImplemented
    if norm is not None and (m > SMALL_M or x.dtype == torch.float16):
        # a separate kernel: x * norm, before the division by its RMS, may overflow float16
        x, norm = rms_norm(x, norm, eps, offset), None
        if x is NotImplemented:
            return x
    out = torch.empty((m, n), dtype=x.dtype, device=x.device)
    use_tensor_cores = not INTERPRETED and x.dtype != torch.float32
    shared: dict[str, Any] = {
        "GATE": activation if is_gated else "", "BIAS": bias is not None,
        "RESIDUAL": residual is not None, **pdl_options(x.device),
    }  # fmt: skip
    weights = (x, weight, _or_unused(up, weight))
    rest = (_or_unused(bias, out), _or_unused(up_bias, out), _or_unused(residual, out), out)
    strides = (x.stride(0), weight.stride(0), _or_unused(residual, out).stride(0), out.stride(0))
    if m == 1 and k <= heuristics.fused_linear_max_gemv_k:
        config = heuristics.fused_gemv_config(n, k, is_gated)
        fused_gemv_kernel[(cdiv(n, config.block_n),)](
            *weights, _or_unused(norm, out), *rest, n, k, weight.stride(0), eps, offset,
            NORM=norm is not None, EVEN=k % config.block_k == 0, BN=config.block_n,
            BK=config.block_k, STAGES=config.num_stages,
            **_prefetch_options(config.prefetch_blocks, config.block_k, k),
            num_warps=config.num_warps, **shared,
        )  # fmt: skip
        return out
    shared["NATIVE"] = use_tensor_cores
    if m <= SMALL_M:
        config = heuristics.fused_small_m_config(m, n, k, is_gated, x.element_size())
        step = config.block_k * config.num_warps
        fused_small_m_kernel[(cdiv(n, config.block_n),)](
            *weights, _or_unused(norm, out), *rest, m, n, k, *strides, eps, offset,
            NORM=norm is not None, EVEN=k % step == 0, R=config.block_m, BN=config.block_n,
            C=config.block_k, W=config.num_warps, STAGES=config.num_stages,
            **_prefetch_options(config.prefetch_blocks, step, k), num_warps=config.num_warps,
            **shared,
        )  # fmt: skip
        return out
    config = heuristics.fused_gemm_config(m, n, k, is_gated, x.element_size())
    tiles = cdiv(n, config.block_n)
    partials = counters = out
    if config.split_k > 1:
        size = config.split_k * tiles * 2 * config.block_m * config.block_n
        partials = torch.empty(size, dtype=torch.float32, device=x.device)
        counters = acquire_counters(x.device, tiles)
    fused_gemm_kernel[(tiles, config.split_k)](
        *weights, *rest, partials, counters, m, n, k, config.split_k, *strides,
        EVEN=k % config.block_k == 0, SPLIT=config.split_k > 1, BM=config.block_m,
        BN=config.block_n, BK=config.block_k, LINES=config.prefetch_lines,
        num_warps=config.num_warps, num_stages=config.num_stages, **shared,
    )  # fmt: skip
    return out


def _prefetch_options(prefetch: int, step: int, k: int) -> dict[str, Any]:
    """How many steps of the weight are prefetched, and whether that is all of K."""
    steps = cdiv(k, step)
    return {"PREFETCH": min(prefetch, steps), "PREFETCH_ALL": prefetch >= steps}


def _is_supported(x: Tensor, weight: Tensor, up: Tensor | None, residual: Tensor | None) -> bool:
    tensors = [x, weight, *(t for t in (up, residual) if t is not None)]
    same_dtype = all(t.dtype == x.dtype and t.stride(-1) == 1 for t in tensors)
    if up is not None and up.stride(0) != weight.stride(0):
        return False
    return same_dtype and x.dtype in (torch.bfloat16, torch.float16, torch.float32)


def _or_unused(tensor: Tensor | None, unused: Tensor) -> Tensor:
    """A pointer argument: the tensor, or one that the kernel does not read."""
    return unused if tensor is None else tensor
