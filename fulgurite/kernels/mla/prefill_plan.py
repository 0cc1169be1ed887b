"""The plan of a step with prompts for MLA on a GPU: lengths on the host in, tiles on the device out.

    plan = plan_prefill(metadata, sizes, device)      once a step, before the first layer
    mla_attention(..., metadata, plan=plan)           in every layer: no loop over sequences, no copy

Each sequence of a step is absorbed or expanded (`tuning.mla.should_expand`); in deterministic mode all
are absorbed. The plan has, for all layers alike:

    chunks     the keys of all expanded sequences end to end, cut into chunks of at most
               `mla_max_expanded_keys`. A chunk is gathered, expanded and attended to by one launch
               each. Only a sequence with more keys than a chunk is cut; the state of its softmax is in
               memory between chunks.
    absorbed   the other sequences, in groups whose absorbed queries and latent outputs need no more
               memory than a chunk of expanded keys

All tables are int32 in one tensor, copied to the device at once from pinned memory. The tiles of all
chunks are computed together: the host time of a step hardly depends on how many sequences it has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fulgurite.determinism import is_deterministic
from fulgurite.kernels.attention.metadata import AttentionMetadata
from fulgurite.kernels.integer_math import cdiv
from fulgurite.kernels.tuning.heuristics import heuristics_for
from fulgurite.kernels.tuning.mla import MLA_MIN_EXPANDED_QUERIES, should_expand

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
    expanded = []
    if heuristics.mla_expands_keys:
        expanded = find_expanded(query_lens, seq_lens, sizes)
    max_absorbed = max_absorbed_tokens(sizes, heuristics.mla_max_expanded_keys)
    num_tokens = sum(query_lens)
    if not expanded and num_tokens <= max_absorbed:
        return PrefillPlan(num_tokens, block_m=0, num_state_tokens=0)
    starts = [0, *accumulate(query_lens)]
    block_m = heuristics.mla_prefill_block_m([query_lens[s] for s in expanded])
    chunks = pack_keys(expanded, seq_lens, heuristics.mla_max_expanded_keys)
    state_rows, num_state_tokens = _assign_state_rows(chunks, query_lens)
    is_expanded = set(expanded)
    others = [s for s in range(len(query_lens)) if s not in is_expanded]
    groups = pack_queries(others, query_lens, seq_lens, starts, max_absorbed)
    tables = _Tables()
    if chunks:
        segments_N5 = _list_segments(chunks)
        tables.add_split(*_gather_tiles(segments_N5, heuristics.mla_gather.block_m))
        lens_S3 = np.array([starts[:-1], query_lens, seq_lens]).T
        state_row_S = np.zeros(len(query_lens), dtype=np.int64)
        state_row_S[list(state_rows)] = list(state_rows.values())
        tables.add_split(*_attention_tiles(segments_N5, lens_S3, state_row_S, block_m))
    for group in groups:
        tables.add_group(group)
    on_device = tables.copy_to(device)
    gather_tiles, attention_tiles = (next(on_device), next(on_device)) if chunks else ((), ())
    return PrefillPlan(
        num_tokens,
        block_m,
        num_state_tokens,
        tuple(
            KeyChunk(
                sum(segment.num_keys for segment in chunk),
                gathered,
                attended,
                any(segment.sequence in state_rows for segment in chunk),
            )
            for chunk, gathered, attended in zip(chunks, gather_tiles, attention_tiles, strict=True)
        ),
        tuple(_absorbed_group(group, metadata, on_device) for group in groups),
    )


def find_expanded(query_lens: Sequence[int], seq_lens: Sequence[int], sizes: MLASizes) -> list[int]:
    """The sequences whose keys are expanded. Most of a step have too few new tokens for it."""
    return [
        sequence
        for sequence, (queries, keys) in enumerate(zip(query_lens, seq_lens, strict=True))
        if queries >= MLA_MIN_EXPANDED_QUERIES and should_expand(queries, keys, *sizes)
    ]


def max_absorbed_tokens(sizes: MLASizes, max_keys: int) -> int:
    """Tokens whose absorbed queries and latent outputs take the memory of `max_keys` expanded keys.

    In deterministic mode accumulators are in memory too, in float32.
    """
    absorbed = (4 if is_deterministic() else 2) * sizes.rank + sizes.rope_dim
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


def _list_segments(chunks: list[list[KeySegment]]) -> np.ndarray:
    """Columns: chunk, sequence, first key, keys, row of the chunk."""
    rows = [(index, *segment) for index, chunk in enumerate(chunks) for segment in chunk]
    return np.array(rows, dtype=np.int64)


def _cut(length_N: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Lengths cut into tiles of `size`: the item of each tile, and its offset there."""
    count_N = -(-length_N // size)
    item_M = np.repeat(np.arange(len(length_N)), count_N)
    first_N = np.cumsum(count_N) - count_N
    return item_M, (np.arange(len(item_M)) - first_N[item_M]) * size


def _gather_tiles(segments_N5: np.ndarray, size: int) -> tuple[np.ndarray, list[int]]:
    """The tiles of all chunks, and how many each has."""
    item_M, offset_M = _cut(segments_N5[:, 3], size)
    chunk_M, sequence_M, first_M, keys_M, row_M = segments_N5[item_M].T
    tiles = np.empty((len(item_M), GATHER_COLUMNS), dtype=np.int32)
    tiles[:, 0] = sequence_M
    tiles[:, 1] = first_M + offset_M
    tiles[:, 2] = np.minimum(size, keys_M - offset_M)
    tiles[:, 3] = row_M + offset_M
    return tiles, np.bincount(chunk_M).tolist()


def _attention_tiles(
    segments_N5: np.ndarray, lens_S3: np.ndarray, state_row_S: np.ndarray, block_m: int
) -> tuple[np.ndarray, list[int]]:
    """Tiles of query tokens that see a key of a segment, for all chunks; and how many each has.

    `lens_S3`: the first token of each sequence, its tokens and its keys. In a chunk, tiles with more
    keys come first: what runs last is short.
    """
    item_M, offset_M = _cut(lens_S3[segments_N5[:, 1], 1], block_m)
    chunk_M, sequence_M, first_M, keys_M, row_M = segments_N5[item_M].T
    start_M, queries_M, length_M = lens_S3[sequence_M].T
    tokens_M = np.minimum(block_m, queries_M - offset_M)
    position_M = length_M - queries_M + offset_M
    end_M = position_M + tokens_M  # keys that the last token of the tile sees
    tiles = np.empty((len(item_M), TILE_COLUMNS), dtype=np.int32)
    tiles[:, 0] = start_M + offset_M
    tiles[:, 1] = tokens_M
    tiles[:, 2] = position_M
    tiles[:, 3] = row_M
    tiles[:, 4] = first_M
    tiles[:, 5] = keys_M
    tiles[:, 6] = IS_FIRST * (first_M == 0) + IS_LAST * (first_M + keys_M >= end_M)
    tiles[:, 7] = state_row_S[sequence_M] + offset_M
    visible_M = np.minimum(end_M - first_M, keys_M)
    order = np.lexsort((-visible_M, chunk_M))
    order = order[visible_M[order] > 0]
    return tiles[order], np.bincount(chunk_M[order]).tolist()


class _Tables:
    """Integer tables that are copied to the device at once, in the order of `add`."""

    def __init__(self) -> None:
        self.arrays: list[np.ndarray] = []
        self.row_counts: list[
            list[int] | None
        ] = []  # where a table is split, for one table a chunk

    def add(self, table: np.ndarray) -> None:
        self.add_split(table, None)

    def add_split(self, table: np.ndarray, row_counts: list[int] | None) -> None:
        self.arrays.append(table)
        self.row_counts.append(row_counts)

    def add_group(self, group: list[QuerySegment]) -> None:
        """Sequences, query offsets and sequence lengths of an `AbsorbedGroup`; and its tokens, if they
        are no slice."""
        sequences, first_tokens, counts, keys = zip(*group, strict=True)
        self.add(np.array(sequences))
        self.add(np.array([0, *accumulate(counts)]))
        self.add(np.array(keys))
        if not _is_slice(group):
            item_M, offset_M = _cut(np.array(counts), 1)
            self.add(np.array(first_tokens)[item_M] + offset_M)

    def copy_to(self, device: torch.device) -> Iterator[Any]:
        """The tables on the device; of one that is split, a tuple."""
        ends = [*accumulate(cdiv(array.size, ALIGNMENT) * ALIGNMENT for array in self.arrays)]
        memory = torch.empty(ends[-1], dtype=torch.int32, pin_memory=device.type == "cuda")
        host = memory.numpy()
        offsets = [0, *ends[:-1]]
        for array, offset in zip(self.arrays, offsets, strict=True):
            host[offset : offset + array.size] = array.reshape(-1)
        memory = memory.to(device, non_blocking=True)
        for array, offset, counts in zip(self.arrays, offsets, self.row_counts, strict=True):
            table = memory[offset : offset + array.size].view(array.shape)
            yield table if counts is None else table.split(counts)


def _is_slice(group: list[QuerySegment]) -> bool:
    """Whether the tokens of a group follow one another: then nothing is gathered for them."""
    last = group[-1].first_token + group[-1].num_tokens
    return sum(segment.num_tokens for segment in group) == last - group[0].first_token


def _absorbed_group(
    group: list[QuerySegment], metadata: AttentionMetadata, tables: Iterator[Any]
) -> AbsorbedGroup:
    sequences, query_start_loc, seq_lens = next(tables), next(tables), next(tables)
    subset = AttentionMetadata(
        metadata.block_table_SM.index_select(0, sequences),
        query_start_loc,
        seq_lens,
        max(segment.num_tokens for segment in group),
        max(segment.num_keys for segment in group),
    )
    if _is_slice(group):
        last = group[-1].first_token + group[-1].num_tokens
        return AbsorbedGroup(slice(group[0].first_token, last), subset)
    return AbsorbedGroup(next(tables).long(), subset)
