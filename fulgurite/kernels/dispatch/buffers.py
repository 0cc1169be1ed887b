"""Buffer sizes of device-side dispatch and combine: a `DispatchConfig` in, `DispatchBuffers` out."""

from __future__ import annotations

from dataclasses import dataclass

from fulgurite.kernels.dispatch.wire_format import WireFormat, align

HEADER_BYTES = 16  # before a row: source token, copy index, number of assignments, unused
ASSIGNMENT_BYTES = 8  # in the header, for each expert of the row: its index on the rank, its weight
NUM_BUFFERS = 2  # double buffering: one is read while the other is filled
EXPERT_CHUNK_ROWS = 16384  # rows that the experts of a rank compute at once; more run in chunks


@dataclass(frozen=True)
class DispatchConfig:
    """What a dispatcher is built for; equal on all ranks.

    max_tokens         most tokens that a rank sends in one step
    top_k              experts of a token
    experts_per_rank   expert slots of a rank
    dispatch_format    wire format of tokens that are sent to experts
    combine_format     wire format of results
    capacity           most rows from one rank to another; None: all tokens
    """

    max_tokens: int
    top_k: int
    hidden_size: int
    experts_per_rank: int
    dispatch_format: str = "bf16"
    combine_format: str = "bf16"
    capacity: int | None = None

    def size_buffers(self, num_ranks: int) -> DispatchBuffers:
        return DispatchBuffers(
            num_ranks=num_ranks,
            max_tokens=self.max_tokens,
            top_k=self.top_k,
            experts_per_rank=self.experts_per_rank,
            row_bytes=WireFormat(self.dispatch_format, self.hidden_size).row_bytes,
            result_bytes=WireFormat(self.combine_format, self.hidden_size).row_bytes,
            capacity=self.capacity,
        )

    def num_bytes(self, num_ranks: int) -> int:
        """Bytes of one rank's symmetric buffer."""
        return self.size_buffers(num_ranks).total_bytes


@dataclass(frozen=True)
class DispatchBuffers:
    """Memory of one rank for dispatch and combine, in bytes.

    A token is sent once to each rank that has experts of it, and one result comes back from each.

    inbox_bytes    received rows with headers: NUM_BUFFERS x ranks x rows x (header + row)
    return_bytes   received results: NUM_BUFFERS x tokens x min(k, ranks) x result
    flag_bytes     counts and signals: NUM_BUFFERS x ranks x 16
    """

    num_ranks: int
    max_tokens: int
    top_k: int
    experts_per_rank: int
    row_bytes: int
    result_bytes: int
    capacity: int | None = None

    @property
    def rows(self) -> int:
        """The most rows from one rank to another."""
        return self.max_tokens if self.capacity is None else min(self.capacity, self.max_tokens)

    @property
    def experts_per_row(self) -> int:
        """The most experts of one rank that a token is assigned to."""
        return min(self.top_k, self.experts_per_rank)

    @property
    def ranks_per_token(self) -> int:
        """The most ranks that a token is sent to."""
        return min(self.top_k, self.num_ranks)

    @property
    def header_bytes(self) -> int:
        return align(HEADER_BYTES + ASSIGNMENT_BYTES * self.experts_per_row)

    @property
    def inbox_bytes(self) -> int:
        return NUM_BUFFERS * self.num_ranks * self.rows * (self.header_bytes + self.row_bytes)

    @property
    def return_bytes(self) -> int:
        return NUM_BUFFERS * self.max_tokens * self.ranks_per_token * self.result_bytes

    @property
    def flag_bytes(self) -> int:
        return NUM_BUFFERS * self.num_ranks * 16

    @property
    def total_bytes(self) -> int:
        return self.inbox_bytes + self.return_bytes + self.flag_bytes

    def __str__(self) -> str:
        return (
            f"dispatch buffers of a rank: {_format_bytes(self.total_bytes)}\n"
            f"  inbox    {NUM_BUFFERS} x {self.num_ranks} ranks x {self.rows} rows x "
            f"({self.header_bytes} + {self.row_bytes}) bytes = {_format_bytes(self.inbox_bytes)}\n"
            f"  returns  {NUM_BUFFERS} x {self.max_tokens} tokens x {self.ranks_per_token} ranks x "
            f"{self.result_bytes} bytes = {_format_bytes(self.return_bytes)}\n"
            f"  flags    {NUM_BUFFERS} x {self.num_ranks} ranks x 16 bytes = {self.flag_bytes} bytes"
        )


def _format_bytes(size: int) -> str:
    return f"{size / 2**20:.1f} MiB" if size >= 2**20 else f"{size / 2**10:.1f} KiB"
