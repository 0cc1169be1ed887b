"""GPTQ: codes of 2, 3, 4 or 8 bits, packed along K.

    qweight [K * bits / 32, N]    qzeros [G, N * bits / 32]    scales [G, N]    g_idx [K]

`g_idx` is the group of each column. Without activation order it is k / group_size, and the weight
stays packed. With activation order (`desc_act`) neighbouring columns have scales of different
groups, which no format has: the weight is dequantized.

The first version stores zero points minus one (`checkpoint_format` "gptq"). Its writers subtract
one from each field of a word, as one subtraction of the whole word, so one is added that way.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fulgurite.quant.files.layouts.integers import WORD_BITS, build_from_words, unpack_words
from fulgurite.quant.files.layouts.stored import (
    CheckpointLayout,
    DenseWeight,
    ReadWeight,
    StoredParts,
    StoredTensor,
)

SUPPORTED_BITS = (2, 3, 4, 8)
# One in each field of a word, as int32.
ONES = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}
FORMATS_WITHOUT_OFFSET = ("gptq_v2",)
FORMATS_WITH_OFFSET = ("", "gptq")


def read_gptq(parts: StoredParts) -> ReadWeight:
    """`qweight`, `qzeros`, `scales` and `g_idx` in the layout of AutoGPTQ and GPTQModel."""
    words = parts.check_dtype("qweight", torch.int32)
    scales = parts["scales"]
    if words.dim() != 2 or scales.dim() != 2:
        raise parts.error("GPTQ tensors must have two dimensions", "qweight", "download it again")
    groups, rows = scales.shape
    columns, bits = _find_columns(parts, words)
    parts.check_shape("qweight", (-(-columns * bits // WORD_BITS), rows))
    zero = _read_zero_points(parts, bits, groups, rows)
    is_symmetric = parts.config.symmetric is True and not parts.config.has_overrides
    if is_symmetric:
        _require_middle(parts, zero, bits)
    width = _group_width(parts, columns, groups)
    order = _read_activation_order(parts, columns, groups, width)
    if order is not None:
        return _dequantize_in_order(words, bits, order, scales, zero)
    zeros = None if is_symmetric else zero.t()
    return build_from_words(words.t(), bits, columns, scales.t(), zeros, width)


def _find_columns(parts: StoredParts, words: Tensor) -> tuple[int, int]:
    """K and the bits of a code, from config.json or from the shapes."""
    bits = parts.config.bits or 4
    if parts.config.bits is None or parts.config.has_overrides:
        if "g_idx" in parts:
            bits = words.shape[0] * WORD_BITS // max(parts["g_idx"].numel(), 1)
        else:  # rows of zero points are packed with the same bits
            bits = parts["qzeros"].shape[-1] * WORD_BITS // max(words.shape[1], 1)
    if bits not in SUPPORTED_BITS:
        raise parts.error(
            f"GPTQ weights of {bits} bits are not supported",
            "qweight",
            "use 2, 3, 4 or 8 bits (`bits` in quantization_config)",
        )
    if "g_idx" in parts:
        return parts["g_idx"].numel(), bits
    return words.shape[0] * WORD_BITS // bits, bits


def _read_zero_points(parts: StoredParts, bits: int, groups: int, rows: int) -> Tensor:
    """Zero points [G, N], unsigned."""
    parts.check_dtype("qzeros", torch.int32)
    words = parts.check_shape("qzeros", (groups, -(-rows * bits // WORD_BITS)))
    format = parts.config.checkpoint_format
    if format not in FORMATS_WITH_OFFSET + FORMATS_WITHOUT_OFFSET:
        raise parts.error(
            f"checkpoint_format {format!r} is not supported",
            "qzeros",
            "convert the checkpoint to gptq or gptq_v2",
        )
    has_offset = format in FORMATS_WITH_OFFSET
    if has_offset and bits in ONES:
        words = words + ONES[bits]  # modulo 2^32
    zero = unpack_words(words, bits, rows)
    if has_offset and bits not in ONES:
        zero = (zero + 1) & (2**bits - 1)
    return zero


def _require_middle(parts: StoredParts, zero: Tensor, bits: int) -> None:
    middle = 2 ** (bits - 1)
    if zero.is_meta or bool((zero == middle).all()):
        return
    raise parts.error(
        f"sym is true, and the zero points are not all {middle}",
        "qzeros",
        "check sym and checkpoint_format in quantization_config",
    )


def _group_width(parts: StoredParts, columns: int, groups: int) -> int:
    given = None if parts.config.has_overrides else parts.config.group_size
    inferred = columns // groups if groups and columns % groups == 0 else 0
    width = columns if given == -1 else given or inferred
    if width <= 0 or -(-columns // width) != groups:
        raise parts.error(
            f"{groups} groups of {width} columns do not make K = {columns}",
            "scales",
            "check group_size in quantization_config, or download it again",
        )
    return width


def _read_activation_order(
    parts: StoredParts, columns: int, groups: int, width: int
) -> Tensor | None:
    """The group of each column, or None if groups are neighbouring columns."""
    if "g_idx" not in parts or groups == 1:
        return None
    order = parts.values("g_idx").long()
    if torch.equal(order, torch.arange(columns, device=order.device) // width):
        return None
    if int(order.min()) < 0 or int(order.max()) >= groups:
        raise parts.error(
            f"g_idx has values from {int(order.min())} to {int(order.max())}, and there are "
            f"{groups} groups",
            "g_idx",
            "the file is damaged: download it again",
        )
    return order


def _dequantize_in_order(
    words: Tensor, bits: int, order: Tensor, scales: Tensor, zero: Tensor
) -> DenseWeight:
    codes = unpack_words(words.t().contiguous(), bits, len(order)).float()
    order = order.to("meta") if words.is_meta else order.to(words.device)
    values = (codes - zero.t().float()[:, order]) * scales.t().float()[:, order]
    return DenseWeight(values, "its columns are in activation order (desc_act)")


def is_gptq(stored: Mapping[str, StoredTensor]) -> bool:
    """Whether `qweight` is packed along K, with a column for each of the scales.

    AWQ's "gemv" has a row for each of the scales, and "gemm" an eighth of their columns.
    """
    words, scales = stored["qweight"].shape, stored["scales"].shape
    if len(words) != 2 or len(scales) != 2:
        return "g_idx" in stored
    return words[1] == scales[1] and (words[0] != scales[0] or "g_idx" in stored)


GPTQ_LAYOUTS = (
    CheckpointLayout(
        "gptq",
        ("qweight", "scales", "qzeros"),
        read_gptq,
        optional=("g_idx",),
        value_roles=("g_idx",),
        matches=is_gptq,
    ),
)
