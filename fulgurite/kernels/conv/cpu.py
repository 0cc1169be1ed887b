"""Calls of the C++ kernels of packed convolutions and linears (`include/conv.h`), and of gradients.

In: float32 tensors on the CPU. Out: a new tensor, channels-last for convolutions, or `NotImplemented`
where no kernel supports the arguments.

A kernel takes one array of integers: five addresses (x, weight, bias, residual, out), the numbers of
`conv_numbers` or `linear_numbers`, and the number of threads. Where the weight is packed at each call,
the numbers of the packing follow. Host programs call it in the same way.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fulgurite import device, native, replay
from fulgurite.errors import FulguriteError
from fulgurite.kernels.common.cpu_library import build_translation_unit
from fulgurite.kernels.conv.activations import ACTIVATION_CODES, NONE
from fulgurite.kernels.conv.packing import (
    bias_size,
    is_depthwise,
    packed_size,
    panel_vectors,
)
from fulgurite.native import find_compiler

HEADERS = (
    "vec16.h", "epilogue.h", "conv.h", "conv_transpose.h", "conv_pack.h", "conv_gradient.h", "matmul.h",
)  # fmt: skip
CONV, DEPTHWISE, TRANSPOSE = "conv", "depthwise_conv", "conv_transpose"
WEIGHT_GRADIENT, DEPTHWISE_WEIGHT_GRADIENT = "conv_weight_gradient", "depthwise_weight_gradient"
PACK, MATMUL = "pack_conv_weight", "matmul"
_pack_arguments = struct.Struct("31q").pack
_pack_matmul = struct.Struct("13q").pack
_pack_packing = struct.Struct("15q").pack
_pack_dense = struct.Struct("44q").pack  # a convolution, then the packing of its weight


def start_build() -> None:
    """Start to compile the kernels, or find them in the cache, in the background."""
    native.start_build(_source())


@functools.cache
def _source() -> str:
    return build_translation_unit(*HEADERS)


@functools.cache
def load_kernel(name: str) -> replay.NativeKernel:
    """The kernel `CONV`, `DEPTHWISE` and so on."""
    return replay.NativeKernel(native.load(_source()), name, f"packed_{name}", _no_memory)


def _no_memory(status: int) -> Exception:
    return FulguriteError("a convolution found no memory for its input rows", next="free memory")


@dataclass(frozen=True)
class ConvParameters:
    """What a 2-d convolution computes, beside its tensors; also a transposed one.

    filters      [O, kh, kw]
    parameters   of the activation
    is_scaled    whether the packed bias has scales
    """

    filters: Sequence[int]
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    groups: int
    activation: str = NONE
    parameters: Sequence[float] = ()
    is_scaled: bool = False

    def output_shape(self, x: Tensor) -> tuple[Any, ...]:
        """The sizes of a convolution's result."""
        height, width = (
            output_size(
                x.shape[2 + k],
                self.filters[1 + k],
                self.stride[k],
                self.padding[k],
                self.dilation[k],
            )
            for k in range(2)
        )
        return (x.shape[0], self.filters[0], height, width)

    def is_depthwise(self, channels: int) -> bool:
        return is_depthwise(self.filters[0], channels, self.groups)


