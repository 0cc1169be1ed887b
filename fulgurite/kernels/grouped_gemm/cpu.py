"""Grouped GEMM on the CPU: rows sorted by expert times dense or quantized weights, then gated.

In: `GroupedGemmArgs`. Out: [S, N], or [S, N / 2] with a gate; `NotImplemented` for what only the
reference takes (float64). Dense weights run in the kernel of grouped_gemm.h. Quantized weights run
in those of linear.h, packed into panels on their first use. All calls are `replay.NativeKernel`s.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fulgurite import device, native, replay
from fulgurite.errors import ArgumentError
from fulgurite.kernels.common.cpu_library import (
    DTYPE_CODES,
    build_translation_unit,
    load_library,
)
from fulgurite.kernels.elementwise.gated_activation import UNGATED, GatedActivation
from fulgurite.kernels.gemm.cpu_layout import PackedPanels, pack_panels
from fulgurite.kernels.gemm.cpu_layout_cache import WeightLayoutCache
from fulgurite.kernels.gemm.cpu_linear import INT8_ACTIVATIONS
from fulgurite.kernels.gemm.reference import UNQUANTIZED, fake_quantize_activations
from fulgurite.kernels.grouped_gemm.args import DENSE, GroupedGemmArgs
from fulgurite.quant import QuantTensor, resolve_format

LANES = 16  # floats of a vector in the C++ kernels
_pack_widen = struct.Struct("10q").pack
_pack_quantized = struct.Struct("12q").pack
_pack_job = struct.Struct("19q2d3q").pack

# errors of grouped_gemm.h, by status - 1
INDEX_ERRORS = (
    "a row index is out of range",
    "an offset is past the last row",
)


@functools.cache
def load_kernel(name: str) -> replay.NativeKernel:
    """A function of moe.h or grouped_gemm.h."""
    text = build_translation_unit("vec16.h", "elementwise.h", "moe.h", "grouped_gemm.h")
    return replay.NativeKernel(native.load(text), name, make_error=_index_error)


def _index_error(status: int) -> ArgumentError:
    return ArgumentError(
        INDEX_ERRORS[status - 1],
        next="take indices and offsets from moe.sort_by_expert of the same tokens",
    )


def supports_dtypes(*tensors: Tensor | None) -> bool:
    """Whether there is a compiler and the kernels have these dtypes."""
    is_supported = all(tensor is None or tensor.dtype in DTYPE_CODES for tensor in tensors)
    return is_supported and native.find_compiler() is not None


def to_float_rows(x: Tensor, row_indices: Tensor | None = None, copy: bool = False) -> Tensor:
    """x [R, K], or some rows of it, in float32 with rows padded to whole vectors.

    Returns x itself if it is that already, unless `copy`.
    """
    padded = x.shape[1] + -x.shape[1] % LANES
    is_ready = x.dtype == torch.float32 and padded == x.shape[1] and x.stride(1) == 1
    if is_ready and row_indices is None and not copy:
        return x
    x = x if x.stride(1) == 1 or x.numel() == 0 else x.contiguous()
    rows = x.shape[0] if row_indices is None else row_indices.shape[0]
    out = torch.empty(rows, padded)
    packed = _pack_widen(
        x.data_ptr(), out.data_ptr(), rows, x.shape[1], x.stride(0), padded, DTYPE_CODES[x.dtype],
        _address(row_indices), device.num_cpu_threads(), x.shape[0],
    )  # fmt: skip
    load_kernel("widen_rows")(packed, (x, row_indices, out))
    return out


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
        return _dense_gemm(x, args.row_indices, data, epilogue, x.dtype)
    if resolve_format(args.format).family == "cast" or data.numel() == 0:
        return NotImplemented
    rows, indices = x, args.row_indices
    weight = expert_panels_cache(data, args.scales, args.format)
    is_int8 = args.activations == INT8_ACTIVATIONS and weight.panels[0].integer
    if args.activations != UNQUANTIZED and not is_int8:
        gathered = x if indices is None else x[indices]
        rows, indices = fake_quantize_activations(gathered, args.activations), None
    sums = _quantized_gemm(to_float_rows(rows, indices), x.shape[1], args.offsets, weight, is_int8)
    return _apply_epilogue(sums, x.dtype, data.shape[1], epilogue)


@dataclass(frozen=True)
class Epilogue:
    """out = gate(row_weights * sums + bias); without offsets one expert has all rows."""

    row_weights: Tensor | None = None
    offsets: Tensor | None = None
    bias: Tensor | None = None
    gate: GatedActivation = UNGATED

    @property
    def dense_bias(self) -> Tensor | None:
        bias = self.bias
        return bias if bias is None or bias.stride(1) == 1 else bias.contiguous()


def _dense_gemm(
    x: Tensor,
    row_indices: Tensor | None,
    data: Tensor,
    epilogue: Epilogue,
    out_dtype: torch.dtype,
) -> Tensor:
    x_float, bias, gate = to_float_rows(x), epilogue.dense_bias, epilogue.gate
    rows = (x if row_indices is None else row_indices).shape[0]
    out = torch.empty(rows, data.shape[1] // gate.num_inputs, dtype=out_dtype)
    scratch = torch.empty(data.shape[0], dtype=torch.int32)
    packed = _pack_job(
        x_float.data_ptr(), _address(row_indices), _address(epilogue.row_weights),
        _address(epilogue.offsets), data.data_ptr(), _address(bias), out.data_ptr(), rows,
        *data.shape, x_float.stride(0), *data.stride()[:2],
        *_bias_and_dtype_codes(bias, out, data.dtype), gate.kernel_id, gate.alpha, gate.limit,
        device.num_cpu_threads(), scratch.data_ptr(), x_float.shape[0],
    )  # fmt: skip
    tensors = (x_float, row_indices, epilogue.row_weights, epilogue.offsets, data, bias)
    load_kernel("grouped_gemm")(packed, (*tensors, out, scratch))
    return out


def _apply_epilogue(
    sums: Tensor, out_dtype: torch.dtype, columns: int, epilogue: Epilogue
) -> Tensor:
    """Row weights, bias and gate of sums in memory."""
    bias, gate, offsets = epilogue.dense_bias, epilogue.gate, epilogue.offsets
    assert offsets is not None, "rows without offsets"
    out = torch.empty(sums.shape[0], columns // gate.num_inputs, dtype=out_dtype)
    packed = _pack_job(
        sums.data_ptr(), 0, _address(epilogue.row_weights), offsets.data_ptr(), 0, _address(bias),
        out.data_ptr(), sums.shape[0], offsets.shape[0], columns, 0, sums.stride(0), 0, 0,
        *_bias_and_dtype_codes(bias, out, torch.float32), gate.kernel_id, gate.alpha, gate.limit,
        device.num_cpu_threads(), 0, 0,
    )  # fmt: skip
    load_kernel("grouped_epilogue")(packed, (sums, epilogue.row_weights, offsets, bias, out))
    return out


def _bias_and_dtype_codes(
    bias: Tensor | None, out: Tensor, weight_dtype: torch.dtype
) -> tuple[int, ...]:
    """The stride of the bias, and the dtypes of output, weight and bias."""
    bias_code = 0 if bias is None else DTYPE_CODES[bias.dtype]
    codes = (DTYPE_CODES[out.dtype], DTYPE_CODES[weight_dtype], bias_code)
    return (0 if bias is None else bias.stride(0), *codes)


def compute_router_logits(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x @ weight.T + bias in float32: one expert that has all rows."""
    epilogue = Epilogue(bias=None if bias is None else bias[None])
    return _dense_gemm(x, None, weight[None], epilogue, torch.float32)


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


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
    sums = torch.empty(x.shape[0], columns)
    packed = _pack_quantized(
        ctypes.addressof(weight.addresses), x.data_ptr(), sums.data_ptr(), offsets.data_ptr(),
        len(weight.panels), size, columns, x.stride(0), sums.stride(0), is_int8,
        device.num_cpu_threads(), x.shape[0],
    )  # fmt: skip
    _grouped_linear()(packed, (weight, x, offsets, sums))
    return sums


@functools.cache
def _grouped_linear() -> replay.NativeKernel:
    return replay.NativeKernel(load_library(), "grouped_linear", make_error=_index_error)
