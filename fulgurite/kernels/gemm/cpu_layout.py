"""The layout of quantized weights for the CPU kernels: a QuantTensor [N, K] in, `PackedPanels` out.

Sixteen rows (a panel) are interleaved. So one vector works on sixteen rows of the output, and no
sum is taken across a vector. Every format becomes one of four kinds of codes, with scales for
groups of columns, without loss (weight.h has the formula):

    4-bit codes   q4_0 q4_1 q4_k int4_g* nvfp4 mxfp4     a table of sixteen values, so e2m1 fits, too;
                  nf4 fp4                                their tables are floats
    8-bit codes   q8_0 q6_k int8                         e4m3, e5m2   fp8_* mxfp8_*

Float16 scales stay float16. Scales become bfloat16 if it holds them exactly (e8m0, e4m3). K formats
keep bytes under a float16 scale. All others are float32. Rows are padded to 16 and columns to 32,
with zeros.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from fulgurite.errors import FormatError
from fulgurite.kernels.common.cpu_library import WeightStruct
from fulgurite.quant import QuantTensor
from fulgurite.quant.codecs.blocks import expand_blocks
from fulgurite.quant.codecs.codebook import CODEBOOKS
from fulgurite.quant.codecs.minifloat import E2M1_VALUES, dequantize_e8m0
from fulgurite.quant.format import WHOLE_DIM, Format, get_scale_spec, resolve_format
from fulgurite.quant.shapes import data_shape, scale_shape

PANEL_ROWS, BLOCK_COLUMNS = 16, 32
CODE_4BIT, CODE_8BIT, CODE_E4M3, CODE_E5M2 = range(4)
SCALE_DTYPE_CODES = {
    None: 0,
    torch.float16: 1,
    torch.bfloat16: 2,
    torch.float32: 3,
    torch.uint8: 4,
    torch.int8: 5,
}
BYTE_OFFSET = -128
# Twice the values of e2m1, plus 12: unsigned integers. The factor 0.5 goes into the row's scale.
E2M1_TABLE = [int(2 * v) + 12 for v in (*E2M1_VALUES, *(-value for value in E2M1_VALUES))]
TENSOR_FIELDS = ("codes", "scales", "minimums", "row_scales", "super_scales", "super_minimums")


@dataclass(frozen=True)
class PackedPanels:
    """A weight in the kernels' layout. `integer`: the kernels can multiply it in integers."""

    rows: int
    columns: int
    group: int
    kind: int
    offset: int
    table: tuple[int, ...]
    codes: Tensor
    scales: Tensor | None
    minimums: Tensor | None
    row_scales: Tensor | None
    super_scales: Tensor | None = None
    super_minimums: Tensor | None = None
    values: tuple[float, ...] | None = None  # 4-bit codes of a codebook; `table` is not used
    structure: WeightStruct = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        padded = self.columns + -self.columns % BLOCK_COLUMNS
        structure = WeightStruct(
            rows=self.rows,
            columns=padded,
            group=self.group,
            codes_kind=self.kind,
            scale_type=SCALE_DTYPE_CODES[None if self.scales is None else self.scales.dtype],
            minimum_type=SCALE_DTYPE_CODES[None if self.minimums is None else self.minimums.dtype],
            offset=self.offset,
            codes=self.codes.data_ptr(),
            scales=_address(self.scales),
            minimums=_address(self.minimums),
            row_scales=_address(self.row_scales),
            super_scales=_address(self.super_scales),
            super_minimums=_address(self.super_minimums),
            table=(ctypes.c_uint8 * 16)(*self.table),
            values=(ctypes.c_float * 16)(
                *(self.values or (code + self.offset for code in self.table))
            ),
        )
        object.__setattr__(self, "structure", structure)

    @property
    def integer(self) -> bool:
        return self.kind in (CODE_4BIT, CODE_8BIT) and self.values is None

    @property
    def address(self) -> int:
        """The address of the C struct, which lives as long as this object."""
        return ctypes.addressof(self.structure)

    @property
    def nbytes(self) -> int:
        """Bytes that a GEMV reads."""
        parts = (getattr(self, name) for name in TENSOR_FIELDS)
        return sum(part.numel() * part.element_size() for part in parts if part is not None)


