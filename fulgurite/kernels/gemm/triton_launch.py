# mypy: allow-untyped-defs, allow-incomplete-defs
"""From packed operands to a launch of `matmul_kernel` or `few_rows_kernel`.

In: x [M, K] and a packed weight [N, K] with its scales. Out: [M, N].
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from fulgurite.kernels.common.triton_counters import take_counters
from fulgurite.kernels.common.triton_operands import (
    Packed,
    Weight,
    packed,
    strides_of,
    takes,
    weight_of,
)
from fulgurite.kernels.gemm.triton_gemm import matmul_kernel
from fulgurite.kernels.gemm.triton_small_m import launch_few_rows
from fulgurite.kernels.tuning.gemm import Tile
from fulgurite.kernels.tuning.small_m import FewTile
from fulgurite.quant import Format

PACKED = not triton.knobs.runtime.interpret


def matmul(
    x: Tensor,
    x_scale: Tensor | None,
    x_format: Format | None,
    data: Tensor,
    scales: list[Tensor],
    format: Format,
    weight: Weight,
    bias: Tensor | None,
    dtype: torch.dtype,
    tile: Tile | FewTile,
    ends: Tensor | None = None,
    factor: Tensor | None = None,
) -> Tensor:
    """x @ weight.T + bias by a kernel; x packed in 8 bits if it has a scale, or times a factor.

    With `ends` the weight is a stack [E, N, K], and its e-th matrix is for the rows up to ends[e].
    """
    m, k = x.shape
    parts = packed(data, scales, format, weight)
    n = parts.data.shape[-2]
    out = x.new_empty((m, n), dtype=dtype)
    if isinstance(tile, FewTile):
        launch_few_rows(
            x, parts, weight, tile, out, tensor_scale=format.family == "nvfp4", bias=bias,
            ends=ends, factor=factor,
        )  # fmt: skip
        return out
    experts = 0 if ends is None else ends.shape[0]
    tiles_m = triton.cdiv(m, tile.rows)
    if ends is not None:
        tiles_m += min(experts, m) + 1  # each expert's last tile may be partial, and so the rest
    shared: dict[str, Any] = {
        "experts": experts, "tiles_m": tiles_m,
        "w_expert": parts.data.stride(0), "w_scale_expert": parts.scale.stride(0),
        "SCALING": weight.scaling, "GROUP": weight.group, "W_ROWS": weight.rows,
        "FACTOR": factor is not None, "TENSOR_SCALE": format.family == "nvfp4",
        "ZERO": parts.zero, "BIAS": bias is not None,
        "GROUPS": triton.next_power_of_2(experts + 1) if ends is not None else 0,
        "PACKED": PACKED,
    }  # fmt: skip
    bias, ends = out if bias is None else bias, out if ends is None else ends
    x_strides = (0, 0)
    if x_scale is not None and x_format is not None:
        x_strides = strides_of(x_scale, x_format)
    tiles = tiles_m * triton.cdiv(n, tile.columns)
    partial, count = out, out
    if tile.split > 1:
        size = tile.split * tiles * tile.rows * tile.columns
        kind = torch.int32 if x.dtype == torch.int8 else torch.float32
        partial = torch.empty(size, dtype=kind, device=x.device)
        count = take_counters(x.device, tiles)
    matmul_kernel[(tiles, tile.split)](
        x, parts.data, out, _first(x_scale, factor, parts.scale), parts.scale, parts.second, bias,
        partial, count, ends, m, n, k, tile.split, x.stride(0), parts.data.stride(-2),
        out.stride(0), *x_strides, *parts.strides,
        DECODE="same" if x_scale is not None else weight.decode, X_SCALED=x_scale is not None,
        EVEN=k % tile.depth == 0, FULL=m % tile.rows == 0 and experts == 0,
        BM=tile.rows, BN=tile.columns, BK=tile.depth, SPLIT=tile.split > 1, ACROSS=8,
        num_warps=tile.warps, num_stages=tile.stages, **shared,
    )  # fmt: skip
    return out


def _first(*tensors: Tensor | None) -> Tensor:
    return next(tensor for tensor in tensors if tensor is not None)


__all__ = ["PACKED", "Packed", "Weight", "matmul", "packed", "strides_of", "takes", "weight_of"]
