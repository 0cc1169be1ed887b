"""bitsandbytes: 4-bit codes of a codebook (nf4, fp4) and LLM.int8.

    weight [N * K / 2, 1]  weight.absmax  weight.quant_map  weight.quant_state.bitsandbytes__nf4
    weight.nested_absmax  weight.nested_quant_map           double quantization of absmax
    weight int8 [N, K]  SCB [N]                             value = code * SCB / 127

Blocks of `blocksize` elements run over the flattened weight, the first of a pair in the high nibble.
If rows are whole blocks, the weight becomes `nf4` or `fp4`; otherwise it is dequantized. The quant
state is JSON in bytes: shape, block sizes, dtype and the offset of nested scales.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from fulgurite.errors import WeightsError
from fulgurite.quant.codecs.codebook import CODEBOOKS
from fulgurite.quant.files.layouts.integers import repeat_groups
from fulgurite.quant.files.layouts.stored import (
    CheckpointLayout,
    DenseWeight,
    PackedWeight,
    ReadWeight,
    StoredParts,
)
from fulgurite.quant.format import FORMATS

STATE_ROLES = {kind: f"weight.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4")}
INT8_STEPS = 7.874015718698502e-3  # 1 / 127, as bitsandbytes has it
ROW_MAJOR = 0  # `weight_format` of LLM.int8


def read_4bit(parts: StoredParts) -> ReadWeight:
    """nf4 or fp4, with or without double quantization."""
    kind = next(kind for kind, role in STATE_ROLES.items() if role in parts)
    state = _read_state(parts, STATE_ROLES[kind])
    shape, block = tuple(state["shape"]), int(state["blocksize"])
    data = parts["weight"].reshape(-1).view(torch.uint8)
    count = torch.Size(shape).numel()
    if data.numel() != -(-count // 2) or len(shape) < 2:
        raise parts.error(
            f"{data.numel()} bytes do not hold a {kind} weight of shape {list(shape)}",
            "weight",
            "the file is truncated: download it again",
        )
    _check_codebook(parts, kind)
    absmax = _read_absmax(parts, state, -(-count // block))
    format = FORMATS[kind]
    group = format.block[1]
    swapped = (data >> 4) | (data << 4)  # the first of a pair in the low nibble
    if shape[-1] % group == 0 and block % group == 0 and shape[-1] % block == 0:
        nibbles = swapped.reshape(*shape[:-1], shape[-1] // 2)
        scale = repeat_groups(absmax, block // group, count // group)
        return PackedWeight(format, nibbles, {"scale": scale.reshape(*shape[:-1], -1)})
    codes = torch.stack((data >> 4, data & 0xF), dim=-1).flatten()[:count]
    table = torch.tensor(CODEBOOKS[kind], device=data.device)
    values = table[codes.int()] * repeat_groups(absmax, block, count)
    reason = f"its blocks of {block} are not within rows of {shape[-1]}"
    if shape[-1] % block == 0:
        reason = f"its blocks of {block} are smaller than those of {kind}, {group}"
    return DenseWeight(values.reshape(shape), reason)


def _read_state(parts: StoredParts, role: str) -> dict[str, Any]:
    text = bytes(parts.values(role).flatten().to(torch.uint8).tolist())
    try:
        state = json.loads(text.decode("utf-8"))
        nested = {"nested_offset"} if "nested_blocksize" in state else set()
        missing = ({"shape", "blocksize"} | nested) - set(state)
    except (UnicodeDecodeError, ValueError, TypeError) as error:
        raise WeightsError(
            f"cannot parse the quant state: {error}",
            where=parts.name(role),
            next="download it again",
        ) from error
    if missing:
        raise WeightsError(
            f"the quant state has no {', '.join(sorted(missing))}",
            where=parts.name(role),
            next="download it again",
        )
    return dict(state)


def _check_codebook(parts: StoredParts, kind: str) -> None:
    stored = parts["weight.quant_map"]
    if stored.is_meta:
        return
    expected = torch.tensor(CODEBOOKS[kind], device=stored.device)
    if stored.shape != expected.shape or not torch.allclose(
        stored.float(), expected, rtol=0, atol=1e-6
    ):
        raise parts.error(
            f"the codebook is not that of {kind}",
            "weight.quant_map",
            "the file is damaged, or of a codebook that is not supported",
        )


def _read_absmax(parts: StoredParts, state: dict[str, Any], blocks: int) -> Tensor:
    """Scales in float32, one a block."""
    absmax = parts["weight.absmax"].reshape(-1)
    if absmax.numel() != blocks:
        raise parts.error(
            f"absmax has {absmax.numel()} values for {blocks} blocks",
            "weight.absmax",
            "the file is truncated: download it again",
        )
    if "nested_blocksize" not in state:
        return absmax.float()
    for role in ("weight.nested_absmax", "weight.nested_quant_map"):
        if role not in parts:
            raise WeightsError(
                "the scales are quantized, and their own scales are missing",
                where=parts.name(role),
                next="the file is incomplete: download it again",
            )
    parts.check_shape("weight.nested_quant_map", (256,))
    codes = parts.check_dtype("weight.absmax", torch.uint8).reshape(-1)
    table, nested = parts["weight.nested_quant_map"], parts["weight.nested_absmax"].reshape(-1)
    width = int(state["nested_blocksize"])
    if nested.numel() != -(-blocks // width):
        raise parts.error(
            f"nested_absmax has {nested.numel()} values for {blocks} scales in blocks of {width}",
            "weight.nested_absmax",
            "the file is truncated: download it again",
        )
    values = table.float()[codes.int()] * repeat_groups(nested.float(), width, blocks)
    return values + float(state["nested_offset"])


def read_int8(parts: StoredParts) -> ReadWeight:
    """LLM.int8: `SCB` is the amax of each row."""
    weight = parts.check_dtype("weight", torch.int8)
    amax = parts.check_shape("SCB", (weight.shape[0],), (weight.shape[0], 1))
    if "weight_format" in parts and int(parts.values("weight_format")) != ROW_MAJOR:
        raise parts.error(
            "only LLM.int8 weights in row-major order are supported",
            "weight_format",
            "save the model again with a recent version of bitsandbytes",
        )
    return PackedWeight(
        FORMATS["int8"], weight, {"scale": amax.float().reshape(-1, 1) * INT8_STEPS}
    )


BITSANDBYTES_LAYOUTS = (
    *(
        CheckpointLayout(
            f"bitsandbytes {kind}",
            ("weight", "weight.absmax", "weight.quant_map", role),
            read_4bit,
            optional=("weight.nested_absmax", "weight.nested_quant_map"),
            value_roles=(role,),
        )
        for kind, role in STATE_ROLES.items()
    ),
    CheckpointLayout(
        "bitsandbytes int8",
        ("weight", "SCB"),
        read_int8,
        optional=("weight_format",),
        value_roles=("weight_format",),
    ),
)
