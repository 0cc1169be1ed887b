"""What attention of every kind is told of pages: who has which, and where new tokens go.

In: `tables_SM` (int32; the key at position j of sequence s is in page tables[s, j // B], slot j % B),
`query_starts` [S + 1] and `lengths_S` (int32), and `slots_T` for new tokens. Out: the same as kernels read
them, or an error that says what does not fit. What the numbers name is checked on CPUs (cpu/paged.h).
"""

from __future__ import annotations

import torch
from torch import Tensor

from fulgurite.errors import ArgumentError


def check_tables(tables: Tensor, starts: Tensor, lengths: Tensor) -> None:
    """Raises where these don't belong together."""
    for name, index, size in (
        ("tables", tables, 2),
        ("query_starts", starts, 1),
        ("lengths", lengths, 1),
    ):
        if index.dtype != torch.int32:
            raise ArgumentError(f"{name} is {index.dtype}", next="use torch.int32")
        if index.dim() != size:
            raise ArgumentError(f"{name} {list(index.shape)} must have {size} dimensions")
    if starts.shape[0] != lengths.shape[0] + 1 or tables.shape[0] != lengths.shape[0]:
        raise ArgumentError(
            f"{lengths.shape[0]} lengths, {tables.shape[0]} rows of the table and "
            f"{starts.shape[0]} query_starts",
            next="S lengths, S rows and S + 1 query_starts belong together",
        )


def check_slots(slots: Tensor, tokens: int) -> None:
    """Raises where there is not one slot a token."""
    if slots.dtype not in (torch.int64, torch.int32) or tuple(slots.shape) != (tokens,):
        kind = str(slots.dtype).removeprefix("torch.")
        raise ArgumentError(
            f"slots must be int64[{tokens}], one a new token, and are {kind}{list(slots.shape)}"
        )


def as_read(tables: Tensor, starts: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same with numbers next to each other; rows of the table may be apart."""
    tables = tables if tables.stride(1) == 1 else tables.contiguous()
    return tables, starts.contiguous(), lengths.contiguous()
