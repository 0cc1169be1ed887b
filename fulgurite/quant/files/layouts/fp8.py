"""FP8 weights: one byte per element, with scales per tensor, row or block.

    weight  weight_scale        ModelOpt, compressed-tensors, fbgemm (with input_scale_ub); MXFP8 if
                                the scales are e8m0 of 32 columns
    weight  weight_scale_inv    DeepSeek-V3 and transformers' "fp8": blocks of 128x128, or one scale.
                                Despite its name it is multiplied by, not divided
    name    name_scale_inv      the same, of stacked experts [E, N, K]
    name    name_scale          fbgemm, and name_weight_scale of ModelOpt: stacked experts of Llama-4
                                and gpt-oss, stored transposed, [E, K, N]

Blocks that no format has (64x64) are dequantized; multiples of 128x128 repeat their scales.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fulgurite.quant.codecs.blocks import expand_blocks
from fulgurite.quant.codecs.minifloat import dequantize_e8m0
from fulgurite.quant.files.layouts.stored import (
    CheckpointLayout,
    DenseWeight,
    Naming,
    PackedWeight,
    ReadWeight,
    StoredParts,
    StoredTensor,
)
from fulgurite.quant.format import FORMATS
from fulgurite.quant.shapes import scale_shape

ELEMENTS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
# FP8 of AMD's older GPUs: other values for the same bits.
FNUZ_DTYPES = (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
E8M0_DTYPES = (torch.uint8, torch.float8_e8m0fnu)
MX_BLOCK = 32
BLOCK_FORMATS = ("tensor", "row", "1x128", "128x128")


def read_weight_scale(parts: StoredParts) -> ReadWeight:
    """An FP8 weight with `weight_scale`, whose shape and dtype determine the format."""
    return read_fp8(parts, parts["weight"], parts["weight_scale"], "weight_scale")


def read_weight_scale_inv(parts: StoredParts) -> ReadWeight:
    """An FP8 weight with `weight_scale_inv`: in blocks, or one scale for the tensor."""
    return read_fp8(parts, parts["weight"], parts["weight_scale_inv"], "weight_scale_inv")


def read_stacked_scale_inv(parts: StoredParts) -> ReadWeight:
    """Stacked FP8 experts [E, N, K] of transformers."""
    return read_fp8(parts, parts["weight"], parts["scale_inv"], "scale_inv")


def read_transposed_scale(parts: StoredParts) -> ReadWeight:
    """Stacked FP8 experts of fbgemm (Llama-4), [E, K, N]."""
    return read_transposed_fp8(parts, "scale")


def read_transposed_fp8(parts: StoredParts, role: str) -> ReadWeight:
    """Stacked FP8 experts that are stored [E, K, N], with one scale per tensor or output."""
    weight, scale = parts["weight"], parts[role]
    if weight.dim() != 3:
        raise parts.error("stacked experts have three dimensions", "weight", "download it again")
    experts, _, rows = weight.shape
    if scale.numel() == experts * rows:
        scale = scale.reshape(experts, rows, 1)
    by_byte = weight.view(torch.uint8).transpose(-1, -2).contiguous()
    return read_fp8(parts, by_byte.view(weight.dtype), scale, role)


def read_fp8(parts: StoredParts, weight: Tensor, scale: Tensor, role: str) -> ReadWeight:
    """An FP8 weight [.., N, K] and its scales, which are the tensor `role`."""
    if weight.dtype in FNUZ_DTYPES:
        blocks = _find_block(parts, weight, scale, role)
        reason = f"its dtype {weight.dtype} has other values than the FP8 formats"
        return DenseWeight(
            weight.float() * expand_blocks(scale.float(), blocks, weight.shape), reason
        )
    if weight.dtype not in ELEMENTS:
        raise parts.error(
            f"weights of {weight.dtype} with a {role} are not supported",
            parts.roles[0],
            "convert the checkpoint to float8_e4m3fn, float8_e5m2 or int8",
        )
    element = ELEMENTS[weight.dtype]
    if scale.dtype in E8M0_DTYPES:
        if tuple(scale.shape) == (*weight.shape[:-1], weight.shape[-1] // MX_BLOCK):
            return PackedWeight(
                FORMATS[f"mxfp8_{element}"], weight, {"scale": scale.view(torch.float8_e8m0fnu)}
            )
        scale = dequantize_e8m0(scale)
    return _match_blocks(parts, weight, scale.float(), role, element)


def _match_blocks(
    parts: StoredParts, weight: Tensor, scale: Tensor, role: str, element: str
) -> ReadWeight:
    """Find the FP8 format that matches the shape of the scale."""
    shapes = {
        f"fp8_{element}_{block}": scale_shape(
            FORMATS[f"fp8_{element}_{block}"].scales[0], weight.shape
        )
        for block in BLOCK_FORMATS
    }
    per_tensor, per_row = list(shapes.values())[:2]
    scale = _normalize_shape(scale, weight, per_tensor, per_row)
    given = parts.config.block_size
    is_other_block = given not in (None, (128, 128)) and scale.numel() > 1
    for name, shape in shapes.items():
        if tuple(scale.shape) == shape and not (is_other_block and name.endswith("x128")):
            return PackedWeight(FORMATS[name], weight, {"scale": scale})
    block = _find_block(parts, weight, scale, role, shapes)
    if block[0] % 128 == 0 and block[1] % 128 == 0:
        finer = expand_blocks(
            scale, (block[0] // 128, block[1] // 128), torch.Size(shapes[f"fp8_{element}_128x128"])
        )
        return PackedWeight(FORMATS[f"fp8_{element}_128x128"], weight, {"scale": finer})
    values = weight.float() * expand_blocks(scale, block, weight.shape)
    return DenseWeight(values, f"its blocks of {block[0]}x{block[1]} are not 128x128")


def _normalize_shape(
    scale: Tensor, weight: Tensor, per_tensor: tuple[int, ...], per_row: tuple[int, ...]
) -> Tensor:
    """Scales of one element, a row, or blocks with dimensions of size 1 in between."""
    count = torch.Size(per_tensor).numel()
    if scale.numel() == 1:
        return scale.reshape(()).expand(per_tensor).contiguous()
    is_per_matrix = scale.shape[: weight.dim() - 2] == weight.shape[:-2]
    if scale.numel() == count and is_per_matrix:
        return scale.reshape(per_tensor)
    if tuple(scale.shape) == tuple(weight.shape[:-1]):
        return scale.reshape(per_row)
    if scale.dim() == weight.dim() + 2:  # [N / 128, 1, K / 128, 1]
        return scale.squeeze(-1).squeeze(-2)
    return scale


def _find_block(
    parts: StoredParts,
    weight: Tensor,
    scale: Tensor,
    role: str,
    shapes: dict[str, tuple[int, ...]] | None = None,
) -> tuple[int, int]:
    """Rows and columns of a block, from config.json or by division."""
    sizes = (weight.shape[-2], weight.shape[-1])
    counts = (scale.shape[-2], scale.shape[-1]) if scale.dim() >= 2 else (1, scale.numel())
    block = parts.config.block_size
    if block is None and all(c and s % c == 0 for s, c in zip(sizes, counts, strict=True)):
        block = max(sizes[0] // counts[0], 1), max(sizes[1] // counts[1], 1)
    expected = (-(-sizes[0] // block[0]), -(-sizes[1] // block[1])) if block else None
    if block is not None and expected == counts and scale.shape[:-2] in (weight.shape[:-2], ()):
        return block
    supported = ", ".join(f"{list(shape)} ({name})" for name, shape in (shapes or {}).items())
    text = f"; blocks of {block[0]}x{block[1]} need {list(expected)}" if block and expected else ""
    raise parts.error(
        f"{role} {list(scale.shape)} matches no FP8 format of a weight {list(weight.shape)}{text}",
        role,
        "check weight_block_size in config.json, or download it again"
        + (f". Supported shapes: {supported}" if supported else ""),
    )


# Tensors that may accompany a weight: activation scales, and values that are not used.
ACTIVATION_ROLES = (
    "input_scale", "input_global_scale", "activation_scale", "input_scale_ub", "input_zero_point",
    "output_scale", "output_zero_point", "weight_zero_point", "pre_quant_scale",
)  # fmt: skip
STACKED_ACTIVATION_ROLES = ("input_scale", "output_scale")


def is_stacked(stored: Mapping[str, StoredTensor]) -> bool:
    """Whether a parameter holds quantized experts, [E, N, K]."""
    weight = stored["weight"]
    return len(weight.shape) == 3 and weight.dtype.itemsize == 1


FP8_LAYOUTS = (
    CheckpointLayout(
        "deepseek fp8",
        ("weight", "weight_scale_inv"),
        read_weight_scale_inv,
        optional=ACTIVATION_ROLES,
    ),
    CheckpointLayout(
        "stacked fp8",
        ("weight", "scale_inv"),
        read_stacked_scale_inv,
        Naming.PARAMETER,
        (*STACKED_ACTIVATION_ROLES, "activation_scale"),
        matches=is_stacked,
    ),
    CheckpointLayout(
        "fbgemm experts",
        ("weight", "scale"),
        read_transposed_scale,
        Naming.PARAMETER,
        (*STACKED_ACTIVATION_ROLES, "input_scale_ub"),
        matches=is_stacked,
    ),
    CheckpointLayout(
        "weight_scale", ("weight", "weight_scale"), read_weight_scale, optional=ACTIVATION_ROLES
    ),
)
