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
from fulgurite.kernels.common.cpu_library import library, translation_unit
from fulgurite.kernels.elementwise.cpu import KINDS
from fulgurite.kernels.gemm.cpu_layout import Panels, panels
from fulgurite.kernels.gemm.cpu_layout_cache import LaidOut
from fulgurite.kernels.gemm.cpu_linear import INTEGER_ACTIVATIONS as INTEGER
from fulgurite.kernels.gemm.quant_linear import PLAIN, rounded_activations
from fulgurite.kernels.grouped_gemm.ops import CLAMPED, DENSE, NO_GATE
from fulgurite.quant import QuantTensor, resolve

GATES = {NO_GATE: 0, "silu": 1, "gelu": 2, "gelu_pytorch_tanh": 3, CLAMPED: 4}
LANES = 16
_pack_widen = struct.Struct("10q").pack
_pack_packed = struct.Struct("12q").pack
_pack_job = struct.Struct("19q2d3q").pack


@functools.cache
def kernel(name: str) -> replay.Kernel:
    """A function of moe.h or grouped_matmul.h."""
    text = translation_unit("vectors.h", "glue.h", "moe.h", "grouped_matmul.h")
    return replay.Kernel(native.load(text), name, problem=_problem)


def _problem(status: int) -> ArgumentError:
    what = "a row that is asked for is not there", "an expert's rows end behind the last one"
    return ArgumentError(
        what[status - 1],
        next="take rows and offsets from fulgurite.kernels.moe.ops.index of the same tokens",
    )


def takes(*tensors: Tensor | None) -> bool:
    """Whether there is a compiler and the kernels know the dtypes."""
    known = all(tensor is None or tensor.dtype in KINDS for tensor in tensors)
    return known and native.compiler() is not None


def float_rows(x: Tensor, rows: Tensor | None = None, fresh: bool = False) -> Tensor:
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
        x.data_ptr(), out.data_ptr(), count, x.shape[1], x.stride(0), padded, KINDS[x.dtype],
        _address(rows), device.cpu_threads(), x.shape[0],
    )  # fmt: skip
    kernel("widen_rows")(packed, (x, rows, out))
    return out


def grouped_matmul(
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
    if not takes(x, bias) or (factors is not None and factors.dtype != torch.float32):
        return NotImplemented
    after = (factors, offsets, bias, gate, alpha, limit)
    if format == DENSE:
        if not takes(data) or data.stride(2) != 1 or data.shape[0] == 0:
            return NotImplemented
        return _dense(x, rows, data, *after)
    if resolve(format).family == "cast" or data.numel() == 0:
        return NotImplemented
    given, stack = x, kept_stack(data, scales, format)
    integer = activations == INTEGER and stack.panels[0].integer
    if activations != PLAIN and not integer:
        given, rows = rounded_activations(x if rows is None else x[rows], activations), None
    sums = _packed(float_rows(given, rows), x.shape[1], offsets, stack, integer)
    return _finish(sums, x.dtype, data.shape[1], *after)


def _dense(
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
    given = float_rows(x)
    count = x.shape[0] if rows is None else rows.shape[0]
    columns = data.shape[1]
    out = torch.empty(count, columns // (1 if gate == NO_GATE else 2), dtype=dtype or x.dtype)
    room = torch.empty(data.shape[0], dtype=torch.int32)
    bias = bias if bias is None or bias.stride(1) == 1 else bias.contiguous()
    packed = _pack_job(
        given.data_ptr(), _address(rows), _address(factors), _address(offsets), data.data_ptr(),
        _address(bias), out.data_ptr(), count, *data.shape, given.stride(0), *data.stride()[:2],
        *_bias_facts(bias, out, data.dtype), GATES[gate], alpha, limit, device.cpu_threads(),
        room.data_ptr(), given.shape[0],
    )  # fmt: skip
    kernel("grouped_matmul")(packed, (given, rows, factors, offsets, data, bias, out, room))
    return out


def _finish(
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
        *_bias_facts(bias, out, torch.float32), GATES[gate], alpha, limit, device.cpu_threads(), 0, 0,
    )  # fmt: skip
    kernel("finish_rows")(packed, (sums, factors, offsets, bias, out))
    return out


def _bias_facts(bias: Tensor | None, out: Tensor, weight: torch.dtype) -> tuple[int, ...]:
    """Stride of the bias; kinds of result, weight and bias."""
    kinds = (KINDS[out.dtype], KINDS[weight], 0 if bias is None else KINDS[bias.dtype])
    return (0 if bias is None else bias.stride(0), *kinds)


def dense_logits(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x @ weight.T + bias in float32: one expert that has all rows."""
    stacked = None if bias is None else bias[None]
    return _dense(
        x, None, weight[None], None, None, stacked, NO_GATE, 0.0, 0.0, dtype=torch.float32
    )


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


# ---- packed weights --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stack:
    """Experts laid out for the kernels."""

    panels: tuple[Panels, ...]
    addresses: ctypes.Array[ctypes.c_int64]


def _stack(weight: QuantTensor) -> Stack:
    laid = tuple(panels(weight[expert]) for expert in range(weight.packed.shape[0]))
    return Stack(laid, (ctypes.c_int64 * len(laid))(*(one.address for one in laid)))


kept_stack = LaidOut(_stack)


def _packed(given: Tensor, size: int, offsets: Tensor, stack: Stack, integer: bool) -> Tensor:
    """Sums [S, N] of float rows times packed weights."""
    columns = stack.panels[0].rows
    sums = torch.empty(given.shape[0], columns)
    packed = _pack_packed(
        ctypes.addressof(stack.addresses), given.data_ptr(), sums.data_ptr(), offsets.data_ptr(),
        len(stack.panels), size, columns, given.stride(0), sums.stride(0), integer,
        device.cpu_threads(), given.shape[0],
    )  # fmt: skip
    _grouped_linear()(packed, (stack, given, offsets, sums))
    return sums


@functools.cache
def _grouped_linear() -> replay.Kernel:
    return replay.Kernel(library(), "grouped_linear", problem=_problem)
