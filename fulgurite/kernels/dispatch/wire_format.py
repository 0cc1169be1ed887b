"""Wire formats of tokens between ranks: hidden states [T, D] in, rows of bytes [T, B] out, and back.

    f64 f32 bf16 f16   the values, rounded to that dtype
    fp8                e4m3 values, a float32 scale for each 128 values
    nvfp4              e2m1 values, an e4m3 scale for each 16 values, a float32 scale for each token

The sender quantizes each token once. A row has the values, then the scales; each field is 16-byte
aligned. No scale spans two tokens, so a row can be decoded alone.

Shapes: T tokens; R rows; D hidden size; B bytes of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fulgurite.errors import ArgumentError
from fulgurite.kernels.quantize.ops import quantize
from fulgurite.quant import QuantTensor, resolve_format
from fulgurite.quant.shapes import check_shape, data_shape, scale_shape

# name → a dtype, or a number format
WIRE_FORMATS: dict[str, torch.dtype | str] = {
    "f64": torch.float64,
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "fp8": "fp8_e4m3_1x128",
    "nvfp4": "nvfp4",
}
ALIGNMENT = 16  # bytes of one vectorized load


@dataclass(frozen=True)
class RowField:
    """One field of a row: `count` values of `dtype` from byte `offset` on."""

    dtype: torch.dtype
    count: int
    offset: int

    @property
    def end(self) -> int:
        return self.offset + self.count * self.dtype.itemsize


@dataclass(frozen=True)
class WireFormat:
    """Rows of `hidden_size` values in one of `WIRE_FORMATS`."""

    name: str
    hidden_size: int

    def __post_init__(self) -> None:
        if self.name not in WIRE_FORMATS:
            raise ArgumentError(
                f"unknown wire format {self.name!r}", next=f"one of {', '.join(WIRE_FORMATS)}"
            )
        format = WIRE_FORMATS[self.name]
        if isinstance(format, str):
            where = f"tokens of {self.hidden_size} values"
            check_shape(resolve_format(format), (self.hidden_size,), where=where)

    @cached_property
    def fields(self) -> tuple[RowField, ...]:
        """The values, then their scales."""
        format = WIRE_FORMATS[self.name]
        if isinstance(format, torch.dtype):
            sizes = [(format, self.hidden_size)]
        else:
            entry, row = resolve_format(format), (1, self.hidden_size)
            sizes = [(entry.data_dtype, data_shape(entry, row)[-1])]
            sizes += [(s.dtype, scale_shape(s, row)[-1]) for s in entry.separate_scales]
        fields, offset = [], 0
        for dtype, count in sizes:
            fields.append(RowField(dtype, count, offset))
            offset = align(fields[-1].end)
        return tuple(fields)

    @property
    def row_bytes(self) -> int:
        return align(self.fields[-1].end)

    def pack(self, x_TD: Tensor) -> Tensor:
        """Each token as a row of bytes, [T, B]; a view of x if the format is its dtype."""
        shape = (x_TD.shape[0], self.row_bytes)
        if x_TD.shape[0] == 0:
            return torch.empty(shape, dtype=torch.uint8, device=x_TD.device)
        values = self._quantize(x_TD)
        if len(values) == 1 and self.fields[0].end == self.row_bytes:
            return values[0].contiguous().view(torch.uint8)
        has_gaps = self.row_bytes > sum(field.end - field.offset for field in self.fields)
        allocate = torch.zeros if has_gaps else torch.empty
        rows = allocate(shape, dtype=torch.uint8, device=x_TD.device)
        for field, value in zip(self.fields, values, strict=True):
            rows[:, field.offset : field.end] = value.contiguous().view(torch.uint8)
        return rows

    def unpack(self, rows_RB: Tensor, dtype: torch.dtype) -> Tensor:
        """The dequantized values of rows of bytes, [R, D]."""
        if rows_RB.shape[0] == 0:
            return rows_RB.new_zeros(0, self.hidden_size, dtype=dtype)
        values = [
            rows_RB[:, field.offset : field.end].contiguous().view(field.dtype)
            for field in self.fields
        ]
        format = WIRE_FORMATS[self.name]
        if isinstance(format, torch.dtype):
            return values[0].to(dtype)
        entry = resolve_format(format)
        data, *scales = (value[:, None, :] for value in values)
        names = [scale.name for scale in entry.separate_scales]
        quantized = QuantTensor(entry, data, dict(zip(names, scales, strict=True)), dtype)
        return quantized.dequantize().squeeze(1)

    @property
    def quant_format(self) -> str | None:
        """The number format of the values; None if they are not quantized."""
        format = WIRE_FORMATS[self.name]
        return None if isinstance(format, torch.dtype) else format

    def read_quantized(self, rows_RB: Tensor, dtype: torch.dtype) -> QuantTensor:
        """Values and scales of rows of bytes, [R, D]; only for formats without a scale a token."""
        assert self.quant_format is not None, f"{self.name} is not quantized"
        entry = resolve_format(self.quant_format)
        data, scale = (
            rows_RB[:, field.offset : field.end].contiguous().view(field.dtype)
            for field in self.fields
        )
        (name,) = (one.name for one in entry.separate_scales)
        return QuantTensor(entry, data, {name: scale}, dtype)

    def _quantize(self, x_TD: Tensor) -> list[Tensor]:
        """Values and scales, one tensor a field."""
        format = WIRE_FORMATS[self.name]
        if isinstance(format, torch.dtype):
            return [x_TD.to(format)]
        # T matrices of one row, so that a scale of the whole tensor becomes one of the token.
        x_T1D = (x_TD.float() if x_TD.dtype == torch.float64 else x_TD)[:, None, :]
        quantized = quantize(x_T1D.contiguous(), format)
        return [field.squeeze(1) for field in (quantized.packed, *quantized.scales.values())]


def align(size: int) -> int:
    """Bytes rounded up to the alignment."""
    return -(-size // ALIGNMENT) * ALIGNMENT
