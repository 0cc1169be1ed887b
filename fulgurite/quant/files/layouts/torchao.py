"""torchao: flattened tensor subclasses, `module._weight_qdata` and its companions.

    qdata float8 [N, K]    scale [N, 1], [1, 1] or in blocks                Float8Tensor
    qdata int8 [N, K]      scale [N, G]    zero_point                       Int8Tensor, Intx
    qdata int8 [N, K / 2]  scale [K / g, N]  zero_point [K / g, N] (float)  Int4Tensor
    qdata int32 [N / 8, K / 128, 32, 4]    scale_and_zero [K / g, N, 2]     Int4TilePackedTo4dTensor
    qdata uint8 [N, K / 2] scale e4m3      per_tensor_scale                 NVFP4Tensor
    qdata, scale e8m0                                                       MXTensor, 4 or 8 bits

INT4: value = code * scale + zero_point with signed codes. Tile-packed codes are in the order of the
registers of a tensor-core instruction; N and K are padded to multiples of 8 and 1024. Scales of MX
and NVFP4 may be swizzled. `act_pre_scale` is a factor of the input, as ModelOpt's
`pre_quant_scale`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fulgurite.quant.codecs.blocks import unpack_nibbles
from fulgurite.quant.files.layouts.fp8 import read_fp8
from fulgurite.quant.files.layouts.integers import build_int8_weight
from fulgurite.quant.files.layouts.modelopt import NIBBLE_SIGN, build_nvfp4
from fulgurite.quant.files.layouts.stored import (
    CheckpointLayout,
    DenseWeight,
    Naming,
    PackedWeight,
    ReadWeight,
    StoredParts,
)
from fulgurite.quant.format import FORMATS
from fulgurite.quant.swizzle import unswizzle_scales

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FLOAT8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
OPTIONAL_ROLES = (
    "zero_point", "per_tensor_scale", "act_per_tensor_scale", "act_pre_scale", "act_quant_scale",
    "act_quant_zero_point",
)  # fmt: skip
INT4_MIN_GROUP = 32
LANES, TILE_ROWS, TILE_COLUMNS = 32, 8, 16  # of a warp; N and K of an m16n8k16 instruction


def read_subclass(parts: StoredParts) -> ReadWeight:
    """A flattened tensor subclass, by its dtypes and shapes."""
    data, scale = parts["qdata"], parts["scale"]
    if scale.dim() == 0:
        scale = scale.reshape(1, 1)
    if scale.dtype == torch.float8_e8m0fnu:
        return _read_mx(parts, data, scale)
    if data.dtype in FLOAT8_DTYPES:
        return read_fp8(parts, data, scale, "scale")
    if scale.dtype == torch.float8_e4m3fn:
        return _read_nvfp4(parts, data, scale)
    zero = parts.find("zero_point")
    is_packed = zero is not None and zero.dtype in FLOAT_DTYPES and data.element_size() == 1
    if is_packed and zero is not None and zero.shape == scale.shape:
        return _read_int4(parts, data.view(torch.uint8), scale, zero)
    if data.dtype == torch.int8:
        return _read_int8(parts, data, scale, parts.get_nonzero("zero_point"))
    raise parts.error(
        f"a torchao tensor with qdata of {data.dtype} is not supported",
        "qdata",
        "save it as Float8Tensor, Int8Tensor, Int4Tensor, MXTensor or NVFP4Tensor",
    )


def _read_mx(parts: StoredParts, data: Tensor, scale: Tensor) -> PackedWeight:
    is_4bit = data.dtype == torch.uint8
    columns = data.shape[-1] * (2 if is_4bit else 1)
    name = (
        "mxfp4" if is_4bit else f"mxfp8_{'e4m3' if data.dtype == torch.float8_e4m3fn else 'e5m2'}"
    )
    scale = _unswizzle(parts, scale, data.shape[:-1], columns // 32)
    return PackedWeight(FORMATS[name], data, {"scale": scale})


def _read_nvfp4(parts: StoredParts, data: Tensor, scale: Tensor) -> PackedWeight:
    scale = _unswizzle(parts, scale, data.shape[:-1], data.shape[-1] // 8)
    tensor_scale = parts.find("per_tensor_scale")
    if tensor_scale is None:
        tensor_scale = torch.ones((), device=data.device)
    return build_nvfp4(parts, data, scale, tensor_scale.float(), "per_tensor_scale")


def _unswizzle(parts: StoredParts, scale: Tensor, rows: torch.Size, columns: int) -> Tensor:
    """Scales in rows; swizzled ones have the padded size of the 128x4 layout."""
    if tuple(scale.shape) == (*rows, columns):
        return scale
    padded = (-(-rows[-1] // 128) * 32, -(-columns // 4) * 16)
    if tuple(scale.shape) != (*rows[:-1], *padded):
        raise parts.error(
            f"scale {list(scale.shape)} is neither {[*rows, columns]} nor swizzled",
            "scale",
            "the file is truncated or in another layout: download it again",
        )
    return unswizzle_scales(scale.flatten(-2), rows[-1], columns)


def _read_int4(parts: StoredParts, data: Tensor, scale: Tensor, zero: Tensor) -> ReadWeight:
    """value = code * scale + zero, signed codes; scales are transposed, [K / g, N]."""
    columns = data.shape[-1] * 2
    groups = scale.shape[-2] if scale.dim() >= 2 else 0
    if scale.shape != (*data.shape[:-2], groups, data.shape[-2]) or not groups or columns % groups:
        raise parts.error(
            f"scale {list(scale.shape)} does not match qdata {list(data.shape)}",
            "scale",
            f"it must be {[*data.shape[:-2], 'K / group size', data.shape[-2]]}",
        )
    steps, low = scale.transpose(-1, -2).float(), zero.transpose(-1, -2).float()
    return _build_int4(data ^ NIBBLE_SIGN, steps, low)  # signed codes plus 8


def _build_int4(nibbles: Tensor, steps: Tensor, low: Tensor) -> ReadWeight:
    """value = (code - 8) * step + low, with unsigned codes [.., N, K / 2] and steps [.., N, G]."""
    width = nibbles.shape[-1] * 2 // steps.shape[-1]
    if width % INT4_MIN_GROUP == 0:
        repeats = width // INT4_MIN_GROUP
        scales = {
            "scale": steps.repeat_interleave(repeats, dim=-1),
            "minimum": (low - 8 * steps).repeat_interleave(repeats, dim=-1),
        }
        return PackedWeight(FORMATS["int4_g32_min"], nibbles, scales)
    codes = unpack_nibbles(nibbles).float() - 8
    steps, low = (part.repeat_interleave(width, dim=-1) for part in (steps, low))
    return DenseWeight(
        codes * steps + low, f"its groups of {width} columns are not a multiple of 32"
    )


def _read_int8(parts: StoredParts, data: Tensor, scale: Tensor, zero: Tensor | None) -> ReadWeight:
    columns, rows = data.shape[-1], data.shape[:-1]
    if scale.numel() == 1:
        scale = scale.reshape(()).expand(*rows, 1).contiguous()
    elif scale.shape == rows:
        scale = scale.unsqueeze(-1)
    groups = scale.shape[-1]
    if scale.shape[:-1] != rows or not groups or columns % groups:
        raise parts.error(
            f"scale {list(scale.shape)} does not match qdata {list(data.shape)}",
            "scale",
            "the file is truncated or in another layout: download it again",
        )
    if zero is not None:
        zero = zero.expand(scale.shape) if zero.numel() == 1 else zero.reshape(scale.shape)
        if zero.dtype in FLOAT_DTYPES:
            raise parts.error(
                "int8 codes with floating-point zero points are not supported",
                "zero_point",
                "quantize with integer zero points",
            )
    return build_int8_weight(data, scale, zero, columns // groups)


def read_tile_packed(parts: StoredParts) -> ReadWeight:
    """Codes in the order of tensor-core registers, which 32 lanes of a warp load."""
    words = parts.check_dtype("qdata", torch.int32)
    both = parts["scale_and_zero"]
    if words.dim() < 4 or words.shape[-2] != LANES or both.dim() != words.dim() - 1:
        raise parts.error(
            f"qdata {list(words.shape)} and scale_and_zero {list(both.shape)} are not tile-packed",
            "qdata",
            "they must be [N / 8, K / 128, 32, 4] and [K / group size, N, 2]",
        )
    *batch, tiles, super_tiles, _, inner = words.shape
    rows, columns = tiles * TILE_ROWS, super_tiles * inner * 2 * TILE_COLUMNS
    groups = both.shape[-3]
    if both.shape != (*batch, groups, rows, 2) or not groups or columns % groups:
        raise parts.error(
            f"scale_and_zero {list(both.shape)} does not match qdata {list(words.shape)}",
            "scale_and_zero",
            f"it must be {[*batch, 'K / group size', rows, 2]}",
        )
    # Nibbles b and b + 4 of a word are neighbouring columns, b = 0 to 3.
    pairs = [((words >> 4 * b) & 0xF) | (((words >> (16 + 4 * b)) & 0xF) << 4) for b in range(4)]
    data = torch.stack(pairs, dim=-1).to(torch.uint8).unflatten(-3, (TILE_ROWS, 4))
    # [.., N / 8, super tile, row, quad, inner, pair] -> rows, then columns
    ordered = data.movedim(-4, -5).movedim(-3, -1)
    nibbles = ordered.reshape(*batch, rows, columns // 2)
    steps, low = both.float().transpose(-2, -3).unbind(-1)
    return _build_int4(nibbles, steps, low)


TORCHAO_LAYOUTS = tuple(
    layout
    for naming in (Naming.FLATTENED, Naming.FLATTENED_PARAMETER)
    for layout in (
        CheckpointLayout(
            "torchao", ("qdata", "scale"), read_subclass, naming, OPTIONAL_ROLES, ("zero_point",)
        ),
        CheckpointLayout(
            "torchao tile-packed int4",
            ("qdata", "scale_and_zero"),
            read_tile_packed,
            naming,
            OPTIONAL_ROLES,
        ),
    )
)
