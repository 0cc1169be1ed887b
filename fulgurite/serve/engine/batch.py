"""One step as flat tensors: `ScheduledChunk`s in, the `InputBatch` of model and KV cache out.

The numbers are collected on the host first (`HostBatch`). Recorded steps of a CPU copy them into memory of
their own (recorded_step.py).

Shapes: T tokens of the step; S sequences; B blocks of the longest sequence; G KV-cache groups;
R tokens whose logits are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fulgurite.serve.engine.block_manager import BlockManager
from fulgurite.serve.engine.scheduler import ScheduledChunk


@dataclass(frozen=True)
class InputBatch:
    """The tensors of one step; all chunks are concatenated along T.

    slot_mapping_GT     slot of each token's key: block * block_size + offset
    block_tables_GSB    blocks of each sequence
    query_start_loc_S   the tokens of sequence s are query_start_loc_S[s]:query_start_loc_S[s + 1]
    seq_lens_S          keys of each sequence, with those of this step
    rope_seq_lens_T     sequence length that the rotary embedding uses; None: it uses none
    logit_rows_R        tokens whose logits are computed; None: all
    query_lens_host, seq_lens_host    tokens and keys of each sequence on the host, if known
    state_slots_S       slot of each sequence's state, for layers without attention
    prompt_lens_S       tokens of each sequence's prompt; both None: the model has no such layers
    pending_rows_T      rows of the block tables, if some tokens are still being sampled: their ids are
                        -1; None: all token ids are known
    """

    token_ids_T: Tensor
    positions_T: Tensor
    slot_mapping_GT: list[Tensor]
    block_tables_GSB: list[Tensor]
    query_start_loc_S: Tensor
    seq_lens_S: Tensor
    rope_seq_lens_T: Tensor | None
    logit_rows_R: Tensor | None
    max_query_len: int
    max_seq_len: int
    query_lens_host: list[int] | None = None
    seq_lens_host: list[int] | None = None
    pending_rows_T: Tensor | None = None
    state_slots_S: Tensor | None = None
    prompt_lens_S: Tensor | None = None


@dataclass(frozen=True)
class HostBatch:
    """The numbers of one step on the host; the fields of an `InputBatch`, with

    rows_S        row of each sequence in the block tables
    sequence_T    sequence of each token
    is_pending    some tokens are still being sampled: their ids are -1
    """

    token_ids_T: np.ndarray
    positions_T: np.ndarray
    slot_mapping_GT: list[np.ndarray]
    block_tables_GSB: list[np.ndarray]
    query_lens_S: np.ndarray
    query_start_loc_S: np.ndarray
    seq_lens_S: np.ndarray
    prompt_lens_S: np.ndarray
    rope_seq_lens_T: np.ndarray | None
    logit_rows_R: np.ndarray | None
    rows_S: np.ndarray
    sequence_T: np.ndarray
    is_pending: bool

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids_T)

    @property
    def num_sequences(self) -> int:
        return len(self.rows_S)


def build_host_batch(
    chunks: Sequence[ScheduledChunk],
    block_manager: BlockManager,
    *,
    needs_rope_seq_lens: bool = False,
    recompute_after: int | None = None,
) -> HostBatch:
    """The numbers of a step; the last options say what the model needs."""
    query_lens_S = np.array([chunk.num_tokens for chunk in chunks], dtype=np.int64)
    starts_S = np.array([chunk.start for chunk in chunks], dtype=np.int64)
    rows_S = np.array([chunk.request.block_table_row for chunk in chunks], dtype=np.int64)
    seq_lens_S = starts_S + query_lens_S
    query_start_loc_S = np.zeros(len(chunks) + 1, dtype=np.int32)
    np.cumsum(query_lens_S, out=query_start_loc_S[1:])
    sequence_T = np.repeat(np.arange(len(chunks)), query_lens_S)
    positions_T = np.arange(len(sequence_T)) - (query_start_loc_S[:-1] - starts_S)[sequence_T]
    token_ids_T = np.concatenate(
        [chunk.request.tokens[chunk.start : chunk.start + chunk.num_tokens] for chunk in chunks]
    )
    is_pending_S = np.array([chunk.ends_pending for chunk in chunks])
    token_ids_T[query_start_loc_S[1:][is_pending_S] - 1] = -1
    size = block_manager.block_size
    columns = -(-int(seq_lens_S.max()) // size)
    slot_mapping_GT, block_tables_GSB = [], []
    for table in block_manager.block_tables:
        blocks_T = table[rows_S[sequence_T], positions_T // size]
        slot_mapping_GT.append((blocks_T * size + positions_T % size).astype(np.int64))
        block_tables_GSB.append(table[rows_S, :columns])
    rope_seq_lens_T = None
    if needs_rope_seq_lens:
        rope_seq_lens_T = rope_seq_lens(chunks, recompute_after)[sequence_T]
        if recompute_after is None:
            rope_seq_lens_T = np.maximum(rope_seq_lens_T, positions_T + 1)
    sampled = [index for index, chunk in enumerate(chunks) if chunk.needs_sampling]
    logit_rows_R = None
    if len(sampled) != len(sequence_T):
        logit_rows_R = query_start_loc_S[1:][sampled].astype(np.int64) - 1
    return HostBatch(
        token_ids_T=token_ids_T,
        positions_T=positions_T,
        slot_mapping_GT=slot_mapping_GT,
        block_tables_GSB=block_tables_GSB,
        query_lens_S=query_lens_S,
        query_start_loc_S=query_start_loc_S,
        seq_lens_S=seq_lens_S.astype(np.int32),
        prompt_lens_S=np.array([chunk.request.prompt_length for chunk in chunks], dtype=np.int32),
        rope_seq_lens_T=rope_seq_lens_T,
        logit_rows_R=logit_rows_R,
        rows_S=rows_S,
        sequence_T=sequence_T,
        is_pending=bool(is_pending_S.any()),
    )


def move_to_device(host: HostBatch, device: torch.device, has_states: bool) -> InputBatch:
    """The batch on the device; `has_states`: the model has layers with states."""

    def move(array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        return tensor if device.type == "cpu" else tensor.to(device, non_blocking=True)

    rope, logit_rows = host.rope_seq_lens_T, host.logit_rows_R
    return InputBatch(
        token_ids_T=move(host.token_ids_T),
        positions_T=move(host.positions_T),
        slot_mapping_GT=[move(slots) for slots in host.slot_mapping_GT],
        block_tables_GSB=[move(table) for table in host.block_tables_GSB],
        query_start_loc_S=move(host.query_start_loc_S),
        seq_lens_S=move(host.seq_lens_S),
        rope_seq_lens_T=None if rope is None else move(rope),
        logit_rows_R=None if logit_rows is None else move(logit_rows),
        max_query_len=int(host.query_lens_S.max()),
        max_seq_len=int(host.seq_lens_S.max()),
        query_lens_host=host.query_lens_S.tolist(),
        seq_lens_host=host.seq_lens_S.tolist(),
        pending_rows_T=move(host.rows_S[host.sequence_T]) if host.is_pending else None,
        state_slots_S=move(host.rows_S.astype(np.int32)) if has_states else None,
        prompt_lens_S=move(host.prompt_lens_S) if has_states else None,
    )


def rope_seq_lens(chunks: Sequence[ScheduledChunk], recompute_after: int | None) -> np.ndarray:
    """The sequence length of each chunk for the rotary embedding.

    LongRoPE (`recompute_after` is set) rotates all keys by the current length. Dynamic NTK rotates
    each key when it is computed, the prompt's by the prompt's length, also after a preemption.
    """
    if recompute_after is None:
        return np.array([chunk.request.prompt_length for chunk in chunks])
    return np.array([chunk.request.scheduled_length for chunk in chunks])
