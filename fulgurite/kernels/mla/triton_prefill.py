# mypy: allow-untyped-defs, allow-incomplete-defs
"""Expanded MLA on GPUs: one sequence's new tokens over the expanded keys and values of every head.

    scores = scale * (q_d . k_j + rope(q_r) . r_j)      out = sum_j softmax_j(scores) v_j

Keys are expanded chunk by chunk, so that a long context is never expanded as a whole:
`gather_latents` reads a chunk out of the cache, a GEMM expands it, and `attend_expanded` attends to
it. Between chunks the running maximum, sum and accumulator are in memory. Blocks of keys that every
token of a tile sees completely are not masked.

    T  new tokens of the sequence    N  heads    D  part without RoPE    R  rotary part    V  value
    K  keys of a chunk
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fulgurite.kernels.common.triton_import import tl, triton
from fulgurite.kernels.common.triton_launch import cached_launch
from fulgurite.kernels.integer_math import cdiv, next_power_of_2
from fulgurite.kernels.mla.reference import LatentCache
from fulgurite.kernels.mla.triton_decode import LOG2E, NEG_INF
from fulgurite.kernels.mla.triton_store_kv import load_rope
from fulgurite.kernels.tuning.heuristics import heuristics_for


class SoftmaxState(NamedTuple):
    """Online softmax state of the queries after some chunks."""

    max_TN: Tensor
    sum_TN: Tensor
    acc_TNV: Tensor


@triton.jit
def _attend_blocks(
    start, stop, q_d, q_r, m_i, l_i, acc, position, kv_ptr, ropes_ptr, first_key, keys,
    key_stride, qk_scale, D: tl.constexpr, BD: tl.constexpr, R: tl.constexpr, BR: tl.constexpr,
    V: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr, BN: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Online softmax over keys start .. stop of the chunk, in blocks of BN."""
    d, i, v = tl.arange(0, BD), tl.arange(0, BR), tl.arange(0, BV)
    for j in range(start, stop, BN):
        key = j + tl.arange(0, BN)
        is_key = key < keys
        kv_ptrs = kv_ptr + key.to(tl.int64) * key_stride
        k = tl.load(kv_ptrs[:, None] + d[None, :], is_key[:, None] & (d < D)[None, :], 0.0)
        qk = tl.dot(q_d, tl.trans(k), input_precision=PRECISION)
        if R > 0:
            rope_key_ptrs = ropes_ptr + (key * R)[:, None] + i[None, :]
            r = tl.load(rope_key_ptrs, is_key[:, None] & (i < R)[None, :], 0.0)
            qk = tl.dot(q_r, tl.trans(r), qk, input_precision=PRECISION)
        if MASKED:
            visible = ((first_key + key)[None, :] <= position[:, None]) & is_key[None, :]
            qk = tl.where(visible, qk, NEG_INF)
        m_new = tl.maximum(m_i, tl.max(qk, 1) * qk_scale)
        m_base = tl.where(m_new == NEG_INF, 0.0, m_new) if MASKED else m_new
        p = tl.exp2(qk * qk_scale - m_base[:, None])
        alpha = tl.exp2(m_i - m_base)
        l_i = l_i * alpha + tl.sum(p, 1)
        value_ptrs = (kv_ptrs + D)[:, None] + v[None, :]
        values = tl.load(value_ptrs, is_key[:, None] & (v < V)[None, :], 0.0)
        acc = tl.dot(p.to(values.dtype), values, acc * alpha[:, None], input_precision=PRECISION)
        m_i = m_new
    return m_i, l_i, acc


