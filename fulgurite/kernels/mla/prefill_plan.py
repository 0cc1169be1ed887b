"""The plan of a step with prompts for MLA on a GPU: lengths on the host in, tiles on the device out.

    plan = plan_prefill(metadata, sizes, device)      once a step, before the first layer
    mla_attention(..., metadata, plan=plan)           in every layer: no loop over sequences, no copy

Each sequence of a step is absorbed or expanded (`tuning.mla.should_expand`). The plan has, for all
layers alike:

    chunks     the keys of all expanded sequences end to end, cut into chunks of at most
               `mla_max_expanded_keys`. A chunk is gathered, expanded and attended to by one launch
               each. Only a sequence with more keys than a chunk is cut; the state of its softmax is in
               memory between chunks.
    absorbed   the other sequences, in groups whose absorbed queries and latent outputs need no more
               memory than a chunk of expanded keys

All tables are int32 in one tensor, copied to the device at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fulgurite.kernels.attention.metadata import AttentionMetadata
from fulgurite.kernels.integer_math import cdiv
from fulgurite.kernels.tuning.heuristics import heuristics_for
from fulgurite.kernels.tuning.mla import should_expand

# columns of the tables; the kernels read them in this order
GATHER_COLUMNS = 4  # sequence, first key, keys, row of the chunk
TILE_COLUMNS = 8  # token, tokens, position, row of the chunk, first key, keys, flags, state row
IS_FIRST, IS_LAST = 1, 2  # flags: a tile's first and last chunk
ALIGNMENT = 4  # numbers: every table starts at 16 bytes


class MLASizes(NamedTuple):
    """Sizes of a layer: latent, query without RoPE, rotary part, value."""

    rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int


class KeySegment(NamedTuple):
    """Keys first_key .. first_key + num_keys of a sequence, from row `row` of a chunk on."""

    sequence: int
    first_key: int
    num_keys: int
    row: int


class QuerySegment(NamedTuple):
    """Query tokens of a sequence, by their index in the step, and its keys up to the last of them."""

    sequence: int
    first_token: int
    num_tokens: int
    num_keys: int


@dataclass(frozen=True)
class KeyChunk:
    """Keys that are expanded together; `has_state`: some sequence has keys in other chunks, too."""

    num_keys: int
    gather_tiles: Tensor
    attention_tiles: Tensor
    has_state: bool


@dataclass(frozen=True)
class AbsorbedGroup:
    """Sequences that are absorbed together: their tokens and their metadata."""

    tokens: slice | Tensor
    metadata: AttentionMetadata


@dataclass(frozen=True)
class PrefillPlan:
    """How all layers attend in one step.

    num_tokens         of all sequences; tokens after them are padding
    block_m            most tokens of an attention tile
    num_state_tokens   tokens of sequences with more keys than a chunk
    """

    num_tokens: int
    block_m: int
    num_state_tokens: int
    chunks: tuple[KeyChunk, ...] = ()
    absorbed: tuple[AbsorbedGroup, ...] = ()

    @property
    def is_one_call(self) -> bool:
        """Whether one absorbed call takes all sequences, as the step has them."""
        return not self.chunks and not self.absorbed


def plan_prefill(
    metadata: AttentionMetadata, sizes: MLASizes, device: torch.device
) -> PrefillPlan | None:
    """The plan of a step; None where the host does not know its lengths."""
    query_lens, seq_lens = metadata.query_lens, metadata.seq_lens
    if query_lens is None or seq_lens is None:
        return None
    heuristics = heuristics_for(device)
    lens = list(zip(query_lens, seq_lens, strict=True))
    expanded = [s for s, (queries, keys) in enumerate(lens) if should_expand(queries, keys, *sizes)]
    max_absorbed = max_absorbed_tokens(sizes, heuristics.mla_max_expanded_keys)
    num_tokens = sum(query_lens)
    if not expanded and num_tokens <= max_absorbed:
        return PrefillPlan(num_tokens, block_m=0, num_state_tokens=0)
    starts = np.concatenate(([0], np.cumsum(query_lens))).tolist()
    block_m = heuristics.mla_prefill_block_m([query_lens[s] for s in expanded])
    chunks = pack_keys(expanded, seq_lens, heuristics.mla_max_expanded_keys)
    state_rows, num_state_tokens = _assign_state_rows(chunks, query_lens)
    tables = _Tables()
    for chunk in chunks:
        gather = [_gather_tiles(segment, heuristics.mla_gather.block_m) for segment in chunk]
        tiles = [
            _attention_tiles(segment, starts[segment.sequence], lens[segment.sequence], block_m,
                             state_rows.get(segment.sequence, 0))
            for segment in chunk
        ]  # fmt: skip
        tables.add(np.concatenate(gather))
        tables.add(_longest_first(np.concatenate(tiles)))
    others = set(range(len(lens))) - set(expanded)
    groups = pack_queries(sorted(others), query_lens, seq_lens, starts, max_absorbed)
    for group in groups:
        tables.add_group(group)
    on_device = tables.copy_to(device)
    return PrefillPlan(
        num_tokens,
        block_m,
        num_state_tokens,
        tuple(
            KeyChunk(
                sum(segment.num_keys for segment in chunk),
                next(on_device),
                next(on_device),
                any(segment.sequence in state_rows for segment in chunk),
            )
            for chunk in chunks
        ),
        tuple(
            _absorbed_group(group, metadata, *(next(on_device) for _ in range(4)))
            for group in groups
        ),
    )


def max_absorbed_tokens(sizes: MLASizes, max_keys: int) -> int:
    """Tokens whose absorbed queries and latent outputs take the memory of `max_keys` expanded keys."""
    absorbed = 2 * sizes.rank + sizes.rope_dim
    return max(max_keys * (sizes.nope_dim + sizes.value_dim) // max(absorbed, 1), 1)


def pack_keys(
    sequences: Sequence[int], seq_lens: Sequence[int], max_keys: int
) -> list[list[KeySegment]]:
    """Chunks of at most `max_keys` keys, in order. A sequence is cut only if it has more keys."""
    chunks: list[list[KeySegment]] = []
    used = max_keys
    for sequence in sequences:
        first, length = 0, seq_lens[sequence]
        if length <= max_keys < used + length:
            used = max_keys
        while first < length:
            if used == max_keys:
                chunks.append([])
                used = 0
            count = min(length - first, max_keys - used)
            chunks[-1].append(KeySegment(sequence, first, count, used))
            first, used = first + count, used + count
    return chunks


def pack_queries(
    sequences: Sequence[int],
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    starts: Sequence[int],
    max_tokens: int,
) -> list[list[QuerySegment]]:
    """Groups of at most `max_tokens` query tokens, in order; a sequence may be cut between tokens."""
    groups: list[list[QuerySegment]] = []
    used = max_tokens
    for sequence in sequences:
        queries, cached = query_lens[sequence], seq_lens[sequence] - query_lens[sequence]
        first = 0
        while first < queries:
            if used == max_tokens:
                groups.append([])
                used = 0
            count = min(queries - first, max_tokens - used)
            token, keys = starts[sequence] + first, cached + first + count
            groups[-1].append(QuerySegment(sequence, token, count, keys))
            first, used = first + count, used + count
    return groups


def _assign_state_rows(
    chunks: list[list[KeySegment]], query_lens: Sequence[int]
) -> tuple[dict[int, int], int]:
    """The first state row of each sequence that is in several chunks, and the number of rows."""
    rows: dict[int, int] = {}
    count = 0
    for segment in (segment for chunk in chunks for segment in chunk):
        if segment.first_key > 0 and segment.sequence not in rows:
            rows[segment.sequence] = count
            count += query_lens[segment.sequence]
    return rows, count


def _gather_tiles(segment: KeySegment, size: int) -> np.ndarray:
    offset = np.arange(0, segment.num_keys, size, dtype=np.int32)
    tiles = np.empty((len(offset), GATHER_COLUMNS), dtype=np.int32)
    tiles[:, 0] = segment.sequence
    tiles[:, 1] = segment.first_key + offset
    tiles[:, 2] = np.minimum(size, segment.num_keys - offset)
    tiles[:, 3] = segment.row + offset
    return tiles


def _attention_tiles(
    segment: KeySegment, start: int, lens: tuple[int, int], block_m: int, state_row: int
) -> np.ndarray:
    """Tiles of a sequence's query tokens that see a key of the segment."""
    queries, keys = lens
    offset = np.arange(0, queries, block_m, dtype=np.int32)
    rows = np.minimum(block_m, queries - offset)
    position = keys - queries + offset
    end = position + rows  # keys that the last token of the tile sees
    tiles = np.empty((len(offset), TILE_COLUMNS), dtype=np.int32)
    tiles[:, 0] = start + offset
    tiles[:, 1] = rows
    tiles[:, 2] = position
    tiles[:, 3:6] = segment.row, segment.first_key, segment.num_keys
    is_last = segment.first_key + segment.num_keys >= end
    tiles[:, 6] = IS_FIRST * (segment.first_key == 0) + IS_LAST * is_last
    tiles[:, 7] = state_row + offset
    return tiles[end > segment.first_key]


