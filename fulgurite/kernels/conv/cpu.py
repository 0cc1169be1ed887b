"""Calls of the C++ kernels of packed convolutions and linears (`include/conv.h`), and of gradients.

In: float32 tensors on the CPU. Out: a new tensor, channels-last for convolutions, or `NotImplemented`
where no kernel supports the arguments.

A kernel takes one array of integers: five addresses (x, weight, bias, residual, out), the numbers of
`conv_numbers` or `linear_numbers`, and the number of threads. Host programs call it in the same way.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fulgurite import device, native, replay
from fulgurite.errors import FulguriteError
from fulgurite.kernels.common.cpu_library import build_translation_unit
from fulgurite.kernels.conv.activations import ACTIVATION_CODES
from fulgurite.kernels.conv.packing import (
    bias_size,
    is_depthwise,
    packed_size,
    panel_vectors,
)
from fulgurite.native import find_compiler

HEADERS = ("vec16.h", "epilogue.h", "conv.h", "conv_transpose.h", "conv_gradient.h", "matmul.h")
CONV, DEPTHWISE, TRANSPOSE = "conv", "depthwise_conv", "conv_transpose"
WEIGHT_GRADIENT, DEPTHWISE_WEIGHT_GRADIENT = "conv_weight_gradient", "depthwise_weight_gradient"
PACK, MATMUL = "pack_conv_weight", "matmul"
_pack_arguments = struct.Struct("31q").pack
_pack_matmul = struct.Struct("13q").pack
_pack_packing = struct.Struct("15q").pack


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


def output_size(size: Any, kernel: int, stride: int, padding: int, dilation: int) -> Any:
    """Output positions of a convolution along one dimension."""
    return (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1


def channels_last_strides(shape: Sequence[Any]) -> tuple[Any, ...]:
    _, channels, height, width = shape
    return (channels * height * width, 1, channels * width, channels)


def kernel_name(channels: int, filters: Sequence[int], groups: int) -> str:
    """The kernel of a convolution."""
    return DEPTHWISE if is_depthwise(filters[0], channels, groups) else CONV


def conv_numbers(
    x: Tensor,
    filters: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    activation: str,
    parameters: Sequence[float],
    is_scaled: bool,
) -> tuple[Any, ...]:
    """The numbers of a convolution: sizes, strides, geometry, activation, panels, place of scales."""
    height, width = x.shape[2:]
    out_height = output_size(height, filters[1], stride[0], padding[0], dilation[0])
    out_width = output_size(width, filters[2], stride[1], padding[1], dilation[1])
    return (
        *x.shape, *x.stride(), filters[0], out_height, out_width, filters[1], filters[2],
        *stride, *padding, *dilation, groups, ACTIVATION_CODES[activation],
        *_parameter_bits(tuple(parameters)), panel_vectors(filters[0] // groups),
        bias_size(filters[0], x.shape[1], groups) if is_scaled else 0,
    )  # fmt: skip


def transpose_numbers(
    x: Tensor,
    filters: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    size: Sequence[int],
    activation: str,
    parameters: Sequence[float],
    is_scaled: bool,
) -> tuple[Any, ...]:
    """The numbers of a transposed convolution, in the order of `conv_numbers`."""
    return (
        *x.shape, *x.stride(), filters[0], *size, *filters[1:],
        *stride, *padding, *dilation, groups, ACTIVATION_CODES[activation],
        *_parameter_bits(tuple(parameters)), panel_vectors(filters[0] // groups),
        bias_size(filters[0], x.shape[1], groups) if is_scaled else 0,
    )  # fmt: skip


def weight_gradient_numbers(
    gradient: Tensor,
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> tuple[Any, ...]:
    """The numbers of a weight's gradient, in the order of `conv_numbers`."""
    return (
        *x.shape, *x.stride(), *gradient.shape[1:], *kernel,
        *stride, *padding, *dilation, 1, 0, 0, 0, 1, 0,
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
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    filters: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    activation: str,
    parameters: list[float],
    is_scaled: bool,
) -> Any:
    """`fulgurite::packed_conv`."""
    if x.dtype != torch.float32 or find_compiler() is None:
        return NotImplemented
    numbers = conv_numbers(
        x, filters, stride, padding, dilation, groups, activation, parameters, is_scaled
    )
    shape = (x.shape[0], *numbers[8:11])
    out = torch.empty_strided(shape, channels_last_strides(shape))
    if residual is not None and residual.stride() != out.stride():
        residual = torch.empty_like(out).copy_(residual)
    _run(kernel_name(x.shape[1], filters, groups), (x, weight, bias, residual, out), numbers)
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
    if residual is not None and residual.stride() != out.stride():
        residual = residual.contiguous()
    numbers = linear_numbers(x, features, activation, parameters)
    _run(CONV, (x, weight, bias, residual, out), numbers)
    return out


def packed_conv_transpose(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    filters: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    size: list[int],
    activation: str,
    parameters: list[float],
    is_scaled: bool,
) -> Any:
    """`fulgurite::packed_conv_transpose`."""
    if x.dtype != torch.float32 or find_compiler() is None:
        return NotImplemented
    shape = (x.shape[0], filters[0], *size)
    out = torch.empty_strided(shape, channels_last_strides(shape))
    if residual is not None and residual.stride() != out.stride():
        residual = torch.empty_like(out).copy_(residual)
    numbers = transpose_numbers(
        x, filters, stride, padding, dilation, groups, size, activation, parameters, is_scaled
    )
    _run(TRANSPOSE, (x, weight, bias, residual, out), numbers)
    return out


def conv_weight_gradient(
    gradient: Tensor,
    x: Tensor,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> Any:
    """`fulgurite::conv_weight_gradient`."""
    if x.dtype != torch.float32 or find_compiler() is None:
        return NotImplemented
    if gradient.stride() != channels_last_strides(gradient.shape):
        shape = tuple(gradient.shape)
        gradient = torch.empty_strided(shape, channels_last_strides(shape)).copy_(gradient)
    out = torch.empty((gradient.shape[1], x.shape[1] // groups, *kernel))
    numbers = weight_gradient_numbers(gradient, x, kernel, stride, padding, dilation)
    name = WEIGHT_GRADIENT if groups == 1 else DEPTHWISE_WEIGHT_GRADIENT
    _run(name, (x, gradient, None, None, out), numbers)
    return out


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
