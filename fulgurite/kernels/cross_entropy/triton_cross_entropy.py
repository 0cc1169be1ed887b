# mypy: allow-untyped-defs, allow-incomplete-defs
"""`cross_entropy_rows` on a GPU: one program a row, which reads the logits twice and writes once.

The first pass keeps a maximum and a sum of exponentials for each lane (online softmax), the second
overwrites the logits with their gradient.
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


@triton.jit
def load_logits(row, columns, size, scale, cap, HAS_CAP: tl.constexpr):
    """Scaled and capped logits in float32; -inf beyond the row."""
    x = tl.load(row + columns, mask=columns < size, other=0.0).to(tl.float32) * scale
    if HAS_CAP:
        x = tanh(x / cap) * cap
    return tl.where(columns < size, x, float("-inf"))


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
    lanes = tl.arange(0, BLOCK)
    largest = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, size, BLOCK):
        x = load_logits(row, start + lanes, size, scale, cap, HAS_CAP)
        new = tl.maximum(largest, x)
        base = tl.where(new == float("-inf"), 0.0, new)  # a lane without a finite logit
        total = total * tl.exp(largest - base) + tl.exp(x - base)
        largest = new
    peak = tl.max(largest, 0)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    log_z = tl.log(tl.sum(total * tl.exp(largest - base), 0)) + base
    tl.store(losses + index, tl.where(is_labelled, log_z - picked, 0.0))
    tl.store(zs + index, tl.where(is_labelled, log_z * log_z, 0.0))
    if HAS_GRADIENT:
        weight = 1.0 + 2.0 * z_weight * log_z
        for start in range(0, size, BLOCK):
            columns = start + lanes
            x = load_logits(row, columns, size, scale, cap, HAS_CAP)
            grad = tl.exp(x - log_z) * weight - tl.where(columns == label, 1.0, 0.0)
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
            BLOCK=min(config.block_n, next_power_of_2(size)),
            num_warps=config.num_warps,
        )
    return loss_C, z_C, logits_CV if args.has_gradient else None
