"""Grouped matmuls on the CPU: rows sorted by expert times dense or packed weights, then gated.

In: the operator's arguments. Out: [S, N], or [S, N / 2] with a gate; `NotImplemented` for what only the
reference takes (float64). Dense weights run in the kernel of grouped_matmul.h, packed ones in those of
linear.h, laid out on their first use. All calls are `replay.Kernel`s.
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
from fulgurite.kernels.common.cpu_library import DTYPE_CODES, build_translation_unit, load_library
from fulgurite.kernels.elementwise.gated_activation import CLAMPED_SWIGLU, NO_GATE
from fulgurite.kernels.gemm.cpu_layout import PackedPanels, pack_panels
from fulgurite.kernels.gemm.cpu_layout_cache import WeightLayoutCache
from fulgurite.kernels.gemm.cpu_linear import INT8_ACTIVATIONS as INTEGER
from fulgurite.kernels.gemm.reference import UNQUANTIZED, fake_quantize_activations
from fulgurite.kernels.grouped_gemm.reference import DENSE
from fulgurite.quant import QuantTensor, resolve_format

GATE_IDS = {NO_GATE: 0, "silu": 1, "gelu": 2, "gelu_pytorch_tanh": 3, CLAMPED_SWIGLU: 4}
LANES = 16
_pack_widen = struct.Struct("10q").pack
_pack_packed = struct.Struct("12q").pack
_pack_job = struct.Struct("19q2d3q").pack


@functools.cache
def load_kernel(name: str) -> replay.NativeKernel:
    """A function of moe.h or grouped_matmul.h."""
    text = build_translation_unit("vec16.h", "elementwise.h", "moe.h", "grouped_matmul.h")
    return replay.NativeKernel(native.load(text), name, make_error=_index_error)


def _index_error(status: int) -> ArgumentError:
    what = "a row that is asked for is not there", "an expert's rows end behind the last one"
    return ArgumentError(
        what[status - 1],
        next="take rows and offsets from fulgurite.kernels.moe.ops.sort_by_expert of the same tokens",
    )


def supports_dtypes(*tensors: Tensor | None) -> bool:
    """Whether there is a compiler and the kernels know the dtypes."""
    known = all(tensor is None or tensor.dtype in DTYPE_CODES for tensor in tensors)
    return known and native.find_compiler() is not None


def to_float_rows(x: Tensor, rows: Tensor | None = None, fresh: bool = False) -> Tensor:
    """x [R, K], or some rows of it, in float32 with rows padded to whole vectors.

    It is x itself where it is that already, unless `fresh` memory is asked for.
    """
    padded = x.shape[1] + -x.shape[1] % LANES
    ready = x.dtype == torch.float32 and padded == x.shape[1] and x.stride(1) == 1
    if ready and rows is None and not fresh:
        return x
    x = x if x.stride(1) == 1 or x.numel() == 0 else x.contiguous()
    count = x.shape[0] if rows is None else rows.shape[0]
    out = torch.empty(count, padded)
    packed = _pack_widen(
        x.data_ptr(), out.data_ptr(), count, x.shape[1], x.stride(0), padded, DTYPE_CODES[x.dtype],
        _address(rows), device.num_cpu_threads(), x.shape[0],
    )  # fmt: skip
    load_kernel("widen_rows")(packed, (x, rows, out))
    return out


def grouped_gemm(
    x: Tensor,
    rows: Tensor | None,
    places: Tensor | None,
    factors: Tensor | None,
    offsets: Tensor,
    data: Tensor,
    scales: list[Tensor],
    format: str,
    bias: Tensor | None,
    activations: str,
    gate: str,
    alpha: float,
    limit: float,
) -> Any:
    """`fulgurite::grouped_matmul`."""
    if not supports_dtypes(x, bias) or (factors is not None and factors.dtype != torch.float32):
        return NotImplemented
    after = (factors, offsets, bias, gate, alpha, limit)
    if format == DENSE:
        if not supports_dtypes(data) or data.stride(2) != 1 or data.shape[0] == 0:
            return NotImplemented
        return _dense_gemm(x, rows, data, *after)
    if resolve_format(format).family == "cast" or data.numel() == 0:
        return NotImplemented
    given, stack = x, expert_panels_cache(data, scales, format)
    integer = activations == INTEGER and stack.panels[0].integer
    if activations != UNQUANTIZED and not integer:
        given, rows = fake_quantize_activations(x if rows is None else x[rows], activations), None
    sums = _quantized_gemm(to_float_rows(given, rows), x.shape[1], offsets, stack, integer)
    return _apply_epilogue(sums, x.dtype, data.shape[1], *after)


def _dense_gemm(
    x: Tensor,
    rows: Tensor | None,
    data: Tensor,
    factors: Tensor | None,
    offsets: Tensor | None,
    bias: Tensor | None,
    gate: str,
    alpha: float,
    limit: float,
    dtype: torch.dtype | None = None,
) -> Tensor:
    given = to_float_rows(x)
    count = x.shape[0] if rows is None else rows.shape[0]
    columns = data.shape[1]
    out = torch.empty(count, columns // (1 if gate == NO_GATE else 2), dtype=dtype or x.dtype)
    room = torch.empty(data.shape[0], dtype=torch.int32)
    bias = bias if bias is None or bias.stride(1) == 1 else bias.contiguous()
    packed = _pack_job(
        given.data_ptr(), _address(rows), _address(factors), _address(offsets), data.data_ptr(),
        _address(bias), out.data_ptr(), count, *data.shape, given.stride(0), *data.stride()[:2],
        *_bias_and_dtype_codes(bias, out, data.dtype), GATE_IDS[gate], alpha, limit, device.num_cpu_threads(),
        room.data_ptr(), given.shape[0],
    )  # fmt: skip
    load_kernel("grouped_matmul")(packed, (given, rows, factors, offsets, data, bias, out, room))
    return out


def _apply_epilogue(
    sums: Tensor,
    dtype: torch.dtype,
    columns: int,
    factors: Tensor | None,
    offsets: Tensor,
    bias: Tensor | None,
    gate: str,
    alpha: float,
    limit: float,
) -> Tensor:
    """Factors, bias and gate of sums that lie in memory."""
    half = columns // (1 if gate == NO_GATE else 2)
    out = torch.empty(sums.shape[0], half, dtype=dtype)
    bias = bias if bias is None or bias.stride(1) == 1 else bias.contiguous()
    packed = _pack_job(
        sums.data_ptr(), 0, _address(factors), offsets.data_ptr(), 0, _address(bias),
        out.data_ptr(), sums.shape[0], offsets.shape[0], columns, 0, sums.stride(0), 0, 0,
        *_bias_and_dtype_codes(bias, out, torch.float32), GATE_IDS[gate], alpha, limit, device.num_cpu_threads(), 0, 0,
    )  # fmt: skip
    load_kernel("finish_rows")(packed, (sums, factors, offsets, bias, out))
    return out


def _bias_and_dtype_codes(bias: Tensor | None, out: Tensor, weight: torch.dtype) -> tuple[int, ...]:
    """Stride of the bias; kinds of result, weight and bias."""
    kinds = (
        DTYPE_CODES[out.dtype],
        DTYPE_CODES[weight],
        0 if bias is None else DTYPE_CODES[bias.dtype],
    )
    return (0 if bias is None else bias.stride(0), *kinds)


def compute_router_logits(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x @ weight.T + bias in float32: one expert that has all rows."""
    stacked = None if bias is None else bias[None]
    return _dense_gemm(
        x, None, weight[None], None, None, stacked, NO_GATE, 0.0, 0.0, dtype=torch.float32
    )


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


