"""Absorbed latent attention on GPUs: flash-style over the latents as they are kept, contexts split.

    scores = scale * (q_c . c_j + turned q_r . r_j)      out = sum_j softmax_j(scores) c_j

A program takes a tile of rows, the (token, head) pairs of one sequence, over a span of its keys: a latent is read
once for all rows of the tile, and serves as key and as value. With few tiles contexts are split into
spans, each of which leaves its maximum, its sum and its weighted latents, and `merge_kernel` joins them.
The scale of an FP8 latent multiplies its column of the scores and its weight, never the latent itself.

    T  tokens    N  heads    C  latent rank    R  rotary part    S  sequences
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fulgurite.kernels.mla_reference import Parts
from fulgurite.kernels.triton.mla_write import turned

LEAST_SPAN = 128  # keys worth a program of their own
NEGATIVE = tl.constexpr(-float("inf"))
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _walk(
    start, stop, last, q_c, q_r, top, total, gathered, position, latents_ptr, ropes_ptr,
    scales_ptr, table, scale, latent_page, latent_slot, rope_page, rope_slot, scale_page, scale_slot,
    C: tl.constexpr, BC: tl.constexpr, R: tl.constexpr, BR: tl.constexpr, PAGE: tl.constexpr,
    PACKED: tl.constexpr, PRECISION: tl.constexpr, COMPUTE: tl.constexpr, BN: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Keys start .. stop, a block at a time, with a running maximum and sum (online softmax)."""
    column, i = tl.arange(0, BC), tl.arange(0, BR)
    for j in range(start, stop, BN):
        key = j + tl.arange(0, BN)
        inside = key < (last if MASKED else j + BN)
        if PAGE % BN == 0:  # a block lies in one page: one number says where
            page = tl.load(table + j // PAGE).to(tl.int64)
            slot = j % PAGE + tl.arange(0, BN)
        else:
            page = tl.load(table + key // PAGE, inside, 0).to(tl.int64)
            slot = key % PAGE
        at = (page * latent_page + slot * latent_slot)[:, None] + column[None, :]
        c = tl.load(latents_ptr + at, inside[:, None] & (column < C)[None, :], 0.0).to(COMPUTE)
        scores = tl.dot(q_c, tl.trans(c), input_precision=PRECISION)
        if PACKED:
            factor_j = tl.load(scales_ptr + page * scale_page + slot * scale_slot, inside, 0.0)
            scores *= factor_j[None, :]
        if R > 0:
            at = (page * rope_page + slot * rope_slot)[:, None] + i[None, :]
            r = tl.load(ropes_ptr + at, inside[:, None] & (i < R)[None, :], 0.0).to(COMPUTE)
            scores = tl.dot(q_r, tl.trans(r), scores, input_precision=PRECISION)
        scores *= scale * LOG2E
        if MASKED:
            seen = (key[None, :] <= position[:, None]) & inside[None, :]
            scores = tl.where(seen, scores, NEGATIVE)
        new_top = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(new_top == NEGATIVE, 0.0, new_top) if MASKED else new_top
        weights = tl.exp2(scores - base[:, None])
        factor = tl.exp2(top - base)
        total = total * factor + tl.sum(weights, 1)
        if PACKED:
            weights *= factor_j[None, :]
        gathered = tl.dot(
            weights.to(COMPUTE), c, gathered * factor[:, None], input_precision=PRECISION
        )
        top = new_top
    return top, total, gathered


@triton.jit
def absorbed_kernel(
    q_ptr, rope_ptr, cos_ptr, sin_ptr, latents_ptr, ropes_ptr, scales_ptr, tables_ptr, starts_ptr,
    lengths_ptr, out_ptr, parts_ptr, tops_ptr, sums_ptr, scale, tiles, splits,
    q_token, q_head, rope_token, rope_head, out_token, out_head, table_row,
    latent_page, latent_slot, rope_page, rope_slot, scale_page, scale_slot,
    HEADS: tl.constexpr, C: tl.constexpr, BC: tl.constexpr, R: tl.constexpr, BR: tl.constexpr,
    PAGE: tl.constexpr, PACKED: tl.constexpr, INTERLEAVED: tl.constexpr, SPLIT: tl.constexpr,
    PRECISION: tl.constexpr, COMPUTE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Rows tile * BM .. of one sequence over one span of its keys."""
    sequence = tl.program_id(0) // tiles
    tile = tiles - 1 - tl.program_id(0) % tiles  # later tiles have more keys: they go first
    split = tl.program_id(1)
    start = tl.load(starts_ptr + sequence)
    count = tl.load(starts_ptr + sequence + 1) - start
    length = tl.load(lengths_ptr + sequence)
    if tile * BM >= count * HEADS:
        return
    row = tile * BM + tl.arange(0, BM)
    is_row = row < count * HEADS
    token, head = (start + row // HEADS).to(tl.int64), row % HEADS
    position = length - count + row // HEADS

    first = 0
    last = tl.max(tl.where(is_row, position, -1), 0) + 1
    if SPLIT:
        span = tl.cdiv(tl.cdiv(last, splits), BN) * BN
        first = split * span
        last = tl.minimum(last, first + span)

    column = tl.arange(0, BC)
    from_q = q_ptr + (token * q_token + head * q_head)[:, None] + column[None, :]
    q_c = tl.load(from_q, is_row[:, None] & (column < C)[None, :], 0.0).to(COMPUTE)
    from_rope = token * rope_token + head * rope_head
    q_r = turned(rope_ptr, from_rope, cos_ptr, sin_ptr, token, is_row, R, BR, INTERLEAVED)
    q_r = q_r.to(COMPUTE)
    top = tl.full([BM], NEGATIVE, tl.float32)
    total = tl.zeros([BM], tl.float32)
    gathered = tl.zeros([BM, BC], tl.float32)
    table = tables_ptr + sequence.to(tl.int64) * table_row

    # blocks that every row sees whole need no mask
    seen_by_all = tl.min(tl.where(is_row, position, last), 0) + 1
    whole = first + tl.maximum(tl.minimum(seen_by_all, last) - first, 0) // BN * BN
    top, total, gathered = _walk(
        first, whole, last, q_c, q_r, top, total, gathered, position, latents_ptr, ropes_ptr,
        scales_ptr, table, scale, latent_page, latent_slot, rope_page, rope_slot, scale_page,
        scale_slot, C, BC, R, BR, PAGE, PACKED, PRECISION, COMPUTE, BN, False,
    )  # fmt: skip
    top, total, gathered = _walk(
        whole, last, last, q_c, q_r, top, total, gathered, position, latents_ptr, ropes_ptr,
        scales_ptr, table, scale, latent_page, latent_slot, rope_page, rope_slot, scale_page,
        scale_slot, C, BC, R, BR, PAGE, PACKED, PRECISION, COMPUTE, BN, True,
    )  # fmt: skip

    if SPLIT:
        place = (token * HEADS + head) * splits + split
        tl.store(tops_ptr + place, top, is_row)
        tl.store(sums_ptr + place, total, is_row)
        tl.store(parts_ptr + place[:, None] * BC + column[None, :], gathered, is_row[:, None])
    else:
        out = (gathered / total[:, None]).to(out_ptr.dtype.element_ty)
        to = out_ptr + (token * out_token + head * out_head)[:, None] + column[None, :]
        tl.store(to, out, is_row[:, None] & (column < C)[None, :])


@triton.jit
def merge_kernel(
    parts_ptr, tops_ptr, sums_ptr, starts_ptr, out_ptr, splits, sequences, out_token, out_head,
    HEADS: tl.constexpr, C: tl.constexpr, BC: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """The spans of one (token, head): each is scaled to the largest maximum."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if token >= tl.load(starts_ptr + sequences):  # nobody's
        return
    split, column = tl.arange(0, SPLITS), tl.arange(0, BC)
    place = (token * HEADS + head) * splits + split
    top = tl.load(tops_ptr + place, split < splits, NEGATIVE)
    most = tl.max(top, 0)
    factor = tl.exp2(top - tl.where(most == NEGATIVE, 0.0, most))
    total = tl.sum(tl.load(sums_ptr + place, split < splits, 0.0) * factor, 0)
    where = (split < splits)[:, None]
    found = tl.load(parts_ptr + place[:, None] * BC + column[None, :], where, 0.0)
    out = tl.sum(found * factor[:, None], 0) / total
    to = out_ptr + token * out_token + head * out_head + column
    tl.store(to, out.to(out_ptr.dtype.element_ty), column < C)


# ---- launching -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """Tile sizes and how contexts are split."""

    rows: int
    keys: int
    warps: int
    stages: int
    splits: int


def plan(rows: int, wide: bool, sequences: int, longest: int, processors: int) -> Plan:
    """For `rows` rows a sequence; not measured yet (`benchmarks/sweep_mla.py` does it).

    Up to 64 rows share a latent: their weighted latents, 64 x 512 floats, fill half the registers.
    """
    if wide:
        tile = Plan(16, 16, 4, 1, 1)
    elif rows <= 16:
        tile = Plan(16, 32, 4, 3, 1)
    elif rows <= 32:
        tile = Plan(32, 32, 4, 3, 1)
    else:
        tile = Plan(64, 32, 8, 3, 1)
    programs = sequences * triton.cdiv(rows, tile.rows)
    splits = min(triton.cdiv(2 * processors, programs), triton.cdiv(longest, LEAST_SPAN), 64)
    return Plan(tile.rows, tile.keys, tile.warps, tile.stages, max(splits, 1))


def attend_absorbed(
    q_TNC: Tensor,
    q_TNR: Tensor,
    cos: Tensor,
    sin: Tensor,
    kept: Parts,
    tables: Tensor,
    starts: Tensor,
    lengths: Tensor,
    scale: float,
    interleaved: bool,
    max_query: int,
    max_length: int,
    chosen: Plan | None = None,
) -> Tensor:
    """What absorbed queries gather, [T, N, C] laid out head by head; zeros for nobody's tokens."""
    tokens, heads, rank = q_TNC.shape
    rope, packed = q_TNR.shape[2], kept.scales_PB is not None
    compute = compute_type(q_TNC.dtype, kept.latents_PBC.dtype)
    wide = compute is tl.float32
    if chosen is None:
        count = processors(q_TNC.device)
        chosen = plan(max_query * heads, wide, lengths.shape[0], max(max_length, 1), count)
    splits, split = chosen.splits, chosen.splits > 1
    out_NTC = torch.zeros((heads, tokens, rank), dtype=q_TNC.dtype, device=q_TNC.device)
    out = out_NTC.transpose(0, 1)
    width = max(16, triton.next_power_of_2(rank))
    numbers = tokens * heads * splits if split else 1
    found = torch.empty(numbers * width if split else 1, device=q_TNC.device)
    tops, sums = torch.empty(2, numbers, device=q_TNC.device).unbind(0)
    scales = cos if kept.scales_PB is None else kept.scales_PB
    tiles = triton.cdiv(max_query * heads, chosen.rows)
    absorbed_kernel[(lengths.shape[0] * tiles, splits)](
        q_TNC, q_TNR, cos, sin, kept.latents_PBC, kept.ropes_PBR, scales, tables, starts, lengths,
        out, found, tops, sums, scale, tiles, splits,
        *q_TNC.stride()[:2], *q_TNR.stride()[:2], *out.stride()[:2], tables.stride(0),
        *kept.latents_PBC.stride()[:2], *kept.ropes_PBR.stride()[:2],
        *(scales.stride() if packed else (0, 0)),
        HEADS=heads, C=rank, BC=width, R=rope, BR=max(16, triton.next_power_of_2(rope)),
        PAGE=kept.latents_PBC.shape[1], PACKED=packed, INTERLEAVED=interleaved, SPLIT=split,
        PRECISION="ieee" if wide else "tf32", COMPUTE=compute, BM=chosen.rows, BN=chosen.keys,
        num_warps=chosen.warps, num_stages=chosen.stages,
    )  # fmt: skip
    if split:
        merge_kernel[(tokens, heads)](
            found, tops, sums, starts, out, splits, lengths.shape[0], *out.stride()[:2],
            HEADS=heads, C=rank, BC=width, SPLITS=triton.next_power_of_2(splits), num_warps=4,
        )  # fmt: skip
    return out


def compute_type(query: torch.dtype, pages: torch.dtype) -> Any:
    """What the dot products run in: 16 bit where both sides fit it exactly."""
    if query == pages or pages.itemsize == 1:
        return {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}.get(query, tl.float32)
    return tl.float32


def processors(device: torch.device) -> int:
    if device.type != "cuda":  # the interpreter
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count
