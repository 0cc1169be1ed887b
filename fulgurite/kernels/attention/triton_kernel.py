# mypy: allow-untyped-defs, allow-incomplete-defs
"""The kernel of paged attention on GPUs; `attention.py` says what it computes, and launches it.

A program takes a tile of rows, the (token, head) pairs of one sequence that share a key head, over a
span of that sequence's keys. With few programs (decode of a small batch) contexts are split into spans:
each leaves its maximum, its sum and its weighted values, and the program that is last to finish a tile
merges them. What a row sees is an interval of keys whether by cause, window or chunk, so masks are two
numbers, and blocks that every row sees whole have none.

Where a page holds whole blocks of keys, a block is in one page: its address is one number, and keys are
read as from a plain matrix. With small pages every key looks its page up.

A key of H numbers is read as two tiles, the largest power of two in H and the rest, so that 576, 96 and
80 waste nothing or little.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fulgurite.kernels.common.triton_launch import prepared
from fulgurite.kernels.common.triton_pdl import fetch_ahead, let_next_start, wait_for_inputs
from fulgurite.kernels.elementwise.triton_elementwise import into_page, tanh, turned_rows

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


@prepared
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
