# mypy: allow-untyped-defs, allow-incomplete-defs
"""Expanded MLA on GPUs: prompts of any number of sequences over the keys and values of every head.

    scores = scale * (q_d . k_j + rope(q_r) . r_j)      out = sum_j softmax_j(scores) v_j

The keys of all sequences are expanded chunk by chunk (`prefill_plan.py`), so that long contexts are
never expanded as a whole: `gather_latents` reads a chunk out of the cache, a GEMM expands it, and
`attend_expanded` attends to it, one launch each. A tile of query tokens belongs to one sequence; its
row of the plan's table says where its keys are. The running maximum, sum and accumulator of a
sequence that goes on in the next chunk are in memory. Blocks of keys that every token of a tile sees
completely are not masked.

    T  query tokens    N  heads    D  part without RoPE    R  rotary part    V  value
    K  keys of a chunk
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fulgurite.kernels.common.triton_import import tl, triton
from fulgurite.kernels.common.triton_launch import cached_launch
from fulgurite.kernels.common.triton_pdl import (
    launch_dependents,
    pdl_options,
    wait_for_dependencies,
)
from fulgurite.kernels.integer_math import next_power_of_2
from fulgurite.kernels.mla import prefill_plan
from fulgurite.kernels.mla.prefill_plan import KeyChunk
from fulgurite.kernels.mla.reference import LatentCache
from fulgurite.kernels.mla.triton_decode import LOG2E, NEG_INF, load_tile
from fulgurite.kernels.mla.triton_store_kv import load_rope
from fulgurite.kernels.tuning.heuristics import heuristics_for

TILE_COLUMNS = tl.constexpr(prefill_plan.TILE_COLUMNS)
GATHER_COLUMNS = tl.constexpr(prefill_plan.GATHER_COLUMNS)
IS_FIRST, IS_LAST = tl.constexpr(prefill_plan.IS_FIRST), tl.constexpr(prefill_plan.IS_LAST)


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
    """Online softmax over keys start .. stop of the segment, in blocks of BN."""
    d, i, v = tl.arange(0, BD), tl.arange(0, BR), tl.arange(0, BV)
    for j in range(start, stop, BN):
        key = j + tl.arange(0, BN)
        is_key = key < keys
        rows = key.to(tl.int64) * key_stride
        k = load_tile(kv_ptr, rows, d, is_key, D, BD, MASKED)
        qk = tl.dot(q_d, tl.trans(k), input_precision=PRECISION)
        if R > 0:
            r = load_tile(ropes_ptr, key * R, i, is_key, R, BR, MASKED)
            qk = tl.dot(q_r, tl.trans(r), qk, input_precision=PRECISION)
        if MASKED:
            visible = ((first_key + key)[None, :] <= position[:, None]) & is_key[None, :]
            qk = tl.where(visible, qk, NEG_INF)
        m_new = tl.maximum(m_i, tl.max(qk, 1) * qk_scale)
        m_base = tl.where(m_new == NEG_INF, 0.0, m_new) if MASKED else m_new
        p = tl.exp2(qk * qk_scale - m_base[:, None])
        alpha = tl.exp2(m_i - m_base)
        l_i = l_i * alpha + tl.sum(p, 1)
        values = load_tile(kv_ptr + D, rows, v, is_key, V, BV, MASKED)
        acc = tl.dot(p.to(values.dtype), values, acc * alpha[:, None], input_precision=PRECISION)
        m_i = m_new
    return m_i, l_i, acc


@cached_launch
def mla_prefill_kernel(
    q_ptr, cos_ptr, sin_ptr, kv_ptr, ropes_ptr, tiles_ptr, out_ptr, max_ptr, sum_ptr, acc_ptr,
    scale, q_token_stride, q_head_stride, key_stride, head_stride,
    HEADS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, R: tl.constexpr, BR: tl.constexpr,
    V: tl.constexpr, BV: tl.constexpr, INTERLEAVED: tl.constexpr, STATE: tl.constexpr,
    PRECISION: tl.constexpr, SUBTILES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One tile of the plan, or one of its SUBTILES parts of BM tokens, of one head over one chunk.

    STATE: some sequence of the chunk has keys in other chunks, too.
    """
    if PDL:
        launch_dependents()
    tile_ptr = tiles_ptr + tl.program_id(0) // SUBTILES * TILE_COLUMNS
    offset = tl.program_id(0) % SUBTILES * BM
    head = tl.program_id(1)
    rows = tl.minimum(tl.load(tile_ptr + 1) - offset, BM)
    first_position = tl.load(tile_ptr + 2) + offset
    chunk_row = tl.load(tile_ptr + 3).to(tl.int64)
    first_key, keys = tl.load(tile_ptr + 4), tl.load(tile_ptr + 5)
    if PDL:
        wait_for_dependencies()
    if rows <= 0:
        return
    row = tl.arange(0, BM)
    token = (tl.load(tile_ptr) + offset + row).to(tl.int64)
    is_row = row < rows
    position = first_position + row
    d, v = tl.arange(0, BD), tl.arange(0, BV)
    q_row = token * q_token_stride + head * q_head_stride
    q_d = tl.load(q_ptr + q_row[:, None] + d[None, :], is_row[:, None] & (d < D)[None, :], 0.0)
    q_r = load_rope(q_ptr, q_row + D, cos_ptr, sin_ptr, token, is_row, R, BR, INTERLEAVED)
    q_r = q_r.to(q_d.dtype)
    out_offsets = (token * HEADS + head)[:, None] * V + v[None, :]
    mask = is_row[:, None] & (v < V)[None, :]
    m_i = tl.full([BM], NEG_INF, tl.float32)
    l_i = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, BV], tl.float32)
    if STATE:
        flags = tl.load(tile_ptr + 6)
        is_loaded = row < tl.where((flags & IS_FIRST) != 0, 0, rows)
        num_saved = tl.where((flags & IS_LAST) != 0, 0, rows)
        is_saved = row < num_saved
        state_row = (tl.load(tile_ptr + 7) + offset + row).to(tl.int64) * HEADS + head
        state_offsets = state_row[:, None] * V + v[None, :]
        m_i = tl.load(max_ptr + state_row, is_loaded, NEG_INF)
        l_i = tl.load(sum_ptr + state_row, is_loaded, 0.0)
        acc = tl.load(acc_ptr + state_offsets, mask & is_loaded[:, None], 0.0)

    visible_end = tl.minimum(first_position + rows - first_key, keys)
    all_visible_end = tl.minimum(tl.maximum(first_position + 1 - first_key, 0), keys)
    unmasked_end = all_visible_end // BN * BN
    kv_ptr += chunk_row * key_stride + head * head_stride
    ropes_ptr += chunk_row * R
    m_i, l_i, acc = _attend_blocks(
        0, unmasked_end, q_d, q_r, m_i, l_i, acc, position, kv_ptr, ropes_ptr, first_key, keys,
        key_stride, scale * LOG2E, D, BD, R, BR, V, BV, PRECISION, BN, False,
    )  # fmt: skip
    m_i, l_i, acc = _attend_blocks(
        unmasked_end, visible_end, q_d, q_r, m_i, l_i, acc, position, kv_ptr, ropes_ptr, first_key,
        keys, key_stride, scale * LOG2E, D, BD, R, BR, V, BV, PRECISION, BN, True,
    )  # fmt: skip

    out = (acc / l_i[:, None]).to(out_ptr.dtype.element_ty)
    if STATE:
        tl.store(out_ptr + out_offsets, out, mask & (row >= num_saved)[:, None])
        tl.store(max_ptr + state_row, m_i, is_saved)
        tl.store(sum_ptr + state_row, l_i, is_saved)
        tl.store(acc_ptr + state_offsets, acc, mask & is_saved[:, None])
    else:
        tl.store(out_ptr + out_offsets, out, mask)


