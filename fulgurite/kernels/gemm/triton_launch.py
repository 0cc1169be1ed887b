"""Launches of `gemm_kernel` and `small_m_gemm_kernel`.

In: `GemmInputs`, x [M, K] and a quantized weight [N, K] or a stack [E, N, K] of experts, and a
`LaunchConfig`. Out: [M, N].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fulgurite.kernels.common.triton_counters import acquire_counters
from fulgurite.kernels.common.triton_numerics import NATIVE
from fulgurite.kernels.common.triton_operands import DequantScheme, QuantizedOperand, scale_strides
from fulgurite.kernels.common.triton_pdl import pdl_options
from fulgurite.kernels.gemm.triton_gemm import gemm_kernel
from fulgurite.kernels.gemm.triton_small_m import SmallMInputs, launch_small_m_gemm
from fulgurite.kernels.integer_math import cdiv, next_power_of_2
from fulgurite.kernels.tuning import LaunchConfig
from fulgurite.quant import Format


@dataclass(frozen=True)
class GemmInputs:
    """x @ weight.T + bias.

    x               [M, K] in 16 bits, or codes of 8 bits in `x_format` with their scale `x_scale`
    expert_offsets  the weight is a stack, and its e-th matrix is for the rows up to expert_offsets[e]
    x_factor        one number that the output is multiplied by
    """

    x: Tensor
    weight: QuantizedOperand
    scheme: DequantScheme
    out_dtype: torch.dtype
    bias: Tensor | None = None
    x_scale: Tensor | None = None
    x_format: Format | None = None
    expert_offsets: Tensor | None = None
    x_factor: Tensor | None = None


def launch_gemm(inputs: GemmInputs, config: LaunchConfig) -> Tensor:
    """[M, N], by the small-M kernel if the config says so."""
    x, weight = inputs.x, inputs.weight
    out = x.new_empty((x.shape[0], weight.data.shape[-2]), dtype=inputs.out_dtype)
    if config.small_m:
        small = SmallMInputs(
            x, weight, inputs.scheme, out, bias=inputs.bias,
            expert_offsets=inputs.expert_offsets, x_factor=inputs.x_factor,
        )  # fmt: skip
        launch_small_m_gemm(small, config)
    else:
        _launch_tiled_gemm(inputs, config, out)
    return out


def _launch_tiled_gemm(inputs: GemmInputs, config: LaunchConfig, out: Tensor) -> None:
    x, weight, scheme, offsets = inputs.x, inputs.weight, inputs.scheme, inputs.expert_offsets
    (m, k), n = x.shape, out.shape[1]
    experts = 0 if offsets is None else offsets.shape[0]
    tiles_m = cdiv(m, config.block_m)
    if offsets is not None:
        tiles_m += (
            min(experts, m) + 1
        )  # the last tile of each expert and of the rest may be partial
    tiles = tiles_m * cdiv(n, config.block_n)
    partial, counters = out, out
    if config.split_k > 1:
        partial, counters = _allocate_partials(x, config, tiles)
    options: dict[str, Any] = {
        "experts": experts, "tiles_m": tiles_m,
        "w_expert": weight.expert_strides[0], "w_scale_expert": weight.expert_strides[1],
        "DEQUANT": "none" if inputs.x_scale is not None else scheme.dequant,
        "SCALING": scheme.scaling, "GROUP_SIZE": scheme.group_size, "SCALE_ROWS": scheme.scale_rows,
        "X_SCALED": inputs.x_scale is not None, "X_FACTOR": inputs.x_factor is not None,
        "TENSOR_SCALE": weight.has_tensor_scale, "ZERO_POINTS": weight.has_zero_points,
        "BIAS": inputs.bias is not None, "EVEN_K": k % config.block_k == 0,
        "EVEN_M": m % config.block_m == 0 and experts == 0,
        "EXPERTS_POW2": next_power_of_2(experts + 1) if offsets is not None else 0,
        "NATIVE": NATIVE,
    }  # fmt: skip
    x_strides = (0, 0)
    if inputs.x_scale is not None and inputs.x_format is not None:
        x_strides = scale_strides(inputs.x_scale, inputs.x_format)
    gemm_kernel[(tiles, config.split_k)](
        x, weight.data, out, _first_given(inputs.x_scale, inputs.x_factor, weight.scale),
        weight.scale, weight.aux, _first_given(inputs.bias, out), partial, counters,
        _first_given(offsets, out), m, n, k, config.split_k, x.stride(0), weight.data.stride(-2),
        out.stride(0), *x_strides, *weight.scale_strides,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k,
        SPLIT_K=config.split_k > 1, PART_STEPS=config.part_k // config.block_k,
        GROUP_N=config.group_n,
        num_warps=config.num_warps, num_stages=config.num_stages, **options,
        **pdl_options(x.device),
    )  # fmt: skip


def _allocate_partials(x: Tensor, config: LaunchConfig, tiles: int) -> tuple[Tensor, Tensor]:
    """Partial sums of split-K, and a counter a tile."""
    parts = cdiv(x.shape[1], config.part_k) if config.part_k else config.split_k
    size = parts * tiles * config.block_m * config.block_n
    dtype = torch.int32 if x.dtype == torch.int8 else torch.float32
    partial = torch.empty(size, dtype=dtype, device=x.device)
    return partial, acquire_counters(x.device, tiles)


def _first_given(*tensors: Tensor | None) -> Tensor:
    return next(tensor for tensor in tensors if tensor is not None)
