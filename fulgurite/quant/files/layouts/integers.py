"""Integer codes of one to eight bits as a weight in a format of `FORMATS`.

    value[n, k] = (code[n, k] - zero[n, k / width]) * scale[n, k / width]

In: codes [.., N, K], scales [.., N, G] and zero points, each for `width` columns. Out: a
`PackedWeight` with the same values: `int4_g*` up to four bits, `int8*` above. Scales of wide groups
are repeated for groups that a format has. What no format holds (groups that are not a multiple of
16) is dequantized.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fulgurite.quant.codecs.blocks import unpack_nibbles
from fulgurite.quant.files.layouts.stored import DenseWeight, PackedWeight, ReadWeight
from fulgurite.quant.format import FORMATS

INT4_GROUPS = (128, 64, 32)
INT8_GROUPS = (32, 16)
WORD_BITS = 32
BYTE_MIDDLE = 128
NIBBLE_MIDDLE = 8


def build_int4_weight(
    nibbles: Tensor, columns: int, scale: Tensor, zero: Tensor | None, width: int
) -> ReadWeight:
    """Unsigned 4-bit codes, two per byte along K, low nibble first. Without `zero` it is 8."""
    group = next((g for g in INT4_GROUPS if width % g == 0 and columns % g == 0), None)
    if group is None:
        codes = unpack_nibbles(nibbles)[..., :columns].to(torch.int8) - NIBBLE_MIDDLE
        signed_zero = None if zero is None else zero.to(torch.int8) - NIBBLE_MIDDLE
        return build_int8_weight(codes, scale, signed_zero, width)
    scales = {"scale": repeat_groups(scale.float(), width // group, columns // group)}
    if zero is None:
        return PackedWeight(FORMATS[f"int4_g{group}"], nibbles, scales)
    zero_point = repeat_groups(zero.to(torch.uint8), width // group, columns // group)
    return PackedWeight(
        FORMATS[f"int4_g{group}_asym"], nibbles, scales | {"zero_point": zero_point}
    )


def build_int8_weight(codes: Tensor, scale: Tensor, zero: Tensor | None, width: int) -> ReadWeight:
    """Signed codes in int8, and signed zero points."""
    columns = codes.shape[-1]
    kind = "" if zero is None else "_asym"
    group = next((g for g in INT8_GROUPS if width % g == 0 and columns % g == 0), None)
    if scale.shape[-1] == 1:
        scales = {"scale": scale.float().contiguous()}
        if zero is not None:
            scales["zero_point"] = zero.to(torch.int8).contiguous()
        return PackedWeight(FORMATS[f"int8{kind}"], codes, scales)
    if group is None:
        return dequantize_groups(codes, scale, zero, width)
    scales = {"scale": repeat_groups(scale.float(), width // group, columns // group)}
    if zero is not None:
        zero_point = repeat_groups(zero.to(torch.int8), width // group, columns // group)
        scales["zero_point"] = zero_point
    return PackedWeight(FORMATS[f"int8_g{group}{kind}"], codes, scales)


def dequantize_groups(codes: Tensor, scale: Tensor, zero: Tensor | None, width: int) -> DenseWeight:
    """Dequantize codes whose groups no format has."""
    columns = codes.shape[-1]
    values = codes.float()
    if zero is not None:
        values = values - repeat_groups(zero.float(), width, columns)
    reason = f"its groups of {width} columns, of K = {columns}, are not a multiple of 16"
    return DenseWeight(values * repeat_groups(scale.float(), width, columns), reason)


def repeat_groups(values: Tensor, count: int, total: int) -> Tensor:
    """Repeat each value along K, up to `total`: the last group may be partial."""
    values = values if count == 1 else values.repeat_interleave(count, dim=-1)[..., :total]
    return values.contiguous()


def build_from_words(
    words: Tensor, bits: int, columns: int, scale: Tensor, zero: Tensor | None, width: int
) -> ReadWeight:
    """int32 words [.., N, W] of unsigned codes along K; `zero` is unsigned, too."""
    if bits == 4:
        nibbles = view_bytes(words)[..., : -(-columns // 2)]
        return build_int4_weight(nibbles, columns, scale, zero, width)
    middle = 2 ** (bits - 1)
    codes = unpack_words(words, bits, columns)
    if bits < 4:
        if zero is None:
            codes = codes + (NIBBLE_MIDDLE - middle)
        pairs = F.pad(codes, (0, columns % 2)).unflatten(-1, (-1, 2))
        nibbles = pairs[..., 0] | (pairs[..., 1] << 4)
        return build_int4_weight(nibbles, columns, scale, zero, width)
    signed = to_signed(codes, middle)
    return build_int8_weight(
        signed, scale, None if zero is None else to_signed(zero, middle), width
    )


def unpack_words(words: Tensor, bits: int, columns: int) -> Tensor:
    """Codes of `bits` bits from the bits of int32 words along the last dimension, as uint8.

    Code i starts at bit i * bits. If the bits don't divide 32, codes straddle words.
    """
    if bits == 8:
        return view_bytes(words)[..., :columns]
    start = torch.arange(columns, device=words.device) * bits
    word, shift = start // WORD_BITS, (start % WORD_BITS).to(torch.int32)
    mask = 2**bits - 1
    if WORD_BITS % bits == 0:
        return ((words[..., word] >> shift) & mask).to(torch.uint8)
    following = (word + 1).clamp_max(words.shape[-1] - 1)
    low = words[..., word].long() & 0xFFFFFFFF
    both = low | (words[..., following].long() << WORD_BITS)
    return ((both >> shift) & mask).to(torch.uint8)


def view_bytes(words: Tensor) -> Tensor:
    """The bytes of words along the last dimension; by way of one dimension, for any strides."""
    return words.reshape(-1).view(torch.uint8).reshape(*words.shape[:-1], -1)


def to_signed(codes: Tensor, middle: int = BYTE_MIDDLE) -> Tensor:
    """Unsigned codes minus the middle of their range, as int8."""
    if middle == BYTE_MIDDLE:
        return (codes.to(torch.uint8) ^ BYTE_MIDDLE).view(torch.int8)
    return (codes.to(torch.int16) - middle).to(torch.int8)
