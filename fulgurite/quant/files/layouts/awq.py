"""AWQ: 4-bit codes with zero points, packed along N ("gemm") or along K ("gemv").

    gemm    qweight [K, N / 8]    qzeros [K / g, N / 8]    scales [K / g, N]
    gemv    qweight [N, K / 8]    qzeros [N, padded]       scales [N, padded * 8]

In "gemm" the nibbles of a word hold columns 0, 2, 4, 6, 1, 3, 5, 7 from low to high. In "gemv" they
are in order, and qzeros and scales are padded with zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fulgurite.errors import FormatError
from fulgurite.quant.files.layouts.integers import (
    build_from_words,
    build_int4_weight,
    unpack_words,
    view_bytes,
)
from fulgurite.quant.files.layouts.stored import (
    CheckpointLayout,
    ReadWeight,
    StoredParts,
)

CODES_PER_WORD = 8
LOW_NIBBLES = 0x0F0F0F0F  # of the bytes of a word
# The column of the low and of the high nibble of each byte of a word.
LOW_COLUMNS, HIGH_COLUMNS = (0, 4, 1, 5), (2, 6, 3, 7)


def read_awq(parts: StoredParts) -> ReadWeight:
    """`qweight`, `qzeros` and `scales` in the layout of AutoAWQ."""
    if parts.config.bits not in (None, 4):
        raise FormatError(
            f"AWQ weights of {parts.config.bits} bits are not supported",
            where=f"bits in quantization_config, {parts.base}",
            next="use a checkpoint of 4 bits",
        )
    words = parts.check_dtype("qweight", torch.int32)
    scales, version = parts["scales"], parts.config.version
    if words.dim() != 2 or scales.dim() != 2:
        raise parts.error("AWQ tensors must have two dimensions", "qweight", "download it again")
    if version == "gemv":
        return _read_gemv(parts, words, scales)
    if version in ("", "gemm") and scales.shape[1] == words.shape[1] * CODES_PER_WORD:
        return _read_gemm(parts, words, scales)
    raise parts.error(
        f"AWQ version {version or 'unknown'} is not supported",
        "qweight",
        "supported versions are gemm and gemv (`version` in quantization_config)",
    )


def _read_gemm(parts: StoredParts, words: Tensor, scales: Tensor) -> ReadWeight:
    columns, groups = words.shape[0], scales.shape[0]
    width = _group_width(parts, columns, groups)
    if columns % 2:
        raise parts.error(f"K = {columns} is odd", "qweight", "download it again")
    zero = None
    if "qzeros" in parts:
        parts.check_dtype("qzeros", torch.int32)
        parts.check_shape("qzeros", (groups, words.shape[1]))
        zero = _unpack_columns(parts["qzeros"])
    return build_int4_weight(_transpose_nibbles(words), columns, scales.t(), zero, width)


def _transpose_nibbles(words: Tensor) -> Tensor:
    """Words [K, N / 8] in AWQ's order -> nibbles of columns 2k and 2k + 1, [N, K / 2]."""
    even, odd = words[0::2], words[1::2]
    low = (even & LOW_NIBBLES) | ((odd & LOW_NIBBLES) << 4)
    high = ((even >> 4) & LOW_NIBBLES) | (odd & ~LOW_NIBBLES)
    return _order_rows(*(view_bytes(part.t()).unflatten(1, (-1, 4)) for part in (low, high)))


def _unpack_columns(words: Tensor) -> Tensor:
    """Words [G, N / 8] in AWQ's order -> one code a byte, [N, G]."""
    data = view_bytes(words.t()).unflatten(1, (-1, 4))
    return _order_rows(data & 0xF, data >> 4)


def _order_rows(low: Tensor, high: Tensor) -> Tensor:
    """What the low and the high nibbles of the bytes of words hold, [N / 8, C, 4] -> [N, C]."""
    rows = [low[..., 0]] * CODES_PER_WORD
    for byte, (first, second) in enumerate(zip(LOW_COLUMNS, HIGH_COLUMNS, strict=True)):
        rows[first], rows[second] = low[..., byte], high[..., byte]
    return torch.stack(rows, dim=1).flatten(0, 1)


def _read_gemv(parts: StoredParts, words: Tensor, scales: Tensor) -> ReadWeight:
    columns = words.shape[1] * CODES_PER_WORD
    width = parts.config.group_size or 0
    width = columns if width <= 0 else width
    groups = -(-columns // width)
    if scales.shape[0] != words.shape[0] or scales.shape[1] < groups:
        raise parts.error(
            f"scales {list(scales.shape)} do not have {groups} groups for each row",
            "scales",
            "check group_size in quantization_config",
        )
    zero = None
    if "qzeros" in parts:
        packed = parts.check_dtype("qzeros", torch.int32)
        zero = unpack_words(packed, 4, packed.shape[1] * CODES_PER_WORD)[:, :groups]
    return build_from_words(words, 4, columns, scales[:, :groups], zero, width)


def _group_width(parts: StoredParts, columns: int, groups: int) -> int:
    given = parts.config.group_size
    width = columns if given == -1 else given or columns // max(groups, 1)
    if width <= 0 or -(-columns // width) != groups:
        raise parts.error(
            f"{groups} groups of {width} columns do not make K = {columns}",
            "scales",
            "check group_size in quantization_config, or download it again",
        )
    return width


AWQ_LAYOUTS = (
    # After GPTQ in the table, which has the same names.
    CheckpointLayout("awq", ("qweight", "scales"), read_awq, optional=("qzeros",)),
)
