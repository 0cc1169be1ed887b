"""One step as flat tensors: pieces of requests in, what the model and the cache read out.

Shapes: T tokens of the step, S sequences, B blocks of the longest one, G groups of layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fulgurite.serve.engine.block_tables import BlockTables
from fulgurite.serve.engine.scheduler import Piece


@dataclass(frozen=True)
class Batch:
    """The tokens of sequence s are `starts_S[s]:starts_S[s + 1]`, its keys `lengths_S[s]` with them.

    `slots_GT`: where each token's key goes, block * block_size + offset. `tables_GSB`: the blocks
    of each sequence. `extents_T`: how long each token's sequence is to the rotary embedding.
    `rows_R`: the tokens whose logits are asked for.
    """

    token_ids_T: Tensor
    positions_T: Tensor
    slots_GT: list[Tensor]
    tables_GSB: list[Tensor]
    starts_S: Tensor
    lengths_S: Tensor
    extents_T: Tensor | None
    rows_R: Tensor | None  # None: all of them
    max_count: int
    max_length: int
    # tokens and keys of each sequence, as the host knows them
    query_counts: list[int] | None = None
    key_counts: list[int] | None = None


def make_batch(
    pieces: Sequence[Piece],
    tables: BlockTables,
    device: torch.device,
    *,
    needs_extent: bool = False,
    stale_after: int | None = None,
) -> Batch:
    counts_S = np.array([piece.count for piece in pieces], dtype=np.int64)
    firsts_S = np.array([piece.start for piece in pieces], dtype=np.int64)
    rows_S = np.array([piece.request.row for piece in pieces], dtype=np.int64)
    lengths_S = firsts_S + counts_S
    starts_S = np.zeros(len(pieces) + 1, dtype=np.int32)
    np.cumsum(counts_S, out=starts_S[1:])
    sequence_T = np.repeat(np.arange(len(pieces)), counts_S)
    positions_T = np.arange(len(sequence_T)) - (starts_S[:-1] - firsts_S)[sequence_T]
    token_ids_T = np.concatenate(
        [piece.request.tokens[piece.start : piece.start + piece.count] for piece in pieces]
    )
    size = tables.block_size
    columns = -(-int(lengths_S.max()) // size)
    slots_GT, tables_GSB = [], []
    for table in tables.tables:
        slots_GT.append(table[rows_S[sequence_T], positions_T // size] * size + positions_T % size)
        tables_GSB.append(table[rows_S, :columns])
    extents_T = None
    if needs_extent:
        extents_T = extents(pieces, stale_after)[sequence_T]
        if stale_after is None:
            extents_T = np.maximum(extents_T, positions_T + 1)
    last = [index for index, piece in enumerate(pieces) if piece.last]
    whole = len(last) == len(sequence_T)
    return Batch(
        token_ids_T=_tensor(token_ids_T, device),
        positions_T=_tensor(positions_T, device),
        slots_GT=[_tensor(slots.astype(np.int64), device) for slots in slots_GT],
        tables_GSB=[_tensor(table, device) for table in tables_GSB],
        starts_S=_tensor(starts_S, device),
        lengths_S=_tensor(lengths_S.astype(np.int32), device),
        extents_T=None if extents_T is None else _tensor(extents_T, device),
        rows_R=None if whole else _tensor(starts_S[1:][last].astype(np.int64) - 1, device),
        max_count=int(counts_S.max()),
        max_length=int(lengths_S.max()),
        query_counts=counts_S.tolist(),
        key_counts=lengths_S.tolist(),
    )


def extents(pieces: Sequence[Piece], stale_after: int | None) -> np.ndarray:
    """LongRoPE turns all keys by the length there is. Dynamic NTK turned each key when it was made,
    all of the prompt's at once, and must do so again after a preemption."""
    if stale_after is None:
        return np.array([piece.request.prompt_length for piece in pieces])
    return np.array([piece.request.length for piece in pieces])


def _tensor(array: np.ndarray, device: torch.device) -> Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor if device.type == "cpu" else tensor.to(device, non_blocking=True)
