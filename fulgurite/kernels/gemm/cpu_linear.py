"""Linears with quantized weights on the CPU: the operator's kernel, and reusable calls.

In: x in float32, bfloat16 or float16, and a weight, packed into panels on its first use. Out: x @
weight.T, with bias, gate and residual in the same pass if given.

With `activations` "q8_0", x is quantized to int8 in blocks of 32, and products are summed in
integers (VNNI where available). FP8 formats, and "none", multiply in float32.

`quant_linear` is what the operator calls. A decode step that calls hundreds of linears builds each
`LinearCall(pack_panels(weight), ...)` once and runs it on fixed memory: one C call, no dispatch.
"""

from __future__ import annotations

import ctypes
import functools
import math
from typing import Any

from torch import Tensor

from fulgurite import device, replay
from fulgurite.errors import ArgumentError
from fulgurite.kernels.common.cpu_library import DTYPE_CODES, LinearStruct, load_library
from fulgurite.kernels.gemm.cpu_dense import Epilogue, dense_gemm
from fulgurite.kernels.gemm.cpu_layout import PackedPanels, pack_panels, pad_rows
from fulgurite.kernels.gemm.cpu_layout_cache import WeightLayoutCache
from fulgurite.kernels.gemm.reference import UNQUANTIZED, fake_quantize_activations
from fulgurite.native import find_compiler
from fulgurite.quant import resolve_format

INT8_ACTIVATIONS = "q8_0"
GATE_IDS = {"none": 0, "silu": 1, "gelu_pytorch_tanh": 2}


def quant_linear(
    x: Tensor,
    data: Tensor,
    scales: list[Tensor],
    format: str,
    bias: Tensor | None,
    activations: str,
) -> Tensor:
    """`fulgurite::quant_linear`."""
    if x.dtype not in DTYPE_CODES or data.numel() == 0 or find_compiler() is None:
        return NotImplemented
    if resolve_format(format).family == "cast":
        return _cast_linear(x, data, bias) if activations == UNQUANTIZED else NotImplemented
    weight = panels_cache(data, scales, format)
    if activations not in (UNQUANTIZED, INT8_ACTIVATIONS) or (
        activations == INT8_ACTIVATIONS and not weight.integer
    ):
        y = linear(fake_quantize_activations(x, activations), weight, bias)
        return y.to(x.dtype)
    return linear(x, weight, bias, integer=activations == INT8_ACTIVATIONS)


def _cast_linear(x: Tensor, data: Tensor, bias: Tensor | None) -> Any:
    """A weight in bfloat16 or float16, whatever the dtype of x."""
    if data.dtype not in DTYPE_CODES or data.dim() != 2 or data.stride(1) != 1:
        return NotImplemented
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    epilogue = Epilogue(bias=None if bias is None else bias[None])
    out = dense_gemm(rows, None, data[None], epilogue, x.dtype)
    return out.view(*x.shape[:-1], data.shape[0])


def linear(
    x: Tensor,
    weight: PackedPanels,
    bias: Tensor | None = None,
    *,
    integer: bool = False,
    up: PackedPanels | None = None,
    gate: str = "none",
    residual: Tensor | None = None,
    threads: int | None = None,
) -> Tensor:
    """x @ weight.T + bias; with `up`, gate(x @ weight.T) * (x @ up.T); plus residual."""
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    rows = rows if rows.stride(-1) == 1 or rows.numel() == 0 else rows.contiguous()
    out = replay.empty((rows.shape[0], weight.rows), x.dtype)
    call = LinearCall(weight, bias, integer=integer, up=up, gate=gate, threads=threads)
    if out.numel():
        extra = None if residual is None else residual.reshape(out.shape).contiguous()
        call.bind(rows, out, extra)
        call()
    return out.view(*x.shape[:-1], weight.rows)


class LinearCall:
    """One linear that is called many times: `bind` it to memory, then call it.

    It keeps the weight and the bound tensors alive. `call.tokens` may change between calls, up to
    the rows that were bound.
    """

    def __init__(
        self,
        weight: PackedPanels,
        bias: Tensor | None = None,
        *,
        integer: bool = True,
        up: PackedPanels | None = None,
        up_bias: Tensor | None = None,
        gate: str = "none",
        threads: int | None = None,
    ) -> None:
        if up is not None and (up.rows, up.columns, up.offset, up.group == 16) != (
            weight.rows, weight.columns, weight.offset, weight.group == 16,
        ):  # fmt: skip
            raise ArgumentError(
                "gate and up must have the same shape and format",
                where=f"[{weight.rows}, {weight.columns}] and [{up.rows}, {up.columns}]",
                next="call them separately",
            )
        biases = [b for b in (bias, up_bias) if b is not None]
        assert all(b.shape == (weight.rows,) for b in biases), "a bias has one value for each row"
        self.weight, self.up = weight, up
        self.biases = tuple(None if b is None else pad_rows(b) for b in (bias, up_bias))
        self.bound: tuple[Tensor | None, ...] = ()
        self.call = LinearStruct(
            weight=weight.address,
            up=None if up is None else up.address,
            bias=_address(self.biases[0]),
            up_bias=_address(self.biases[1]),
            given=weight.columns,
            integer=int(integer and weight.integer),
            activation=GATE_IDS[gate],
            threads=device.num_cpu_threads() if threads is None else threads,
        )
        self.address = ctypes.addressof(self.call)
        self.run = load_library().linear

    def bind(self, x: Tensor, out: Tensor, residual: Tensor | None = None) -> LinearCall:
        """Read from x [M, K] and write to out [M, N] (plus residual, which may be out itself)."""
        call = self.call
        assert x.dtype == out.dtype and x.shape == (out.shape[0], call.given), "x does not fit"
        assert x.stride(-1) == 1 and out.stride(-1) == 1, "columns must be contiguous"
        call.x, call.out, call.residual = x.data_ptr(), out.data_ptr(), _address(residual)
        call.tokens, call.type = x.shape[0], DTYPE_CODES[x.dtype]
        call.x_stride, call.out_stride = x.stride(0), out.stride(0)
        self.bound = (x, out, residual)
        return self

    def __call__(self) -> None:
        if replay.is_recording():
            _kernel()(bytes(self.call), (self.weight, self.up, *self.biases, *self.bound))
        else:
            self.run(self.address)


@functools.cache
def _kernel() -> replay.NativeKernel:
    return replay.NativeKernel(load_library(), "linear_kernel", "linear")


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


# ---- weights packed into panels on their first use -----------------------------------------------

panels_cache = WeightLayoutCache(pack_panels)
