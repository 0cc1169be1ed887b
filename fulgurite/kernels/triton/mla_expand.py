"""Expanded latent attention on GPUs: one sequence's new tokens over keys and values of every head.

    scores = scale * (q_d . k_j + turned q_r . r_j)      out = sum_j softmax_j(scores) v_j

Keys come in pieces, `expand` of a piece at a time, so that a long context never lies expanded as a whole. Between
pieces the running maxima, sums and weighted values stay in memory, and the next piece goes on from them.

    T  new tokens of the sequence    N  heads    D  plain part    R  rotary part    V  value    K  keys of a piece
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fulgurite.kernels.triton.mla_decode import LOG2E, NEGATIVE
from fulgurite.kernels.triton.mla_write import turned


class State(NamedTuple):
    """What the queries have gathered from the pieces so far."""

    tops_TN: Tensor
    sums_TN: Tensor
    gathered_TNV: Tensor


@triton.jit
def expanded_kernel(
    q_ptr, cos_ptr, sin_ptr, up_ptr, ropes_ptr, out_ptr, tops_ptr, sums_ptr, gathered_ptr,
    scale, tokens, before, first_key, keys, q_token, q_head, key_step, head_step,
    HEADS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, R: tl.constexpr, BR: tl.constexpr,
    V: tl.constexpr, BV: tl.constexpr, INTERLEAVED: tl.constexpr, FIRST: tl.constexpr,
    LAST: tl.constexpr, PRECISION: tl.constexpr, COMPUTE: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """Tokens tile * BM .. of one head over the keys of one piece."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # later tiles have more keys: they go first
    head = tl.program_id(1)
    token = (tile * BM + tl.arange(0, BM)).to(tl.int64)
    is_row = token < tokens
    position = before + token
    d, i, v = tl.arange(0, BD), tl.arange(0, BR), tl.arange(0, BV)
    row = token * q_token + head * q_head
    q_d = tl.load(q_ptr + row[:, None] + d[None, :], is_row[:, None] & (d < D)[None, :], 0.0)
    q_d = q_d.to(COMPUTE)
    q_r = turned(q_ptr, row + D, cos_ptr, sin_ptr, token, is_row, R, BR, INTERLEAVED).to(COMPUTE)
    place = token * HEADS + head
    if FIRST:
        top = tl.full([BM], NEGATIVE, tl.float32)
        total = tl.zeros([BM], tl.float32)
        gathered = tl.zeros([BM, BV], tl.float32)
    else:
        top = tl.load(tops_ptr + place, is_row, NEGATIVE)
        total = tl.load(sums_ptr + place, is_row, 0.0)
        there = is_row[:, None] & (v < V)[None, :]
        gathered = tl.load(gathered_ptr + place[:, None] * V + v[None, :], there, 0.0)

    reach = tl.minimum(before + tl.minimum((tile + 1) * BM, tokens) - first_key, keys)
    for j in range(0, reach, BN):
        key = j + tl.arange(0, BN)
        inside = key < keys
        at = key.to(tl.int64) * key_step + head * head_step
        k = tl.load(up_ptr + at[:, None] + d[None, :], inside[:, None] & (d < D)[None, :], 0.0)
        scores = tl.dot(q_d, tl.trans(k.to(COMPUTE)), input_precision=PRECISION)
        if R > 0:
            from_r = ropes_ptr + (key * R)[:, None] + i[None, :]
            r = tl.load(from_r, inside[:, None] & (i < R)[None, :], 0.0).to(COMPUTE)
            scores = tl.dot(q_r, tl.trans(r), scores, input_precision=PRECISION)
        seen = ((first_key + key)[None, :] <= position[:, None]) & inside[None, :]
        scores = tl.where(seen, scores * (scale * LOG2E), NEGATIVE)
        new_top = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(new_top == NEGATIVE, 0.0, new_top)
        weights = tl.exp2(scores - base[:, None])
        factor = tl.exp2(top - base)
        total = total * factor + tl.sum(weights, 1)
        where = inside[:, None] & (v < V)[None, :]
        values = tl.load(up_ptr + (at + D)[:, None] + v[None, :], where, 0.0).to(COMPUTE)
        gathered = tl.dot(
            weights.to(COMPUTE), values, gathered * factor[:, None], input_precision=PRECISION
        )
        top = new_top

    to = place[:, None] * V + v[None, :]
    there = is_row[:, None] & (v < V)[None, :]
    if LAST:
        out = (gathered / total[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + to, out, there)
    else:
        tl.store(tops_ptr + place, top, is_row)
        tl.store(sums_ptr + place, total, is_row)
        tl.store(gathered_ptr + to, gathered, there)


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
    kinds = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
    rows = 32 if wide else 128 if tokens > 64 else 64
    expanded_kernel[(triton.cdiv(tokens, rows), heads)](
        q_TNH, cos, sin, up_KNU, ropes_KR, out_TNV, *state,
        scale, tokens, before, first_key, keys, *q_TNH.stride()[:2], *up_KNU.stride()[:2],
        HEADS=heads, D=plain, BD=_width(plain), R=rope, BR=_width(rope), V=value, BV=_width(value),
        INTERLEAVED=interleaved, FIRST=first_key == 0, LAST=is_last,
        PRECISION="ieee" if wide else "tf32", COMPUTE=kinds[q_TNH.dtype], BM=rows,
        BN=32 if wide else 64, num_warps=4 if rows <= 64 else 8, num_stages=1 if wide else 2,
    )  # fmt: skip


def _width(size: int) -> int:
    return max(16, triton.next_power_of_2(size))