def _longest_first(tiles: np.ndarray) -> np.ndarray:
    """Tiles with more keys run first: what runs last is short."""
    visible = np.minimum(tiles[:, 2] + tiles[:, 1] - tiles[:, 4], tiles[:, 5])
    return tiles[np.argsort(-visible, kind="stable")]


class _Tables:
    """Integer tables that are copied to the device at once, in the order of `add`."""

    def __init__(self) -> None:
        self.arrays: list[np.ndarray] = []

    def add(self, table: np.ndarray) -> None:
        self.arrays.append(np.ascontiguousarray(table, dtype=np.int32))

    def add_group(self, group: list[QuerySegment]) -> None:
        """Sequences, query offsets, sequence lengths and tokens of an `AbsorbedGroup`."""
        counts = [segment.num_tokens for segment in group]
        self.add(np.array([segment.sequence for segment in group]))
        self.add(np.concatenate(([0], np.cumsum(counts))))
        self.add(np.array([segment.num_keys for segment in group]))
        tokens = [np.arange(s.first_token, s.first_token + s.num_tokens) for s in group]
        self.add(np.concatenate(tokens))

    def copy_to(self, device: torch.device):  # type: ignore[no-untyped-def]
        """An iterator over the tables on the device."""
        offsets = [0]
        for array in self.arrays:
            offsets.append(offsets[-1] + cdiv(array.size, ALIGNMENT) * ALIGNMENT)
        host = np.zeros(offsets[-1], dtype=np.int32)
        for array, offset in zip(self.arrays, offsets, strict=False):
            host[offset : offset + array.size] = array.reshape(-1)
        memory = torch.from_numpy(host).to(device, non_blocking=True)
        return iter(
            memory[offset : offset + array.size].view(array.shape)
            for array, offset in zip(self.arrays, offsets, strict=False)
        )


def _absorbed_group(
    group: list[QuerySegment],
    metadata: AttentionMetadata,
    sequences: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    tokens: Tensor,
) -> AbsorbedGroup:
    """Tokens that follow one another are a slice: nothing is gathered for them."""
    first = group[0].first_token
    last = group[-1].first_token + group[-1].num_tokens
    query_lens = [segment.num_tokens for segment in group]
    is_slice = sum(query_lens) == last - first
    subset = AttentionMetadata(
        metadata.block_table_SM.index_select(0, sequences),
        query_start_loc,
        seq_lens,
        max(query_lens),
        max(segment.num_keys for segment in group),
    )
    return AbsorbedGroup(slice(first, last) if is_slice else tokens.long(), subset)
