# mypy: allow-untyped-defs, allow-incomplete-defs
"""`cross_entropy_rows` on a GPU: one program a row, which reads the logits twice and writes once.

The first pass keeps a maximum and a sum of exponentials for each group of 8 neighbouring lanes (online
softmax): a thread's access has one, so a logit takes one exponential, not two. The second pass overwrites
the logits with their gradient; it reads them from L2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fulgurite.kernels.common.triton_import import tl, triton
from fulgurite.kernels.cross_entropy.args import IGNORED, CrossEntropyArgs
from fulgurite.kernels.elementwise.triton_elementwise import SUPPORTED_DTYPES, tanh
from fulgurite.kernels.integer_math import next_power_of_2
from fulgurite.kernels.tuning.heuristics import heuristics_for

NO_LABEL = tl.constexpr(IGNORED)
GROUP = 8  # neighbouring logits: 16 bytes of 16-bit ones, an access of a thread


@triton.jit
def load_logits(row, columns, size, scale, cap, HAS_CAP: tl.constexpr):
    """Scaled and capped logits in float32; beyond the row, those of zeros."""
    x = tl.load(row + columns, mask=columns < size, other=0.0).to(tl.float32) * scale
    if HAS_CAP:
        x = tanh(x / cap) * cap
    return x


@triton.jit
def cross_entropy_kernel(
    logits,
    labels,
    losses,
    zs,
    size,
    stride,
    scale,
    cap,
    z_weight,
    HAS_CAP: tl.constexpr,
    HAS_GRADIENT: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0)
    row = logits + index.to(tl.int64) * stride
    label = tl.load(labels + index)
    is_labelled = label != NO_LABEL
    # read before the reductions, whose barriers keep it ahead of the stores
    picked = tl.load(row + label, mask=is_labelled, other=0.0).to(tl.float32) * scale
    if HAS_CAP:
        picked = tanh(picked / cap) * cap
    groups = tl.arange(0, BLOCK // GROUP)
    lanes = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    largest = tl.full((BLOCK // GROUP,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK // GROUP,), tl.float32)
    for start in range(0, size, BLOCK):
        x = load_logits(row, start + lanes, size, scale, cap, HAS_CAP)
        x = tl.where(start + lanes < size, x, float("-inf"))
        new = tl.maximum(largest, tl.max(x, 1))
        base = tl.where(new == float("-inf"), 0.0, new)  # a group without a finite logit
        total = total * tl.exp(largest - base) + tl.sum(tl.exp(x - base[:, None]), 1)
        largest = new
    peak = tl.max(largest, 0)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    log_z = tl.log(tl.sum(total * tl.exp(largest - base), 0)) + base
    tl.store(losses + index, tl.where(is_labelled, log_z - picked, 0.0))
    tl.store(zs + index, tl.where(is_labelled, log_z * log_z, 0.0))
    if HAS_GRADIENT:
        weight = 1.0 + 2.0 * z_weight * log_z
        place = label.to(tl.int32)
        for start in range(0, size, BLOCK):
            columns = start + lanes
            x = load_logits(row, columns, size, scale, cap, HAS_CAP)
            grad = tl.exp(x - log_z) * weight - tl.where(columns == place, 1.0, 0.0)
            if HAS_CAP:
                grad *= 1.0 - (x / cap) * (x / cap)
            grad = tl.where(is_labelled, grad * scale, 0.0)
            tl.store(row + columns, grad.to(logits.dtype.element_ty), mask=columns < size)


def cross_entropy_rows(logits_CV: Tensor, labels_C: Tensor, args: CrossEntropyArgs) -> Any:
    """`cross_entropy_rows`; the gradient overwrites the logits."""
    count, size = logits_CV.shape
    if logits_CV.dtype not in SUPPORTED_DTYPES or logits_CV.stride(-1) != 1 or size == 0:
        return NotImplemented
    loss_C, z_C = (torch.empty_like(labels_C, dtype=torch.float32) for _ in range(2))
    config = heuristics_for(logits_CV.device).cross_entropy
    is_wide = size % GROUP == 0 and logits_CV.stride(0) % GROUP == 0
    group = GROUP if is_wide else 1  # narrow accesses: neighbours are in other threads
    if count:
        cross_entropy_kernel[(count,)](
            logits_CV,
            labels_C.contiguous(),
            loss_C,
            z_C,
            size,
            logits_CV.stride(0),
            args.scale,
            1.0 if args.cap is None else args.cap,
            args.z_weight,
            HAS_CAP=args.cap is not None,
            HAS_GRADIENT=args.has_gradient,
            GROUP=group,
            BLOCK=max(group, min(config.block_n, next_power_of_2(size))),
            num_warps=config.num_warps,
        )
    return loss_C, z_C, logits_CV if args.has_gradient else None
