"""Validation: a loss module and held-out samples in, loss, perplexity and bits per byte out.

The samples are the same at every evaluation: the first ones of a fixed permutation. Each rank computes its
share; sums are added in the order of the samples, so the result does not depend on the number of ranks.

    perplexity    = exp(loss)
    bits per byte = sum of losses / ln 2 / bytes of the text that the labels stand for

Other evaluations are in probes.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fulgurite.errors import ArgumentError
from fulgurite.train.batch import IGNORED, Batch
from fulgurite.train.data.loader import collate
from fulgurite.train.data.order import sample_index
from fulgurite.train.data.packing import Dataset, Ints
from fulgurite.train.layout import Layout, ModelParallelLayout

SEED = 0  # of the permutation that chooses samples


@dataclass(frozen=True)
class Evaluation:
    """Results on held-out text.

    Attributes:
        loss: mean cross entropy of a token, in nats.
        perplexity: its exponential.
        bits_per_byte: None if the tokens' bytes are not known.
        tokens: with a label.
    """

    loss: float
    perplexity: float
    bits_per_byte: float | None
    tokens: int

    def values(self) -> dict[str, float]:
        """For `StepRecord.evaluation`."""
        found = {"loss": self.loss, "perplexity": self.perplexity}
        return (
            found if self.bits_per_byte is None else found | {"bits_per_byte": self.bits_per_byte}
        )


def evaluate(
    loss_module: nn.Module,
    dataset: Dataset,
    layout: Layout,
    *,
    batches: int,
    batch_size: int,
    device: torch.device | str,
) -> Evaluation:
    """Validation on at most `batches` microbatches of `batch_size` samples.

    `loss_module(tokens, labels, positions, documents)` gives sums with `.loss` and `.tokens`. All ranks
    call this together, and each runs the module equally often.
    """
    if batches < 1 or batch_size < 1:
        raise ArgumentError(
            f"evaluate.batches={batches} of {batch_size} samples are none", next="use at least 1"
        )
    count = min(len(dataset), batches * batch_size)
    groups = [range(at, min(at + batch_size, count)) for at in range(0, count, batch_size)]
    sums = _compute_sums(loss_module, dataset, layout, groups, device)
    losses, tokens, num_bytes = layout.sum_over_data(sums).double().cpu().unbind(0)
    total, labels = math.fsum(losses.tolist()), round(tokens.sum().item())
    return summarize(total, labels, round(num_bytes.sum().item()))


def summarize(total: float, tokens: int, num_bytes: int) -> Evaluation:
    """An evaluation from the sum of losses, the number of labels and their bytes (0: not known)."""
    loss = total / tokens if tokens else math.nan
    bits = total / math.log(2) / num_bytes if num_bytes else None
    return Evaluation(loss, _exp(loss), bits, tokens)


def _exp(loss: float) -> float:
    return math.inf if loss >= 700 else math.exp(loss)


@torch.no_grad()
def _compute_sums(
    loss_module: nn.Module,
    dataset: Dataset,
    layout: Layout,
    groups: Sequence[range],
    device: torch.device | str,
) -> Tensor:
    """Loss, labels and bytes of each microbatch, [3, microbatches]; zero for those of other ranks."""
    byte_lengths: Ints | None = getattr(dataset, "byte_lengths", None)
    sums = torch.zeros(3, len(groups), dtype=torch.float64, device=device)
    was_training = loss_module.training
    loss_module.eval()
    try:
        for first in range(0, len(groups), layout.data_ranks):
            own = first + layout.data_rank
            batch = _load(dataset, groups[min(own, len(groups) - 1)])
            moved = batch.to(device)
            outputs = _run(layout, loss_module, moved)
            if own < len(groups):  # else the last one, again: ranks must run equally often
                sums[0, own] = outputs.loss.double()
                sums[1, own] = outputs.tokens.double()
                sums[2, own] = _count_bytes(batch, byte_lengths)
    finally:
        loss_module.train(was_training)
    return sums


def _run(layout: Layout, loss_module: nn.Module, batch: Batch) -> Any:
    """The sums of one microbatch."""
    if isinstance(layout, ModelParallelLayout):
        return layout.evaluate_batch(loss_module, batch)
    return loss_module(batch.tokens_BT, batch.labels_BT, batch.positions_BT, batch.documents_BT)


def _load(dataset: Dataset, numbers: range) -> Batch:
    length = len(dataset)
    samples = [dataset.sample(sample_index(number, length, SEED)) for number in numbers]
    return collate(samples, numbers[0])


def _count_bytes(batch: Batch, byte_lengths: Ints | None) -> float:
    if byte_lengths is None:
        return 0.0
    labels = batch.labels_BT.numpy()
    return float(np.asarray(byte_lengths)[labels[labels != IGNORED]].sum())
