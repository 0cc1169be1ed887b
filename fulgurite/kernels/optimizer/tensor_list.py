"""Many tensors in one launch: lists of tensors in, tables that a kernel reads out.

    program p    has the elements from starts[p] to starts[p] + CHUNK of entry entries[p]
    entry e      has addresses[e, :], one for each list, and sizes[e] elements

A model has hundreds of small parameters, and a launch each takes longer than its kernel. The tables of
programs depend on sizes alone and are cached; addresses are copied for each launch. Unaligned tensors
are launched apart (`is_aligned`), so that they don't narrow the accesses to the others.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fulgurite.kernels.integer_math import cdiv

BLOCKS_PER_PROGRAM = 16  # a program iterates over them; the tables stay small beside the tensors
ALIGNMENT = 16  # bytes of the widest access, and elements of a size
CACHED_TABLES = 64


@dataclass(frozen=True)
class TensorList:
    """What a kernel over lists of tensors takes.

    Attributes:
        addresses: int64, one row an entry, one column a list.
        sizes: int64, elements of each entry.
        entries, starts: int32 and int64, of each program.
        chunk: elements of a program.
        is_aligned: all addresses are multiples of 16 bytes, and all sizes of 16 elements.
    """

    addresses: Tensor
    sizes: Tensor
    entries: Tensor
    starts: Tensor
    chunk: int
    is_aligned: bool

    @property
    def num_programs(self) -> int:
        return self.entries.numel()

    @property
    def tables(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.addresses, self.sizes, self.entries, self.starts


def make_tensor_list(lists: Sequence[Sequence[Tensor]], block: int) -> TensorList:
    """Tables of lists of contiguous tensors: entries of all lists have the same sizes.

    The tensors must live until the launch; on a GPU, that of the current stream.
    """
    device = lists[0][0].device
    addresses = [x.data_ptr() for entry in zip(*lists, strict=True) for x in entry]
    chunk = BLOCKS_PER_PROGRAM * block
    sizes, entries, starts = _program_tables(device, tuple(x.numel() for x in lists[0]), chunk)
    return TensorList(
        torch.tensor(addresses, dtype=torch.int64).to(device, non_blocking=True),
        sizes,
        entries,
        starts,
        chunk,
        all(number % ALIGNMENT == 0 for number in (*addresses, *(x.numel() for x in lists[0]))),
    )


def is_aligned(tensors: Iterable[Tensor]) -> bool:
    """Whether a kernel may access an entry in 16-byte pieces, without a partial one at its end."""
    return all(x.data_ptr() % ALIGNMENT == 0 and x.numel() % ALIGNMENT == 0 for x in tensors)


@functools.lru_cache(maxsize=CACHED_TABLES)
def _program_tables(
    device: torch.device, sizes: tuple[int, ...], chunk: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Sizes, and the entry and the first element of each program."""
    programs = torch.tensor([cdiv(size, chunk) for size in sizes])
    entries = torch.repeat_interleave(torch.arange(len(sizes)), programs)
    first = (programs.cumsum(0) - programs)[entries]
    starts = (torch.arange(len(entries)) - first) * chunk
    tables = torch.tensor(sizes, dtype=torch.int64), entries.to(torch.int32), starts
    sizes_, entries_, starts_ = (table.to(device) for table in tables)
    return sizes_, entries_, starts_
