"""`cross_entropy_rows` in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from fulgurite.kernels.cross_entropy.args import IGNORED, CrossEntropyArgs
from fulgurite.kernels.gemm.reference import upcast


def cross_entropy_rows(
    logits_CV: Tensor, labels_C: Tensor, args: CrossEntropyArgs
) -> tuple[Tensor, Tensor, Tensor | None]:
    x_CV = upcast(logits_CV)
    x_CV = x_CV if args.scale == 1.0 else x_CV * args.scale
    x_CV = x_CV if args.cap is None else torch.tanh(x_CV / args.cap) * args.cap
    is_labelled_C, index_C1 = labels_C != IGNORED, labels_C.clamp(min=0)[:, None]
    log_z_C = x_CV.logsumexp(-1)
    loss_C = torch.where(is_labelled_C, log_z_C - x_CV.gather(1, index_C1)[:, 0], 0.0)
    z_C = torch.where(is_labelled_C, log_z_C.square(), 0.0)
    if not args.has_gradient:
        return loss_C, z_C, None
    grad_CV = torch.exp(x_CV - log_z_C[:, None])
    if args.z_weight:
        grad_CV *= 1 + 2 * args.z_weight * log_z_C[:, None]
    grad_CV.scatter_add_(1, index_C1, grad_CV.new_full((1, 1), -1.0).expand_as(index_C1))
    if args.cap is not None:
        grad_CV *= 1 - (x_CV / args.cap).square()
    if args.scale != 1.0:
        grad_CV *= args.scale
    grad_CV = grad_CV.masked_fill(~is_labelled_C[:, None], 0.0)
    return loss_C, z_C, grad_CV.to(logits_CV.dtype)