# ---- packed weights --------------------------------------------------------------------------------


@dataclass(frozen=True)
class ExpertPanels:
    """Experts laid out for the kernels."""

    panels: tuple[PackedPanels, ...]
    addresses: ctypes.Array[ctypes.c_int64]


def _pack_experts(weight: QuantTensor) -> ExpertPanels:
    laid = tuple(pack_panels(weight[expert]) for expert in range(weight.packed.shape[0]))
    return ExpertPanels(laid, (ctypes.c_int64 * len(laid))(*(one.address for one in laid)))


expert_panels_cache = WeightLayoutCache(_pack_experts)


def _quantized_gemm(
    given: Tensor, size: int, offsets: Tensor, stack: ExpertPanels, integer: bool
) -> Tensor:
    """Sums [S, N] of float rows times packed weights."""
    columns = stack.panels[0].rows
    sums = torch.empty(given.shape[0], columns)
    packed = _pack_packed(
        ctypes.addressof(stack.addresses), given.data_ptr(), sums.data_ptr(), offsets.data_ptr(),
        len(stack.panels), size, columns, given.stride(0), sums.stride(0), integer,
        device.num_cpu_threads(), given.shape[0],
    )  # fmt: skip
    _grouped_linear()(packed, (stack, given, offsets, sums))
    return sums


@functools.cache
def _grouped_linear() -> replay.NativeKernel:
    return replay.NativeKernel(load_library(), "grouped_linear", make_error=_index_error)
