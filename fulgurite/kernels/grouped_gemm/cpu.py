"""Grouped GEMM on the CPU: rows sorted by expert times dense or quantized weights, then gated.

In: `GroupedGemmArgs`. Out: [S, N], or [S, N / 2] with a gate; `NotImplemented` for what only the
reference takes (float64). Dense weights run in `gemm.cpu_dense`. Quantized weights run in the kernels
of linear.h, packed into panels on their first use. All calls are `replay.NativeKernel`s.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fulgurite import device, replay
from fulgurite.kernels.common.cpu_library import load_library
from fulgurite.kernels.gemm.cpu_dense import (
    Epilogue,
    apply_epilogue,
    dense_gemm,
    index_error,
    prepare_rows,
    supports_dtypes,
)
from fulgurite.kernels.gemm.cpu_layout import PackedPanels, pack_panels
from fulgurite.kernels.gemm.cpu_layout_cache import WeightLayoutCache
from fulgurite.kernels.gemm.cpu_linear import INT8_ACTIVATIONS
from fulgurite.kernels.gemm.reference import UNQUANTIZED, fake_quantize_activations
from fulgurite.kernels.grouped_gemm.args import DENSE, GroupedGemmArgs
from fulgurite.quant import QuantTensor, resolve_format

_pack_quantized = struct.Struct("12q").pack


def grouped_gemm(args: GroupedGemmArgs) -> Any:
    """`fulgurite::grouped_gemm`."""
    x, data, row_weights = args.x, args.data, args.row_weights
    if not supports_dtypes(x, args.bias):
        return NotImplemented
    if row_weights is not None and row_weights.dtype != torch.float32:
        return NotImplemented
    epilogue = Epilogue(row_weights, args.offsets, args.bias, args.gate)
    if args.format == DENSE:
        if not supports_dtypes(data) or data.stride(2) != 1 or data.shape[0] == 0:
            return NotImplemented
        return dense_gemm(x, args.row_indices, data, epilogue, x.dtype)
    if resolve_format(args.format).family == "cast" or data.numel() == 0:
        return NotImplemented
    rows, indices = x, args.row_indices
    weight = expert_panels_cache(data, args.scales, args.format)
    is_int8 = args.activations == INT8_ACTIVATIONS and weight.panels[0].integer
    if args.activations != UNQUANTIZED and not is_int8:
        gathered = x if indices is None else x[indices]
        rows, indices = fake_quantize_activations(gathered, args.activations), None
    sums = _quantized_gemm(prepare_rows(rows, indices), x.shape[1], args.offsets, weight, is_int8)
    return apply_epilogue(sums, x.dtype, data.shape[1], epilogue)


def compute_router_logits(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x @ weight.T + bias in float32: one expert that has all rows. x is widened first."""
    epilogue = Epilogue(bias=None if bias is None else bias[None])
    return dense_gemm(prepare_rows(x)[:, : x.shape[1]], None, weight[None], epilogue, torch.float32)


# ---- quantized weights -----------------------------------------------------------------------------


@dataclass(frozen=True)
class ExpertPanels:
    """The weights of all experts in the kernels' layout."""

    panels: tuple[PackedPanels, ...]
    addresses: ctypes.Array[ctypes.c_int64]


def _pack_experts(weight: QuantTensor) -> ExpertPanels:
    panels = tuple(pack_panels(weight[expert]) for expert in range(weight.packed.shape[0]))
    addresses = (ctypes.c_int64 * len(panels))(*(one.address for one in panels))
    return ExpertPanels(panels, addresses)


expert_panels_cache = WeightLayoutCache(_pack_experts)


def _quantized_gemm(
    x: Tensor, size: int, offsets: Tensor, weight: ExpertPanels, is_int8: bool
) -> Tensor:
    """Sums [S, N] of float rows times quantized weights."""
    columns = weight.panels[0].rows
    sums = replay.empty((x.shape[0], columns))
    packed = _pack_quantized(
        ctypes.addressof(weight.addresses), x.data_ptr(), sums.data_ptr(), offsets.data_ptr(),
        len(weight.panels), size, columns, x.stride(0), sums.stride(0), is_int8,
        device.num_cpu_threads(), x.shape[0],
    )  # fmt: skip
    _grouped_linear()(packed, (weight, x, offsets, sums))
    return sums


@functools.cache
def _grouped_linear() -> replay.NativeKernel:
    return replay.NativeKernel(load_library(), "grouped_linear", make_error=index_error)