@cached_launch
def gather_latents_kernel(
    latents_ptr, ropes_ptr, scales_ptr, table_ptr, tiles_ptr, c_ptr, r_ptr, table_row_stride,
    latent_block_stride, latent_slot_stride, rope_block_stride, rope_slot_stride,
    scale_block_stride, scale_slot_stride,
    C: tl.constexpr, BC: tl.constexpr, R: tl.constexpr, BR: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    FP8: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Up to BK latents and rotary keys of a sequence into a chunk, in the queries' dtype."""
    if PDL:
        launch_dependents()
    tile_ptr = tiles_ptr + tl.program_id(0) * GATHER_COLUMNS
    sequence, first = tl.load(tile_ptr).to(tl.int64), tl.load(tile_ptr + 1)
    is_key = tl.arange(0, BK) < tl.load(tile_ptr + 2)
    row = (tl.load(tile_ptr + 3) + tl.arange(0, BK)).to(tl.int64)
    key = first + tl.arange(0, BK)
    block_ptrs = table_ptr + sequence * table_row_stride + key // BLOCK_SIZE
    block, slot = tl.load(block_ptrs, is_key, 0).to(tl.int64), key % BLOCK_SIZE
    if PDL:
        wait_for_dependencies()
    column, i = tl.arange(0, BC), tl.arange(0, BR)
    mask = is_key[:, None] & (column < C)[None, :]
    offsets = block * latent_block_stride + slot * latent_slot_stride
    c = tl.load(latents_ptr + offsets[:, None] + column[None, :], mask, 0.0)
    if FP8:
        scale_ptrs = scales_ptr + block * scale_block_stride + slot * scale_slot_stride
        c = c.to(tl.float32) * tl.load(scale_ptrs, is_key, 0.0)[:, None]
    c_ptrs = c_ptr + row[:, None] * C + column[None, :]
    tl.store(c_ptrs, c.to(c_ptr.dtype.element_ty), mask)
    if R > 0:
        mask = is_key[:, None] & (i < R)[None, :]
        offsets = block * rope_block_stride + slot * rope_slot_stride
        r = tl.load(ropes_ptr + offsets[:, None] + i[None, :], mask, 0.0)
        r_ptrs = r_ptr + row[:, None] * R + i[None, :]
        tl.store(r_ptrs, r.to(r_ptr.dtype.element_ty), mask)


# ---- launching -----------------------------------------------------------------------------------


class ExpandedKeys(NamedTuple):
    """Buffers of one chunk, which the next chunk overwrites: latents, rotary keys, keys and values."""

    c_KC: Tensor
    r_KR: Tensor
    kv_KNU: Tensor


def allocate_expanded_keys(
    num_keys: int, kv_b_NUC: Tensor, rope_dim: int, dtype: torch.dtype
) -> ExpandedKeys:
    rank = kv_b_NUC.shape[2]
    c_KC = torch.empty((num_keys, rank), dtype=dtype, device=kv_b_NUC.device)
    r_KR = torch.empty((num_keys, rope_dim), dtype=dtype, device=kv_b_NUC.device)
    kv_KNU = torch.empty((num_keys, *kv_b_NUC.shape[:2]), dtype=dtype, device=kv_b_NUC.device)
    return ExpandedKeys(c_KC, r_KR, kv_KNU)


def allocate_state(tokens: int, heads: int, value_dim: int, device: torch.device) -> SoftmaxState:
    row_max, row_sum = torch.empty(2, tokens, heads, device=device).unbind(0)
    return SoftmaxState(row_max, row_sum, torch.empty(tokens, heads, value_dim, device=device))


def gather_latents(
    cache: LatentCache, block_table_SM: Tensor, tiles: Tensor, keys: ExpandedKeys
) -> None:
    """The latents and rotary keys of a chunk, into `keys`."""
    rank, rope_dim = cache.latents_PBC.shape[2], cache.ropes_PBR.shape[2]
    is_fp8 = cache.scales_PB is not None
    scales = keys.c_KC if cache.scales_PB is None else cache.scales_PB
    config = heuristics_for(block_table_SM.device).mla_gather
    gather_latents_kernel[(len(tiles),)](
        cache.latents_PBC, cache.ropes_PBR, scales, block_table_SM, tiles, keys.c_KC, keys.r_KR,
        block_table_SM.stride(0), *cache.latents_PBC.stride()[:2], *cache.ropes_PBR.stride()[:2],
        *(scales.stride() if is_fp8 else (0, 0)),
        C=rank, BC=_padded_width(rank), R=rope_dim, BR=_padded_width(rope_dim),
        BLOCK_SIZE=cache.latents_PBC.shape[1], FP8=is_fp8, BK=config.block_m,
        num_warps=config.num_warps, **pdl_options(block_table_SM.device),
    )  # fmt: skip


def attend_expanded(
    q_TNH: Tensor,
    cos: Tensor,
    sin: Tensor,
    chunk: KeyChunk,
    block_m: int,
    keys: ExpandedKeys,
    out_TNV: Tensor,
    state: SoftmaxState,
    scale: float,
    interleaved: bool,
) -> None:
    """Attend to one chunk of keys, into `out_TNV`, or into `state` before a tile's last chunk."""
    heads, size = q_TNH.shape[1:]
    rope_dim, value_dim = keys.r_KR.shape[1], out_TNV.shape[2]
    nope_dim, is_float32 = size - rope_dim, q_TNH.dtype == torch.float32
    config = heuristics_for(q_TNH.device).mla_prefill_config(block_m, is_float32)
    subtiles = block_m // config.block_m
    mla_prefill_kernel[(len(chunk.attention_tiles) * subtiles, heads)](
        q_TNH, cos, sin, keys.kv_KNU, keys.r_KR, chunk.attention_tiles, out_TNV, *state,
        scale, *q_TNH.stride()[:2], *keys.kv_KNU.stride()[:2],
        HEADS=heads, D=nope_dim, BD=_padded_width(nope_dim), R=rope_dim,
        BR=_padded_width(rope_dim), V=value_dim, BV=_padded_width(value_dim),
        INTERLEAVED=interleaved, STATE=chunk.has_state,
        PRECISION="ieee" if is_float32 else "tf32", SUBTILES=subtiles, BM=config.block_m,
        BN=config.block_n, num_warps=config.num_warps, num_stages=config.num_stages,
        **pdl_options(q_TNH.device),
    )  # fmt: skip


def _padded_width(size: int) -> int:
    return max(16, next_power_of_2(size))