def output_size(size: Any, kernel: int, stride: int, padding: int, dilation: int) -> Any:
    """Output positions of a convolution along one dimension."""
    return (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1


def channels_last_strides(shape: Sequence[Any]) -> tuple[Any, ...]:
    _, channels, height, width = shape
    return (channels * height * width, 1, channels * width, channels)


def kernel_name(channels: int, p: ConvParameters) -> str:
    """The kernel of a convolution."""
    return DEPTHWISE if p.is_depthwise(channels) else CONV


def conv_numbers(x: Tensor, p: ConvParameters, size: Sequence[Any] = ()) -> tuple[Any, ...]:
    """The numbers of a convolution: sizes, strides, geometry, activation, panels, place of scales.

    size   height and width of the output of a transposed convolution; others follow from x
    """
    scales = bias_size(p.filters[0], x.shape[1], p.groups) if p.is_scaled else 0
    return (
        *x.shape, *x.stride(), p.filters[0], *(size or p.output_shape(x)[2:]), *p.filters[1:],
        *p.stride, *p.padding, *p.dilation, p.groups, ACTIVATION_CODES[p.activation],
        *_parameter_bits(tuple(p.parameters)), panel_vectors(p.filters[0] // p.groups), scales,
    )  # fmt: skip


def weight_gradient_numbers(gradient: Tensor, x: Tensor, p: ConvParameters) -> tuple[Any, ...]:
    """The numbers of a weight's gradient, in the order of `conv_numbers`."""
    return (
        *x.shape, *x.stride(), *gradient.shape[1:], *p.filters[1:],
        *p.stride, *p.padding, *p.dilation, 1, 0, 0, 0, 1, 0,
    )  # fmt: skip


def packing_numbers(weight: Tensor, groups: int, phases: Sequence[int] = (0, 0)) -> tuple[Any, ...]:
    """The numbers of `PACK`.

    weight   [O, I / groups, kh, kw], or [O, I]; of a transposed convolution [I, O / groups, kh, kw]
    phases   the strides of a transposed convolution; zeros: none
    """
    kernel = (*weight.shape[2:], 1, 1)[:2] if weight.dim() > 2 else (1, 1)
    steps = (*weight.stride()[2:], 0, 0)[:2] if weight.dim() > 2 else (0, 0)
    if weight.dim() == 3:  # one dimension: a row
        kernel, steps = (1, weight.shape[2]), (0, weight.stride(2))
    first, second = weight.shape[0] // groups, weight.shape[1]
    by_first, by_second = weight.stride()[:2]
    if phases[0]:
        rows, channels, by_row, by_channel = second, first, by_second, by_first
    else:
        rows, channels, by_row, by_channel = first, second, by_first, by_second
    return (
        rows, channels, groups, *kernel, by_row, by_channel, *steps, first * by_first, *phases,
        panel_vectors(rows),
    )  # fmt: skip


def linear_numbers(
    x: Tensor, features: int, activation: str, parameters: Sequence[float]
) -> tuple[Any, ...]:
    """The numbers of a linear: a convolution of one column of pixels."""
    rows, depth = x.shape
    row, column = x.stride()
    return (
        1, depth, rows, 1, 0, column, row, 0, features, rows, 1, 1, 1, 1, 1, 0, 0, 1, 1, 1,
        ACTIVATION_CODES[activation], *_parameter_bits(tuple(parameters)), panel_vectors(features), 0,
    )  # fmt: skip


@functools.cache
def _parameter_bits(parameters: tuple[float, ...]) -> tuple[int, ...]:
    """The two parameters of an activation as bits of float32."""
    return struct.unpack("2i", struct.pack("2f", *(*parameters, 0.0, 0.0)[:2]))


def packed_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, *parameters: Any
) -> Any:
    """`fulgurite::packed_conv`."""
    if x.dtype != torch.float32 or find_compiler() is None:
        return NotImplemented
    p = ConvParameters(*parameters)
    out = _empty_channels_last(p.output_shape(x))
    name = kernel_name(x.shape[1], p)
    _run(name, (x, weight, bias, _with_strides(residual, out.stride()), out), conv_numbers(x, p))
    return out


def packed_conv_transpose(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    size: list[int],
    *parameters: Any,
) -> Any:
    """`fulgurite::packed_conv_transpose`."""
    if x.dtype != torch.float32 or find_compiler() is None:
        return NotImplemented
    p = ConvParameters(*parameters)
    out = _empty_channels_last((x.shape[0], p.filters[0], *size))
    tensors = (x, weight, bias, _with_strides(residual, out.stride()), out)
    _run(TRANSPOSE, tensors, conv_numbers(x, p, size))
    return out


def packed_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    features: int,
    activation: str,
    parameters: list[float],
) -> Any:
    """`fulgurite::packed_linear`."""
    if x.dtype != torch.float32 or find_compiler() is None:
        return NotImplemented
    out = torch.empty_strided((x.shape[0], features), (features, 1))
    numbers = linear_numbers(x, features, activation, parameters)
    _run(CONV, (x, weight, bias, _with_strides(residual, out.stride()), out), numbers)
    return out


def conv2d(x: Tensor, weight: Tensor, bias: Tensor | None, *geometry: Any) -> Any:
    """`fulgurite::conv2d`."""
    if x.dtype != torch.float32 or find_compiler() is None:
        return NotImplemented
    p = ConvParameters((weight.shape[0], *weight.shape[2:]), *geometry)
    out = _empty_channels_last(p.output_shape(x))
    _run_dense(dense_conv_call(x, weight, p), (x, weight, _with_strides(bias, (1,)), None, out))
    return out


def conv_transpose2d(
    x: Tensor, weight: Tensor, bias: Tensor | None, size: list[int], *geometry: Any
) -> Any:
    """`fulgurite::conv_transpose2d`."""
    if x.dtype != torch.float32 or find_compiler() is None:
        return NotImplemented
    p = ConvParameters((weight.shape[1] * geometry[-1], *weight.shape[2:]), *geometry)
    out = _empty_channels_last((x.shape[0], p.filters[0], *size))
    tensors = (x, weight, _with_strides(bias, (1,)), None, out)
    _run_dense(dense_transpose_call(x, weight, size, p), tensors)
    return out


@dataclass(frozen=True)
class DenseCall:
    """A kernel that packs its weight: name, numbers of the convolution, numbers of the packing."""

    name: str
    numbers: Sequence[Any]
    packing: Sequence[int]


def dense_conv_call(x: Tensor, weight: Tensor, p: ConvParameters) -> DenseCall:
    name = f"dense_{kernel_name(x.shape[1], p)}"
    return DenseCall(name, conv_numbers(x, p), packing_numbers(weight, p.groups))


