"""Calls of the C++ kernels of packed convolutions and linears (`include/conv.h`).

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
from fulgurite.kernels.conv.packing import bias_size, is_depthwise, panel_vectors
from fulgurite.native import find_compiler

HEADERS = ("vec16.h", "epilogue.h", "conv.h")
CONV, DEPTHWISE = "conv", "depthwise_conv"
_pack_arguments = struct.Struct("31q").pack


def start_build() -> None:
    """Start to compile the kernels, or find them in the cache, in the background."""
    native.start_build(_source())


@functools.cache
def _source() -> str:
    return build_translation_unit(*HEADERS)


@functools.cache
def load_kernel(name: str) -> replay.NativeKernel:
    """The kernel `CONV` or `DEPTHWISE`."""
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


def _run(name: str, tensors: Sequence[Tensor | None], numbers: Sequence[int]) -> None:
    addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
    load_kernel(name)(_pack_arguments(*addresses, *numbers, device.num_cpu_threads()), tensors)
