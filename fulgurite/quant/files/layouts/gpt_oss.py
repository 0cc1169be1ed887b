"""gpt-oss: MXFP4 experts as blocks of 16 bytes and e8m0 scales.

name_blocks [.., K / 32, 16]    name_scales [.., K / 32]      (name.blocks, name.scales originally)
"""

from __future__ import annotations

import torch

from fulgurite.quant.files.layouts.stored import (
    CheckpointLayout,
    Naming,
    PackedWeight,
    StoredParts,
)
from fulgurite.quant.format import FORMATS


def read_blocks(parts: StoredParts) -> PackedWeight:
    """`blocks` and `scales`."""
    blocks, scales = parts.check_dtype("blocks", torch.uint8), parts["scales"]
    parts.check_dtype("scales", torch.uint8, torch.float8_e8m0fnu)
    if blocks.dim() < 2 or blocks.shape[-1] != 16 or blocks.shape[:-1] != scales.shape:
        raise parts.error(
            f"blocks {list(blocks.shape)} and scales {list(scales.shape)} do not match",
            "blocks",
            "blocks must be [..., K / 32, 16] bytes and scales [..., K / 32]",
        )
    scale = scales.view(torch.float8_e8m0fnu)
    return PackedWeight(FORMATS["mxfp4"], blocks.flatten(-2), {"scale": scale})


GPT_OSS_LAYOUTS = (
    CheckpointLayout("gpt-oss mxfp4", ("blocks", "scales"), read_blocks, Naming.PARAMETER),
    CheckpointLayout("gpt-oss mxfp4, original names", ("blocks", "scales"), read_blocks),
)
