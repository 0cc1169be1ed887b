# mypy: allow-untyped-defs, allow-incomplete-defs
"""From packed operands to a launch of `gemm_kernel` or `few_rows_kernel`.

In: x [M, K] and a packed weight [N, K] with its scales. Out: [M, N].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fulgurite.kernels.common.triton_counters import acquire_counters
from fulgurite.kernels.common.triton_import import INTERPRETED, triton
from fulgurite.kernels.common.triton_operands import (
    DequantScheme,
    QuantizedOperand,
    dequant_scheme,
    make_operand,
    scale_strides,
    supports_dtype,
)
from fulgurite.kernels.gemm.triton_gemm import gemm_kernel
from fulgurite.kernels.gemm.triton_small_m import launch_small_m_gemm
from fulgurite.kernels.tuning.config import LaunchConfig
from fulgurite.quant import Format

NATIVE = not INTERPRETED


def launch_gemm(
    x: Tensor,
    x_scale: Tensor | None,
    x_format: Format | None,
    data: Tensor,
    scales: list[Tensor],
    format: Format,
    weight: DequantScheme,
    bias: Tensor | None,
    dtype: torch.dtype,
    config: LaunchConfig,
    ends: Tensor | None = None,
    factor: Tensor | None = None,
) -> Tensor:
    """x @ weight.T + bias by a kernel; x packed in 8 bits if it has a scale, or times a factor.

    With `ends` the weight is a stack [E, N, K], and its e-th matrix is for the rows up to ends[e].
    """
    m, k = x.shape
    parts = make_operand(data, scales, format, weight)
    n = parts.data.shape[-2]
    out = x.new_empty((m, n), dtype=dtype)
    if config.small_m:
        launch_small_m_gemm(
            x, parts, weight, config, out, tensor_scale=format.family == "nvfp4", bias=bias,
            ends=ends, factor=factor,
        )  # fmt: skip
        return out
    experts = 0 if ends is None else ends.shape[0]
    tiles_m = triton.cdiv(m, config.block_m)
    if ends is not None:
        tiles_m += min(experts, m) + 1  # each expert's last tile may be partial, and so the rest
    shared: dict[str, Any] = {
        "experts": experts, "tiles_m": tiles_m,
        "w_expert": parts.data.stride(0), "w_scale_expert": parts.scale.stride(0),
        "SCALING": weight.scaling, "GROUP": weight.group_size, "W_ROWS": weight.scale_rows,
        "FACTOR": factor is not None, "TENSOR_SCALE": format.family == "nvfp4",
        "ZERO": parts.has_zero_points, "BIAS": bias is not None,
        "GROUPS": triton.next_power_of_2(experts + 1) if ends is not None else 0,
        "PACKED": NATIVE,
    }  # fmt: skip
    bias, ends = out if bias is None else bias, out if ends is None else ends
    x_strides = (0, 0)
    if x_scale is not None and x_format is not None:
        x_strides = scale_strides(x_scale, x_format)
    tiles = tiles_m * triton.cdiv(n, config.block_n)
    partial, count = out, out
    if config.split_k > 1:
        size = config.split_k * tiles * config.block_m * config.block_n
        kind = torch.int32 if x.dtype == torch.int8 else torch.float32
        partial = torch.empty(size, dtype=kind, device=x.device)
        count = acquire_counters(x.device, tiles)
    gemm_kernel[(tiles, config.split_k)](
        x, parts.data, out, _first_given(x_scale, factor, parts.scale), parts.scale, parts.extra_scale, bias,
        partial, count, ends, m, n, k, config.split_k, x.stride(0), parts.data.stride(-2),
        out.stride(0), *x_strides, *parts.strides,
        DEQUANT="same" if x_scale is not None else weight.dequant, X_SCALED=x_scale is not None,
        EVEN=k % config.block_k == 0, FULL=m % config.block_m == 0 and experts == 0,
        BM=config.block_m, BN=config.block_n, BK=config.block_k, SPLIT=config.split_k > 1, ACROSS=8,
        num_warps=config.num_warps, num_stages=config.num_stages, **shared,
    )  # fmt: skip
    return out


def _first_given(*tensors: Tensor | None) -> Tensor:
    return next(tensor for tensor in tensors if tensor is not None)


__all__ = ["NATIVE", "DequantScheme", "QuantizedOperand", "dequant_scheme", "launch_gemm", "make_operand", "scale_strides", "supports_dtype"]
