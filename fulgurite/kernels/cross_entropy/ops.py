"""`cross_entropy_rows`: logits and labels in; losses, squared log-partitions and gradients out.

    x = cap * tanh(scale * logits / cap)            cap None: x = scale * logits
    log_z = logsumexp(x)       loss = log_z - x[label]       z = log_z^2
    gradient of sum(loss + z_weight * z) with respect to the logits

Rows whose label is `IGNORED` have no loss and a gradient of zero. All arithmetic is float32 (float64
for float64 logits).

Shapes: C rows; V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from fulgurite.kernels import registry
from fulgurite.kernels.cross_entropy import reference, triton_cross_entropy
from fulgurite.kernels.cross_entropy.args import CrossEntropyArgs

CROSS_ENTROPY_KERNELS = {"cuda": triton_cross_entropy.cross_entropy_rows}


class CrossEntropyRows(NamedTuple):
    """A loss and a z of each row; the gradient of the logits, in their dtype, or None."""

    loss_C: Tensor
    z_C: Tensor
    grad_CV: Tensor | None


def cross_entropy_rows(
    logits_CV: Tensor, labels_C: Tensor, args: CrossEntropyArgs
) -> CrossEntropyRows:
    """See the top of this file. The gradient may overwrite the logits."""
    results = registry.dispatch(
        CROSS_ENTROPY_KERNELS,
        logits_CV.device,
        reference.cross_entropy_rows,
        logits_CV,
        labels_C,
        args,
    )
    return CrossEntropyRows(*results)
