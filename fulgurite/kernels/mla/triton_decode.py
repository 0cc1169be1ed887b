# mypy: allow-untyped-defs, allow-incomplete-defs
"""Absorbed latent attention on GPUs: flash-style over the latents as they are kept, contexts split.

    scores = scale * (q_c . c_j + q_r . r_j)      out = sum_j softmax_j(scores) c_j

A program takes a tile of rows, the (token, head) pairs of one sequence, over a span of its keys: a latent is read
once for all rows of the tile, and serves as key and as value. With few tiles contexts are split into spans, each
of which leaves its maximum, its sum and its weighted latents, and `merge_kernel` joins them.

FP8 latents are multiplied in float16, which holds them exactly: an instruction converts two of them, where bfloat16
takes many. Their scales never touch them: a scale multiplies its column of the scores, and it is part of the weight,

    u_j = exp2(s_j + log2 f_j - top)      sum_j u_j c_j,  sum_j u_j / f_j

so that the largest weight is 1 however small the scales are.

    T  tokens    N  heads    C  latent rank    R  rotary part    S  sequences    P  splits
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fulgurite.kernels.mla.reference import Parts
from fulgurite.kernels.mla.triton_absorb import Queries
from fulgurite.kernels.mla.triton_store_kv import NATIVE
from fulgurite.kernels.tuning.gemm import processors

LEAST_SPAN = 64  # keys worth a program of their own
MOST_SPLITS = 64
NEGATIVE = tl.constexpr(-float("inf"))
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _half(x):
    """float16 of e4m3, two an instruction. Not pure, or the compiler would convert once for each use, and
    fetch values byte by byte."""
    return tl.inline_asm_elementwise(
        "{ .reg .b16 a, b; mov.b32 {a, b}, $2;"
        " cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }",
        "=r,=r,r", [x.to(tl.uint8, bitcast=True)], dtype=tl.float16, is_pure=False, pack=4,
    )  # fmt: skip


@triton.jit
def _tile(
    pages_ptr, at, column, inside, SIZE: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr
):
    """Rows `at` of the pages, of SIZE numbers in WIDTH columns."""
    if MASKED:
        keep = inside[:, None] & (column < SIZE)[None, :]
        return tl.load(pages_ptr + at[:, None] + column[None, :], keep, 0.0)
    elif SIZE < WIDTH:
        return tl.load(pages_ptr + at[:, None] + column[None, :], (column < SIZE)[None, :], 0.0)
    else:
        return tl.load(pages_ptr + at[:, None] + column[None, :])


@triton.jit
def _walk(
    start, stop, last, q_c, q_r, top, total, gathered, position, latents_ptr, ropes_ptr,
    scales_ptr, table, factor, latent_page, latent_slot, rope_page, rope_slot, scale_page, scale_slot,
    C: tl.constexpr, BC: tl.constexpr, R: tl.constexpr, BR: tl.constexpr, PAGE: tl.constexpr,
    PACKED: tl.constexpr, HALF: tl.constexpr, PRECISION: tl.constexpr, BN: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Keys start .. stop, a block at a time, with a running maximum and sum (online softmax)."""
    column, i = tl.arange(0, BC), tl.arange(0, BR)
    if PAGE % BN == 0:  # a block lies in one page; its number is read a block ahead
        ahead = tl.load(table + start // PAGE, start < stop, 0)
    for j in range(start, stop, BN):
        key = j + tl.arange(0, BN)
        inside = key < last
        if PAGE % BN == 0:
            page = ahead.to(tl.int64)
            ahead = tl.load(table + (j + BN) // PAGE, j + BN < stop, 0)
            slot = j % PAGE + tl.arange(0, BN)
        else:
            page = tl.load(table + key // PAGE, inside, 0).to(tl.int64)
            slot = key % PAGE
        at = page * latent_page + slot * latent_slot
        c = _tile(latents_ptr, at, column, inside, C, BC, MASKED)
        c = _half(c) if HALF else c.to(q_c.dtype)
        scores = tl.dot(q_c, tl.trans(c), input_precision=PRECISION)
        if PACKED:
            at = scales_ptr + page * scale_page + slot * scale_slot
            size = tl.load(at, inside, 1.0) if MASKED else tl.load(at)
            scores *= size[None, :]
        if R > 0:
            r = _tile(ropes_ptr, page * rope_page + slot * rope_slot, i, inside, R, BR, MASKED)
            scores = tl.dot(q_r, tl.trans(r.to(q_r.dtype)), scores, input_precision=PRECISION)
        if MASKED:
            seen = (key[None, :] <= position[:, None]) & inside[None, :]
            scores = tl.where(seen, scores, NEGATIVE)
        scores *= factor[:, None]
        if PACKED:
            scores += tl.log2(size)[None, :]
        new_top = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(new_top == NEGATIVE, 0.0, new_top) if MASKED else new_top
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(top - base)
        gathered = tl.dot(
            weights.to(q_c.dtype), c, gathered * shrink[:, None], input_precision=PRECISION
        )
        if PACKED:
            weights *= (1.0 / size)[None, :]
        total = total * shrink + tl.sum(weights, 1)
        top = new_top
    return top, total, gathered


@triton.jit
def absorbed_kernel(
    q_ptr, rope_ptr, powers_ptr, latents_ptr, ropes_ptr, scales_ptr, tables_ptr, starts_ptr,
    lengths_ptr, out_ptr, parts_ptr, tops_ptr, sums_ptr, scale, tiles, splits, tokens, sequences,
    table_row,
    latent_page, latent_slot, rope_page, rope_slot, scale_page, scale_slot,
    HEADS: tl.constexpr, C: tl.constexpr, BC: tl.constexpr, R: tl.constexpr, BR: tl.constexpr,
    PAGE: tl.constexpr, PACKED: tl.constexpr, HALF: tl.constexpr, SPLIT: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Rows tile * BM .. of one sequence over one span of its keys."""
    if PACKED:  # rows of bytes lie 16 apart, which the compiler sees in the factor
        rope_page, rope_slot = rope_page * 8, rope_slot * 8
    sequence = tl.program_id(0) // tiles
    tile = tiles - 1 - tl.program_id(0) % tiles  # later tiles have more keys: they go first
    split = tl.program_id(1)
    if sequence >= sequences:
        if not SPLIT:
            zero_rows(out_ptr, starts_ptr, tokens, sequences, HEADS * C)
        return
    start = tl.load(starts_ptr + sequence)
    count = tl.load(starts_ptr + sequence + 1) - start
    length = tl.load(lengths_ptr + sequence)
    if tile * BM >= count * HEADS:
        return
    row = tile * BM + tl.arange(0, BM)
    is_row = row < count * HEADS
    position = length - count + row // HEADS

    first = 0
    last = tl.max(tl.where(is_row, position, -1), 0) + 1
    if SPLIT:
        span = tl.cdiv(tl.cdiv(last, splits), BN) * BN
        first = split * span
        last = tl.minimum(last, first + span)

    column, i = tl.arange(0, BC), tl.arange(0, BR)
    place = start.to(tl.int64) * HEADS + row
    from_q = q_ptr + place[:, None] * C + column[None, :]
    q_c = tl.load(from_q, is_row[:, None] & (column < C)[None, :], 0.0)
    from_rope = rope_ptr + place[:, None] * R + i[None, :]
    q_r = tl.load(from_rope, is_row[:, None] & (i < R)[None, :], 0.0)
    factor = tl.full([BM], 1.0, tl.float32) * (scale * LOG2E)
    if PACKED:
        factor *= tl.load(powers_ptr + place, is_row, 1.0)
    top = tl.full([BM], NEGATIVE, tl.float32)
    total = tl.zeros([BM], tl.float32)
    gathered = tl.zeros([BM, BC], tl.float32)
    table = tables_ptr + sequence.to(tl.int64) * table_row

    # blocks that every row sees whole need no mask
    seen_by_all = tl.min(tl.where(is_row, position, last), 0) + 1
    whole = first + tl.maximum(tl.minimum(seen_by_all, last) - first, 0) // BN * BN
    top, total, gathered = _walk(
        first, whole, last, q_c, q_r, top, total, gathered, position, latents_ptr, ropes_ptr,
        scales_ptr, table, factor, latent_page, latent_slot, rope_page, rope_slot, scale_page,
        scale_slot, C, BC, R, BR, PAGE, PACKED, HALF, PRECISION, BN, False,
    )  # fmt: skip
    top, total, gathered = _walk(
        whole, last, last, q_c, q_r, top, total, gathered, position, latents_ptr, ropes_ptr,
        scales_ptr, table, factor, latent_page, latent_slot, rope_page, rope_slot, scale_page,
        scale_slot, C, BC, R, BR, PAGE, PACKED, HALF, PRECISION, BN, True,
    )  # fmt: skip

    if SPLIT:
        mine = place * splits + split
        tl.store(tops_ptr + mine, top, is_row)
        tl.store(sums_ptr + mine, total, is_row)
        tl.store(parts_ptr + mine[:, None] * BC + column[None, :], gathered, is_row[:, None])
    else:
        out = (gathered / total[:, None]).to(out_ptr.dtype.element_ty)
        to = out_ptr + place[:, None] * C + column[None, :]
        tl.store(to, out, is_row[:, None] & (column < C)[None, :])


@triton.jit
def zero_rows(out_ptr, starts_ptr, tokens, sequences, ROW: tl.constexpr):
    """Tokens that are nobody's, of ROW numbers each."""
    number = tl.arange(0, 1024)
    first = tl.load(starts_ptr + sequences).to(tl.int64)
    count = (tokens - first) * ROW
    for start in range(0, count, 1024):
        empty = tl.zeros([1024], out_ptr.dtype.element_ty)
        tl.store(out_ptr + first * ROW + start + number, empty, start + number < count)


@triton.jit
def merge_kernel(
    parts_ptr, tops_ptr, sums_ptr, starts_ptr, out_ptr, splits, sequences,
    HEADS: tl.constexpr, C: tl.constexpr, BC: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """The spans of one (token, head): each is scaled to the largest maximum. Zeros for nobody's tokens."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    split, column = tl.arange(0, SPLITS), tl.arange(0, BC)
    row = token * HEADS + head
    to = out_ptr + row * C + column
    if token >= tl.load(starts_ptr + sequences):
        tl.store(to, tl.zeros([BC], out_ptr.dtype.element_ty), column < C)
        return
    place = row * splits + split
    top = tl.load(tops_ptr + place, split < splits, NEGATIVE)
    most = tl.max(top, 0)
    factor = tl.exp2(top - tl.where(most == NEGATIVE, 0.0, most))
    total = tl.sum(tl.load(sums_ptr + place, split < splits, 0.0) * factor, 0)
    where = (split < splits)[:, None]
    found = tl.load(parts_ptr + place[:, None] * BC + column[None, :], where, 0.0)
    out = tl.sum(found * factor[:, None], 0) / total
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


class Spans(NamedTuple):
    """What the spans of a split context leave; empty where contexts are whole."""

    parts: Tensor
    tops: Tensor
    sums: Tensor


def plan(
    rows: int, wide: bool, packed: bool, sequences: int, longest: int, device: torch.device
) -> Plan:
    """For `rows` rows a sequence. Measured on an H200 (`benchmarks/sweep_mla.py`), 4096 keys, batch 64: with 16
    rows 64 x 3 stages read bfloat16 at 87% of the copy bandwidth, 32 x 4 keep two programs a processor
    at conversions of FP8; with 128 rows 64 keys beat 32 by a fifth. GPUs with less shared memory take small tiles.
    """
    if wide:
        tile, together = Plan(16, 16, 4, 1, 1), 2
    elif not _is_roomy(device):
        tile, together = Plan(16, 32, 4, 2, 1), 1
    elif rows <= 16:
        tile, together = (Plan(16, 32, 4, 4, 1), 2) if packed else (Plan(16, 64, 4, 3, 1), 1)
    elif rows <= 32:
        tile, together = Plan(32, 32, 4, 3, 1), 1
    else:
        tile, together = Plan(64, 32 if packed else 64, 8, 3 if packed else 2, 1), 1
    programs = sequences * triton.cdiv(rows, tile.rows)
    return replace(tile, splits=splits_for(programs, together * processors(device), longest))


def _is_roomy(device: torch.device) -> bool:
    """Whether a program may have as much shared memory as on Hopper, 227 KiB; so in the interpreter."""
    if device.type != "cuda":
        return True
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin >= 227 << 10


def splits_for(programs: int, resident: int, longest: int) -> int:
    """Spans a context, where `resident` programs run at once: the fewest keys one after the other.

    A program costs as much as 64 keys before its first, and the merge of a span 4.
    """

    def cost(splits: int) -> int:
        waves = triton.cdiv(programs * splits, resident)
        return waves * (triton.cdiv(longest, splits) + 64) + (4 * splits if splits > 1 else 0)

    return min(range(1, max(min(longest // LEAST_SPAN, MOST_SPLITS), 1) + 1), key=cost)


def attend_absorbed(
    queries: Queries,
    kept: Parts,
    tables: Tensor,
    starts: Tensor,
    lengths: Tensor,
    scale: float,
    max_query: int,
    max_length: int,
    dtype: torch.dtype,
    chosen: Plan | None = None,
) -> Tensor:
    """What absorbed queries gather, [T, N, C]; zeros for nobody's tokens."""
    q_TNC, q_TNR, powers = queries
    tokens, heads, rank = q_TNC.shape
    rope, packed, wide = q_TNR.shape[2], powers is not None, q_TNC.dtype == torch.float32
    if chosen is None:
        sizes = (max_query * heads, wide, packed, lengths.shape[0], max_length)
        chosen = plan(*sizes, q_TNC.device)
    splits, split = chosen.splits, chosen.splits > 1
    out = torch.empty((tokens, heads, rank), dtype=dtype, device=q_TNC.device)
    width = max(16, triton.next_power_of_2(rank))
    spans = empty_spans(tokens * heads, splits, width, q_TNC.device)
    scales = kept.scales_PB if kept.scales_PB is not None else spans.tops
    tiles = triton.cdiv(max_query * heads, chosen.rows)
    absorbed_kernel[(lengths.shape[0] * tiles + 1, splits)](
        q_TNC, q_TNR, spans.tops if powers is None else powers, kept.latents_PBC, kept.ropes_PBR,
        scales, tables, starts, lengths, out, *spans, scale, tiles, splits, tokens,
        lengths.shape[0], tables.stride(0),
        *kept.latents_PBC.stride()[:2],
        *(step // (8 if packed else 1) for step in kept.ropes_PBR.stride()[:2]),
        *(scales.stride() if packed else (0, 0)),
        HEADS=heads, C=rank, BC=width, R=rope, BR=max(16, triton.next_power_of_2(rope)),
        PAGE=kept.latents_PBC.shape[1], PACKED=packed, HALF=packed and not wide and NATIVE,
        SPLIT=split, PRECISION="ieee" if wide else "tf32", BM=chosen.rows, BN=chosen.keys,
        num_warps=chosen.warps, num_stages=chosen.stages,
    )  # fmt: skip
    if split:
        merge(spans, starts, out, splits, width)
    return out


def empty_spans(rows: int, splits: int, width: int, device: torch.device) -> Spans:
    count = rows * splits if splits > 1 else 1
    tops, sums = torch.empty(2, count, device=device).unbind(0)
    return Spans(torch.empty(count * width if splits > 1 else 1, device=device), tops, sums)


def merge(spans: Spans, starts: Tensor, out: Tensor, splits: int, width: int) -> None:
    """Join the spans of every (token, head) into `out`, [T, N, C]."""
    tokens, heads, rank = out.shape
    merge_kernel[(tokens, heads)](
        *spans, starts, out, splits, starts.shape[0] - 1,
        HEADS=heads, C=rank, BC=width, SPLITS=triton.next_power_of_2(splits), num_warps=4,
    )  # fmt: skip
