# mypy: allow-untyped-defs, allow-incomplete-defs
"""Absorbed latent attention on Hopper (sm_90), for 64 rows and more of a sequence: DeepSeek's 128 heads.

    scores = scale * (q_c . c_j + q_r . r_j)      out = sum_j softmax_j(scores) c_j

The sums of `mla_decode`, in Gluon, Triton's language of layouts: here products bound the time, and Triton gives both warp
groups of a program all scores of 64 rows, each product done twice. In this kernel

- a warp group makes the scores of half a block's keys, and gathers half of the columns;
- a latent is loaded once, by the tensor memory accelerator, and is key and value where it lies in shared memory;
- the block after is loaded while this one is multiplied.

FP8 latents are converted to float16 on their way from one shared tile to another (`mla_decode` says why). How a tile
is spread over threads there (PIECE) matters beyond itself: with four rows a warp ptxas lets every product wait for the one before.

    T  tokens    N  heads    C  latent rank    R  rotary part    S  sequences
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from fulgurite.kernels.mla.reference import Parts
from fulgurite.kernels.mla.triton_absorb import Queries
from fulgurite.kernels.mla.triton_decode import empty_spans, merge, splits_for
from fulgurite.kernels.tuning.gemm import processors

NEGATIVE = gl.constexpr(-float("inf"))
WIDEN = gl.constexpr(
    "{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }"
)
LOG2E = gl.constexpr(1.4426950408889634)
# names that changed after triton 3.6
barrier = getattr(gl, "thread_barrier", None) or gl.barrier
load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
RANK, ROPE, ROWS, KEYS, WARPS = 512, 64, 64, 64, 8


@gluon.jit
def _fetch(
    i, page, latents, ropes, tiles, turns, ready, BN: gl.constexpr, PAGE: gl.constexpr, first, there
):
    """Start loading block i, which lies in `page`, if it is there."""
    stage = i % 2
    at = page * PAGE + (first + i * BN) % PAGE
    bar = ready.index(stage)
    mbarrier.expect(bar, latents.block_type.nbytes + ropes.block_type.nbytes, there)
    load_tile(latents, [at, 0], bar, tiles.index(stage), there)
    load_tile(ropes, [at, 0], bar, turns.index(stage), there)


@gluon.jit
def hopper_kernel(
    q, q_rope, latents, ropes, scales_ptr, powers_ptr, tables_ptr, starts_ptr, lengths_ptr,
    out_ptr, parts_ptr, tops_ptr, sums_ptr, scale, tiles_count, splits, out_token, out_head,
    table_row, scale_page, scale_slot,
    HEADS: gl.constexpr, C: gl.constexpr, R: gl.constexpr, PAGE: gl.constexpr,
    PACKED: gl.constexpr, SPLIT: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """Rows tile * BM .. of one sequence over one span of its keys."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, BN // 2, 16])
    FOUND: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 256, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    KEY: gl.constexpr = gl.SliceLayout(0, SCORES)
    PIECE: gl.constexpr = gl.BlockedLayout([1, 16], [1, 32], [num_warps, 1], [1, 0])
    NUMBER: gl.constexpr = q.dtype
    HALF: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BN, C], q.dtype)

    sequence = gl.program_id(0) // tiles_count
    tile = gl.program_id(0) % tiles_count
    split = gl.program_id(1)
    start = gl.load(starts_ptr + sequence)
    count = gl.load(starts_ptr + sequence + 1) - start
    length = gl.load(lengths_ptr + sequence)
    if tile * BM >= count * HEADS:
        return
    rows = gl.minimum(BM, count * HEADS - tile * BM)
    last = length - count + (tile * BM + rows - 1) // HEADS + 1
    first = 0
    if SPLIT:
        span = gl.cdiv(gl.cdiv(last, splits), BN) * BN
        first = split * span
        last = gl.minimum(last, first + span)
    blocks = gl.cdiv(gl.maximum(last - first, 0), BN)

    q_c = gl.allocate_shared_memory(q.dtype, [BM, C], q.layout)
    q_r = gl.allocate_shared_memory(q_rope.dtype, [BM, R], q_rope.layout)
    tiles = gl.allocate_shared_memory(latents.dtype, [2, BN, C], latents.layout)
    turns = gl.allocate_shared_memory(ropes.dtype, [2, BN, R], ropes.layout)
    HELD: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BM, BN], q.dtype)
    weights_held = gl.allocate_shared_memory(q.dtype, [BM, BN], HELD)
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    asked = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    if PACKED:
        halves = gl.allocate_shared_memory(q.dtype, [BN, C], HALF)
    mbarrier.init(ready.index(0), count=1)
    mbarrier.init(ready.index(1), count=1)
    mbarrier.init(asked, count=1)
    fence_async_shared()
    barrier()

    table = tables_ptr + sequence.to(gl.int64) * table_row
    row_at = start * HEADS + tile * BM
    mbarrier.expect(asked, q.block_type.nbytes + q_rope.block_type.nbytes)
    load_tile(q, [row_at, 0], asked, q_c)
    load_tile(q_rope, [row_at, 0], asked, q_r)
    page = gl.load(table + first // PAGE, blocks > 0, 0)
    ahead = gl.load(table + (first + BN) // PAGE, blocks > 1, 0)
    _fetch(0, page, latents, ropes, tiles, turns, ready, BN, PAGE, first, blocks > 0)

    row = tile * BM + gl.arange(0, BM, ROW)
    position = length - count + row // HEADS
    factor = gl.full([BM], 1.0, gl.float32, ROW) * (scale * LOG2E)
    if PACKED:
        factor *= gl.load(powers_ptr + start.to(gl.int64) * HEADS + row, row < count * HEADS, 1.0)
    top = gl.full([BM], NEGATIVE, gl.float32, ROW)
    total = gl.zeros([BM], gl.float32, ROW)
    found = warpgroup_mma_init(gl.zeros([BM, C], gl.float32, FOUND))
    nothing = gl.zeros([BM, BN], gl.float32, SCORES)
    mbarrier.wait(asked, 0)
    for i in range(blocks):
        stage = i % 2
        j = first + i * BN
        key = j + gl.arange(0, BN, KEY)
        mbarrier.wait(ready.index(stage), (i // 2) & 1)
        if PACKED:
            slot = j % PAGE + gl.arange(0, BN, KEY)
            at = page.to(gl.int64) * scale_page + slot * scale_slot
            size = gl.load(scales_ptr + at, key < last, 1.0)
            found = warpgroup_mma_wait(0, deps=[found])  # it reads `halves`
            barrier()
            there = i + 1 < blocks
            _fetch(i + 1, ahead, latents, ropes, tiles, turns, ready, BN, PAGE, first, there)
            narrow = tiles.index(stage).load(PIECE)
            wide = gl.inline_asm_elementwise(
                WIDEN, "=r,=r,r", [narrow.to(gl.uint8, bitcast=True)], dtype=gl.float16,
                is_pure=True, pack=4,
            )  # fmt: skip
            inside = j + gl.arange(0, BN, gl.SliceLayout(1, PIECE)) < last
            halves.store(gl.where(inside[:, None], wide, gl.zeros_like(wide)))
            fence_async_shared()
            barrier()
            kept = halves
            scores = warpgroup_mma(q_c, kept.permute((1, 0)), nothing, use_acc=False, is_async=True)
            scores = warpgroup_mma_wait(0, deps=[scores])
            scores *= size[None, :]
            scores = warpgroup_mma(q_r, turns.index(stage).permute((1, 0)), scores, is_async=True)
            scores = warpgroup_mma_wait(0, deps=[scores])
        else:
            kept = tiles.index(stage)
            if j + BN > last:  # what lies behind the end may be no number: it must be zeros
                for part in gl.static_range(0, C, 128):
                    piece = kept.slice(part, 128, 1)
                    some = piece.load(PIECE)
                    inside = j + gl.arange(0, BN, gl.SliceLayout(1, PIECE)) < last
                    piece.store(gl.where(inside[:, None], some, gl.zeros_like(some)))
                fence_async_shared()
                barrier()
            # the block before is done with: load over it
            found = warpgroup_mma_wait(0, deps=[found])
            barrier()
            there = i + 1 < blocks
            _fetch(i + 1, ahead, latents, ropes, tiles, turns, ready, BN, PAGE, first, there)
            scores = warpgroup_mma(q_c, kept.permute((1, 0)), nothing, use_acc=False, is_async=True)
            scores = warpgroup_mma(q_r, turns.index(stage).permute((1, 0)), scores, is_async=True)
            scores = warpgroup_mma_wait(0, deps=[scores])
        page = ahead
        ahead = gl.load(table + (j + 2 * BN) // PAGE, i + 2 < blocks, 0)
        seen = (key[None, :] <= position[:, None]) & (key < last)[None, :]
        scores = gl.where(seen, scores * factor[:, None], NEGATIVE)
        if PACKED:
            scores += gl.log2(size)[None, :]
        new_top = gl.maximum(top, gl.max(scores, 1))
        base = gl.where(new_top == NEGATIVE, 0.0, new_top)
        weights = gl.exp2(scores - base[:, None])
        weights_held.store(weights.to(NUMBER))
        shrink = gl.exp2(top - base)
        found = found * gl.convert_layout(shrink, gl.SliceLayout(1, FOUND))[:, None]
        fence_async_shared()
        barrier()
        found = warpgroup_mma(weights_held, kept, found, is_async=True)
        if PACKED:
            weights = weights * (1.0 / size)[None, :]
        total = total * shrink + gl.sum(weights, 1)
        top = new_top
    found = warpgroup_mma_wait(0, deps=[found])

    is_row = row < count * HEADS
    out_row = tile * BM + gl.arange(0, BM, gl.SliceLayout(1, FOUND))
    is_out = out_row < count * HEADS
    column = gl.arange(0, C, gl.SliceLayout(0, FOUND))
    if SPLIT:
        place = (start.to(gl.int64) * HEADS + row) * splits + split
        gl.store(tops_ptr + place, top, is_row)
        gl.store(sums_ptr + place, total, is_row)
        at = (start.to(gl.int64) * HEADS + out_row) * splits + split
        gl.store(parts_ptr + at[:, None] * C + column[None, :], found, is_out[:, None])
    else:
        found = found / gl.convert_layout(total, gl.SliceLayout(1, FOUND))[:, None]
        token, head = start.to(gl.int64) + out_row // HEADS, out_row % HEADS
        at = token * out_token + head * out_head
        to = out_ptr + at[:, None] + column[None, :]
        gl.store(to, found.to(out_ptr.dtype.element_ty), is_out[:, None])


# ---- launching -----------------------------------------------------------------------------------

KINDS = {
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.float8_e4m3fn: gl.float8e4nv,
}


def fits(queries: Queries, kept: Parts, rows: int) -> bool:
    """Whether this kernel is for these: Hopper, DeepSeek's sizes, pages that hold whole blocks end to end."""
    latents, ropes = kept.latents_PBC, kept.ropes_PBR
    if queries.latent_TNC.device.type != "cuda" or queries.latent_TNC.dtype == torch.float32:
        return False
    sizes = (latents.shape[2], ropes.shape[2], latents.shape[1] % KEYS)
    aligned = all(
        x.data_ptr() % 16 == 0 and x.stride(1) * x.itemsize % 16 == 0 for x in (latents, ropes)
    )
    end_to_end = latents.stride(0) == latents.shape[1] * latents.stride(1)
    on_hopper = torch.cuda.get_device_capability(latents.device)[0] == 9
    return rows > 32 and sizes == (RANK, ROPE, 0) and aligned and end_to_end and on_hopper


def attend_hopper(
    queries: Queries,
    kept: Parts,
    tables: Tensor,
    starts: Tensor,
    lengths: Tensor,
    scale: float,
    max_query: int,
    max_length: int,
    dtype: torch.dtype,
) -> Tensor:
    """What absorbed queries gather, [T, N, C]; zeros for nobody's tokens."""
    q_TNC, q_TNR, powers = queries
    (tokens, heads, rank), sequences = q_TNC.shape, lengths.shape[0]
    latents, ropes, packed = kept.latents_PBC, kept.ropes_PBR, kept.scales_PB is not None
    tiles = triton.cdiv(max_query * heads, ROWS)
    splits = splits_for(sequences * tiles, processors(q_TNC.device), max_length)
    splits = (
        max(splits, 2) if packed else splits
    )  # of FP8 only the split form has been compared on a GPU
    make = torch.zeros if splits == 1 else torch.empty  # the merge writes nobody's zeros
    out = make((tokens, heads, rank), dtype=dtype, device=q_TNC.device)
    spans = empty_spans(tokens * heads, splits, rank, q_TNC.device)
    scales = spans.tops if kept.scales_PB is None else kept.scales_PB
    slots = latents.shape[0] * latents.shape[1]
    hopper_kernel[(sequences * tiles, splits)](
        _descriptor(q_TNC, tokens * heads, rank, ROWS),
        _descriptor(q_TNR, tokens * heads, q_TNR.stride(1), ROWS),
        _descriptor(latents, slots, latents.stride(1), KEYS),
        _descriptor(ropes, slots, ropes.stride(1), KEYS),
        scales, spans.tops if powers is None else powers, tables, starts, lengths, out, *spans,
        scale, tiles, splits, *out.stride()[:2], tables.stride(0),
        *(scales.stride() if packed else (0, 0)),
        HEADS=heads, C=rank, R=q_TNR.shape[2], PAGE=latents.shape[1], PACKED=packed,
        SPLIT=splits > 1, BM=ROWS, BN=KEYS, num_warps=WARPS,
    )  # fmt: skip
    if splits > 1:
        merge(spans, starts, out, splits, rank)
    return out


def _descriptor(x: Tensor, rows: int, step: int, tile: int) -> TensorDescriptor:
    """`rows` rows of the last axis of `x`, `step` numbers apart, in tiles of `tile` rows."""
    block = [tile, x.shape[-1]]
    layout = gl.NVMMASharedLayout.get_default_for(block, KINDS[x.dtype])
    return TensorDescriptor(x, [rows, x.shape[-1]], [step, 1], block, layout)