@cached_launch
def mla_prefill_kernel(
    q_ptr, cos_ptr, sin_ptr, kv_ptr, ropes_ptr, out_ptr, max_ptr, sum_ptr, acc_ptr,
    scale, tokens, cached, first_key, keys, q_token_stride, q_head_stride, key_stride, head_stride,
    HEADS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, R: tl.constexpr, BR: tl.constexpr,
    V: tl.constexpr, BV: tl.constexpr, INTERLEAVED: tl.constexpr, FIRST: tl.constexpr,
    LAST: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Tokens tile * BM .. of one head, over the keys of one chunk."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # later tiles have more keys: run them first
    head = tl.program_id(1)
    token = (tile * BM + tl.arange(0, BM)).to(tl.int64)
    is_row = token < tokens
    position = cached + tile * BM + tl.arange(0, BM)
    d, v = tl.arange(0, BD), tl.arange(0, BV)
    row = token * q_token_stride + head * q_head_stride
    q_d = tl.load(q_ptr + row[:, None] + d[None, :], is_row[:, None] & (d < D)[None, :], 0.0)
    q_r = load_rope(q_ptr, row + D, cos_ptr, sin_ptr, token, is_row, R, BR, INTERLEAVED)
    q_r = q_r.to(q_d.dtype)
    state_row = token * HEADS + head
    out_offsets = state_row[:, None] * V + v[None, :]
    mask = is_row[:, None] & (v < V)[None, :]
    if FIRST:
        m_i = tl.full([BM], NEG_INF, tl.float32)
        l_i = tl.zeros([BM], tl.float32)
        acc = tl.zeros([BM, BV], tl.float32)
    else:
        m_i = tl.load(max_ptr + state_row, is_row, NEG_INF)
        l_i = tl.load(sum_ptr + state_row, is_row, 0.0)
        acc = tl.load(acc_ptr + out_offsets, mask, 0.0)

    visible_end = tl.minimum(cached + tl.minimum((tile + 1) * BM, tokens) - first_key, keys)
    all_visible_end = tl.minimum(tl.maximum(cached + tile * BM + 1 - first_key, 0), keys)
    unmasked_end = all_visible_end // BN * BN
    kv_ptr += head * head_stride
    m_i, l_i, acc = _attend_blocks(
        0, unmasked_end, q_d, q_r, m_i, l_i, acc, position, kv_ptr, ropes_ptr, first_key, keys,
        key_stride, scale * LOG2E, D, BD, R, BR, V, BV, PRECISION, BN, False,
    )  # fmt: skip
    m_i, l_i, acc = _attend_blocks(
        unmasked_end, visible_end, q_d, q_r, m_i, l_i, acc, position, kv_ptr, ropes_ptr, first_key,
        keys, key_stride, scale * LOG2E, D, BD, R, BR, V, BV, PRECISION, BN, True,
    )  # fmt: skip

    if LAST:
        tl.store(out_ptr + out_offsets, (acc / l_i[:, None]).to(out_ptr.dtype.element_ty), mask)
    else:
        tl.store(max_ptr + state_row, m_i, is_row)
        tl.store(sum_ptr + state_row, l_i, is_row)
        tl.store(acc_ptr + out_offsets, acc, mask)


@cached_launch
def gather_latents_kernel(
    latents_ptr, ropes_ptr, scales_ptr, table_ptr, c_ptr, r_ptr, keys, latent_block_stride,
    latent_slot_stride, rope_block_stride, rope_slot_stride, scale_block_stride, scale_slot_stride,
    C: tl.constexpr, BC: tl.constexpr, R: tl.constexpr, BR: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    FP8: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """BK latents and rotary keys out of the cache, end to end, in the queries' dtype."""
    key = tl.program_id(0) * BK + tl.arange(0, BK)
    is_key = key < keys
    block, slot = tl.load(table_ptr + key // BLOCK_SIZE, is_key, 0).to(tl.int64), key % BLOCK_SIZE
    column, i = tl.arange(0, BC), tl.arange(0, BR)
    mask = is_key[:, None] & (column < C)[None, :]
    offsets = block * latent_block_stride + slot * latent_slot_stride
    c = tl.load(latents_ptr + offsets[:, None] + column[None, :], mask, 0.0)
    if FP8:
        scale_ptrs = scales_ptr + block * scale_block_stride + slot * scale_slot_stride
        c = c.to(tl.float32) * tl.load(scale_ptrs, is_key, 0.0)[:, None]
    c_ptrs = c_ptr + key.to(tl.int64)[:, None] * C + column[None, :]
    tl.store(c_ptrs, c.to(c_ptr.dtype.element_ty), mask)
    if R > 0:
        mask = is_key[:, None] & (i < R)[None, :]
        offsets = block * rope_block_stride + slot * rope_slot_stride
        r = tl.load(ropes_ptr + offsets[:, None] + i[None, :], mask, 0.0)
        r_ptrs = r_ptr + key.to(tl.int64)[:, None] * R + i[None, :]
        tl.store(r_ptrs, r.to(r_ptr.dtype.element_ty), mask)


def gather_latents(
    cache: LatentCache, blocks_M: Tensor, keys: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The first `keys` latents and rotary keys of a sequence's blocks."""
    rank, rope_dim = cache.latents_PBC.shape[2], cache.ropes_PBR.shape[2]
    c_KC = torch.empty((keys, rank), dtype=dtype, device=blocks_M.device)
    r_KR = torch.empty((keys, rope_dim), dtype=dtype, device=blocks_M.device)
    is_fp8 = cache.scales_PB is not None
    scales = c_KC if cache.scales_PB is None else cache.scales_PB
    config = heuristics_for(blocks_M.device).mla_gather
    gather_latents_kernel[(cdiv(keys, config.block_m),)](
        cache.latents_PBC, cache.ropes_PBR, scales, blocks_M, c_KC, r_KR, keys,
        *cache.latents_PBC.stride()[:2], *cache.ropes_PBR.stride()[:2],
        *(scales.stride() if is_fp8 else (0, 0)),
        C=rank, BC=_padded_width(rank), R=rope_dim, BR=_padded_width(rope_dim),
        BLOCK_SIZE=cache.latents_PBC.shape[1], FP8=is_fp8, BK=config.block_m,
        num_warps=config.num_warps,
    )  # fmt: skip
    return c_KC, r_KR


def allocate_state(tokens: int, heads: int, value_dim: int, device: torch.device) -> SoftmaxState:
    row_max, row_sum = torch.empty(2, tokens, heads, device=device).unbind(0)
    return SoftmaxState(row_max, row_sum, torch.empty(tokens, heads, value_dim, device=device))


class KeyChunk(NamedTuple):
    """Expanded keys and values of a chunk, and its place in the sequence.

    cached      keys before the first new token
    first_key   position of the chunk's first key
    """

    kv_KNU: Tensor
    ropes_KR: Tensor
    cached: int
    first_key: int
    is_last: bool


def attend_expanded(
    q_TNH: Tensor,
    cos: Tensor,
    sin: Tensor,
    chunk: KeyChunk,
    out_TNV: Tensor,
    state: SoftmaxState,
    scale: float,
    interleaved: bool,
) -> None:
    """Attend to one chunk of keys, into `out_TNV`, or into `state` before the last chunk."""
    tokens, heads, size = q_TNH.shape
    keys, rope_dim, value_dim = len(chunk.kv_KNU), chunk.ropes_KR.shape[1], out_TNV.shape[2]
    nope_dim, is_float32 = size - rope_dim, q_TNH.dtype == torch.float32
    config = heuristics_for(q_TNH.device).mla_prefill_config(tokens, is_float32)
    mla_prefill_kernel[(cdiv(tokens, config.block_m), heads)](
        q_TNH, cos, sin, chunk.kv_KNU, chunk.ropes_KR, out_TNV, *state,
        scale, tokens, chunk.cached, chunk.first_key, keys, *q_TNH.stride()[:2],
        *chunk.kv_KNU.stride()[:2],
        HEADS=heads, D=nope_dim, BD=_padded_width(nope_dim), R=rope_dim,
        BR=_padded_width(rope_dim), V=value_dim, BV=_padded_width(value_dim),
        INTERLEAVED=interleaved, FIRST=chunk.first_key == 0, LAST=chunk.is_last,
        PRECISION="ieee" if is_float32 else "tf32", BM=config.block_m, BN=config.block_n,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip


def _padded_width(size: int) -> int:
    return max(16, next_power_of_2(size))
