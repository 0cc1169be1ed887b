"""Convolutions that run faster as GEMMs, in 16 bits on GPUs.

In: a captured graph, changed in place. Out: nothing. Two kinds are replaced; results have the
strides of the convolution.

Patches that don't overlap (the stride is the kernel size): the patch embedding of vision
transformers, the downsampling of ConvNeXt. Each patch is multiplied by one matrix:

    rows of patches (N·H/k·W/k, C·k·k) @ weight (O, C·k·k)ᵀ + bias

The copy that gathers the patches fuses with what comes before. cuDNN first converts NCHW inputs to
NHWC and pads three channels to eight. H200, bfloat16, 8 images of 3x224x224: 122 us for 16x16
patches, and 13 us as a GEMM; 379 and 15 us for 32x32; 24 and 17 us for 2x2 patches of 96x56x56.

Grouped 1-D convolutions with long kernels, in inference: the position embedding of wav2vec2 (128
taps, 16 groups). One batched GEMM over copies of the windows. cuDNN has only kernels without tensor
cores for them.

float32 stays with cuDNN: it uses TF32 by default, and GEMMs do not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from fulgurite.trace.cost import size_hint
from fulgurite.trace.node_meta import captured_value

CONVOLUTIONS = {torch.conv1d: 1, torch.conv2d: 2, torch.conv3d: 3}
PARAMETERS = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
DEFAULTS = {"bias": None, "stride": 1, "padding": 0, "dilation": 1, "groups": 1}
MIN_TAPS = 16  # of a grouped convolution; fewer were not measured
MIN_GROUP_CHANNELS = 8  # a row of a GEMM's operand starts at a multiple of 16 bytes
MAX_WINDOW_BYTES = 1 << 30


def use_gemm_for_convolutions(module: fx.GraphModule) -> None:
    """Replace the convolutions that a GEMM computes faster."""
    changed = False
    for node in module.graph.nodes:
        if node.op != "call_function" or node.target not in CONVOLUTIONS:
            continue
        arguments, dims = _bind(node), CONVOLUTIONS[node.target]
        if _has_separate_patches(arguments, dims):
            node.target = convolve_patches
            node.kwargs = {"channels_last": not captured_value(node).is_contiguous()}
        elif _has_long_groups(arguments, dims) and captured_value(node).is_contiguous():
            node.target = convolve_groups
            ((stride,), (padding,)) = (_expand(arguments[n], 1) for n in ("stride", "padding"))
            groups = arguments["groups"]
            node.kwargs = {"stride": stride, "padding": padding, "groups": groups}
        else:
            continue
        node.args = (arguments["input"], arguments["weight"], arguments["bias"])
        changed = True
    if changed:
        module.recompile()


def convolve_patches(
    x: Tensor, weight: Tensor, bias: Tensor | None, channels_last: bool = False
) -> Tensor:
    """A convolution with the stride of its kernel, in one, two or three dimensions."""
    batch, channels, *sizes = x.shape
    kernel = weight.shape[2:]
    dims = len(kernel)
    counts = [size // k for size, k in zip(sizes, kernel, strict=True)]
    for dim, (count, k) in enumerate(zip(counts, kernel, strict=True)):
        x = x.narrow(2 + dim, 0, count * k)  # without the pixels after the last whole patch
    split = [size for pair in zip(counts, kernel, strict=True) for size in pair]
    order = [0, *range(2, 2 + 2 * dims, 2), 1, *range(3, 3 + 2 * dims, 2)]
    rows = x.reshape(batch, channels, *split).permute(order).flatten(1 + dims)
    result = F.linear(rows.flatten(0, dims), weight.flatten(1), bias)
    result = result.view(batch, *counts, -1).movedim(-1, 1)
    return result if channels_last else result.contiguous()


def convolve_groups(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: int, groups: int
) -> Tensor:
    """A grouped 1-D convolution: the windows of each group as the rows of one GEMM."""
    windows = F.pad(x, (padding, padding)).unfold(2, weight.shape[2], stride)
    batch, _, length, _ = windows.shape
    windows = windows.unflatten(1, (groups, -1)).permute(1, 0, 3, 2, 4)  # G, N, T, C/G, k
    rows = windows.reshape(groups, batch * length, -1)
    result = torch.bmm(rows, weight.reshape(groups, -1, rows.shape[2]).transpose(1, 2))
    result = result.view(groups, batch, length, -1).permute(1, 0, 3, 2).flatten(1, 2)
    return result if bias is None else result + bias[:, None]


def _bind(node: fx.Node) -> dict[str, Any]:
    given = dict(zip(PARAMETERS, node.args, strict=False))
    return {**DEFAULTS, **given, **node.kwargs}


def _has_separate_patches(arguments: dict[str, Any], dims: int) -> bool:
    x, weight = captured_value(arguments["input"]), captured_value(arguments["weight"])
    if not _are_suitable(x, weight, dims):
        return False
    kernel = list(weight.shape[2:])
    return (
        _expand(arguments["stride"], dims) == kernel
        and (arguments["padding"] == "valid" or _expand(arguments["padding"], dims) == [0] * dims)
        and _expand(arguments["dilation"], dims) == [1] * dims
        and arguments["groups"] == 1
        and math.prod(kernel) > 1
    )


def _has_long_groups(arguments: dict[str, Any], dims: int) -> bool:
    x, weight = captured_value(arguments["input"]), captured_value(arguments["weight"])
    if dims != 1 or arguments["groups"] == 1 or not _are_suitable(x, weight, dims):
        return False
    needs_grad = torch.is_grad_enabled() and any(
        isinstance(argument, fx.Node) and captured_value(argument).requires_grad
        for argument in (arguments["input"], arguments["weight"], arguments["bias"])
    )
    (stride,), (dilation,) = (_expand(arguments[name], 1) for name in ("stride", "dilation"))
    (padding,) = _expand(arguments["padding"], 1)
    if needs_grad or dilation != 1 or not isinstance(padding, int):
        return False
    _, group_channels, taps = weight.shape
    window_bytes = size_hint(x.numel()) // stride * taps * x.element_size()
    is_long = taps >= MIN_TAPS and group_channels >= MIN_GROUP_CHANNELS
    return is_long and window_bytes <= MAX_WINDOW_BYTES


def _are_suitable(x: Any, weight: Any, dims: int) -> bool:
    """Whether a GEMM may replace a convolution of these two, by dtype, device and known sizes."""
    if not isinstance(x, Tensor) or not isinstance(weight, Tensor) or not is_faster_as_gemm(x):
        return False
    is_static = all(isinstance(size, int) for size in (*x.shape[1:], *weight.shape))
    return is_static and x.dim() == dims + 2 and x.dtype == weight.dtype


def is_faster_as_gemm(x: Tensor) -> bool:
    """Whether a GEMM beats the library's convolution for inputs like this one."""
    return x.device.type == "cuda" and x.dtype in (torch.bfloat16, torch.float16)


def _expand(value: Any, dims: int) -> list[Any]:
    values = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    return values * dims if len(values) == 1 else values
