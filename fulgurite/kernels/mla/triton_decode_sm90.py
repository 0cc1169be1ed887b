# mypy: allow-untyped-defs, allow-incomplete-defs
"""Absorbed MLA on Hopper (sm_90) in Gluon, for more than 32 rows: DeepSeek's 128 heads.

    scores = scale * (q_c . c_j + q_r . r_j)      out = sum_j softmax_j(scores) c_j

The computation of `triton_decode.py`. Here the matrix products bound the time, and Triton gives
both warpgroups of a program all scores of 64 rows, so each product is computed twice. In this
kernel

- a warpgroup computes the scores of half a block's keys, and accumulates half of the columns;
- a latent is loaded once, by TMA, and is key and value from the same shared memory;
- the next block is loaded while this one is multiplied.

FP8 latents are converted to float16 from one shared tile to another (`triton_decode.py` says why).
The register layout of that conversion (CONVERT) matters beyond itself: with four rows per warp,
ptxas serializes every wgmma.

    T  tokens    N  heads    C  rank of the latent    R  rotary part    S  sequences
"""

from __future__ import annotations

import torch
from torch import Tensor

from fulgurite.kernels.attention.metadata import AttentionMetadata
from fulgurite.kernels.common.gluon_import import (
    GluonTensorDescriptor,
    async_load,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    thread_barrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from fulgurite.kernels.common.triton_import import tl
from fulgurite.kernels.common.triton_pdl import pdl_options
from fulgurite.kernels.integer_math import cdiv
from fulgurite.kernels.mla.reference import LatentCache
from fulgurite.kernels.mla.triton_absorb import AbsorbedQueries
from fulgurite.kernels.mla.triton_decode import allocate_partials, merge_splits
from fulgurite.kernels.tuning.heuristics import heuristics_for

NEG_INF = gl.constexpr(-float("inf"))
E4M3_TO_F16 = gl.constexpr(
    "{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }"
)
LOG2E = gl.constexpr(1.4426950408889634)
# the kernel's layouts are written for these sizes
RANK, ROPE_DIM, BLOCK_M, BLOCK_N, NUM_WARPS = 512, 64, 64, 64, 8


@gluon.jit
def launch_dependents():
    tl.extra.cuda.gdc_launch_dependents()


@gluon.jit
def wait_for_dependencies():
    tl.extra.cuda.gdc_wait()


@gluon.jit
def _load_block_async(
    i, block, latents, ropes, tiles, rope_tiles, ready, BN: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, first, exists,
):  # fmt: skip
    """Start the TMA load of key block i, which is in cache block `block`, if `exists`."""
    buffer = i % 2
    row = block * BLOCK_SIZE + (first + i * BN) % BLOCK_SIZE
    barrier = ready.index(buffer)
    mbarrier.expect(barrier, latents.block_type.nbytes + ropes.block_type.nbytes, exists)
    async_load(latents, [row, 0], barrier, tiles.index(buffer), exists)
    async_load(ropes, [row, 0], barrier, rope_tiles.index(buffer), exists)


@gluon.jit
def mla_decode_sm90_kernel(
    q, q_rope, latents, ropes, scales_ptr, powers_ptr, block_table_ptr, query_start_loc_ptr,
    seq_lens_ptr, out_ptr, partial_acc_ptr, partial_max_ptr, partial_sum_ptr, scale, num_tiles,
    splits, out_token_stride, out_head_stride, table_row_stride, scale_block_stride,
    scale_slot_stride,
    HEADS: gl.constexpr, C: gl.constexpr, R: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    FP8: gl.constexpr, SPLIT: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    num_warps: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Rows tile * BM .. of one sequence, over one split of its keys."""
    if PDL:
        launch_dependents()
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, BN // 2, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 256, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    KEY: gl.constexpr = gl.SliceLayout(0, SCORES)
    CONVERT: gl.constexpr = gl.BlockedLayout([1, 16], [1, 32], [num_warps, 1], [1, 0])
    QUERY_DTYPE: gl.constexpr = q.dtype
    CONVERTED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BN, C], q.dtype)

    sequence = gl.program_id(0) // num_tiles
    tile = gl.program_id(0) % num_tiles
    split = gl.program_id(1)
    start = gl.load(query_start_loc_ptr + sequence)
    count = gl.load(query_start_loc_ptr + sequence + 1) - start
    length = gl.load(seq_lens_ptr + sequence)
    if tile * BM >= count * HEADS:
        if PDL:
            wait_for_dependencies()
        return
    rows = gl.minimum(BM, count * HEADS - tile * BM)
    last = length - count + (tile * BM + rows - 1) // HEADS + 1
    first = 0
    if SPLIT:
        split_keys = gl.cdiv(gl.cdiv(last, splits), BN) * BN
        first = split * split_keys
        last = gl.minimum(last, first + split_keys)
    blocks = gl.cdiv(gl.maximum(last - first, 0), BN)

    q_c = gl.allocate_shared_memory(q.dtype, [BM, C], q.layout)
    q_r = gl.allocate_shared_memory(q_rope.dtype, [BM, R], q_rope.layout)
    tiles = gl.allocate_shared_memory(latents.dtype, [2, BN, C], latents.layout)
    rope_tiles = gl.allocate_shared_memory(ropes.dtype, [2, BN, R], ropes.layout)
    P_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BM, BN], q.dtype)
    p_shared = gl.allocate_shared_memory(q.dtype, [BM, BN], P_LAYOUT)
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    query_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    if FP8:
        converted = gl.allocate_shared_memory(q.dtype, [BN, C], CONVERTED)
    mbarrier.init(ready.index(0), count=1)
    mbarrier.init(ready.index(1), count=1)
    mbarrier.init(query_ready, count=1)
    fence_async_shared()
    thread_barrier()

    if PDL:
        wait_for_dependencies()
    block_row = block_table_ptr + sequence.to(gl.int64) * table_row_stride
    first_row = start * HEADS + tile * BM
    mbarrier.expect(query_ready, q.block_type.nbytes + q_rope.block_type.nbytes)
    async_load(q, [first_row, 0], query_ready, q_c)
    async_load(q_rope, [first_row, 0], query_ready, q_r)
    block = gl.load(block_row + first // BLOCK_SIZE, blocks > 0, 0)
    next_block = gl.load(block_row + (first + BN) // BLOCK_SIZE, blocks > 1, 0)
    _load_block_async(
        0, block, latents, ropes, tiles, rope_tiles, ready, BN, BLOCK_SIZE, first, blocks > 0
    )

    row = tile * BM + gl.arange(0, BM, ROW)
    position = length - count + row // HEADS
    row_scale = gl.full([BM], 1.0, gl.float32, ROW) * (scale * LOG2E)
    if FP8:
        power_ptrs = powers_ptr + start.to(gl.int64) * HEADS + row
        row_scale *= gl.load(power_ptrs, row < count * HEADS, 1.0)
    m_i = gl.full([BM], NEG_INF, gl.float32, ROW)
    l_i = gl.zeros([BM], gl.float32, ROW)
    acc = warpgroup_mma_init(gl.zeros([BM, C], gl.float32, ACC))
    zero_scores = gl.zeros([BM, BN], gl.float32, SCORES)
    mbarrier.wait(query_ready, 0)
    for i in range(blocks):
        buffer = i % 2
        j = first + i * BN
        key = j + gl.arange(0, BN, KEY)
        mbarrier.wait(ready.index(buffer), (i // 2) & 1)
        if FP8:
            slot = j % BLOCK_SIZE + gl.arange(0, BN, KEY)
            scale_offset = block.to(gl.int64) * scale_block_stride + slot * scale_slot_stride
            key_scale = gl.load(scales_ptr + scale_offset, key < last, 1.0)
            acc = warpgroup_mma_wait(0, deps=[acc])  # it reads `converted`
            thread_barrier()
            _load_block_async(
                i + 1, next_block, latents, ropes, tiles, rope_tiles, ready, BN, BLOCK_SIZE, first,
                i + 1 < blocks,
            )  # fmt: skip
            fp8 = tiles.index(buffer).load(CONVERT)
            f16 = gl.inline_asm_elementwise(
                E4M3_TO_F16, "=r,=r,r", [fp8.to(gl.uint8, bitcast=True)], dtype=gl.float16,
                is_pure=True, pack=4,
            )  # fmt: skip
            is_key = j + gl.arange(0, BN, gl.SliceLayout(1, CONVERT)) < last
            converted.store(gl.where(is_key[:, None], f16, gl.zeros_like(f16)))
            fence_async_shared()
            thread_barrier()
            latent_tile = converted
            latents_T = latent_tile.permute((1, 0))
            qk = warpgroup_mma(q_c, latents_T, zero_scores, use_acc=False, is_async=True)
            qk = warpgroup_mma_wait(0, deps=[qk])
            qk *= key_scale[None, :]
            qk = warpgroup_mma(q_r, rope_tiles.index(buffer).permute((1, 0)), qk, is_async=True)
            qk = warpgroup_mma_wait(0, deps=[qk])
        else:
            latent_tile = tiles.index(buffer)
            if j + BN > last:  # slots past the end may hold NaN: zero them
                for start_column in gl.static_range(0, C, 128):
                    columns = latent_tile.slice(start_column, 128, 1)
                    values = columns.load(CONVERT)
                    is_key = j + gl.arange(0, BN, gl.SliceLayout(1, CONVERT)) < last
                    columns.store(gl.where(is_key[:, None], values, gl.zeros_like(values)))
                fence_async_shared()
                thread_barrier()
            # the previous block is no longer needed: load over it
            acc = warpgroup_mma_wait(0, deps=[acc])
            thread_barrier()
            _load_block_async(
                i + 1, next_block, latents, ropes, tiles, rope_tiles, ready, BN, BLOCK_SIZE, first,
                i + 1 < blocks,
            )  # fmt: skip
            latents_T = latent_tile.permute((1, 0))
            qk = warpgroup_mma(q_c, latents_T, zero_scores, use_acc=False, is_async=True)
            qk = warpgroup_mma(q_r, rope_tiles.index(buffer).permute((1, 0)), qk, is_async=True)
            qk = warpgroup_mma_wait(0, deps=[qk])
        block = next_block
        next_block = gl.load(block_row + (j + 2 * BN) // BLOCK_SIZE, i + 2 < blocks, 0)
        visible = (key[None, :] <= position[:, None]) & (key < last)[None, :]
        qk = gl.where(visible, qk * row_scale[:, None], NEG_INF)
        if FP8:
            qk += gl.log2(key_scale)[None, :]
        m_new = gl.maximum(m_i, gl.max(qk, 1))
        m_base = gl.where(m_new == NEG_INF, 0.0, m_new)
        p = gl.exp2(qk - m_base[:, None])
        p_shared.store(p.to(QUERY_DTYPE))
        alpha = gl.exp2(m_i - m_base)
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, ACC))[:, None]
        fence_async_shared()
        thread_barrier()
        acc = warpgroup_mma(p_shared, latent_tile, acc, is_async=True)
        if FP8:
            p = p * (1.0 / key_scale)[None, :]
        l_i = l_i * alpha + gl.sum(p, 1)
        m_i = m_new
    acc = warpgroup_mma_wait(0, deps=[acc])

    is_row = row < count * HEADS
    out_row = tile * BM + gl.arange(0, BM, gl.SliceLayout(1, ACC))
    is_out_row = out_row < count * HEADS
    column = gl.arange(0, C, gl.SliceLayout(0, ACC))
    if SPLIT:
        partial_row = (start.to(gl.int64) * HEADS + row) * splits + split
        gl.store(partial_max_ptr + partial_row, m_i, is_row)
        gl.store(partial_sum_ptr + partial_row, l_i, is_row)
        acc_row = (start.to(gl.int64) * HEADS + out_row) * splits + split
        acc_ptrs = partial_acc_ptr + acc_row[:, None] * C + column[None, :]
        gl.store(acc_ptrs, acc, is_out_row[:, None])
    else:
        acc = acc / gl.convert_layout(l_i, gl.SliceLayout(1, ACC))[:, None]
        token, head = start.to(gl.int64) + out_row // HEADS, out_row % HEADS
        out_offset = token * out_token_stride + head * out_head_stride
        out_ptrs = out_ptr + out_offset[:, None] + column[None, :]
        gl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), is_out_row[:, None])


# ---- launching -----------------------------------------------------------------------------------

GLUON_DTYPES = {
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.float8_e4m3fn: gl.float8e4nv,
}


def is_supported(queries: AbsorbedQueries, cache: LatentCache, rows: int) -> bool:
    """Hopper, DeepSeek's sizes, and cache blocks that are end to end and hold whole key blocks."""
    latents, ropes = cache.latents_PBC, cache.ropes_PBR
    if queries.latent_TNC.device.type != "cuda" or queries.latent_TNC.dtype == torch.float32:
        return False
    sizes = (latents.shape[2], ropes.shape[2], latents.shape[1] % BLOCK_N)
    is_aligned = all(
        x.data_ptr() % 16 == 0 and x.stride(1) * x.itemsize % 16 == 0 for x in (latents, ropes)
    )
    is_end_to_end = latents.stride(0) == latents.shape[1] * latents.stride(1)
    is_hopper = torch.cuda.get_device_capability(latents.device)[0] == 9
    return rows > 32 and sizes == (RANK, ROPE_DIM, 0) and is_aligned and is_end_to_end and is_hopper


def attend_absorbed_sm90(
    queries: AbsorbedQueries,
    cache: LatentCache,
    metadata: AttentionMetadata,
    scale: float,
    dtype: torch.dtype,
) -> Tensor:
    """Attention of absorbed queries to the latents, [T, N, C]; zeros for tokens of no sequence."""
    q_TNC, q_TNR, powers = queries
    block_table, query_start_loc, seq_lens, max_query_len, max_seq_len = metadata[:5]
    assert max_query_len is not None and max_seq_len is not None, "the operator sets both"
    (tokens, heads, rank), sequences = q_TNC.shape, seq_lens.shape[0]
    latents, ropes, is_fp8 = cache.latents_PBC, cache.ropes_PBR, cache.scales_PB is not None
    heuristics = heuristics_for(q_TNC.device)
    tiles = cdiv(max_query_len * heads, BLOCK_M)
    splits = heuristics.mla_num_splits(sequences * tiles, heuristics.num_sms, max_seq_len)
    if is_fp8:
        splits = max(splits, 2)  # only the split form of FP8 has been compared on a GPU
    allocate = torch.zeros if splits == 1 else torch.empty  # the merge writes zeros itself
    out = allocate((tokens, heads, rank), dtype=dtype, device=q_TNC.device)
    partials = allocate_partials(tokens * heads, splits, rank, q_TNC.device)
    scales = partials.max if cache.scales_PB is None else cache.scales_PB
    slots = latents.shape[0] * latents.shape[1]
    mla_decode_sm90_kernel[(sequences * tiles, splits)](
        _tensor_descriptor(q_TNC, tokens * heads, rank, BLOCK_M),
        _tensor_descriptor(q_TNR, tokens * heads, q_TNR.stride(1), BLOCK_M),
        _tensor_descriptor(latents, slots, latents.stride(1), BLOCK_N),
        _tensor_descriptor(ropes, slots, ropes.stride(1), BLOCK_N),
        scales, partials.max if powers is None else powers, block_table, query_start_loc,
        seq_lens, out, *partials, scale, tiles, splits, *out.stride()[:2], block_table.stride(0),
        *(scales.stride() if is_fp8 else (0, 0)),
        HEADS=heads, C=rank, R=q_TNR.shape[2], BLOCK_SIZE=latents.shape[1], FP8=is_fp8,
        SPLIT=splits > 1, BM=BLOCK_M, BN=BLOCK_N, num_warps=NUM_WARPS,
        **pdl_options(q_TNC.device),
    )  # fmt: skip
    if splits > 1:
        merge_splits(partials, query_start_loc, out, splits, rank)
    return out


def _tensor_descriptor(x: Tensor, rows: int, stride: int, block_rows: int) -> GluonTensorDescriptor:
    """Rows of the last axis of `x`, `stride` numbers apart, in blocks of `block_rows` rows."""
    block = [block_rows, x.shape[-1]]
    layout = gl.NVMMASharedLayout.get_default_for(block, GLUON_DTYPES[x.dtype])
    return GluonTensorDescriptor(x, [rows, x.shape[-1]], [stride, 1], block, layout)
