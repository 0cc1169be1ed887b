# mypy: allow-untyped-defs, allow-incomplete-defs
"""Expanded latent attention on GPUs: one sequence's new tokens over keys and values of every head.

    scores = scale * (q_d . k_j + turned q_r . r_j)      out = sum_j softmax_j(scores) v_j

Keys come in pieces: `gather` reads a piece out of its pages, a matmul expands it, `attend_expanded` takes it, so that a
long context never lies expanded as a whole. Between pieces the running maxima, sums and weighted values stay in memory,
and the next piece goes on from them. Blocks of keys that every token of a tile sees whole have no mask.

    T  new tokens of the sequence    N  heads    D  plain part    R  rotary part    V  value    K  keys of a piece
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fulgurite.kernels.mla.reference import Parts
from fulgurite.kernels.mla.triton_decode import LOG2E, NEGATIVE
from fulgurite.kernels.mla.triton_store_kv import turned

GATHERED = 16  # latents that a program reads out of pages


class State(NamedTuple):
    """What the queries have gathered from the pieces so far."""

    tops_TN: Tensor
    sums_TN: Tensor
    gathered_TNV: Tensor


@triton.jit
def _walk(
    start, stop, q_d, q_r, top, total, gathered, position, up_ptr, ropes_ptr, first_key, keys,
    key_step, factor, D: tl.constexpr, BD: tl.constexpr, R: tl.constexpr, BR: tl.constexpr,
    V: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr, BN: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Keys start .. stop of the piece, a block at a time, with a running maximum and sum."""
    d, i, v = tl.arange(0, BD), tl.arange(0, BR), tl.arange(0, BV)
    for j in range(start, stop, BN):
        key = j + tl.arange(0, BN)
        inside = key < keys
        at = up_ptr + key.to(tl.int64) * key_step
        k = tl.load(at[:, None] + d[None, :], inside[:, None] & (d < D)[None, :], 0.0)
        scores = tl.dot(q_d, tl.trans(k), input_precision=PRECISION)
        if R > 0:
            from_r = ropes_ptr + (key * R)[:, None] + i[None, :]
            r = tl.load(from_r, inside[:, None] & (i < R)[None, :], 0.0)
            scores = tl.dot(q_r, tl.trans(r), scores, input_precision=PRECISION)
        if MASKED:
            seen = ((first_key + key)[None, :] <= position[:, None]) & inside[None, :]
            scores = tl.where(seen, scores, NEGATIVE)
        new_top = tl.maximum(top, tl.max(scores, 1) * factor)
        base = tl.where(new_top == NEGATIVE, 0.0, new_top) if MASKED else new_top
        weights = tl.exp2(scores * factor - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(weights, 1)
        values = tl.load((at + D)[:, None] + v[None, :], inside[:, None] & (v < V)[None, :], 0.0)
        gathered = tl.dot(
            weights.to(values.dtype), values, gathered * shrink[:, None], input_precision=PRECISION
        )
        top = new_top
    return top, total, gathered


@triton.jit
def expanded_kernel(
    q_ptr, cos_ptr, sin_ptr, up_ptr, ropes_ptr, out_ptr, tops_ptr, sums_ptr, gathered_ptr,
    scale, tokens, before, first_key, keys, q_token, q_head, key_step, head_step,
    HEADS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, R: tl.constexpr, BR: tl.constexpr,
    V: tl.constexpr, BV: tl.constexpr, INTERLEAVED: tl.constexpr, FIRST: tl.constexpr,
    LAST: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Tokens tile * BM .. of one head over the keys of one piece."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # later tiles have more keys: they go first
    head = tl.program_id(1)
    token = (tile * BM + tl.arange(0, BM)).to(tl.int64)
    is_row = token < tokens
    position = before + tile * BM + tl.arange(0, BM)
    d, v = tl.arange(0, BD), tl.arange(0, BV)
    row = token * q_token + head * q_head
    q_d = tl.load(q_ptr + row[:, None] + d[None, :], is_row[:, None] & (d < D)[None, :], 0.0)
    q_r = turned(q_ptr, row + D, cos_ptr, sin_ptr, token, is_row, R, BR, INTERLEAVED).to(q_d.dtype)
    place = token * HEADS + head
    to = place[:, None] * V + v[None, :]
    there = is_row[:, None] & (v < V)[None, :]
    if FIRST:
        top = tl.full([BM], NEGATIVE, tl.float32)
        total = tl.zeros([BM], tl.float32)
        gathered = tl.zeros([BM, BV], tl.float32)
    else:
        top = tl.load(tops_ptr + place, is_row, NEGATIVE)
        total = tl.load(sums_ptr + place, is_row, 0.0)
        gathered = tl.load(gathered_ptr + to, there, 0.0)

    reach = tl.minimum(before + tl.minimum((tile + 1) * BM, tokens) - first_key, keys)
    seen_by_all = tl.minimum(tl.maximum(before + tile * BM + 1 - first_key, 0), keys)
    whole = seen_by_all // BN * BN
    up_ptr += head * head_step
    top, total, gathered = _walk(
        0, whole, q_d, q_r, top, total, gathered, position, up_ptr, ropes_ptr, first_key, keys,
        key_step, scale * LOG2E, D, BD, R, BR, V, BV, PRECISION, BN, False,
    )  # fmt: skip
    top, total, gathered = _walk(
        whole, reach, q_d, q_r, top, total, gathered, position, up_ptr, ropes_ptr, first_key, keys,
        key_step, scale * LOG2E, D, BD, R, BR, V, BV, PRECISION, BN, True,
    )  # fmt: skip

    if LAST:
        tl.store(out_ptr + to, (gathered / total[:, None]).to(out_ptr.dtype.element_ty), there)
    else:
        tl.store(tops_ptr + place, top, is_row)
        tl.store(sums_ptr + place, total, is_row)
        tl.store(gathered_ptr + to, gathered, there)


@triton.jit
def gather_kernel(
    latents_ptr, ropes_ptr, scales_ptr, table_ptr, c_ptr, r_ptr, keys,
    latent_page, latent_slot, rope_page, rope_slot, scale_page, scale_slot,
    C: tl.constexpr, BC: tl.constexpr, R: tl.constexpr, BR: tl.constexpr, PAGE: tl.constexpr,
    PACKED: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """BK latents and rotary keys out of their pages, end to end, as numbers of the queries' kind."""
    key = tl.program_id(0) * BK + tl.arange(0, BK)
    inside = key < keys
    page, slot = tl.load(table_ptr + key // PAGE, inside, 0).to(tl.int64), key % PAGE
    column, i = tl.arange(0, BC), tl.arange(0, BR)
    keep = inside[:, None] & (column < C)[None, :]
    at = page * latent_page + slot * latent_slot
    c = tl.load(latents_ptr + at[:, None] + column[None, :], keep, 0.0)
    if PACKED:
        at = scales_ptr + page * scale_page + slot * scale_slot
        c = c.to(tl.float32) * tl.load(at, inside, 0.0)[:, None]
    to = c_ptr + key.to(tl.int64)[:, None] * C + column[None, :]
    tl.store(to, c.to(c_ptr.dtype.element_ty), keep)
    if R > 0:
        keep = inside[:, None] & (i < R)[None, :]
        at = page * rope_page + slot * rope_slot
        r = tl.load(ropes_ptr + at[:, None] + i[None, :], keep, 0.0)
        to = r_ptr + key.to(tl.int64)[:, None] * R + i[None, :]
        tl.store(to, r.to(r_ptr.dtype.element_ty), keep)


def gather(kept: Parts, row_M: Tensor, keys: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The first `keys` latents and rotary keys of the pages that a row of the table names."""
    rank, rope = kept.latents_PBC.shape[2], kept.ropes_PBR.shape[2]
    c_KC = torch.empty((keys, rank), dtype=dtype, device=row_M.device)
    r_KR = torch.empty((keys, rope), dtype=dtype, device=row_M.device)
    packed = kept.scales_PB is not None
    scales = c_KC if kept.scales_PB is None else kept.scales_PB
    gather_kernel[(triton.cdiv(keys, GATHERED),)](
        kept.latents_PBC, kept.ropes_PBR, scales, row_M, c_KC, r_KR, keys,
        *kept.latents_PBC.stride()[:2], *kept.ropes_PBR.stride()[:2],
        *(scales.stride() if packed else (0, 0)),
        C=rank, BC=_width(rank), R=rope, BR=_width(rope), PAGE=kept.latents_PBC.shape[1],
        PACKED=packed, BK=GATHERED, num_warps=4,
    )  # fmt: skip
    return c_KC, r_KR


def empty_state(tokens: int, heads: int, value: int, device: torch.device) -> State:
    tops, sums = torch.empty(2, tokens, heads, device=device).unbind(0)
    return State(tops, sums, torch.empty(tokens, heads, value, device=device))


def attend_expanded(
    q_TNH: Tensor,
    cos: Tensor,
    sin: Tensor,
    up_KNU: Tensor,
    ropes_KR: Tensor,
    out_TNV: Tensor,
    state: State,
    scale: float,
    interleaved: bool,
    before: int,
    first_key: int,
    is_last: bool,
) -> None:
    """One piece of keys, from `first_key` on, into `out_TNV` or, before the last piece, into `state`.

    before   how many keys lie before the first new token
    """
    tokens, heads, size = q_TNH.shape
    keys, rope, value = up_KNU.shape[0], ropes_KR.shape[1], out_TNV.shape[2]
    plain, wide = size - rope, q_TNH.dtype == torch.float32
    rows = 32 if wide else 128 if tokens > 64 else 64
    expanded_kernel[(triton.cdiv(tokens, rows), heads)](
        q_TNH, cos, sin, up_KNU, ropes_KR, out_TNV, *state,
        scale, tokens, before, first_key, keys, *q_TNH.stride()[:2], *up_KNU.stride()[:2],
        HEADS=heads, D=plain, BD=_width(plain), R=rope, BR=_width(rope), V=value, BV=_width(value),
        INTERLEAVED=interleaved, FIRST=first_key == 0, LAST=is_last,
        PRECISION="ieee" if wide else "tf32", BM=rows,
        BN=32 if wide else 64, num_warps=4 if rows <= 64 else 8, num_stages=1 if wide else 3,
    )  # fmt: skip


def _width(size: int) -> int:
    return max(16, triton.next_power_of_2(size))
