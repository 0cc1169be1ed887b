"""compressed-tensors (llm-compressor): NVFP4, MXFP4, MXFP6 and integers. Its FP8 is in `fp8.py`.

    weight_packed  weight_scale  weight_global_scale    NVFP4; the global scale is 448 * 6 / amax, the
                                                        reciprocal of our tensor scale
    weight_packed  weight_scale  (uint8)                MXFP4; MXFP6 (e2m3), which is dequantized
    weight_packed  weight_scale  weight_shape  (int32)  integers of 1 to 8 bits, as a dense string of bits
    weight  weight_scale  (int8)                        integers of 8 bits

Integers have a scale per tensor, row or group, and `weight_zero_point` if they are asymmetric: packed
along N beside packed weights, otherwise int8. With `weight_g_idx`, columns are in activation order;
such a weight is dequantized.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fulgurite.quant.codecs.minifloat import dequantize_e8m0
from fulgurite.quant.files.layouts.fp8 import ACTIVATION_ROLES, E8M0_DTYPES
from fulgurite.quant.files.layouts.integers import (
    WORD_BITS,
    build_from_words,
    build_int8_weight,
    unpack_words,
)
from fulgurite.quant.files.layouts.modelopt import build_nvfp4
from fulgurite.quant.files.layouts.stored import (
    CheckpointLayout,
    DenseWeight,
    PackedWeight,
    ReadWeight,
    StoredParts,
    StoredTensor,
)
from fulgurite.quant.format import FORMATS

SUPPORTED_BITS = (4, 8, 2, 3, 5, 6, 7, 1)  # the first that fits is taken; tiny K is ambiguous
MX_BLOCK = 32
# Magnitudes of e2m3, by the five bits below the sign.
E2M3_VALUES = (
    *(m / 8 for m in range(8)),
    *((1 + m / 8) * 2**e for e in range(3) for m in range(8)),
)


def read_nvfp4(parts: StoredParts) -> PackedWeight:
    """NVFP4: the global scale is a reciprocal."""
    scale = parts.check_dtype("weight_scale", torch.float8_e4m3fn)
    packed = parts.check_dtype("weight_packed", torch.uint8)
    reciprocal = parts["weight_global_scale"].float()
    return build_nvfp4(parts, packed, scale, 1.0 / reciprocal, "weight_global_scale")


def read_mx(parts: StoredParts) -> ReadWeight:
    """MXFP4 or MXFP6, by the width of the packed rows."""
    data = parts.check_dtype("weight_packed", torch.uint8)
    scale = parts.check_dtype("weight_scale", *E8M0_DTYPES)
    if scale.dim() < 2:
        raise parts.error(
            f"weight_scale {list(scale.shape)} has fewer than two dimensions",
            "weight_scale",
            "the file is damaged: download it again",
        )
    columns = scale.shape[-1] * MX_BLOCK
    exponents = scale.view(torch.float8_e8m0fnu)
    if data.shape[:-1] == scale.shape[:-1] and data.shape[-1] * 4 == columns * 3:
        values = _dequantize_e2m3(data) * dequantize_e8m0(exponents).repeat_interleave(
            MX_BLOCK, dim=-1
        )
        return DenseWeight(values, "MXFP6 has no format here")
    parts.check_shape("weight_packed", (*scale.shape[:-1], columns // 2))
    return PackedWeight(FORMATS["mxfp4"], data, {"scale": exponents})


def _dequantize_e2m3(data: Tensor) -> Tensor:
    """Four codes of six bits in three bytes, little-endian."""
    b = data.unflatten(-1, (-1, 3)).int()
    word = b[..., 0] | (b[..., 1] << 8) | (b[..., 2] << 16)
    codes = torch.stack([(word >> shift) & 63 for shift in (0, 6, 12, 18)], dim=-1).flatten(-2)
    table = torch.tensor([*E2M3_VALUES, *(-value for value in E2M3_VALUES)], device=data.device)
    return table[codes]


def read_packed_integers(parts: StoredParts) -> ReadWeight:
    """Integers packed into int32 words."""
    words = parts.check_dtype("weight_packed", torch.int32)
    parts.check_shape("weight_shape", (2,), (3,))
    *batch, rows, columns = (int(size) for size in parts.values("weight_shape"))
    if list(words.shape[:-1]) != [*batch, rows] and list(words.shape[1:-1]) == [*batch, rows]:
        batch = [words.shape[0]]  # stacked experts with the shape of one
    bits = next(
        (b for b in SUPPORTED_BITS if -(-columns * b // WORD_BITS) == words.shape[-1]), None
    )
    if list(words.shape[:-1]) != [*batch, rows] or bits is None:
        raise parts.error(
            f"packed words {list(words.shape)} do not hold {[*batch, rows, columns]} codes",
            "weight_packed",
            "the file is truncated, or weight_shape is wrong: download it again",
        )
    scale, width = _expand_scales(parts, [*batch, rows], columns)
    zero = _read_packed_zero_points(parts, bits, scale)
    order = _read_activation_order(parts, columns, width, scale.shape[-1])
    if order is None:
        return build_from_words(words, bits, columns, scale, zero, width)
    middle = 2 ** (bits - 1)
    zero = torch.full_like(scale, middle) if zero is None else zero
    codes = unpack_words(words, bits, columns)
    return _dequantize_in_order(codes, scale, zero, order)


def read_int8(parts: StoredParts) -> ReadWeight:
    """Integers in int8: W8A8 and W8A16, also asymmetric and in groups."""
    weight = parts["weight"]
    scale, width = _expand_scales(parts, list(weight.shape[:-1]), weight.shape[-1])
    zero = None
    if parts.get_nonzero("weight_zero_point") is not None:
        zero = _match_scales(parts, parts.check_dtype("weight_zero_point", torch.int8), scale)
    order = _read_activation_order(parts, weight.shape[-1], width, scale.shape[-1])
    if order is not None:
        return _dequantize_in_order(
            weight, scale, torch.zeros_like(scale) if zero is None else zero, order
        )
    return build_int8_weight(weight, scale, zero, width)


def _expand_scales(parts: StoredParts, rows: list[int], columns: int) -> tuple[Tensor, int]:
    """Scales as [.., N, G], and the columns of a group; a scale per tensor is repeated."""
    scale = parts["weight_scale"].float()
    if scale.dim() == 0 or scale.numel() == 1:
        return scale.reshape(()).expand(*rows, 1).contiguous(), columns
    if list(scale.shape) == rows:
        return scale.unsqueeze(-1), columns
    if len(rows) > 1 and scale.numel() == torch.Size(rows[:-1]).numel():  # one for each expert
        return scale.reshape(*rows[:-1], 1, 1).expand(*rows, 1).contiguous(), columns
    groups = scale.shape[-1]
    width = parts.config.group_size or (
        columns // groups if groups and columns % groups == 0 else 0
    )
    width = columns if groups == 1 else width
    if list(scale.shape[:-1]) != rows or width <= 0 or -(-columns // width) != groups:
        raise parts.error(
            f"weight_scale {list(scale.shape)} is neither per tensor nor per row nor per group of "
            f"{[*rows, columns]}",
            "weight_scale",
            "check group_size in quantization_config, or download it again",
        )
    return scale, width


def _match_scales(parts: StoredParts, zero: Tensor, scale: Tensor) -> Tensor:
    """Zero points in the shape of the scales."""
    if zero.numel() == 1:
        return zero.reshape(()).expand(scale.shape).contiguous()
    if zero.numel() != scale.numel():
        raise parts.error(
            f"weight_zero_point {list(zero.shape)} does not match the scales {list(scale.shape)}",
            "weight_zero_point",
            "the file is truncated: download it again",
        )
    return zero.reshape(scale.shape)


def _read_packed_zero_points(parts: StoredParts, bits: int, scale: Tensor) -> Tensor | None:
    """Unsigned zero points [.., N, G]: words along N, or int8."""
    if "weight_zero_point" not in parts:
        return None
    packed = parts.check_dtype("weight_zero_point", torch.int32, torch.int8)
    rows = scale.shape[-2]
    if packed.dtype == torch.int8:
        signed = _match_scales(parts, packed, scale)
        return (signed.to(torch.int16) + 2 ** (bits - 1)).to(torch.uint8)
    expected = (*scale.shape[:-2], -(-rows * bits // WORD_BITS), scale.shape[-1])
    words = parts.check_shape("weight_zero_point", expected)
    return unpack_words(words.transpose(-1, -2).contiguous(), bits, rows).transpose(-1, -2)


def _read_activation_order(
    parts: StoredParts, columns: int, width: int, groups: int
) -> Tensor | None:
    """The group of each column, or None if groups are neighbouring columns."""
    if "weight_g_idx" not in parts or groups == 1:
        return None
    order = parts.values("weight_g_idx").long()
    if torch.equal(order, torch.arange(columns, device=order.device) // width):
        return None
    if order.shape != (columns,) or int(order.min()) < 0 or int(order.max()) >= groups:
        raise parts.error(
            f"weight_g_idx does not name one of {groups} groups for each of {columns} columns",
            "weight_g_idx",
            "the file is damaged: download it again",
        )
    return order


def _dequantize_in_order(codes: Tensor, scale: Tensor, zero: Tensor, order: Tensor) -> DenseWeight:
    order = order.to(codes.device)
    values = (codes.float() - zero.float()[..., order]) * scale.float()[..., order]
    return DenseWeight(values, "its columns are in activation order (actorder)")


def _is_int8(stored: Mapping[str, StoredTensor]) -> bool:
    return stored["weight"].dtype == torch.int8


COMPRESSED_TENSORS_LAYOUTS = (
    CheckpointLayout(
        "compressed-tensors nvfp4",
        ("weight_packed", "weight_scale", "weight_global_scale"),
        read_nvfp4,
        optional=ACTIVATION_ROLES,
    ),
    CheckpointLayout(
        "compressed-tensors packed",
        ("weight_packed", "weight_scale", "weight_shape"),
        read_packed_integers,
        optional=(*ACTIVATION_ROLES, "weight_g_idx"),
        value_roles=("weight_shape", "weight_g_idx"),
    ),
    CheckpointLayout(
        "compressed-tensors mxfp4",
        ("weight_packed", "weight_scale"),
        read_mx,
        optional=ACTIVATION_ROLES,
    ),
    CheckpointLayout(
        "compressed-tensors int8",
        ("weight", "weight_scale"),
        read_int8,
        optional=(*ACTIVATION_ROLES, "weight_g_idx"),
        value_roles=("weight_g_idx", "weight_zero_point"),
        matches=_is_int8,
    ),
)