def dense_transpose_call(
    x: Tensor, weight: Tensor, size: Sequence[int], p: ConvParameters
) -> DenseCall:
    """A transposed depthwise convolution without stride is one of the rotated filter."""
    packed = packing_numbers(weight, p.groups, p.stride)
    padding = [
        d * (k - 1) - n for d, k, n in zip(p.dilation, p.filters[1:], p.padding, strict=True)
    ]
    if p.is_depthwise(x.shape[1]) and tuple(p.stride) == (1, 1) and min(padding) >= 0:
        rotated = replace(p, padding=padding)
        return DenseCall(f"dense_{DEPTHWISE}", conv_numbers(x, rotated, size), packed)
    return DenseCall(f"dense_{TRANSPOSE}", conv_numbers(x, p, size), packed)


def conv_weight_gradient(gradient: Tensor, x: Tensor, kernel: list[int], *geometry: Any) -> Any:
    """`fulgurite::conv_weight_gradient`."""
    if x.dtype != torch.float32 or find_compiler() is None:
        return NotImplemented
    gradient = _with_strides(gradient, channels_last_strides(gradient.shape))
    p = ConvParameters((gradient.shape[1], *kernel), *geometry)
    out = torch.empty((gradient.shape[1], x.shape[1] // p.groups, *kernel))
    numbers = weight_gradient_numbers(gradient, x, p)
    _run(weight_gradient_kernel(p.groups), (x, gradient, None, None, out), numbers)
    return out


def weight_gradient_kernel(groups: int) -> str:
    return WEIGHT_GRADIENT if groups == 1 else DEPTHWISE_WEIGHT_GRADIENT


def _empty_channels_last(shape: Sequence[Any]) -> Tensor:
    return torch.empty_strided(tuple(shape), channels_last_strides(shape))


def _with_strides(x: Any, strides: Sequence[int]) -> Any:
    """A tensor, copied if its strides are others; or None."""
    if x is None or x.stride() == tuple(strides):
        return x
    return torch.empty_strided(x.shape, tuple(strides)).copy_(x)


def matmul_numbers(a: Tensor, b: Tensor) -> tuple[Any, ...]:
    """The numbers of `MATMUL`: sizes, strides, vectors of a panel."""
    return (*a.shape, b.shape[1], *a.stride(), *b.stride(), panel_vectors(b.shape[1]))


def matmul(a: Tensor, b: Tensor, bias: Tensor | None) -> Any:
    """`fulgurite::matmul`."""
    if a.dtype != torch.float32 or find_compiler() is None:
        return NotImplemented
    out = torch.empty((a.shape[0], b.shape[1]))
    bias = bias if bias is None else bias.contiguous()
    addresses = [0 if tensor is None else tensor.data_ptr() for tensor in (a, b, bias, out)]
    arguments = _pack_matmul(*addresses, *matmul_numbers(a, b), device.num_cpu_threads())
    load_kernel(MATMUL)(arguments, (a, b, bias, out))
    return out


def pack_weight(weight: Tensor, groups: int) -> Any:
    """`fulgurite::pack_weight`."""
    taps = weight[0, 0].numel() if weight.numel() else 0
    is_vector = is_depthwise(weight.shape[0], weight.shape[1] * groups, groups)
    if weight.dtype != torch.float32 or is_vector or taps == 0 or find_compiler() is None:
        return NotImplemented
    size = packed_size(weight.shape[0], weight.shape[1] * groups, taps, groups)
    return _pack(weight, size, packing_numbers(weight, groups))


def pack_transposed_weight(weight: Tensor, groups: int, stride: list[int]) -> Any:
    """`fulgurite::pack_transposed_weight`."""
    if weight.dtype != torch.float32 or find_compiler() is None:
        return NotImplemented
    channels, columns, *kernel = weight.shape
    taps = kernel[0] * kernel[1]
    size = packed_size(columns * groups, channels, taps, groups, can_be_depthwise=False)
    return _pack(weight, size, packing_numbers(weight, groups, stride))


def _pack(weight: Tensor, size: int, numbers: Sequence[int]) -> Tensor:
    out = torch.empty(size)
    arguments = _pack_packing(weight.data_ptr(), out.data_ptr(), *numbers)
    load_kernel(PACK)(arguments, (weight, out))
    return out


def _run(name: str, tensors: Sequence[Tensor | None], numbers: Sequence[int]) -> None:
    addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
    load_kernel(name)(_pack_arguments(*addresses, *numbers, device.num_cpu_threads()), tensors)


def _run_dense(call: DenseCall, tensors: Sequence[Tensor | None]) -> None:
    addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
    threads = device.num_cpu_threads()
    arguments = _pack_dense(*addresses, *call.numbers, threads, *call.packing)
    load_kernel(call.name)(arguments, tensors)
