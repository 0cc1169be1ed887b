# mypy: allow-untyped-defs, allow-incomplete-defs
"""Absorbed MLA on GPUs: FlashAttention-style decode over cached latents, with split-KV.

    scores = scale * (q_c . c_j + q_r . r_j)      out = sum_j softmax_j(scores) c_j

A program takes a tile of rows and a range of keys. Rows are the (token, head) pairs of one
sequence. A latent is read once for all rows of the tile and is both key and value. With few tiles
contexts are split: each program stores its maximum, sum and accumulator, and `merge_splits_kernel`
merges them.

FP8 latents are multiplied in float16, which holds them exactly: one instruction converts two of
them, where bfloat16 takes many. Scales are not applied to the latents. The scale f_j multiplies
column j of the scores, and it is part of the weight u_j:

    u_j = exp2(s_j + log2 f_j - max)      acc = sum_j u_j c_j,   sum = sum_j u_j / f_j

So the largest weight is 1 however small the scales are.

    T  tokens    N  heads    C  rank of the latent    R  rotary part    S  sequences
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fulgurite.kernels.attention.metadata import AttentionMetadata
from fulgurite.kernels.attention.triton_attention import count_parts, limit_splits
from fulgurite.kernels.attention.triton_kernel import (
    find_part,
    find_part_start,
    merge_part,
    merge_parts,
    store_part,
)
from fulgurite.kernels.common.triton_import import INTERPRETED, tl, triton
from fulgurite.kernels.common.triton_launch import cached_launch
from fulgurite.kernels.common.triton_pdl import (
    launch_dependents,
    pdl_options,
    prefetch_l2,
    wait_for_dependencies,
)
from fulgurite.kernels.integer_math import cdiv, next_power_of_2
from fulgurite.kernels.mla.reference import LatentCache
from fulgurite.kernels.mla.triton_absorb import AbsorbedQueries
from fulgurite.kernels.tuning.config import LaunchConfig
from fulgurite.kernels.tuning.heuristics import heuristics_for

NEG_INF = tl.constexpr(-float("inf"))
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _e4m3_to_f16(x):
    """float16 of e4m3, two per instruction.

    Not pure: otherwise the compiler converts once per use and loads values byte by byte.
    """
    return tl.inline_asm_elementwise(
        "{ .reg .b16 a, b; mov.b32 {a, b}, $2;"
        " cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }",
        "=r,=r,r", [x.to(tl.uint8, bitcast=True)], dtype=tl.float16, is_pure=False, pack=4,
    )  # fmt: skip


@triton.jit
def load_tile(
    cache_ptr,
    offsets,
    column,
    is_key,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Rows at `offsets` of the cache, SIZE numbers padded to WIDTH columns."""
    if MASKED:
        mask = is_key[:, None] & (column < SIZE)[None, :]
        return tl.load(cache_ptr + offsets[:, None] + column[None, :], mask, 0.0)
    elif SIZE < WIDTH:
        return tl.load(
            cache_ptr + offsets[:, None] + column[None, :], (column < SIZE)[None, :], 0.0
        )
    else:
        return tl.load(cache_ptr + offsets[:, None] + column[None, :])


