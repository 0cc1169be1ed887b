"""Operands of torch's scaled matmuls, read as quantized matrices of ours.

In: packed data, scales, and torch's names of their scaling and swizzle. Out: a `QuantizedMatrix` in a
format of `FORMATS`, scales row-major; None for what no format of ours describes. Sizes may be symbols:
they are compared without a guard, except that K must divide into MX and NVFP4 blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn.functional import ScalingType, SwizzleType

from fulgurite.quant.swizzle import unswizzle_scales

ELEMENTS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
FP4 = torch.float4_e2m1fn_x2
OUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# swizzled bytes, blocks along K -> scale factors [.., rows, blocks]
Unswizzle = Callable[[Tensor, int], Tensor]


def same_sizes(actual: Sequence[Any], expected: Sequence[Any]) -> bool:
    """Whether two shapes are known to be equal."""
    pairs = zip(actual, expected, strict=False)
    return len(actual) == len(expected) and all(statically_known_true(a == b) for a, b in pairs)


def is_empty(*tensors: Tensor) -> bool:
    """Whether one of them is known to have no elements."""
    return any(statically_known_true(tensor.numel() == 0) for tensor in tensors)


@dataclass(frozen=True)
class QuantizedMatrix:
    """[rows, K] as packed data, its scales and the name of their format."""

    data: Tensor
    scales: list[Tensor]
    format: str


def read_matrix(
    data: Tensor,
    scales: list[Tensor],
    recipes: Sequence[Any],
    swizzles: Sequence[Any],
    is_right: bool = False,
) -> QuantizedMatrix | None:
    """An operand [rows, K] in a format of ours; None if there is none."""
    kinds = [ScalingType(recipe) for recipe in recipes]
    (rows, columns), scale = data.shape, scales[0]
    element = ELEMENTS.get(data.dtype)
    if data.stride(-1) != 1:
        return None
    if kinds[0] in (ScalingType.BlockWise1x16, ScalingType.BlockWise1x32):
        return read_block_scaled(
            data, scales, kinds, swizzles,
            lambda swizzled, blocks: unswizzle_scales(swizzled.flatten(), rows, blocks),
        )  # fmt: skip
    if element is None or scale.dtype != torch.float32 or len(kinds) != 1:
        return None
    if kinds == [ScalingType.TensorWise]:
        return QuantizedMatrix(data, [scale.reshape(1, 1)], f"fp8_{element}_tensor")
    if kinds == [ScalingType.RowWise]:
        return QuantizedMatrix(data, [scale.reshape(rows, 1)], f"fp8_{element}_row")
    if kinds == [ScalingType.BlockWise1x128]:
        return QuantizedMatrix(data, [scale], f"fp8_{element}_1x128")
    if kinds == [ScalingType.BlockWise128x128] and is_right:
        blocks = scale[: -(-columns // 128)].t()  # [K / 128 padded to four, N / 128]
        return QuantizedMatrix(data, [blocks], f"fp8_{element}_128x128")
    return None


def read_block_scaled(
    data: Tensor,
    scales: list[Tensor],
    kinds: Sequence[ScalingType],
    swizzles: Sequence[Any],
    unswizzle: Unswizzle,
) -> QuantizedMatrix | None:
    """MX and NVFP4: swizzled scales of one byte, and for NVFP4 perhaps one scale a tensor."""
    if not swizzles or SwizzleType(swizzles[0]) != SwizzleType.SWIZZLE_32_4_4:
        return None
    element = "e2m1" if data.dtype == FP4 else ELEMENTS.get(data.dtype)
    is_nvfp4 = kinds[0] == ScalingType.BlockWise1x16
    name = "nvfp4" if is_nvfp4 else "mxfp4" if element == "e2m1" else f"mxfp8_{element}"
    if element is None or is_nvfp4 != (scales[0].dtype == torch.float8_e4m3fn):
        return None
    if is_nvfp4 and element != "e2m1":
        return None
    packed = data.view(torch.uint8) if element == "e2m1" else data
    columns = data.shape[-1] * (2 if element == "e2m1" else 1)
    width = 16 if is_nvfp4 else 32
    if columns % width:
        return None
    found = [unswizzle(scales[0], columns // width)]
    if is_nvfp4:
        whole = scales[1] if len(scales) > 1 else torch.ones(1, device=data.device)
        found.append(whole.reshape(-1, 1))
    return QuantizedMatrix(packed, found, name)
