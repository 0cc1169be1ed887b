"""Cross entropy of logits whose columns are split over ranks: no rank ever has all of them.

    logits = cap * tanh(scale * (hidden @ weight.T + bias) / cap)
    lse = log sum exp(logits)        maximum and sum: two all-reduces of one number a token
    ce = lse - logits[label]         in the second one, too: only one rank has the label's column

Rows are computed in chunks, and their gradients with them, in forward: softmax - one-hot of this rank's
columns, which needs no communication. So no logits are saved, and backward only scales.

Shapes: T tokens; C tokens of a chunk; D hidden size; O this rank's columns of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from fulgurite.parallel.collectives import all_reduce, run_collective
from fulgurite.parallel.mesh import Axis
from fulgurite.train.batch import IGNORED
from fulgurite.train.loss import chunk_rows


@dataclass(frozen=True)
class SplitLoss:
    """Which columns a rank has, and what is done to logits and losses.

    Attributes:
        axis: the ranks that share the vocabulary.
        start: this rank's first column.
        z_weight: of the squared log-partition in the total.
        scale, cap: of logits.
        most_columns: of any rank; 0: all have as many as this one. Ranks cut rows into equal chunks,
            since they reduce each chunk together.
    """

    axis: Axis
    start: int
    z_weight: float = 0.0
    scale: float = 1.0
    cap: float | None = None
    most_columns: int = 0


def vocab_parallel_cross_entropy(
    hidden_TD: Tensor,
    weight_OD: Tensor,
    bias_O: Tensor | None,
    labels_T: Tensor,
    options: SplitLoss,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sums of loss + z_weight * z, of loss and of z, equal on all ranks.

    Only the first has a gradient. That of `hidden_TD` is partial: the sum over ranks is complete.
    """
    outputs = _VocabParallelCrossEntropy.apply(hidden_TD, weight_OD, bias_O, labels_T, options)
    total, loss, z = outputs
    return total, loss.detach(), z.detach()


class _VocabParallelCrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        weight_OD: Tensor,
        bias_O: Tensor | None,
        labels_T: Tensor,
        options: SplitLoss,
    ) -> tuple[Tensor, Tensor, Tensor]:
        sums = hidden_TD.new_zeros(3, dtype=torch.float32)
        grad_hidden = torch.zeros_like(hidden_TD)
        grad_weight = torch.zeros_like(weight_OD, dtype=torch.float32)
        grad_bias = torch.zeros_like(weight_OD[:, 0], dtype=torch.float32)
        rows = chunk_rows(max(len(weight_OD), options.most_columns), hidden_TD)
        for start in range(0, len(hidden_TD), rows):
            hidden_CD, labels_C = hidden_TD[start : start + rows], labels_T[start : start + rows]
            logits_CO = torch.nn.functional.linear(hidden_CD, weight_OD, bias_O).float()
            chunk_sums, grad_CO = _chunk_loss(logits_CO, labels_C, options)
            sums += chunk_sums
            if any(ctx.needs_input_grad):
                grad_hidden[start : start + rows] = grad_CO.to(weight_OD.dtype) @ weight_OD
                grad_weight += (grad_CO.to(hidden_CD.dtype).t() @ hidden_CD).float()
                grad_bias += grad_CO.sum(0)
        ctx.has_bias = bias_O is not None
        ctx.save_for_backward(grad_hidden, grad_weight.to(weight_OD.dtype), grad_bias)
        return sums[0].clone(), sums[1].clone(), sums[2].clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        hidden, weight, bias = (x * gradients[0].to(x.dtype) for x in ctx.saved_tensors)
        return hidden, weight, bias.to(weight.dtype) if ctx.has_bias else None, None, None


def _chunk_loss(logits_CO: Tensor, labels_C: Tensor, options: SplitLoss) -> tuple[Tensor, Tensor]:
    """The three sums of a chunk, and the gradient of the first in this rank's logits."""
    scale, cap = options.scale, options.cap
    logits_CO = logits_CO if scale == 1.0 else logits_CO * scale
    logits_CO = logits_CO if cap is None else torch.tanh(logits_CO / cap) * cap
    maximum_C = _all_reduce_max(logits_CO.amax(dim=-1), options.axis)
    exp_CO = torch.exp(logits_CO - maximum_C[:, None])
    column_C = labels_C - options.start
    is_mine_C = (column_C >= 0) & (column_C < logits_CO.shape[1]) & (labels_C != IGNORED)
    column_C1 = column_C.where(is_mine_C, 0)[:, None]
    picked_C = (logits_CO.gather(1, column_C1)[:, 0] - maximum_C).where(is_mine_C, 0.0)
    both_2C = all_reduce(
        torch.stack((exp_CO.sum(dim=-1), picked_C)), options.axis, "all-reduce of the softmax"
    )
    partition_C, picked_C = both_2C.unbind(0)
    has_loss_C = labels_C != IGNORED
    loss_C = (partition_C.log() - picked_C).where(has_loss_C, 0.0)
    lse_C = maximum_C + partition_C.log()
    z_C = lse_C.square().where(has_loss_C, 0.0)
    grad_CO = exp_CO / partition_C[:, None] * (1 + 2 * options.z_weight * lse_C)[:, None]
    grad_CO.scatter_add_(1, column_C1, -is_mine_C.to(grad_CO.dtype)[:, None])
    grad_CO = grad_CO if cap is None else grad_CO * (1 - (logits_CO / cap).square())
    sums = torch.stack(((loss_C + options.z_weight * z_C).sum(), loss_C.sum(), z_C.sum()))
    return sums, grad_CO * scale * has_loss_C[:, None]


def _all_reduce_max(x: Tensor, axis: Axis) -> Tensor:
    """The maximum over ranks, in place."""
    if axis.group is not None:
        run_collective(
            axis, "all-reduce of maxima", x, partial(dist.all_reduce, x, op=dist.ReduceOp.MAX)
        )
    return x
