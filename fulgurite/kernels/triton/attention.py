"""Paged attention on GPUs: one kernel for prefill and decode, flash-style.

    out[t, n] = sum_j p_j value[j],   p = softmax over the seen keys j, and the sink, of
    softcap * tanh(scale * q[t, n] . key[j] / softcap)

A program takes a tile of rows, the (token, head) pairs of one sequence that share a key head, over a
span of that sequence's keys. With few programs (decode of a small batch) contexts are split into spans:
each leaves its maximum, its sum and its weighted values, and the program that is last to finish a tile
merges them. What a row sees is an interval of keys whether by cause, window or chunk, so masks are two
numbers, and blocks that every row sees whole have none.

Where a page holds whole blocks of keys, a block is in one page: its address is one number, and keys are
read as from a plain matrix. With small pages every key looks its page up.

A key of H numbers is read as two tiles, the largest power of two in H and the rest, so that 576, 96 and
80 waste nothing or little.

    T  query tokens    S  sequences    N  query heads    K  key heads    G  N / K    H  key    V  value
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fulgurite.kernels.glue import HeadNorms, Heads, Pages
from fulgurite.kernels.triton.counters import take_counters
from fulgurite.kernels.triton.early import early, fetch_ahead, let_next_start, wait_for_inputs
from fulgurite.kernels.triton.glue import (
    DTYPES,
    angles_fit,
    into_page,
    pages_fit,
    tanh,
    turned_rows,
)
from fulgurite.kernels.triton.sizes import cdiv, next_power_of_2
from fulgurite.kernels.triton.tiles import processors

LEAST_SPAN = 128  # keys worth a program of their own
TOGETHER = 8  # spans that are merged at once
MERGED_NUMBERS = 8192  # what a program merges at once: 64 registers of each of 128 threads
NEGATIVE = tl.constexpr(-float("inf"))
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _tile(
    pages_ptr, at, column, inside, SIZE: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr
):
    """Rows `at` of a page, of SIZE numbers in WIDTH columns."""
    if MASKED:
        keep = inside[:, None] & (column < SIZE)[None, :]
        return tl.load(pages_ptr + at[:, None] + column[None, :], keep, 0.0)
    elif SIZE < WIDTH:
        keep = (column < SIZE)[None, :]
        return tl.load(pages_ptr + at[:, None] + column[None, :], keep, 0.0)
    else:
        return tl.load(pages_ptr + at[:, None] + column[None, :])


@triton.jit
def _walk(
    start, stop, last, q1, q2, top, total, gathered, low, position, keys_ptr, values_ptr, table,
    scale, softcap, key_page, key_slot, value_page, value_slot,
    H: tl.constexpr, H1: tl.constexpr, H2: tl.constexpr, V: tl.constexpr,
    BV: tl.constexpr, PAGE: tl.constexpr, SHARED: tl.constexpr, SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr, COMPUTE: tl.constexpr, BN: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Keys start .. stop, a block at a time, with a running maximum and sum (online softmax)."""
    c1, c2, cv = tl.arange(0, H1), H1 + tl.arange(0, H2), tl.arange(0, BV)
    for j in range(start, stop, BN):
        key = j + tl.arange(0, BN)
        inside = key < last
        if PAGE % BN == 0:  # the whole block lies in one page
            page = tl.load(table + j // PAGE).to(tl.int64)
            slot = j % PAGE + tl.arange(0, BN)
        else:
            page = tl.load(table + key // PAGE, inside, 0).to(tl.int64)
            slot = key % PAGE
        at_key = page * key_page + slot * key_slot
        at_value = page * value_page + slot * value_slot
        k1 = _tile(keys_ptr, at_key, c1, inside, min(H, H1), H1, MASKED).to(COMPUTE)
        if SHARED and V == H1:
            values = k1
        else:
            values = _tile(values_ptr, at_value, cv, inside, V, BV, MASKED).to(COMPUTE)
        scores = tl.dot(q1, tl.trans(k1), input_precision=PRECISION)
        if H > H1:
            k2 = _tile(keys_ptr, at_key, c2, inside, H, H1 + H2, MASKED).to(COMPUTE)
            scores = tl.dot(q2, tl.trans(k2), scores, input_precision=PRECISION)
        factor = scale * LOG2E
        if SOFTCAP:
            scores = softcap * tanh(scores * (scale / softcap))
            factor = LOG2E
        if MASKED:
            seen = (key[None, :] >= low[:, None]) & (key[None, :] <= position[:, None])
            scores = tl.where(seen & inside[None, :], scores, NEGATIVE)
        new_top = tl.maximum(top, tl.max(scores, 1) * factor)
        base = tl.where(new_top == NEGATIVE, 0.0, new_top) if MASKED else new_top
        weights = tl.exp2(scores * factor - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(weights, 1)
        gathered = tl.dot(
            weights.to(COMPUTE), values, gathered * shrink[:, None], input_precision=PRECISION
        )
        top = new_top
    return top, total, gathered


@triton.jit
def attention_kernel(
    q_ptr, keys_ptr, values_ptr, tables_ptr, starts_ptr, lengths_ptr, sinks_ptr, out_ptr,
    parts_ptr, tops_ptr, sums_ptr, count_ptr,
    scale, softcap, value_scale, window, chunk, tiles, splits, tokens, sequences,
    q_token, q_head, table_row, key_page, key_slot, key_head_step, value_page, value_slot,
    value_head_step,
    k_ptr, v_ptr, slots_ptr, query_norm_ptr, key_norm_ptr, cos_ptr, sin_ptr, k_token, k_head, v_token,
    v_head, pairs, eps, offset, limit,
    HEADS: tl.constexpr, GROUP: tl.constexpr, H: tl.constexpr, H1: tl.constexpr, H2: tl.constexpr,
    V: tl.constexpr, BV: tl.constexpr, PAGE: tl.constexpr, SHARED: tl.constexpr,
    HAS_SINKS: tl.constexpr, SOFTCAP: tl.constexpr, SPLIT: tl.constexpr, BOUNDED: tl.constexpr,
    PRECISION: tl.constexpr, COMPUTE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    LEAST: tl.constexpr, TOGETHER: tl.constexpr, MERGED: tl.constexpr, FRESH: tl.constexpr,
    NORM: tl.constexpr, TURN: tl.constexpr, INTERLEAVED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Rows tile * BM .. of one sequence under one key head, over one span of its keys.

    With FRESH a sequence has one token, whose heads are as the linears left them: they are normed and
    turned here, and the program of the last span stores key and value before it reads them.
    """
    if EARLY:
        let_next_start()
    sequence = tl.program_id(0) // tiles
    tile = tiles - 1 - tl.program_id(0) % tiles  # later tiles have more keys: they go first
    key_head = tl.program_id(1)
    split = tl.program_id(2)
    if sequence >= sequences:
        if EARLY:
            wait_for_inputs()
        if split == 0:
            first_token = tl.load(starts_ptr + sequences)
            _zero(out_ptr, first_token, tokens, key_head * GROUP, HEADS, GROUP, V, BV)
        return
    start = tl.load(starts_ptr + sequence)
    count = tl.load(starts_ptr + sequence + 1) - start
    length = tl.load(lengths_ptr + sequence)
    if tile * BM >= count * GROUP:
        if EARLY:
            wait_for_inputs()
        return
    row = tile * BM + tl.arange(0, BM)
    is_row = row < count * GROUP
    token = row // GROUP
    head = key_head * GROUP + row % GROUP
    position = length - count + token
    low = tl.where(window > 0, tl.maximum(position - window + 1, 0), 0)
    low = tl.where(chunk > 0, tl.maximum(low, position // tl.maximum(chunk, 1) * chunk), low)

    # the keys of the tile, and of them those of this span
    first = tl.min(tl.where(is_row, low, length), 0)
    last = tl.max(tl.where(is_row, position, -1), 0) + 1
    first = first // BN * BN
    used = splits
    if SPLIT:  # a short context is split less than there are programs for
        used = tl.minimum(splits, tl.cdiv(last - first, LEAST))
        if split >= used:
            if EARLY:
                wait_for_inputs()
            return
        span = tl.cdiv(tl.cdiv(last - first, used), BN) * BN
        first = first + split * span
        last = tl.minimum(last, first + span)

    c1, c2, cv = tl.arange(0, H1), H1 + tl.arange(0, H2), tl.arange(0, BV)
    table = tables_ptr + sequence.to(tl.int64) * table_row
    if EARLY:
        LINES: tl.constexpr = (
            H1 * (keys_ptr.dtype.element_ty.primitive_bitwidth // 8) + 127
        ) // 128
        if BM == 16:  # decode: all but the new token's keys and values are there already
            ahead = first + tl.arange(0, LEAST)
            page = tl.load(table + ahead // PAGE, ahead < last, 0).to(tl.int64)
            at_key = page * key_page + (ahead % PAGE) * key_slot + key_head * key_head_step
            fetch_ahead(keys_ptr + at_key, LINES)
            if not SHARED:
                at_value = (
                    page * value_page + (ahead % PAGE) * value_slot + key_head * value_head_step
                )
                fetch_ahead(values_ptr + at_value, LINES)
        wait_for_inputs()
    row_q = q_ptr + ((start + token).to(tl.int64) * q_token + head * q_head)
    if FRESH:
        new, single = start.to(tl.int64), tl.zeros([1], tl.int64)
        cos_ptr += new * pairs
        sin_ptr += new * pairs
        q1 = turned_rows(
            row_q, is_row, query_norm_ptr, cos_ptr, sin_ptr, pairs, eps, offset, H, H1, NORM, TURN, INTERLEAVED
        )  # fmt: skip
        q1 = q1.to(q_ptr.dtype.element_ty).to(COMPUTE)
        q2 = tl.zeros([BM, H2], COMPUTE)
        if (first < last) & (last == length):
            slot = tl.load(slots_ptr + start)
            new_key = turned_rows(
                k_ptr + new * k_token + key_head * k_head + single, single == 0, key_norm_ptr, cos_ptr, sin_ptr,
                pairs, eps, offset, H, H1, NORM, TURN, INTERLEAVED,
            )  # fmt: skip
            new_key = tl.reshape(new_key, [H1])
            value = tl.load(v_ptr + new * v_token + key_head * v_head + cv, cv < V, 0.0).to(
                tl.float32
            )
            into_page(
                new_key, keys_ptr, slot, key_head, c1, slot >= 0, 1.0, limit, key_page, key_slot, key_head_step, H, PAGE
            )  # fmt: skip
            into_page(
                value, values_ptr, slot, key_head, cv, slot >= 0, 1.0, limit, value_page, value_slot, value_head_step,
                V, PAGE,
            )  # fmt: skip
            tl.debug_barrier()
    else:
        from_q = row_q[:, None]
        q1 = tl.load(from_q + c1[None, :], is_row[:, None] & (c1 < H)[None, :], 0.0).to(COMPUTE)
        q2 = tl.load(from_q + c2[None, :], is_row[:, None] & (c2 < H)[None, :], 0.0).to(COMPUTE)
    top = tl.full([BM], NEGATIVE, tl.float32)
    total = tl.zeros([BM], tl.float32)
    gathered = tl.zeros([BM, BV], tl.float32)
    keys_ptr += key_head * key_head_step
    values_ptr += key_head * value_head_step

    # blocks that every row sees whole need no mask: all but the last ones, of many rows
    whole = first
    if not BOUNDED:
        low_last = tl.min(tl.where(is_row, position, last), 0) + 1
        whole = first + tl.maximum(tl.minimum(low_last, last) - first, 0) // BN * BN
        top, total, gathered = _walk(
            first, whole, last, q1, q2, top, total, gathered, low, position, keys_ptr, values_ptr, table,
            scale, softcap, key_page, key_slot, value_page, value_slot, H, H1, H2, V, BV, PAGE, SHARED, SOFTCAP, PRECISION, COMPUTE, BN, False,
        )  # fmt: skip
    top, total, gathered = _walk(
        whole, last, last, q1, q2, top, total, gathered, low, position, keys_ptr, values_ptr, table,
        scale, softcap, key_page, key_slot, value_page, value_slot, H, H1, H2, V, BV, PAGE, SHARED, SOFTCAP, PRECISION, COMPUTE, BN, True,
    )  # fmt: skip

    place = (start + token).to(tl.int64) * HEADS + head
    if SPLIT:
        mine = place * splits + split
        tl.store(tops_ptr + mine, top, is_row)
        tl.store(sums_ptr + mine, total, is_row)
        tl.store(parts_ptr + mine[:, None] * BV + cv[None, :], gathered, is_row[:, None])
        tl.debug_barrier()
        counter = count_ptr + tl.program_id(0) * tl.num_programs(1) + key_head
        if tl.atomic_add(counter, 1, sem="acq_rel") == used - 1:
            tl.store(counter, 0)
            rows = tl.minimum(BM, count * GROUP - tile * BM)
            for some in range(0, rows, MERGED):
                one = tile * BM + some + tl.arange(0, MERGED)
                of_one = key_head * GROUP + one % GROUP
                at_one = (start + one // GROUP).to(tl.int64) * HEADS + of_one
                _merge(
                    parts_ptr, tops_ptr, sums_ptr, sinks_ptr, out_ptr, at_one, of_one,
                    one < count * GROUP, splits, used, value_scale, V, BV, HAS_SINKS, MERGED, TOGETHER,
                )  # fmt: skip
    else:
        if HAS_SINKS:
            sink = tl.load(sinks_ptr + head, is_row, 0.0).to(tl.float32) * LOG2E
            most = tl.maximum(top, sink)
            factor = tl.exp2(top - most)
            total = total * factor + tl.exp2(sink - most)
            gathered *= factor[:, None]
        out = gathered * value_scale / tl.where(is_row, total, 1.0)[:, None]
        into = out_ptr + place[:, None] * V + cv[None, :]
        keep = is_row[:, None] & (cv < V)[None, :]
        tl.store(into, out.to(out_ptr.dtype.element_ty), keep)


@triton.jit
def _merge(
    parts_ptr, tops_ptr, sums_ptr, sinks_ptr, out_ptr, place, head, is_row, splits, used, value_scale,
    V: tl.constexpr, BV: tl.constexpr, HAS_SINKS: tl.constexpr, ROWS: tl.constexpr,
    TOGETHER: tl.constexpr,
):  # fmt: skip
    """The spans of a few rows, TOGETHER at a time: each is scaled to the largest maximum so far."""
    column = tl.arange(0, BV)
    most = tl.full([ROWS], NEGATIVE, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if HAS_SINKS:
        most = tl.load(sinks_ptr + head, is_row, 0.0).to(tl.float32) * LOG2E
        total += 1.0
    gathered = tl.zeros([ROWS, BV], tl.float32)
    for start in range(0, used, TOGETHER):
        split = start + tl.arange(0, TOGETHER)
        at = place[:, None] * splits + split[None, :]
        there = is_row[:, None] & (split < used)[None, :]
        top = tl.load(tops_ptr + at, there, NEGATIVE, cache_modifier=".cg")
        share = tl.load(sums_ptr + at, there, 0.0, cache_modifier=".cg")
        from_parts = parts_ptr + at[:, :, None] * BV + column[None, None, :]
        parts = tl.load(from_parts, there[:, :, None], 0.0, cache_modifier=".cg")
        new_most = tl.maximum(most, tl.max(top, 1))
        base = tl.where(new_most == NEGATIVE, 0.0, new_most)
        shrink = tl.exp2(most - base)
        factor = tl.exp2(top - base[:, None])
        total = total * shrink + tl.sum(share * factor, 1)
        gathered = gathered * shrink[:, None] + tl.sum(parts * factor[:, :, None], 1)
        most = new_most
    out = gathered * value_scale / tl.where(is_row, total, 1.0)[:, None]
    into = out_ptr + place[:, None] * V + column[None, :]
    keep = is_row[:, None] & (column < V)[None, :]
    tl.store(into, out.to(out_ptr.dtype.element_ty), keep)


@triton.jit
def _zero(
    out_ptr, first, tokens, head, HEADS: tl.constexpr, GROUP: tl.constexpr, V: tl.constexpr,
    BV: tl.constexpr,
):  # fmt: skip
    """Tokens that are nobody's, under one key head."""
    column = tl.arange(0, BV)
    out_ptr += (first.to(tl.int64) * HEADS + head) * V
    for row in range(0, (tokens - first) * GROUP):
        place = (row // GROUP) * HEADS + row % GROUP
        empty = tl.zeros([BV], out_ptr.dtype.element_ty)
        tl.store(out_ptr + place * V + column, empty, column < V)


@triton.jit
def store_kernel(
    k_ptr, v_ptr, keys_ptr, values_ptr, slots_ptr, key_scale, value_scale, key_limit, value_limit,
    k_token, k_head, v_token, v_head, key_page, key_slot, key_head, value_page, value_slot, value_head,
    H: tl.constexpr, BH: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, PAGE: tl.constexpr,
    HAS_VALUES: tl.constexpr,
):  # fmt: skip
    """One head of one token into its slot."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots_ptr + token)
    column = tl.arange(0, BH)
    x = tl.load(k_ptr + token * k_token + head * k_head + column, column < H, 0.0)
    into_page(
        x.to(tl.float32), keys_ptr, slot, head, column, slot >= 0, key_scale, key_limit, key_page, key_slot,
        key_head, H, PAGE,
    )  # fmt: skip
    if HAS_VALUES:
        column = tl.arange(0, BV)
        x = tl.load(v_ptr + token * v_token + head * v_head + column, column < V, 0.0)
        into_page(
            x.to(tl.float32), values_ptr, slot, head, column, slot >= 0, value_scale, value_limit, value_page,
            value_slot, value_head, V, PAGE,
        )  # fmt: skip


# ---- launching -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """Tile sizes and how contexts are split."""

    rows: int
    keys: int
    warps: int
    stages: int
    splits: int


def plan(
    rows: int,
    key_dim: int,
    value_dim: int,
    wide: bool,
    programs: int,
    longest: int,
    processors: int,
) -> Plan:
    """For `rows` rows a sequence and key head, and `programs` of those.

    Contexts are split until every processor has two programs, since a program waits for memory most
    of its time. Measured on an H200 (`benchmarks/sweep_decode.py`): many programs want few warps each; in
    prefill 64 x 64 beat 128 rows and 128 keys, with 290 to 350 TFLOP/s.
    """
    large = key_dim > 256
    if rows <= 16:
        if programs >= 12 * processors:
            tile = Plan(16, 32, 1, 2 if large or wide else 4, 1)
        elif programs >= 2 * processors:
            tile = Plan(16, 32, 2, 2 if large or wide else 3, 1)
        else:
            tile = Plan(16, 32 if large or wide else 64, 4, 2, 1)
    else:
        side = 32 if large or wide else 64
        tile = Plan(side, side, 4, 2, 1)
    count = programs * cdiv(rows, tile.rows)
    splits = 1
    if rows <= 64:
        splits = min(cdiv(2 * processors, max(count, 1)), cdiv(longest, LEAST_SPAN))
    return Plan(tile.rows, tile.keys, tile.warps, tile.stages, max(min(splits, 64), 1))


def paged_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor | None,
    tables: Tensor,
    starts: Tensor,
    lengths: Tensor,
    scale: float,
    value_dim: int,
    window: int | None,
    chunk: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    key_scale: float,
    value_scale: float,
    max_query: int,
    max_length: int,
    fresh: tuple[Heads, Tensor] | None = None,
) -> Any:
    """`kernels.attention.paged_attention`; with `fresh` heads and their slots it stores them."""
    if q.dtype not in DTYPES or q.stride(-1) != 1 or keys.stride(-1) != 1 or scale * key_scale <= 0:
        return NotImplemented
    if values is not None and (values.dtype != keys.dtype or values.stride(-1) != 1):
        return NotImplemented
    tokens, heads, size = q.shape
    sequences, key_heads = lengths.shape[0], keys.shape[2]
    if q.numel() == 0 or sequences == 0 or max_query == 0:
        return torch.zeros((tokens, heads, value_dim), dtype=q.dtype, device=q.device)
    shared = values is None
    pages_of_values = keys if values is None else values
    compute = _compute(q.dtype, keys.dtype)
    group = heads // key_heads
    wide = compute is tl.float32
    reach = min(max_length, window or max_length, chunk or max_length)
    chosen = plan(
        max_query * group, size, value_dim, wide, sequences * key_heads, max(reach, 1),
        processors(q.device),
    )  # fmt: skip
    splits, split = chosen.splits, chosen.splits > 1
    out = torch.empty((tokens, heads, value_dim), dtype=q.dtype, device=q.device)
    first = 1 << (size.bit_length() - 1)
    first = max(first, 16)
    value_width = max(16, next_power_of_2(value_dim))
    numbers = tokens * heads * splits if split else 1
    parts = torch.empty(numbers * value_width if split else 1, device=q.device)
    tops, sums = torch.empty(2, numbers, device=q.device).unbind(0)
    tiles = cdiv(max_query * group, chosen.rows)
    counters = take_counters(q.device, sequences * tiles * key_heads) if split else lengths
    together = min(TOGETHER, next_power_of_2(splits))
    new, slots = fresh or (Heads(q, q, q, None, None, None, False), lengths)
    norms = new.norms or HeadNorms(q, q, 0.0, 0.0)
    cos, sin = (q, q) if new.cos is None or new.sin is None else (new.cos, new.sin)
    limit = torch.finfo(keys.dtype).max if keys.dtype.itemsize == 1 else float("inf")
    attention_kernel[(sequences * tiles + 1, key_heads, splits)](
        q, keys, pages_of_values, tables, starts, lengths, q if sinks is None else sinks, out,
        parts, tops, sums, counters,
        scale * key_scale, softcap or 1.0, key_scale if shared else value_scale, window or 0,
        chunk or 0, tiles, splits, tokens, sequences,
        *q.stride()[:2], tables.stride(0), *keys.stride()[:3], *pages_of_values.stride()[:3],
        new.k_XKH, new.v_XKV, slots, norms.query, norms.key, cos, sin, *new.k_XKH.stride()[:2],
        *new.v_XKV.stride()[:2], 0 if new.cos is None else cos.shape[-1], norms.eps, norms.offset, limit,
        HEADS=heads, GROUP=group, H=size, H1=first, H2=max(16, next_power_of_2(max(size - first, 1))),
        V=value_dim, BV=value_width, PAGE=keys.shape[1], SHARED=shared,
        HAS_SINKS=sinks is not None, SOFTCAP=softcap is not None, SPLIT=split,
        BOUNDED=bool(window or chunk) or max_query == 1,  # one walk waits for memory once
        PRECISION="ieee" if wide else "tf32", COMPUTE=compute, BM=chosen.rows, BN=chosen.keys,
        LEAST=LEAST_SPAN, TOGETHER=together,
        MERGED=min(
            chosen.rows, next_power_of_2(max_query * group),
            max(1, MERGED_NUMBERS // (together * value_width)),
        ),
        FRESH=fresh is not None, NORM=new.norms is not None, TURN=new.cos is not None,
        INTERLEAVED=new.interleaved,
        num_warps=chosen.warps, num_stages=chosen.stages, **early(q.device),
    )  # fmt: skip
    return out


def fresh_attention(heads: Heads, pages: Pages, *rest: Any) -> Any:
    """`kernels.attention.fresh_attention`."""
    q, size = heads.q_XNH, heads.q_XNH.shape[-1]
    whole = size == next_power_of_2(size) and size >= 16 and q.shape[0] > 0
    alike = all(t.dtype == q.dtype and t.dim() == 3 and t.stride(-1) == 1 for t in heads[:3])
    if not whole or not alike or not angles_fit(q, heads.cos, heads.sin) or not pages_fit(pages):
        return NotImplemented
    more: dict[str, Any] = {"fresh": (heads, pages.slots_T)}
    return paged_attention(q, *pages[:2], *rest, **more)


def _compute(query: torch.dtype, pages: torch.dtype) -> Any:
    """What the dot products run in: 16 bit where both sides fit it exactly."""
    if query == pages or pages.itemsize == 1:
        return {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}.get(query, tl.float32)
    return tl.float32


def store_pages(
    k: Tensor,
    v: Tensor | None,
    keys: Tensor,
    values: Tensor | None,
    slots: Tensor,
    key_scale: float,
    value_scale: float,
) -> Any:
    """`kernels.attention.store_pages`."""
    if k.dtype not in DTYPES or slots.dtype != torch.int64 or slots.stride(0) != 1:
        return NotImplemented
    if any(x is not None and x.stride(-1) != 1 for x in (k, v, keys, values)):
        return NotImplemented
    if k.numel() == 0:
        return None
    new_v, pages_v = (k, keys) if v is None or values is None else (v, values)
    limit = torch.finfo(keys.dtype).max if keys.dtype.itemsize == 1 else float("inf")
    store_kernel[(k.shape[0], k.shape[1])](
        k, new_v, keys, pages_v, slots, key_scale, value_scale, limit, limit,
        *k.stride()[:2], *new_v.stride()[:2], *keys.stride()[:3], *pages_v.stride()[:3],
        H=k.shape[2], BH=next_power_of_2(k.shape[2]), V=new_v.shape[2],
        BV=next_power_of_2(new_v.shape[2]), PAGE=keys.shape[1],
        HAS_VALUES=v is not None, num_warps=1,
    )  # fmt: skip
    return None
