"""Paged attention on GPUs: one kernel for prefill and decode, flash-style, and one that merges splits.

    out[t, n] = sum_j p_j value[j],   p = softmax over the seen keys j, and the sink, of
    softcap * tanh(scale * q[t, n] . key[j] / softcap)

A program takes a tile of rows, the (token, head) pairs of one sequence that share a key head, over a
span of that sequence's keys. With few programs (decode of a small batch) contexts are split into spans,
and `merge_kernel` joins what they found: each span leaves its maximum, its sum and its weighted values.
What a row sees is an interval of keys whether by cause, window or chunk, so masks are two numbers.

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

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PROCESSORS = 132  # of an H200; splits fill about two programs on each
LEAST_SPAN = 128  # keys worth a program of their own
NEGATIVE = tl.constexpr(-float("inf"))
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _tanh(x):
    """By its series near 0, where 2 sigmoid(2x) - 1 would lose digits."""
    z = x * x
    series = x * (1.0 + z * (-1.0 / 3 + z * (2.0 / 15 + z * (-17.0 / 315 + z * (62.0 / 2835)))))
    return tl.where(tl.abs(x) < 0.3, series, 2.0 * tl.sigmoid(2.0 * x) - 1.0)


@triton.jit
def _walk(
    start, stop, last, q1, q2, top, total, gathered, low, position, keys_ptr, values_ptr, table,
    key_head, scale, softcap, key_page, key_slot, key_head_step, value_page, value_slot,
    value_head_step, H: tl.constexpr, H1: tl.constexpr, H2: tl.constexpr, V: tl.constexpr,
    BV: tl.constexpr, PAGE: tl.constexpr, SHARED: tl.constexpr, SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr, COMPUTE: tl.constexpr, BN: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Keys start .. stop, a block at a time, with a running maximum and sum (online softmax)."""
    c1, c2, cv = tl.arange(0, H1), H1 + tl.arange(0, H2), tl.arange(0, BV)
    for j in range(start, stop, BN):
        key = j + tl.arange(0, BN)
        inside = key < (last if MASKED else j + BN)
        page = tl.load(table + key // PAGE, inside, 0).to(tl.int64)
        slot = key % PAGE
        at_key = (page * key_page + slot * key_slot + key_head * key_head_step)[:, None]
        k1 = tl.load(keys_ptr + at_key + c1[None, :], inside[:, None] & (c1 < H)[None, :], 0.0)
        k1 = k1.to(COMPUTE)
        scores = tl.dot(q1, tl.trans(k1), input_precision=PRECISION)
        if H > H1:
            k2 = tl.load(keys_ptr + at_key + c2[None, :], inside[:, None] & (c2 < H)[None, :], 0.0)
            scores = tl.dot(q2, tl.trans(k2.to(COMPUTE)), scores, input_precision=PRECISION)
        if SOFTCAP:
            scores = (softcap * LOG2E) * _tanh(scores * (scale / softcap))
        else:
            scores *= scale * LOG2E
        if MASKED:
            seen = (key[None, :] >= low[:, None]) & (key[None, :] <= position[:, None])
            scores = tl.where(seen & inside[None, :], scores, NEGATIVE)
        new_top = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(new_top == NEGATIVE, 0.0, new_top) if MASKED else new_top
        weights = tl.exp2(scores - base[:, None])
        factor = tl.exp2(top - base)
        total = total * factor + tl.sum(weights, 1)
        if SHARED and V == H1:
            values = k1
        else:
            at_value = (page * value_page + slot * value_slot + key_head * value_head_step)[:, None]
            where = inside[:, None] & (cv < V)[None, :]
            values = tl.load(values_ptr + at_value + cv[None, :], where, 0.0).to(COMPUTE)
        gathered = tl.dot(
            weights.to(COMPUTE), values, gathered * factor[:, None], input_precision=PRECISION
        )
        top = new_top
    return top, total, gathered


@triton.jit
def attention_kernel(
    q_ptr, keys_ptr, values_ptr, tables_ptr, starts_ptr, lengths_ptr, sinks_ptr, out_ptr,
    parts_ptr, tops_ptr, sums_ptr,
    scale, softcap, value_scale, window, chunk, tiles, splits, tokens,
    q_token, q_head, table_row, key_page, key_slot, key_head_step, value_page, value_slot,
    value_head_step,
    HEADS: tl.constexpr, GROUP: tl.constexpr, H: tl.constexpr, H1: tl.constexpr, H2: tl.constexpr,
    V: tl.constexpr, BV: tl.constexpr, PAGE: tl.constexpr, SHARED: tl.constexpr,
    HAS_SINKS: tl.constexpr, SOFTCAP: tl.constexpr, SPLIT: tl.constexpr, BOUNDED: tl.constexpr,
    PRECISION: tl.constexpr, COMPUTE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Rows tile * BM .. of one sequence under one key head, over one span of its keys."""
    sequence = tl.program_id(0) // tiles
    tile = tiles - 1 - tl.program_id(0) % tiles  # later tiles have more keys: they go first
    key_head = tl.program_id(1)
    split = tl.program_id(2)
    start = tl.load(starts_ptr + sequence)
    count = tl.load(starts_ptr + sequence + 1) - start
    length = tl.load(lengths_ptr + sequence)
    if tile * BM >= count * GROUP:
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
    if SPLIT:
        span = tl.cdiv(tl.cdiv(last - first, splits), BN) * BN
        first = first + split * span
        last = tl.minimum(last, first + span)

    c1, c2, cv = tl.arange(0, H1), H1 + tl.arange(0, H2), tl.arange(0, BV)
    from_q = q_ptr + ((start + token).to(tl.int64) * q_token + head * q_head)[:, None]
    q1 = tl.load(from_q + c1[None, :], is_row[:, None] & (c1 < H)[None, :], 0.0).to(COMPUTE)
    q2 = tl.load(from_q + c2[None, :], is_row[:, None] & (c2 < H)[None, :], 0.0).to(COMPUTE)
    top = tl.full([BM], NEGATIVE, tl.float32)
    total = tl.zeros([BM], tl.float32)
    gathered = tl.zeros([BM, BV], tl.float32)
    table = tables_ptr + sequence.to(tl.int64) * table_row

    # blocks that every row sees whole need no mask: all but the last ones without a window or chunk
    whole = first
    if not BOUNDED:
        low_last = tl.min(tl.where(is_row, position, last), 0) + 1
        whole = first + tl.maximum(tl.minimum(low_last, last) - first, 0) // BN * BN
        top, total, gathered = _walk(
            first, whole, last, q1, q2, top, total, gathered, low, position, keys_ptr, values_ptr, table,
            key_head, scale, softcap, key_page, key_slot, key_head_step, value_page, value_slot,
            value_head_step, H, H1, H2, V, BV, PAGE, SHARED, SOFTCAP, PRECISION, COMPUTE, BN, False,
        )  # fmt: skip
    top, total, gathered = _walk(
        whole, last, last, q1, q2, top, total, gathered, low, position, keys_ptr, values_ptr, table,
        key_head, scale, softcap, key_page, key_slot, key_head_step, value_page, value_slot,
        value_head_step, H, H1, H2, V, BV, PAGE, SHARED, SOFTCAP, PRECISION, COMPUTE, BN, True,
    )  # fmt: skip

    if SPLIT:
        place = ((start + token).to(tl.int64) * HEADS + head) * splits + split
        tl.store(tops_ptr + place, top, is_row)
        tl.store(sums_ptr + place, total, is_row)
        tl.store(parts_ptr + place[:, None] * BV + cv[None, :], gathered, is_row[:, None])
    else:
        if HAS_SINKS:
            sink = tl.load(sinks_ptr + head, is_row, 0.0).to(tl.float32) * LOG2E
            most = tl.maximum(top, sink)
            factor = tl.exp2(top - most)
            total = total * factor + tl.exp2(sink - most)
            gathered *= factor[:, None]
        out = gathered * value_scale / total[:, None]
        place = ((start + token).to(tl.int64) * HEADS + head)[:, None] * V + cv[None, :]
        tl.store(
            out_ptr + place, out.to(out_ptr.dtype.element_ty), is_row[:, None] & (cv < V)[None, :]
        )


@triton.jit
def merge_kernel(
    parts_ptr, tops_ptr, sums_ptr, sinks_ptr, starts_ptr, out_ptr, value_scale, splits, sequences,
    HEADS: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, HAS_SINKS: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    """The spans of one (token, head): each is scaled to the largest maximum."""
    token, head = tl.program_id(0), tl.program_id(1)
    place = (token.to(tl.int64) * HEADS + head) * splits
    split, column = tl.arange(0, SPLITS), tl.arange(0, BV)
    at = (token.to(tl.int64) * HEADS + head) * V + column
    if token >= tl.load(starts_ptr + sequences):  # nobody's
        tl.store(out_ptr + at, tl.zeros([BV], out_ptr.dtype.element_ty), column < V)
        return
    top = tl.load(tops_ptr + place + split, split < splits, NEGATIVE)
    most = tl.max(top, 0)
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head).to(tl.float32) * LOG2E
        most = tl.maximum(most, sink)
    factor = tl.exp2(top - tl.where(most == NEGATIVE, 0.0, most))
    total = tl.sum(tl.load(sums_ptr + place + split, split < splits, 0.0) * factor, 0)
    if HAS_SINKS:
        total += tl.exp2(sink - most)
    where = (split < splits)[:, None]
    parts = tl.load(parts_ptr + (place + split)[:, None] * BV + column[None, :], where, 0.0)
    out = tl.sum(parts * factor[:, None], 0) * value_scale / total
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), column < V)


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
    if slot < 0:
        return
    page, within = slot // PAGE, slot % PAGE
    column = tl.arange(0, BH)
    x = tl.load(k_ptr + token * k_token + head * k_head + column, column < H, 0.0).to(tl.float32)
    x = tl.clamp(tl.div_rn(x, key_scale), -key_limit, key_limit)
    to = keys_ptr + page * key_page + within * key_slot + head * key_head + column
    tl.store(to, x.to(keys_ptr.dtype.element_ty), column < H)
    if HAS_VALUES:
        column = tl.arange(0, BV)
        x = tl.load(v_ptr + token * v_token + head * v_head + column, column < V, 0.0).to(
            tl.float32
        )
        x = tl.clamp(tl.div_rn(x, value_scale), -value_limit, value_limit)
        to = values_ptr + page * value_page + within * value_slot + head * value_head + column
        tl.store(to, x.to(values_ptr.dtype.element_ty), column < V)


# ---- launching -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """Tile sizes and how contexts are split."""

    rows: int
    keys: int
    warps: int
    stages: int
    splits: int


def plan(rows: int, key_dim: int, value_dim: int, wide: bool, programs: int, longest: int) -> Plan:
    """For `rows` rows a sequence and key head, `programs` of them at 16 rows a tile."""
    large = key_dim > 256
    if rows <= 16:
        tile = Plan(16, 32, 4, 2 if large or wide else 5, 1)  # H200: 32 x 5 stages beat 64 and 128
    elif rows <= 64 or large or wide:
        tile = Plan(32 if large or wide else 64, 32 if large or wide else 64, 4, 2, 1)
    else:
        tile = Plan(64, 64, 4, 2, 1)  # H200: 205 TFLOP/s of 64, 128 x 32, 64, 128
    count = programs * triton.cdiv(rows, tile.rows)
    splits = 1
    if rows <= 64:
        splits = min(
            triton.cdiv(2 * PROCESSORS, max(count, 1)), triton.cdiv(longest, LEAST_SPAN), 64
        )
    return Plan(tile.rows, tile.keys, tile.warps, tile.stages, max(splits, 1))


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
) -> Any:
    """`kernels.attention.paged_attention`."""
    if q.dtype not in DTYPES or q.stride(-1) != 1 or keys.stride(-1) != 1:
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
    chosen = plan(max_query * group, size, value_dim, wide, sequences * key_heads, max(reach, 1))
    splits, split = chosen.splits, chosen.splits > 1
    make = torch.empty if split else torch.zeros  # merging writes every token, nobody's too
    out = make((tokens, heads, value_dim), dtype=q.dtype, device=q.device)
    first = 1 << (size.bit_length() - 1)
    first = max(first, 16)
    value_width = max(16, triton.next_power_of_2(value_dim))
    numbers = tokens * heads * splits if split else 1
    parts = torch.empty(numbers * value_width if split else 1, device=q.device)
    tops, sums = torch.empty(2, numbers, device=q.device).unbind(0)
    tiles = triton.cdiv(max_query * group, chosen.rows)
    attention_kernel[(sequences * tiles, key_heads, splits)](
        q, keys, pages_of_values, tables, starts, lengths, q if sinks is None else sinks, out,
        parts, tops, sums,
        scale * key_scale, softcap or 1.0, key_scale if shared else value_scale, window or 0,
        chunk or 0, tiles, splits, tokens,
        *q.stride()[:2], tables.stride(0), *keys.stride()[:3], *pages_of_values.stride()[:3],
        HEADS=heads, GROUP=group, H=size, H1=first, H2=max(16, triton.next_power_of_2(max(size - first, 1))),
        V=value_dim, BV=value_width, PAGE=keys.shape[1], SHARED=shared,
        HAS_SINKS=sinks is not None, SOFTCAP=softcap is not None, SPLIT=split,
        BOUNDED=bool(window or chunk),
        PRECISION="ieee" if wide else "tf32", COMPUTE=compute, BM=chosen.rows, BN=chosen.keys,
        num_warps=chosen.warps, num_stages=chosen.stages,
    )  # fmt: skip
    if split:
        merge_kernel[(tokens, heads)](
            parts, tops, sums, q if sinks is None else sinks, starts, out,
            key_scale if shared else value_scale, splits, sequences,
            HEADS=heads, V=value_dim, BV=value_width, HAS_SINKS=sinks is not None,
            SPLITS=triton.next_power_of_2(splits), num_warps=4,
        )  # fmt: skip
    return out


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
        H=k.shape[2], BH=triton.next_power_of_2(k.shape[2]), V=new_v.shape[2],
        BV=triton.next_power_of_2(new_v.shape[2]), PAGE=keys.shape[1],
        HAS_VALUES=v is not None, num_warps=1,
    )  # fmt: skip
    return None
