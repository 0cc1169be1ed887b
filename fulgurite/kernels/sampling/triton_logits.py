# mypy: allow-untyped-defs, allow-incomplete-defs
"""Bias, mask and penalties on a GPU, and what the next step needs of the sampled tokens.

In and out: as the operators of `sampling/ops.py`. Counts, biases and masks are rows of a
`LogitsTable`. Rows without flags are copied. All kernels may be part of a CUDA graph.

    x = x + bias;  x = -inf where the mask's bit is 0
    x = x * repetition if x < 0 else x / repetition     where counts > 0
    x = x - (frequency * occurrences + presence)        where the reply has the token
"""

from __future__ import annotations

import torch
from torch import Tensor

from fulgurite.kernels.common.triton_import import tl
from fulgurite.kernels.common.triton_launch import cached_launch
from fulgurite.kernels.integer_math import cdiv, next_power_of_2
from fulgurite.kernels.sampling import table as layout
from fulgurite.kernels.sampling.table import LogitsTable
from fulgurite.kernels.tuning.heuristics import heuristics_for

MAX_ROWS = 65535  # of a grid's second dimension
NUM_PROCESSING = tl.constexpr(layout.NUM_PROCESSING)
HAS_BIAS, HAS_MASK = tl.constexpr(layout.HAS_BIAS), tl.constexpr(layout.HAS_MASK)
HAS_PENALTIES = tl.constexpr(layout.HAS_PENALTIES)


@cached_launch
def process_kernel(
    logits, processed, processing, counts, bias, allowed, size, stride, words, CHUNK: tl.constexpr
):  # fmt: skip
    """processed: float32 [R, size]."""
    row = tl.program_id(1).to(tl.int64)
    offsets = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    is_token = offsets < size
    row_processing = processing + row * NUM_PROCESSING
    flags = tl.load(row_processing + 1).to(tl.int32)
    table_row = tl.load(row_processing).to(tl.int64)
    x = tl.load(logits + row * stride + offsets, is_token, 0.0).to(tl.float32)
    if (flags & HAS_BIAS) > 0:
        x += tl.load(bias + table_row * size + offsets, is_token, 0.0)
    if (flags & HAS_MASK) > 0:
        word = tl.load(allowed + table_row * words + offsets // 32, is_token, 0)
        x = tl.where(((word >> (offsets % 32)) & 1) > 0, x, float("-inf"))
    if (flags & HAS_PENALTIES) > 0:
        count = tl.load(counts + table_row * size + offsets, is_token, 0)
        repetition = tl.load(row_processing + 2).to(tl.float32)
        repeated = tl.where(x < 0, x * repetition, tl.div_rn(x, tl.zeros_like(x) + repetition))
        x = tl.where(count > 0, repeated, x)
        occurrences = (count >> 1).to(tl.float64)
        penalty = occurrences * tl.load(row_processing + 3) + tl.load(row_processing + 4)
        x = tl.where(count > 1, x - penalty.to(tl.float32), x)
    tl.store(processed + row * size + offsets, x, is_token)


@cached_launch
def record_kernel(
    tokens, processing, last_tokens, counts, rows, size, HAS_COUNTS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """last_tokens[row] = token, and counts[row, token] += 2 for rows with penalties."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_row = index < rows
    token = tl.maximum(tl.load(tokens + index, is_row, 0), 0)
    row_processing = processing + index * NUM_PROCESSING
    table_row = tl.load(row_processing, is_row, 0.0).to(tl.int64)
    tl.store(last_tokens + table_row, token, is_row)
    if HAS_COUNTS:
        flags = tl.load(row_processing + 1, is_row, 0.0).to(tl.int32)
        is_counted = is_row & ((flags & HAS_PENALTIES) > 0)
        tl.atomic_add(counts + table_row * size + token, 2, is_counted, sem="relaxed")


@cached_launch
def pending_kernel(token_ids, table_rows, last_tokens, count, BLOCK: tl.constexpr):
    """token_ids[t] = last_tokens[table_rows[t]] where it is negative."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(token_ids + index, index < count, 0)
    is_pending = (index < count) & (token < 0)
    table_row = tl.load(table_rows + index, is_pending, 0)
    last = tl.load(last_tokens + table_row, is_pending, 0)
    tl.store(token_ids + index, last, is_pending)


# ---- launching -----------------------------------------------------------------------------------


def process_logits(logits_RO: Tensor, processing_R5: Tensor, table: LogitsTable) -> Tensor:
    """`sampling.ops.process_logits`."""
    rows, size = logits_RO.shape
    if not 0 < rows <= MAX_ROWS or not 0 < size < 2**31 or logits_RO.stride(1) != 1:
        return NotImplemented  # type: ignore[no-any-return]
    heuristics = heuristics_for(logits_RO.device)
    processed = torch.empty(rows, size, dtype=torch.float32, device=logits_RO.device)
    process_kernel[(cdiv(size, heuristics.sampling_chunk), rows)](
        logits_RO, processed, processing_R5.contiguous(), table.counts_WO, table.bias_WO,
        table.allowed_WM, size, logits_RO.stride(0), table.allowed_WM.shape[1],
        CHUNK=heuristics.sampling_chunk, num_warps=heuristics.sampling_num_warps,
    )  # fmt: skip
    return processed


def record_tokens(
    tokens_R: Tensor, processing_R5: Tensor, last_tokens_W: Tensor, counts_WO: Tensor | None
) -> None:
    """`sampling.ops.record_tokens`."""
    rows = len(tokens_R)
    block = min(next_power_of_2(rows), 256)
    counts = last_tokens_W if counts_WO is None else counts_WO
    record_kernel[(cdiv(rows, block),)](
        tokens_R, processing_R5.contiguous(), last_tokens_W, counts, rows, counts.shape[-1],
        HAS_COUNTS=counts_WO is not None, BLOCK=block, num_warps=1,
    )  # fmt: skip


def fill_pending_tokens(token_ids_T: Tensor, rows_T: Tensor, last_tokens_W: Tensor) -> None:
    """`sampling.ops.fill_pending_tokens`."""
    count = len(token_ids_T)
    block = min(next_power_of_2(count), 256)
    pending_kernel[(cdiv(count, block),)](
        token_ids_T, rows_T, last_tokens_W, count, BLOCK=block, num_warps=1
    )
