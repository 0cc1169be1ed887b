"""Tokens on the wire between ranks: how a row is laid out in bytes, and how large buffers must be.

In: hidden states [T, D]. Out: bytes [T, B], one row a token, quantized once by the sender; and back.

    f64 f32 bf16 f16   the values, rounded to that type
    fp8                e4m3, a float32 scale for each 128 values
    nvfp4              e2m1, an e4m3 scale for each 16 values, a float32 scale for each token

A row is made of parts (values, then scales), each beginning at a multiple of 16 bytes. Because no scale
spans two tokens, a row means the same wherever it goes and whatever travels beside it.

`Visits` says which ranks a token goes to: one row travels to each of them, however many of its experts
they have, and one comes back. `Buffers` is the formula for the memory that device-side dispatch and combine need on each rank.

Shapes: T tokens; R rows that travel; S visits, pairs of token and expert; D hidden size; B bytes of a
row; W ranks; k experts of a token; m = min(k, W).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from fulgurite.errors import ArgumentError
from fulgurite.kernels.quantize.ops import quantize
from fulgurite.quant import QuantTensor, resolve
from fulgurite.quant.shapes import check_shape, data_shape, scale_shape

# what a user says -> a dtype, or a number format
WIRES: dict[str, torch.dtype | str] = {
    "f64": torch.float64,
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "fp8": "fp8_e4m3_1x128",
    "nvfp4": "nvfp4",
}
ALIGNMENT = 16  # bytes: what one thread moves at once
HEADER = 16  # bytes before a row: source token, place of its result, number of visits, nothing
VISIT = 8  # bytes of a header for each expert that a row visits: its number there, its weight
COPIES = 2  # every buffer is there twice: one is read while the other is filled


@dataclass(frozen=True)
class Part:
    """One part of a row: `items` values of `dtype` from byte `offset` on."""

    dtype: torch.dtype
    items: int
    offset: int

    @property
    def end(self) -> int:
        return self.offset + self.items * self.dtype.itemsize


@dataclass(frozen=True)
class Wire:
    """Rows of `hidden` values in one of the formats of `WIRES`."""

    name: str
    hidden: int

    def __post_init__(self) -> None:
        if self.name not in WIRES:
            raise ArgumentError(
                f"tokens can't travel as {self.name!r}", next=f"one of {', '.join(WIRES)}"
            )
        format = WIRES[self.name]
        if isinstance(format, str):
            check_shape(resolve(format), (self.hidden,), where=f"tokens of {self.hidden} values")

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """Values, then every scale that travels with them."""
        format = WIRES[self.name]
        if isinstance(format, torch.dtype):
            pieces = [(format, self.hidden)]
        else:
            entry, row = resolve(format), (1, self.hidden)
            pieces = [(entry.data_dtype, data_shape(entry, row)[-1])]
            pieces += [(s.dtype, scale_shape(s, row)[-1]) for s in entry.stored_scales]
        parts, offset = [], 0
        for dtype, items in pieces:
            parts.append(Part(dtype, items, offset))
            offset = _aligned(parts[-1].end)
        return tuple(parts)

    @property
    def row_bytes(self) -> int:
        return _aligned(self.parts[-1].end)

    def pack(self, x_TD: Tensor) -> Tensor:
        """Each token as a row of bytes, [T, B]; x itself where that is what it is."""
        shape = (x_TD.shape[0], self.row_bytes)
        if x_TD.shape[0] == 0:
            return torch.empty(shape, dtype=torch.uint8, device=x_TD.device)
        values = self._values(x_TD)
        if len(values) == 1 and self.parts[0].end == self.row_bytes:
            return values[0].contiguous().view(torch.uint8)
        gaps = self.row_bytes > sum(part.end - part.offset for part in self.parts)
        make = torch.zeros if gaps else torch.empty
        rows = make(shape, dtype=torch.uint8, device=x_TD.device)
        for part, value in zip(self.parts, values, strict=True):
            rows[:, part.offset : part.end] = value.contiguous().view(torch.uint8)
        return rows

    def unpack(self, rows_RB: Tensor, dtype: torch.dtype) -> Tensor:
        """The values of rows of bytes, [R, D]."""
        if rows_RB.shape[0] == 0:
            return rows_RB.new_zeros(0, self.hidden, dtype=dtype)
        parts = [
            rows_RB[:, part.offset : part.end].contiguous().view(part.dtype) for part in self.parts
        ]
        format = WIRES[self.name]
        if isinstance(format, torch.dtype):
            return parts[0].to(dtype)
        entry = resolve(format)
        data, *scales = (part[:, None, :] for part in parts)
        names = [scale.name for scale in entry.stored_scales]
        packed = QuantTensor(entry, data, dict(zip(names, scales, strict=True)), dtype)
        return packed.dequantize().squeeze(1)

    def rounded(self, x_TD: Tensor) -> Tensor:
        """What arrives when x is sent."""
        return self.unpack(self.pack(x_TD), x_TD.dtype)

    def _values(self, x_TD: Tensor) -> list[Tensor]:
        format = WIRES[self.name]
        if isinstance(format, torch.dtype):
            return [x_TD.to(format)]
        # As T matrices of one row: a scale "of the tensor" is then one of the token.
        x_T1D = (x_TD.float() if x_TD.dtype == torch.float64 else x_TD)[:, None, :]
        packed = quantize(x_T1D.contiguous(), format)
        return [part.squeeze(1) for part in (packed.packed, *packed.scales.values())]


class Visits(NamedTuple):
    """Rows to ranks. Everything is on the tokens' device, in static shapes.

    rank_Tk      the rank of each expert; W for one that doesn't exist
    visited_TW   whether a token goes to a rank
    turn_TW      which of its token's rows that is, by rank
    row_TW       which of the rows to that rank it is, by token
    """

    rank_Tk: Tensor
    visited_TW: Tensor
    turn_TW: Tensor
    row_TW: Tensor


def visits(slots_Tk: Tensor, slots: int, ranks: int) -> Visits:
    """Who goes where, by the slots of experts: rank r has the slots from r * slots / ranks on."""
    outside_Tk = (slots_Tk < 0) | (slots_Tk >= slots)
    rank_Tk = (slots_Tk // (slots // ranks)).masked_fill(outside_Tk, ranks).long()
    nobody = torch.zeros(slots_Tk.shape[0], ranks + 1, dtype=torch.bool, device=slots_Tk.device)
    visited_TW = nobody.scatter(1, rank_Tk, True)[:, :ranks].contiguous()
    ones_TW = visited_TW.int()
    turn_TW = ones_TW.cumsum(1, dtype=torch.int32) - ones_TW
    return Visits(rank_Tk, visited_TW, turn_TW, ones_TW.cumsum(0, dtype=torch.int32) - ones_TW)


@dataclass(frozen=True)
class Buffers:
    """What one rank of an expert axis keeps for device-side dispatch and combine, in bytes.

    A token is sent once to each rank that has experts of it, and one result comes back from each.

    tokens      the most tokens a rank sends in one step; `capacity` the most of them that may go to one
                rank, which is all unless it is set lower
    inbox       rows that come in, with their headers: COPIES x W x capacity x (header + row)
    returns     results that come back: COPIES x T x min(k, W) x result
    flags       counts and signals: 16 bytes a rank and copy
    """

    ranks: int
    tokens: int
    per_token: int
    experts_per_rank: int
    row_bytes: int
    result_bytes: int
    capacity: int | None = None

    @property
    def rows(self) -> int:
        """The most rows from one rank to one rank."""
        return self.tokens if self.capacity is None else min(self.capacity, self.tokens)

    @property
    def visits(self) -> int:
        """The most experts of one rank that a token visits."""
        return min(self.per_token, self.experts_per_rank)

    @property
    def homecomings(self) -> int:
        """The most ranks that a token visits."""
        return min(self.per_token, self.ranks)

    @property
    def header(self) -> int:
        return _aligned(HEADER + VISIT * self.visits)

    @property
    def inbox(self) -> int:
        return COPIES * self.ranks * self.rows * (self.header + self.row_bytes)

    @property
    def returns(self) -> int:
        return COPIES * self.tokens * self.homecomings * self.result_bytes

    @property
    def flags(self) -> int:
        return COPIES * self.ranks * 16

    @property
    def total(self) -> int:
        return self.inbox + self.returns + self.flags

    def __str__(self) -> str:
        return (
            f"dispatch buffers of a rank: {_mib(self.total)}\n"
            f"  inbox    {COPIES} x {self.ranks} ranks x {self.rows} rows x "
            f"({self.header} + {self.row_bytes}) bytes = {_mib(self.inbox)}\n"
            f"  returns  {COPIES} x {self.tokens} tokens x {self.homecomings} ranks x "
            f"{self.result_bytes} bytes = {_mib(self.returns)}\n"
            f"  flags    {COPIES} x {self.ranks} ranks x 16 bytes = {self.flags} bytes"
        )


def buffers(
    ranks: int,
    tokens: int,
    per_token: int,
    hidden: int,
    experts_per_rank: int,
    wire: str = "bf16",
    result: str = "bf16",
    capacity: int | None = None,
) -> Buffers:
    """The buffers for `tokens` tokens a rank and step, in these formats there and back."""
    rows, results = Wire(wire, hidden).row_bytes, Wire(result, hidden).row_bytes
    return Buffers(ranks, tokens, per_token, experts_per_rank, rows, results, capacity)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB" if size >= 2**20 else f"{size / 2**10:.1f} KiB"
