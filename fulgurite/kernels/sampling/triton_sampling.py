# mypy: allow-untyped-defs, allow-incomplete-defs
"""Drawing tokens on a GPU: many programs a row, four readings of the logits, no sorting.

In: logits and each row's settings, as `kernels/sampling.py` says. Out: a token a row.

What min-p, top-k and top-p keep is the front of the list sorted by falling p, so it is said by one
number p* and how many tokens of exactly p* belong to it. The bits of a p in [0, 1] grow with it.

    most_kernel    the largest logit, and bounds of p*: for top-k the k-th largest of what each few
                   tokens have as their largest, for top-p what the sums of p and p squared allow
    pivot_kernel   the sums of all p above each of 16 or 32 pivots between the bounds: two hold p*
    list_kernel    sums what lies above those two and lists what lies between, a few of all tokens
    edge_kernel    finds p* in the list (or in all tokens, if the list was too long: rows where
                   thousands share a p); one program a row, which reads no logits
    draw_kernel    sums what each chunk of the vocabulary keeps; the last program of a row finds the
                   chunk in which the sum passes the random number, and in it the token

The first two are in `sampling_bounds.py`, the next two in `sampling_edge.py`. The middle three run
only if a row asks for top-k or top-p. Pivots and what is summed for them are rounded and only say where
to look. What decides is summed in whole numbers, 2^43 for p = 1, so that no order of programs changes
it; what is less than one is never drawn. p is exp2 of a float32, right to 2^-18. Nothing waits for
the host.

    R  rows    C  chunks of the vocabulary
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fulgurite.kernels.common.integer_math import cdiv, next_power_of_2
from fulgurite.kernels.common.triton_counters import take_counters
from fulgurite.kernels.common.triton_launch import prepared
from fulgurite.kernels.sampling.triton_bounds import (
    BOUNDS,
    COLUMNS,
    EDGE,
    MOST,
    SCALE,
    STATE,
    TIES,
    cuts,
    load,
    most_kernel,
    pivot_kernel,
    probabilities,
    units_of,
)
from fulgurite.kernels.sampling.triton_threshold import edge_kernel, list_kernel

CHUNK = 2048  # tokens of a program
PIVOT_CHUNK = 4096  # of one that compares with pivots
LANES = 128  # tokens that it compares with all pivots at once
PIVOTS = 32
FEW_PIVOTS = 16  # of MANY_ROWS: shorter lists would cost more than they save
MANY_ROWS = 32
STRETCH = 64  # tokens of which the largest logit is noted, to bound the k-th largest of all
CAPACITY = 32768  # of a list; normal logits of any width leave about half as many
TILE = 2048  # of a list, kept in registers
BLOCK = 2048  # of a longer one, times sixteen thresholds
WARPS = 4
EDGE_WARPS = 8
MOST_ROWS = 65535  # programs in the second direction


@triton.jit
def _top(logits_row, offsets, size):
    """The largest logit and the smallest token that has it, packed; NaN is larger than all."""
    x = load(logits_row, offsets, size)
    x = tl.where(x == 0.0, 0.0, x)  # -0 is 0
    bits = x.to(tl.int32, bitcast=True)
    keys = tl.where(x != x, 0x7FFFFFFF, tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF))
    key = tl.max(keys, 0)
    token = tl.min(tl.where(keys == key, offsets, 0x7FFFFFFF), 0)
    return ((key.to(tl.int64) + 2147483648) << 31) | (0x7FFFFFFF - token).to(tl.int64)


@prepared
def greedy_kernel(
    logits, packed, tokens, counters, size, stride, CHUNK: tl.constexpr, CHUNKS: tl.constexpr
):  # fmt: skip
    """packed: int64 [R, C]."""
    chunk, row, chunks = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(0)
    top = _top(logits + row * stride, chunk * CHUNK + tl.arange(0, CHUNK), size)
    tl.store(packed + row * chunks + chunk, top)
    tl.debug_barrier()
    if tl.atomic_add(counters + row, 1, sem="acq_rel") == chunks - 1:
        tl.store(counters + row, 0)
        index = tl.arange(0, CHUNKS)
        tops = tl.load(packed + row * chunks + index, index < chunks, 0, cache_modifier=".cg")
        tl.store(tokens + row, 0x7FFFFFFF - (tl.max(tops, 0) & 0x7FFFFFFF))


@triton.jit
def _kept(logits_row, offsets, size, most, scale, edge):
    """What lies above the edge in units, and what lies on it."""
    p = probabilities(load(logits_row, offsets, size), most, scale)
    bits = p.to(tl.int32, bitcast=True)
    return tl.where(bits > edge, units_of(p), 0), (bits == edge) & (offsets < size)


@prepared
def draw_kernel(
    logits, bounds, state, chunk_sums, chunk_ties, settings, tokens, counters, size, stride,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """chunk_sums, chunk_ties: int64 [R, C], what a chunk keeps above p*, and has of p*."""
    chunk, row, chunks = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(0)
    mine, state_row = settings + row * COLUMNS, state + row * STATE
    most, scale = tl.load(bounds + row * BOUNDS + MOST), tl.load(bounds + row * BOUNDS + SCALE)
    edge = tl.load(mine + 1).to(tl.float32).to(tl.int32, bitcast=True)
    ties = tl.full([], 1 << 31, tl.int64)
    if cuts(mine):
        edge, ties = tl.load(state_row + EDGE).to(tl.int32), tl.load(state_row + TIES)
    logits_row, place = logits + row * stride, row * chunks + chunk
    offsets = chunk * CHUNK + tl.arange(0, CHUNK)
    above, on = _kept(logits_row, offsets, size, most, scale, edge)
    inside, on_edge = tl.sum(above, 0), tl.sum(on.to(tl.int32), 0).to(tl.int64)
    tl.store(chunk_sums + place, inside)
    tl.store(chunk_ties + place, on_edge)
    tl.debug_barrier()
    if tl.atomic_add(counters + row, 1, sem="acq_rel") == chunks - 1:
        tl.store(counters + row, 0)
        each = units_of(edge.to(tl.float32, bitcast=True))
        index = tl.arange(0, CHUNKS)
        at = row * chunks + index
        sums = tl.load(chunk_sums + at, index < chunks, 0, cache_modifier=".cg")
        on_edges = tl.load(chunk_ties + at, index < chunks, 0, cache_modifier=".cg")
        ties_before = tl.cumsum(on_edges, 0) - on_edges
        here = tl.minimum(tl.maximum(ties - ties_before, 0), on_edges)
        through = tl.cumsum(sums + here * each, 0)
        whole = tl.max(through, 0)
        target = (tl.load(mine + 4) * whole.to(tl.float64)).to(tl.int64)
        target = tl.minimum(target, whole - 1)
        passed = tl.sum((through <= target).to(tl.int32), 0)  # chunks before the one
        is_mine = index == passed
        before = tl.sum(tl.where(is_mine, through - sums - here * each, 0), 0)
        allowed = ties - tl.sum(tl.where(is_mine, ties_before, 0), 0)
        offsets = passed * CHUNK + tl.arange(0, CHUNK)
        above, on = _kept(logits_row, offsets, size, most, scale, edge)
        rank = tl.cumsum(on.to(tl.int32), 0)
        running = before + tl.cumsum(above + tl.where(on & (rank <= allowed), each, 0), 0)
        token = passed * CHUNK + tl.sum((running <= target).to(tl.int32), 0)
        if tl.abs(most) < float("inf"):
            tl.store(tokens + row, token.to(tl.int64))
        else:  # infinite or NaN: no distribution
            top = tl.zeros([], tl.int64)
            for start in range(0, size, CHUNK):
                top = tl.maximum(top, _top(logits_row, start + tl.arange(0, CHUNK), size))
            tl.store(tokens + row, 0x7FFFFFFF - (top & 0x7FFFFFFF))


# ---- launching -----------------------------------------------------------------------------------


def greedy(logits_RO: Tensor) -> Tensor:
    """`kernels.sampling.greedy`."""
    rows, size = logits_RO.shape
    if not 0 < rows <= MOST_ROWS or not 0 < size < 2**31 or logits_RO.stride(1) != 1:
        return NotImplemented  # type: ignore[no-any-return]
    device, chunks = logits_RO.device, cdiv(size, CHUNK)
    packed = torch.empty(rows, chunks, dtype=torch.int64, device=device)
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    greedy_kernel[(chunks, rows)](
        logits_RO, packed, tokens, take_counters(device, rows), size, logits_RO.stride(0),
        CHUNK=CHUNK, CHUNKS=next_power_of_2(chunks), num_warps=WARPS,
    )  # fmt: skip
    return tokens


class Space(NamedTuple):
    """What the programs of a call tell each other. Nothing in it has to be zero at first."""

    bounds: Tensor
    parts: Tensor
    largest: Tensor
    pivot_sums: Tensor
    listed: Tensor
    state: Tensor
    chunks: tuple[Tensor, ...]  # int64 [R, C] each: all, above, sums, ties


def _space(rows: int, size: int, pivots: int, device: torch.device) -> Space:
    chunks, pivot_chunks = cdiv(size, CHUNK), cdiv(size, PIVOT_CHUNK)
    floats = [
        rows * each
        for each in (
            BOUNDS.value,
            4 * chunks,
            CHUNK // STRETCH * chunks,
            2 * pivots * pivot_chunks,
            min(size, CAPACITY) + TILE,
        )
    ]
    state = torch.empty(rows, STATE.value, dtype=torch.int64, device=device)
    by_chunk = torch.empty(4, rows, chunks, dtype=torch.int64, device=device)
    bounds, parts, largest, sums, listed = torch.empty(sum(floats), device=device).split(floats)
    return Space(bounds, parts, largest, sums, listed, state, by_chunk.unbind(0))


def sample_rows(logits_RO: Tensor, settings_R5: Tensor, cut: bool | None = None) -> Tensor:
    """`kernels.sampling.sample_rows`; `cut` says whether some row has top-k or top-p."""
    rows, size = logits_RO.shape
    if not 0 < rows <= MOST_ROWS or not 0 < size <= 2**19 or logits_RO.stride(1) != 1:
        return NotImplemented  # type: ignore[no-any-return]
    device, chunks = logits_RO.device, cdiv(size, CHUNK)
    if cut is None:
        cut = settings_R5.device.type != "cpu" or cuts_any(settings_R5)
    settings = settings_R5.to(device, torch.float64, non_blocking=True).contiguous()
    pivots = FEW_PIVOTS if rows >= MANY_ROWS else PIVOTS
    space = _space(rows, size, pivots, device)
    counters, stride = take_counters(device, rows), logits_RO.stride(0)
    grid, shared = (chunks, rows), {"CHUNK": CHUNK, "CHUNKS": next_power_of_2(chunks)}
    most_kernel[grid](
        logits_RO, space.parts, space.largest, space.bounds, space.state, settings, counters, size,
        stride, STRETCHES=CHUNK // STRETCH, PIVOTS=pivots, num_warps=WARPS, **shared,
    )  # fmt: skip
    if cut:
        _find_edges(logits_RO, settings, counters, space, pivots)
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    draw_kernel[grid](
        logits_RO, space.bounds, space.state, *space.chunks[2:], settings, tokens, counters, size,
        stride, num_warps=WARPS, **shared,
    )  # fmt: skip
    return tokens


def cuts_any(settings_R5: Tensor) -> bool:
    return bool(((settings_R5[:, 2] > 0) | (settings_R5[:, 3] < 1)).any())


def _find_edges(
    logits_RO: Tensor, settings: Tensor, counters: Tensor, space: Space, pivots: int
) -> None:
    """For rows with top-k or top-p: p*, and how many tokens of it are kept."""
    rows, size = logits_RO.shape
    chunks, pivot_chunks = cdiv(size, CHUNK), cdiv(size, PIVOT_CHUNK)
    pivot_kernel[(pivot_chunks, rows)](
        logits_RO, space.bounds, space.state, space.pivot_sums, settings, counters, size,
        logits_RO.stride(0), CHUNK=PIVOT_CHUNK, CHUNKS=next_power_of_2(pivot_chunks),
        PIVOTS=pivots, LANES=LANES, num_warps=LANES // 32,
    )  # fmt: skip
    rest = (*space.chunks[:2], space.listed, settings, size, logits_RO.stride(0))
    list_kernel[(chunks, rows)](
        logits_RO, space.bounds, space.state, *rest, min(size, CAPACITY),
        CHUNK=CHUNK, TILE=TILE, num_warps=WARPS,
    )  # fmt: skip
    edge_kernel[(rows,)](
        logits_RO, space.bounds, space.state, *rest, min(size, CAPACITY), chunks,
        CHUNKS=next_power_of_2(chunks), TILE=TILE, BLOCK=BLOCK, num_warps=EDGE_WARPS,
    )  # fmt: skip