def panel_bytes(format: Format, shape: Sequence[int]) -> int:
    """Bytes of a weight [.., N, K] in the kernels' layout; 0 for formats without such kernels."""
    if format.family == "cast":
        return 0
    *experts, rows, columns = shape
    return math.prod(experts) * -(-rows // PANEL_ROWS) * _bytes_of_one_panel(format.name, columns)


@functools.cache
def _bytes_of_one_panel(format: str, columns: int) -> int:
    """Every panel of a weight has the same size: pack one of zeros."""
    entry, shape = resolve_format(format), (PANEL_ROWS, columns)
    data = torch.zeros(data_shape(entry, shape), dtype=torch.uint8)
    scales = {
        scale.name: torch.zeros(scale_shape(scale, shape)).to(scale.dtype)
        for scale in entry.separate_scales
    }
    if entry.data_dtype != torch.uint8:
        data = torch.zeros(data_shape(entry, shape)).to(entry.data_dtype)
    return pack_panels(QuantTensor(entry, data, scales)).nbytes


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def pack_panels(weight: QuantTensor) -> PackedPanels:
    """Pack a weight. It is read once and not kept."""
    if weight.dim() != 2 or weight.device.type != "cpu":
        raise FormatError(
            "only a weight [N, K] on the CPU can be packed for the CPU kernels",
            where=f"{weight.format.name} {list(weight.shape)} on {weight.device}",
            next="take one expert of a stack, or move it with .cpu()",
        )
    codes, scales = weight.unpack()
    entry = weight.format
    if entry.family == "cast":
        raise FormatError(f"{entry.name} weights have no CPU kernel", next="use F.linear")
    if entry.element.name in ("e4m3", "e5m2"):
        return _pack_fp8(entry, codes, scales)
    if entry.element.name == "e2m1":
        return _pack_e2m1(entry, codes, scales)
    if entry.name == "q4_k":
        panels = _pack_4bit(codes, scales["sub_scale"], scales["sub_minimum"], 32, 0)
        minimums = pack_scales(-scales["minimum_scale"])
        return replace(panels, super_scales=pack_scales(scales["scale"]), super_minimums=minimums)
    if entry.name == "q6_k":
        panels = _pack_8bit(codes, scales["sub_scale"], 16)
        return replace(panels, super_scales=pack_scales(scales["scale"]))
    group = entry.block[1]
    if entry.family == "codebook":
        panels = _pack_4bit(codes, scales["scale"], None, group, 0)
        return replace(panels, values=CODEBOOKS[entry.element.name])
    if entry.element.bits == 8:
        return _pack_int8(codes, scales, group)
    offset = int(-entry.element.min_value)
    minimum = scales.get("minimum")
    if "zero_point" in scales:
        minimum = -scales["zero_point"].float() * scales["scale"]
    return _pack_4bit(codes + offset, scales["scale"], minimum, group, -offset)


def _pack_4bit(
    codes: Tensor, scale: Tensor, minimum: Tensor | None, group: int, offset: int
) -> PackedPanels:
    rows, columns = codes.shape
    return PackedPanels(
        rows, columns, group, CODE_4BIT, offset, tuple(range(16)), pack_4bit_codes(codes),
        pack_scales(scale), None if minimum is None else pack_scales(minimum), None,
    )  # fmt: skip


def _pack_e2m1(entry: Format, codes: Tensor, scales: dict[str, Tensor]) -> PackedPanels:
    rows, columns = codes.shape
    factor = torch.full((rows,), 0.5)
    scale = scales["scale"]
    if "tensor_scale" in scales:
        factor = factor * scales["tensor_scale"].flatten()
        scale = scale.to(torch.bfloat16)
    else:
        scale = dequantize_e8m0(scale).to(torch.bfloat16)
    return PackedPanels(
        rows, columns, entry.block[1], CODE_4BIT, -12, tuple(E2M1_TABLE),
        pack_4bit_codes(codes), pack_scales(_pad_groups(scale, entry.block[1])), None,
        pad_rows(factor),
    )  # fmt: skip


def _pack_int8(codes: Tensor, scales: dict[str, Tensor], group: int) -> PackedPanels:
    """Codes with scales, and zero points as minima. A row's scale is applied to its sum."""
    scale, zero = scales["scale"], scales.get("zero_point")
    if group == WHOLE_DIM:
        minimum = None if zero is None else -zero.float()
        return _pack_8bit(codes, None, WHOLE_DIM, scale.flatten(), minimum)
    return _pack_8bit(codes, scale, group, None, None if zero is None else -zero.float() * scale)


def _pack_8bit(
    codes: Tensor,
    scale: Tensor | None,
    group: int,
    row_scales: Tensor | None = None,
    minimum: Tensor | None = None,
) -> PackedPanels:
    rows, columns = codes.shape
    shifted = (codes.to(torch.int16) - BYTE_OFFSET).to(torch.uint8)
    return PackedPanels(
        rows, columns, group or columns + -columns % BLOCK_COLUMNS, CODE_8BIT, BYTE_OFFSET, (0,) * 16,
        pack_8bit_codes(shifted, fill=-BYTE_OFFSET),
        None if scale is None else pack_scales(_pad_groups(scale, group)),
        None if minimum is None else pack_scales(_pad_groups(minimum, group)),
        None if row_scales is None else pad_rows(row_scales),
    )  # fmt: skip


def _pack_fp8(entry: Format, codes: Tensor, scales: dict[str, Tensor]) -> PackedPanels:
    """A row with a NaN gets a NaN scale: its outputs are NaN for every x."""
    rows, columns = codes.shape
    values = codes.float()
    if bool(values.isinf().any()):
        raise FormatError(
            "an e5m2 weight with infinities has no kernel",
            where=f"{entry.name} {list(codes.shape)}",
            next="use fulgurite.kernels.gemm.reference.quant_linear, or quantize again (saturating)",
        )
    factor = torch.where(values.isnan().any(dim=1), float("nan"), 1.0)
    group, scale = entry.block[1], scales["scale"]
    kind = CODE_E4M3 if entry.element.name == "e4m3" else CODE_E5M2
    if scale.dtype == torch.float8_e8m0fnu:
        scale = dequantize_e8m0(scale).to(torch.bfloat16)
    elif group == WHOLE_DIM:
        factor = factor * scale.flatten()
    else:
        scale = expand_blocks(
            scale, (get_scale_spec(entry, "scale").block[0], 1), torch.Size((rows, scale.shape[1]))
        )
    if group != WHOLE_DIM:
        scale, exponent = _limit_scales(scale)
        factor = factor * 2.0**exponent
    padded = columns + -columns % BLOCK_COLUMNS
    if group > BLOCK_COLUMNS and padded % group:  # the last group of a row may be partial
        scale = scale.repeat_interleave(group // BLOCK_COLUMNS, dim=1)
        scale, group = scale[:, : padded // BLOCK_COLUMNS], BLOCK_COLUMNS
    return PackedPanels(
        rows, columns, group or padded, kind, 0, (0,) * 16, pack_8bit_codes(codes.view(torch.uint8)),
        None if group == WHOLE_DIM else pack_scales(scale), None, pad_rows(factor),
    )  # fmt: skip


def _limit_scales(scale: Tensor) -> tuple[Tensor, int]:
    """Scales of FP8 codes over a power of two, and its exponent, which is not negative.

    The kernels multiply scales by up to 2^120 before they multiply codes by them. So none may be 2^7
    or more.
    """
    largest = scale.float().abs().nan_to_num(0.0).max()
    exponent = max(0, int(torch.frexp(largest).exponent) - 7)
    return (scale if exponent == 0 else torch.ldexp(scale, torch.tensor(-exponent))), exponent


def pack_4bit_codes(codes: Tensor) -> Tensor:
    """Codes 0 to 15 [N, K] as [N / 16, K / 32, 4 vectors, 16 rows, 4 bytes]."""
    blocks = _to_blocks(codes.to(torch.uint8), 0).unflatten(-1, (4, 2, 4))
    low, high = blocks[..., 0, :], blocks[..., 1, :]
    return (low | (high << 4)).permute(0, 2, 3, 1, 4).contiguous()


def pack_8bit_codes(codes: Tensor, fill: int = 0) -> Tensor:
    """Bytes [N, K] as [N / 16, K / 32, 8 vectors, 16 rows, 4 bytes]."""
    return _to_blocks(codes, fill).unflatten(-1, (8, 4)).permute(0, 2, 3, 1, 4).contiguous()


def pack_scales(scale: Tensor) -> Tensor:
    """[N, groups] as [N / 16, groups, 16 rows]."""
    whole = F.pad(scale, (0, 0, 0, -scale.shape[0] % PANEL_ROWS))
    return whole.unflatten(0, (-1, PANEL_ROWS)).transpose(1, 2).contiguous()


def _pad_groups(scale: Tensor, group: int) -> Tensor:
    """Scales of groups of 16 for columns that are padded to 32."""
    return F.pad(scale, (0, 1)) if group == 16 and scale.shape[1] % 2 else scale


def _to_blocks(codes: Tensor, fill: int) -> Tensor:
    """[N, K] padded to [N / 16, 16, K / 32, 32]."""
    rows, columns = codes.shape
    whole = F.pad(codes, (0, -columns % BLOCK_COLUMNS, 0, -rows % PANEL_ROWS), value=fill)
    return whole.unflatten(1, (-1, BLOCK_COLUMNS)).unflatten(0, (-1, PANEL_ROWS))


def pad_rows(values: Tensor) -> Tensor:
    """One value a row [N] in float32, padded to whole panels."""
    is_padded = values.shape[0] % PANEL_ROWS == 0
    if values.dtype == torch.float32 and is_padded and values.is_contiguous():
        return values  # nothing to compute, so a decode step that needs it can be recorded
    return F.pad(values.float(), (0, -values.shape[0] % PANEL_ROWS)).contiguous()


def concat_panels(parts: list[PackedPanels]) -> PackedPanels:
    """Weights of the same layout stacked along N: one call computes all of their outputs."""
    first = parts[0]
    same = ("columns", "group", "kind", "offset", "table", "values")
    is_same = all(getattr(p, name) == getattr(first, name) for p in parts for name in same)
    if not is_same or any(part.rows % PANEL_ROWS for part in parts[:-1]):
        raise FormatError(
            "these weights can't be concatenated for one call",
            where=", ".join(f"[{p.rows}, {p.columns}] in groups of {p.group}" for p in parts),
            next=f"use weights of one format with a multiple of {PANEL_ROWS} rows, or separate calls",
        )

    def concat(name: str) -> Tensor | None:
        tensors = [getattr(part, name) for part in parts]
        return None if tensors[0] is None else torch.cat(tensors)

    codes = concat("codes")
    assert codes is not None, "panels without codes"
    panels = PackedPanels(
        sum(part.rows for part in parts), first.columns, first.group, first.kind, first.offset,
        first.table, codes, *(concat(name) for name in TENSOR_FIELDS[1:]),
    )  # fmt: skip
    return replace(panels, values=first.values)
