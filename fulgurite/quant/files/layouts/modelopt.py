"""NVIDIA ModelOpt: NVFP4, MXFP4 and INT4 weights. Its FP8, MXFP8 and INT8 are in `fp8.py` and
`compressed_tensors.py`, which have the same tensors.

    weight [N, K / 2]    weight_scale e4m3 [N, K / 16]    weight_scale_2       NVFP4
    weight [N, K / 2]    weight_scale uint8 [N, K / 32]                        MXFP4
    weight [N / 2, K]    weight_scale float [N, K / g]    (weight_scale_2)     INT4 AWQ, W4A8

INT4 codes are signed nibbles, packed along N. `weight_scale_2` of W4A8 is the scale with which a
kernel rounds dequantized weights to FP8; it does not change the weight. `pre_quant_scale` [K] is a
factor of the input: the weight is dequantized and multiplied by it (`checkpoint_layouts.py`).

Stacked experts of Llama-4 and gpt-oss (name, name_weight_scale, name_weight_scale_2) are stored
transposed: [E, K / 2, N] and [E, K / 16, N].
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fulgurite.quant.files.layouts.fp8 import (
    ACTIVATION_ROLES,
    E8M0_DTYPES,
    STACKED_ACTIVATION_ROLES,
    is_stacked,
    read_transposed_fp8,
)
from fulgurite.quant.files.layouts.integers import build_int4_weight
from fulgurite.quant.files.layouts.stored import (
    CheckpointLayout,
    Naming,
    PackedWeight,
    ReadWeight,
    StoredParts,
    StoredTensor,
)
from fulgurite.quant.format import FORMATS
from fulgurite.quant.shapes import logical_shape, scale_shape

NIBBLE_SIGN = 0x88  # added to (xor) two signed nibbles: signed codes plus 8


def read_nvfp4(parts: StoredParts) -> PackedWeight:
    """NVFP4 with `weight_scale` and `weight_scale_2`."""
    scale = parts.check_dtype("weight_scale", torch.float8_e4m3fn)
    tensor_scale = parts["weight_scale_2"].float()
    return build_nvfp4(parts, parts["weight"], scale, tensor_scale, "weight_scale_2")


def read_stacked(parts: StoredParts) -> ReadWeight:
    """Experts of Llama-4 or gpt-oss: NVFP4 or FP8, transposed."""
    if "weight_scale_2" not in parts:
        return read_transposed_fp8(parts, "weight_scale")
    weight, scale = parts["weight"], parts.check_dtype("weight_scale", torch.float8_e4m3fn)
    if scale.dim() == 3 and weight.shape[-1] == scale.shape[-1]:
        weight = weight.transpose(-1, -2).contiguous()
        by_byte = scale.view(torch.uint8).transpose(-1, -2).contiguous()
        scale = by_byte.view(torch.float8_e4m3fn)
    tensor_scale = parts["weight_scale_2"].float()
    return build_nvfp4(parts, weight, scale, tensor_scale, "weight_scale_2")


def build_nvfp4(
    parts: StoredParts, weight: Tensor, scale: Tensor, tensor_scale: Tensor, role: str
) -> PackedWeight:
    """Nibbles [.., N, K / 2], scales of 16 columns and one scale a matrix.

    Scales of larger groups (32 columns in W4A8_NVFP4_FP8) are repeated.
    """
    format = FORMATS["nvfp4"]
    data = weight.view(torch.uint8)
    columns = data.shape[-1] * 2
    groups = scale.shape[-1] if scale.dim() else 0
    if groups and columns % (16 * groups) == 0:
        repeats = columns // (16 * groups)
        scale = scale.view(torch.uint8).repeat_interleave(repeats, -1).view(scale.dtype)
    if tuple(scale.shape) != (*data.shape[:-1], -(-columns // 16)):
        raise parts.error(
            f"weight_scale {list(scale.shape)} does not have one scale for 16 columns of "
            f"{[*data.shape[:-1], columns]}",
            "weight_scale",
            "the file is truncated or in another layout: download it again",
        )
    shape = scale_shape(format.scales[1], logical_shape(format, data.shape))
    count = torch.Size(shape).numel()
    if tensor_scale.numel() not in (1, count):
        raise parts.error(
            f"got {tensor_scale.numel()} tensor scales for {count} matrices",
            role,
            "a weight needs one tensor scale, stacked experts one each",
        )
    expanded = tensor_scale.reshape(-1).expand(count).reshape(shape).contiguous()
    return PackedWeight(format, data, {"scale": scale, "tensor_scale": expanded})


def read_packed_rows(parts: StoredParts) -> ReadWeight:
    """MXFP4 along K, or signed INT4 along N, by the dtype of the scales."""
    weight, scale = parts["weight"], parts["weight_scale"]
    if scale.dtype in E8M0_DTYPES:
        parts.check_shape("weight_scale", (*weight.shape[:-1], weight.shape[-1] // 16))
        exponents = scale.view(torch.float8_e8m0fnu)
        return PackedWeight(FORMATS["mxfp4"], weight, {"scale": exponents})
    rows, columns = weight.shape[-2] * 2, weight.shape[-1]
    groups = scale.shape[-1] if scale.dim() else 0
    parts.check_dtype("weight_scale", torch.float32, torch.bfloat16, torch.float16)
    if scale.shape[:-1] != (*weight.shape[:-2], rows) or not groups or columns % groups:
        raise parts.error(
            f"weight_scale {list(scale.shape)} does not match INT4 codes packed along N, "
            f"{list(weight.shape)}",
            "weight_scale",
            f"it must be {[*weight.shape[:-2], rows, 'K / group size']}",
        )
    nibbles = _pack_along_columns(weight)
    return build_int4_weight(nibbles, columns, scale, None, columns // groups)


def _pack_along_columns(weight: Tensor) -> Tensor:
    """Signed nibbles of rows 2n and 2n + 1 [.., N / 2, K] -> unsigned ones along K [.., N, K / 2]."""
    codes = weight ^ NIBBLE_SIGN
    if codes.shape[-1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    first, second = codes[..., 0::2], codes[..., 1::2]
    even = (first & 0xF) | (second << 4)
    odd = (first >> 4) | (second & 0xF0)
    return torch.stack((even, odd), dim=-2).flatten(-3, -2)


def _is_nvfp4(stored: Mapping[str, StoredTensor]) -> bool:
    return stored["weight_scale"].dtype not in (torch.float32, torch.bfloat16, torch.float16)


def _is_uint8(stored: Mapping[str, StoredTensor]) -> bool:
    return stored["weight"].dtype == torch.uint8


MODELOPT_LAYOUTS = (
    CheckpointLayout(
        "modelopt nvfp4",
        ("weight", "weight_scale", "weight_scale_2"),
        read_nvfp4,
        optional=ACTIVATION_ROLES,
        matches=_is_nvfp4,
    ),
    CheckpointLayout(
        "modelopt packed",
        ("weight", "weight_scale"),
        read_packed_rows,
        optional=(*ACTIVATION_ROLES, "weight_scale_2"),
        matches=_is_uint8,
    ),
    CheckpointLayout(
        "modelopt experts",
        ("weight", "weight_scale"),
        read_stacked,
        Naming.PARAMETER,
        (*STACKED_ACTIVATION_ROLES, "weight_scale_2"),
        matches=is_stacked,
    ),
)
