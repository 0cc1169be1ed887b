"""Drawing tokens on a GPU: one program a row, without sorting the vocabulary.

In: logits and each row's settings and random number, as `kernels/sampling.py` says. Out: a token a row.

What min-p, top-k and top-p keep is the front of the list sorted by falling p, so it is said by one
number p* and how many tokens of exactly p* belong to it. The bits of a p in [0, 1] grow with it: p*
is found four bits at a time, by counting (top-k) or summing (top-p) over sixteen thresholds in one
pass. Then one more pass walks the tokens in order of their ids to where the sum of the kept passes
the random number.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 512  # times sixteen thresholds in float64: what fits in registers
ONE = tl.constexpr(0x3F800000)  # the bits of 1.0, the largest p


@triton.jit
def _search(p_row, size, floor, wanted, by_count: tl.constexpr, BLOCK: tl.constexpr):
    """The largest bits t at which tokens with bits >= t reach `wanted`; at least `floor`."""
    low = tl.zeros([], dtype=tl.int32)
    for index in range(8):
        shift = tl.maximum(26 - 4 * index, 0)
        thresholds = low + (tl.arange(0, 16) << shift)
        reached = tl.zeros([16], dtype=tl.float64)
        for start in range(0, size, BLOCK):
            offsets = start + tl.arange(0, BLOCK)
            p = tl.load(p_row + offsets, mask=offsets < size, other=-1.0)
            bits = p.to(tl.int32, bitcast=True)
            seen = (bits[:, None] >= thresholds[None, :]) & (p >= 0)[:, None]
            if by_count:
                reached += tl.sum(seen.to(tl.float64), axis=0)
            else:
                reached += tl.sum(tl.where(seen, p[:, None].to(tl.float64), 0.0), axis=0)
        passes = (reached >= wanted) | (thresholds <= floor)
        low += (tl.sum(passes.to(tl.int32), axis=0) - 1) << shift
    return low


@triton.jit
def _above(p_row, size, least, BLOCK: tl.constexpr):
    """Of the tokens with bits >= least: how many, and the sum of their p."""
    count, total = 0, tl.zeros([], dtype=tl.float64)
    for start in range(0, size, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        p = tl.load(p_row + offsets, mask=offsets < size, other=-1.0)
        kept = (p.to(tl.int32, bitcast=True) >= least) & (p >= 0)
        count += tl.sum(kept.to(tl.int32), axis=0)
        total += tl.sum(tl.where(kept, p.to(tl.float64), 0.0), axis=0)
    return count, total


@triton.jit
def _softmax(logits_row, p_row, size, temperature, BLOCK: tl.constexpr):
    """p relative to the largest, into p_row."""
    most = tl.full([], float("-inf"), dtype=tl.float32)
    for start in range(0, size, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        x = tl.load(logits_row + offsets, mask=offsets < size, other=float("-inf"))
        most = tl.maximum(most, tl.max(x.to(tl.float32), axis=0))
    for start in range(0, size, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        x = tl.load(logits_row + offsets, mask=offsets < size, other=float("-inf"))
        p = tl.exp((x.to(tl.float32) - most) / temperature)
        tl.store(p_row + offsets, p, mask=offsets < size)


@triton.jit
def _walk(p_row, size, edge, ties, target, BLOCK: tl.constexpr):
    """The first token at which the running sum of the kept passes `target`."""
    sum_before, ties_before = tl.zeros([], dtype=tl.float64), 0
    found, last = size, 0
    for start in range(0, size, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        p = tl.load(p_row + offsets, mask=offsets < size, other=-1.0)
        bits = p.to(tl.int32, bitcast=True)
        equal = ((bits == edge) & (p >= 0)).to(tl.int32)
        rank = ties_before + tl.cumsum(equal, axis=0) - equal
        kept = ((bits > edge) & (p > 0)) | ((equal > 0) & (rank < ties))
        weights = tl.where(kept, p.to(tl.float64), 0.0)
        sums = sum_before + tl.cumsum(weights, axis=0)
        passed = kept & (p > 0) & (sums > target)
        found = tl.minimum(found, tl.min(tl.where(passed, offsets, size), axis=0))
        last = tl.maximum(last, tl.max(tl.where(kept & (p > 0), offsets, 0), axis=0))
        sum_before += tl.sum(weights, axis=0)
        ties_before += tl.sum(equal, axis=0)
    return tl.where(found < size, found, last)


@triton.jit
def sample_kernel(
    logits, p, settings, tokens, size, logits_stride, BLOCK: tl.constexpr
):  # fmt: skip
    """settings: float64 [R, 5] of temperature, min_p, top_k, top_p, random."""
    row = tl.program_id(0).to(tl.int64)
    mine = settings + row * 5
    temperature, min_p = tl.load(mine).to(tl.float32), tl.load(mine + 1).to(tl.float32)
    top_k, top_p, random = tl.load(mine + 2), tl.load(mine + 3), tl.load(mine + 4)
    p_row = p + row * size
    _softmax(logits + row * logits_stride, p_row, size, temperature, BLOCK)
    tl.debug_barrier()  # other threads of this program read what was stored
    edge = min_p.to(tl.int32, bitcast=True)
    count, total = _above(p_row, size, edge, BLOCK)
    ties = size  # all tokens of p* are kept
    if (top_k > 0) & (top_k < count):
        edge = _search(p_row, size, 0, top_k, True, BLOCK)
        over, above = _above(p_row, size, edge + 1, BLOCK)
        ties = (top_k - over).to(tl.int32)
        total = above + ties * edge.to(tl.float32, bitcast=True).to(tl.float64)
    if top_p < 1:
        wanted = top_p * total
        front = _search(p_row, size, edge, wanted, False, BLOCK)
        over, above = _above(p_row, size, front + 1, BLOCK)
        each = front.to(tl.float32, bitcast=True).to(tl.float64)
        needed = tl.maximum(tl.ceil((wanted - above) / tl.maximum(each, 1e-300)), 1.0)
        ties = tl.minimum(needed, tl.where(front == edge, ties, size)).to(tl.int32)
        edge = front
    over, above = _above(p_row, size, edge + 1, BLOCK)
    same, _ = _above(p_row, size, edge, BLOCK)
    ties = tl.minimum(ties, same - over)
    kept = above + ties * edge.to(tl.float32, bitcast=True).to(tl.float64)
    tl.store(tokens + row, _walk(p_row, size, edge, ties, random * kept, BLOCK))


def sample_rows(
    logits_RO: Tensor,
    temperature_R: Tensor,
    min_p_R: Tensor,
    top_k_R: Tensor,
    top_p_R: Tensor,
    random_R: Tensor,
) -> Tensor:
    """`kernels.sampling.sample_rows`."""
    rows, size = logits_RO.shape
    columns = (temperature_R, min_p_R, top_k_R, top_p_R, random_R)
    settings = torch.stack([column.double() for column in columns], dim=1)
    settings = settings.to(logits_RO.device, non_blocking=True)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits_RO.device)
    p = torch.empty(rows, size, dtype=torch.float32, device=logits_RO.device)
    sample_kernel[(rows,)](
        logits_RO, p, settings, tokens, size, logits_RO.stride(0), BLOCK=BLOCK, num_warps=8
    )
    return tokens