@triton.jit
def _attend_blocks(
    start, stop, last, q_c, q_r, m_i, l_i, acc, position, latents_ptr, ropes_ptr, scales_ptr,
    block_row, row_scale, latent_block_stride, latent_slot_stride, rope_block_stride,
    rope_slot_stride, scale_block_stride, scale_slot_stride,
    C: tl.constexpr, BC: tl.constexpr, R: tl.constexpr, BR: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    FP8: tl.constexpr, CONVERT_F16: tl.constexpr, PRECISION: tl.constexpr, BN: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Online softmax over keys start .. stop, in blocks of BN."""
    column, i = tl.arange(0, BC), tl.arange(0, BR)
    if BLOCK_SIZE % BN == 0:  # BN keys are in one cache block, which is looked up one step ahead
        next_block = tl.load(block_row + start // BLOCK_SIZE, start < stop, 0)
    for j in range(start, stop, BN):
        key = j + tl.arange(0, BN)
        is_key = key < last
        if BLOCK_SIZE % BN == 0:
            block = next_block.to(tl.int64)
            next_block = tl.load(block_row + (j + BN) // BLOCK_SIZE, j + BN < stop, 0)
            slot = j % BLOCK_SIZE + tl.arange(0, BN)
        else:
            block = tl.load(block_row + key // BLOCK_SIZE, is_key, 0).to(tl.int64)
            slot = key % BLOCK_SIZE
        offsets = block * latent_block_stride + slot * latent_slot_stride
        c = load_tile(latents_ptr, offsets, column, is_key, C, BC, MASKED)
        c = _e4m3_to_f16(c) if CONVERT_F16 else c.to(q_c.dtype)
        qk = tl.dot(q_c, tl.trans(c), input_precision=PRECISION)
        if FP8:
            scale_ptrs = scales_ptr + block * scale_block_stride + slot * scale_slot_stride
            key_scale = tl.load(scale_ptrs, is_key, 1.0) if MASKED else tl.load(scale_ptrs)
            qk *= key_scale[None, :]
        if R > 0:
            offsets = block * rope_block_stride + slot * rope_slot_stride
            r = load_tile(ropes_ptr, offsets, i, is_key, R, BR, MASKED)
            qk = tl.dot(q_r, tl.trans(r.to(q_r.dtype)), qk, input_precision=PRECISION)
        if MASKED:
            visible = (key[None, :] <= position[:, None]) & is_key[None, :]
            qk = tl.where(visible, qk, NEG_INF)
        qk *= row_scale[:, None]
        if FP8:
            qk += tl.log2(key_scale)[None, :]
        m_new = tl.maximum(m_i, tl.max(qk, 1))
        m_base = tl.where(m_new == NEG_INF, 0.0, m_new) if MASKED else m_new
        p = tl.exp2(qk - m_base[:, None])
        alpha = tl.exp2(m_i - m_base)
        acc = tl.dot(p.to(q_c.dtype), c, acc * alpha[:, None], input_precision=PRECISION)
        if FP8:
            p *= (1.0 / key_scale)[None, :]
        l_i = l_i * alpha + tl.sum(p, 1)
        m_i = m_new
    return m_i, l_i, acc


@cached_launch
def mla_decode_kernel(
    q_ptr, q_rope_ptr, powers_ptr, latents_ptr, ropes_ptr, scales_ptr, block_table_ptr,
    query_start_loc_ptr, seq_lens_ptr, out_ptr, partial_acc_ptr, partial_max_ptr, partial_sum_ptr,
    scale, tiles, splits, max_parts, tokens, sequences, table_row_stride, latent_block_stride,
    latent_slot_stride, rope_block_stride, rope_slot_stride, scale_block_stride, scale_slot_stride,
    HEADS: tl.constexpr, C: tl.constexpr, BC: tl.constexpr, R: tl.constexpr, BR: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, FP8: tl.constexpr, CONVERT_F16: tl.constexpr, SPLIT: tl.constexpr,
    PRECISION: tl.constexpr, PART_KEYS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Rows tile * BM .. of one sequence, over one split of its keys.

    PART_KEYS   not 0: parts of a context are attended to by themselves and merged in order, as in
                `attention.triton_kernel`. The accumulator of a program that has all parts is in memory.
    """
    if PDL:
        launch_dependents()
    if FP8:  # strides are multiples of 16 bytes, which the compiler sees in the factor
        rope_block_stride, rope_slot_stride = rope_block_stride * 8, rope_slot_stride * 8
    sequence = tl.program_id(0) // tiles
    tile = tiles - 1 - tl.program_id(0) % tiles  # later tiles have more keys: run them first
    split = tl.program_id(1)
    if sequence >= sequences:
        if PDL:
            wait_for_dependencies()
        if not SPLIT:
            zero_unused_tokens(out_ptr, query_start_loc_ptr, tokens, sequences, HEADS * C)
        return
    start = tl.load(query_start_loc_ptr + sequence)
    count = tl.load(query_start_loc_ptr + sequence + 1) - start
    length = tl.load(seq_lens_ptr + sequence)
    if tile * BM >= count * HEADS:
        if PDL:
            wait_for_dependencies()
        return
    row = tile * BM + tl.arange(0, BM)
    is_row = row < count * HEADS
    position = length - count + row // HEADS

    first = 0
    last = tl.max(tl.where(is_row, position, -1), 0) + 1
    if SPLIT and PART_KEYS == 0:
        split_keys = tl.cdiv(tl.cdiv(last, splits), BN) * BN
        first = split * split_keys
        last = tl.minimum(last, first + split_keys)

    column, i = tl.arange(0, BC), tl.arange(0, BR)
    block_row = block_table_ptr + sequence.to(tl.int64) * table_row_stride
    if PDL:
        if BM == 16:  # decode: all latents but the new token's are already in the cache
            LINES: tl.constexpr = (
                BC * (latents_ptr.dtype.element_ty.primitive_bitwidth // 8) + 127
            ) // 128
            key = first + tl.arange(0, BN)
            block = tl.load(block_row + key // BLOCK_SIZE, key < last, 0).to(tl.int64)
            offsets = block * latent_block_stride + (key % BLOCK_SIZE) * latent_slot_stride
            prefetch_l2(latents_ptr + offsets, LINES)
        wait_for_dependencies()
    out_row = start.to(tl.int64) * HEADS + row
    q_ptrs = q_ptr + out_row[:, None] * C + column[None, :]
    q_c = tl.load(q_ptrs, is_row[:, None] & (column < C)[None, :], 0.0)
    q_rope_ptrs = q_rope_ptr + out_row[:, None] * R + i[None, :]
    q_r = tl.load(q_rope_ptrs, is_row[:, None] & (i < R)[None, :], 0.0)
    row_scale = tl.full([BM], 1.0, tl.float32) * (scale * LOG2E)
    if FP8:
        row_scale *= tl.load(powers_ptr + out_row, is_row, 1.0)
    m_i = tl.full([BM], NEG_INF, tl.float32)
    l_i = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, BC], tl.float32)

    if PART_KEYS > 0:
        acc_ptrs = partial_acc_ptr + out_row[:, None] * BC + column[None, :]  # without SPLIT
        num_parts = find_part(last - 1, PART_KEYS) + 1
        for part in range(split, num_parts, splits):
            part_last = tl.minimum(find_part_start(part + 1, PART_KEYS), last)
            part_max, part_sum, part_acc = _attend_blocks(
                find_part_start(part, PART_KEYS), part_last, last, q_c, q_r,
                tl.full([BM], NEG_INF, tl.float32), tl.zeros([BM], tl.float32),
                tl.zeros([BM, BC], tl.float32), position, latents_ptr, ropes_ptr, scales_ptr,
                block_row, row_scale, latent_block_stride, latent_slot_stride, rope_block_stride,
                rope_slot_stride, scale_block_stride, scale_slot_stride, C, BC, R, BR, BLOCK_SIZE,
                FP8, CONVERT_F16, PRECISION, BN, True,
            )  # fmt: skip
            if SPLIT:
                store_part(
                    partial_acc_ptr, partial_max_ptr, partial_sum_ptr, out_row * max_parts + part,
                    is_row, part_max, part_sum, part_acc, BC,
                )  # fmt: skip
            else:
                has_acc = is_row & (m_i != NEG_INF)
                merged = tl.load(acc_ptrs, has_acc[:, None], 0.0)
                m_i, l_i, merged = merge_part(m_i, l_i, merged, part_max, part_sum, part_acc)
                tl.debug_barrier()
                tl.store(acc_ptrs, merged, is_row[:, None])
                tl.debug_barrier()
        if not SPLIT:
            acc = tl.load(acc_ptrs, is_row[:, None], 0.0)
    else:
        # blocks of keys that every row sees completely need no mask
        all_visible_end = tl.min(tl.where(is_row, position, last), 0) + 1
        unmasked_end = first + tl.maximum(tl.minimum(all_visible_end, last) - first, 0) // BN * BN
        m_i, l_i, acc = _attend_blocks(
            first, unmasked_end, last, q_c, q_r, m_i, l_i, acc, position, latents_ptr, ropes_ptr,
            scales_ptr, block_row, row_scale, latent_block_stride, latent_slot_stride,
            rope_block_stride, rope_slot_stride, scale_block_stride, scale_slot_stride, C, BC, R,
            BR, BLOCK_SIZE, FP8, CONVERT_F16, PRECISION, BN, False,
        )  # fmt: skip
        m_i, l_i, acc = _attend_blocks(
            unmasked_end, last, last, q_c, q_r, m_i, l_i, acc, position, latents_ptr, ropes_ptr,
            scales_ptr, block_row, row_scale, latent_block_stride, latent_slot_stride,
            rope_block_stride, rope_slot_stride, scale_block_stride, scale_slot_stride, C, BC, R,
            BR, BLOCK_SIZE, FP8, CONVERT_F16, PRECISION, BN, True,
        )  # fmt: skip
        if SPLIT:
            store_part(
                partial_acc_ptr, partial_max_ptr, partial_sum_ptr, out_row * max_parts + split,
                is_row, m_i, l_i, acc, BC,
            )  # fmt: skip

    if not SPLIT:
        out = (acc / l_i[:, None]).to(out_ptr.dtype.element_ty)
        out_ptrs = out_ptr + out_row[:, None] * C + column[None, :]
        tl.store(out_ptrs, out, is_row[:, None] & (column < C)[None, :])


@triton.jit
def zero_unused_tokens(out_ptr, query_start_loc_ptr, tokens, sequences, ROW: tl.constexpr):
    """Zero the output of tokens of no sequence, ROW numbers each."""
    offset = tl.arange(0, 1024)
    first = tl.load(query_start_loc_ptr + sequences).to(tl.int64)
    count = (tokens - first) * ROW
    for start in range(0, count, 1024):
        zeros = tl.zeros([1024], out_ptr.dtype.element_ty)
        tl.store(out_ptr + first * ROW + start + offset, zeros, start + offset < count)


@cached_launch
def merge_splits_kernel(
    partial_acc_ptr, partial_max_ptr, partial_sum_ptr, query_start_loc_ptr, out_ptr, splits,
    sequences,
    HEADS: tl.constexpr, C: tl.constexpr, BC: tl.constexpr, SPLITS: tl.constexpr,
    ORDERED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Merge the splits of one (token, head), rescaled to the largest maximum.

    Tokens of no sequence get zeros. With ORDERED splits are parts of a context: they are merged one
    after the other, and those from some part on were not written, but for a maximum of -inf.
    """
    if PDL:
        launch_dependents()
        wait_for_dependencies()
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    split, column = tl.arange(0, SPLITS), tl.arange(0, BC)
    row = token * HEADS + head
    out_ptrs = out_ptr + row * C + column
    if token >= tl.load(query_start_loc_ptr + sequences):
        tl.store(out_ptrs, tl.zeros([BC], out_ptr.dtype.element_ty), column < C)
        return
    partial_row = row * splits + split
    partial_max = tl.load(partial_max_ptr + partial_row, split < splits, NEG_INF)
    if ORDERED:
        num_parts = tl.max(tl.where(partial_max == NEG_INF, 0, split + 1), 0)
        rows = row * splits + tl.zeros([1], tl.int64)
        m_i, l_i, acc = merge_parts(
            tl.full([1], NEG_INF, tl.float32), tl.zeros([1], tl.float32),
            tl.zeros([1, BC], tl.float32), partial_acc_ptr, partial_max_ptr, partial_sum_ptr, rows,
            rows >= 0, num_parts, BC,
        )  # fmt: skip
        out = tl.reshape(acc / l_i[:, None], [BC])
    else:
        m_i = tl.max(partial_max, 0)
        rescale = tl.exp2(partial_max - tl.where(m_i == NEG_INF, 0.0, m_i))
        l_i = tl.sum(tl.load(partial_sum_ptr + partial_row, split < splits, 0.0) * rescale, 0)
        acc_ptrs = partial_acc_ptr + partial_row[:, None] * BC + column[None, :]
        partial_acc = tl.load(acc_ptrs, (split < splits)[:, None], 0.0)
        out = tl.sum(partial_acc * rescale[:, None], 0) / l_i
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), column < C)


# ---- launching -----------------------------------------------------------------------------------


class SplitPartials(NamedTuple):
    """Partial results of split contexts; one element each where contexts are not split."""

    acc: Tensor
    max: Tensor
    sum: Tensor


def attend_absorbed(
    queries: AbsorbedQueries,
    cache: LatentCache,
    metadata: AttentionMetadata,
    scale: float,
    dtype: torch.dtype,
    config: LaunchConfig | None = None,
) -> Tensor:
    """Attention of absorbed queries to the latents, [T, N, C]; zeros for tokens of no sequence."""
    q_TNC, q_TNR, powers = queries
    block_table, query_start_loc, seq_lens, max_query_len, max_seq_len = metadata[:5]
    assert max_query_len is not None and max_seq_len is not None, "the operator sets both"
    tokens, heads, rank = q_TNC.shape
    rope_dim, is_fp8, is_float32 = q_TNR.shape[2], powers is not None, q_TNC.dtype == torch.float32
    sequences = seq_lens.shape[0]
    if config is None:
        config = heuristics_for(q_TNC.device).mla_decode_config(
            max_query_len * heads, is_float32, is_fp8, sequences, max_seq_len
        )
    width = max(16, next_power_of_2(rank))
    splits = parts = config.split_k
    has_parts = config.part_k > 0
    if has_parts:
        parts = count_parts(max_seq_len, config.part_k)
        splits = limit_splits(splits, parts, tokens * heads * width)
        parts = parts if splits > 1 else 1
    out = torch.empty((tokens, heads, rank), dtype=dtype, device=q_TNC.device)
    partials = allocate_partials(tokens * heads, parts, width, q_TNC.device, has_parts)
    scales = cache.scales_PB if cache.scales_PB is not None else partials.max
    tiles = cdiv(max_query_len * heads, config.block_m)
    mla_decode_kernel[(sequences * tiles + 1, splits)](
        q_TNC, q_TNR, partials.max if powers is None else powers, cache.latents_PBC,
        cache.ropes_PBR, scales, block_table, query_start_loc, seq_lens, out, *partials, scale,
        tiles, splits, parts, tokens, sequences, block_table.stride(0),
        *cache.latents_PBC.stride()[:2],
        *(stride // (8 if is_fp8 else 1) for stride in cache.ropes_PBR.stride()[:2]),
        *(scales.stride() if is_fp8 else (0, 0)),
        HEADS=heads, C=rank, BC=width, R=rope_dim, BR=max(16, next_power_of_2(rope_dim)),
        BLOCK_SIZE=cache.latents_PBC.shape[1], FP8=is_fp8,
        CONVERT_F16=is_fp8 and not is_float32 and not INTERPRETED, SPLIT=splits > 1,
        PRECISION="ieee" if is_float32 else "tf32", PART_KEYS=config.part_k,
        BM=config.block_m, BN=config.block_n,
        num_warps=config.num_warps, num_stages=config.num_stages, **pdl_options(q_TNC.device),
    )  # fmt: skip
    if splits > 1:
        merge_splits(partials, query_start_loc, out, parts, width, has_parts)
    return out


def allocate_partials(
    rows: int, splits: int, width: int, device: torch.device, are_parts: bool = False
) -> SplitPartials:
    """Not initialized: every split of every row of a sequence is written.

    Parts of a context are written as far as a row sees keys, and one part is the accumulator of all.
    """
    count = rows * splits if splits > 1 else 1
    row_max, row_sum = torch.empty(2, count, device=device).unbind(0)
    if are_parts and splits > 1:
        row_max.fill_(float("-inf"))
    acc = torch.empty(rows * splits * width if splits > 1 or are_parts else 1, device=device)
    return SplitPartials(acc, row_max, row_sum)


def merge_splits(
    partials: SplitPartials,
    query_start_loc: Tensor,
    out: Tensor,
    splits: int,
    width: int,
    are_parts: bool = False,
) -> None:
    """Merge the splits of every (token, head) into `out`, [T, N, C]."""
    tokens, heads, rank = out.shape
    merge_splits_kernel[(tokens, heads)](
        *partials, query_start_loc, out, splits, query_start_loc.shape[0] - 1,
        HEADS=heads, C=rank, BC=width, SPLITS=next_power_of_2(splits), ORDERED=are_parts,
        num_warps=heuristics_for(out.device).mla_merge_num_warps, **pdl_options(out.device),
    )  # fmt: skip
