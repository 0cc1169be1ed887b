"""Gradients of a step's microbatches: one forward and backward each in, their sum out.

    tree = SumTree()
    for batch in batches:
        sums = run_backward(loss_module, batch)              # forward, backward of the sum of losses
        tree.push([*take_gradients(parameters), *sums])      # a leaf
    *gradients, loss, z_loss, tokens, load = tree.total()
    store_gradients(parameters, gradients, tokens)           # divided by the tokens of the step

A `SumTree` adds its leaves in the order of a binary tree, as a binary counter: two subtrees of equal
size are added as soon as both are there, the left one first. So any contiguous share of 2^n leaves
sums to the same bits on whichever rank, and adding the shares in the same order gives those of one
rank. It holds at most log2(leaves) + 1 sums at a time. 16-bit leaves are summed in float32.

Where the order does not matter, backward divides: `run_backward(loss_module, batch, factor)`. That saves
a pass over all gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from fulgurite.train.batch import Batch
from fulgurite.train.layout import StepTotals
from fulgurite.train.loss import LossSums
from fulgurite.train.optim.scale import scale_tensors

Leaf = list[Tensor | None]


class SumTree:
    """Sums of lists of tensors in the order of a binary tree. An entry may be None: no gradient."""

    def __init__(self) -> None:
        self._subtrees: list[tuple[int, Leaf]] = []  # (leaves, their sum), larger ones first

    def push(self, leaf: Sequence[Tensor | None], leaves: int = 1) -> None:
        """Add a leaf, or the sum of a subtree of `leaves` leaves. The tree may overwrite it."""
        size, right = leaves, list(leaf)
        while self._subtrees and self._subtrees[-1][0] == size:
            _, left = self._subtrees.pop()
            size, right = 2 * size, add_lists(left, right)
        self._subtrees.append((size, right))

    def total(self) -> Leaf:
        """The sum of all leaves. Subtrees of unequal sizes are added from the right."""
        if not self._subtrees:
            return []
        _, total = self._subtrees.pop()
        while self._subtrees:
            _, left = self._subtrees.pop()
            total = add_lists(left, total)
        return total


def add_lists(left: Leaf, right: Leaf) -> Leaf:
    """The sums of the pairs, in place where the dtype allows it; float32 for 16-bit tensors."""
    return [_add(a, b) for a, b in zip(left, right, strict=True)]


def _add(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    if left is None or right is None:
        return right if left is None else left
    is_16_bit = left.is_floating_point() and left.dtype.itemsize == 2
    return left.float().add_(right) if is_16_bit else left.add_(right)


def trainable_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The parameters that get gradients, each once."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def count_terms(loss_module: nn.Module, batch: Batch) -> Tensor:
    """`LossSums.tokens` of a microbatch before it has run: what its loss is divided by.

    Tokens with a label, unless the module has a `count_terms` of its own (pairs of answers).
    """
    count = getattr(loss_module, "count_terms", None)
    return batch.num_tokens if count is None else count(batch)  # type: ignore[no-any-return]


def run_backward(loss_module: nn.Module, batch: Batch, factor: Tensor | None = None) -> LossSums:
    """Forward and backward of one microbatch; `.grad` grows by its gradients, times `factor`.

    Returns its sums, without the factor.
    """
    offsets = () if batch.offsets_S is None else (batch.offsets_S,)
    sums: LossSums = loss_module(
        batch.tokens_BT, batch.labels_BT, batch.positions_BT, batch.documents_BT, *offsets
    )
    seed = None if factor is None else factor.to(sums.total)
    sums.total.backward(seed)  # type: ignore[no-untyped-call]
    return LossSums(*(None if x is None else x.detach() for x in sums))


def take_gradients(parameters: Iterable[nn.Parameter]) -> Leaf:
    """The gradients of the last backward, which are removed from their parameters."""
    gradients: Leaf = []
    for parameter in parameters:
        gradients.append(parameter.grad)
        parameter.grad = None
    return gradients


@torch.no_grad()
def store_gradients(
    parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None], tokens: Tensor
) -> None:
    """Set `.grad` to a sum of gradients divided by the number of tokens; may overwrite the sum."""
    present = [gradient for gradient in gradients if gradient is not None]
    scale_tensors(present, reciprocal(tokens))
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = None if gradient is None else gradient.to(parameter.dtype)


def reciprocal(tokens: Tensor) -> Tensor:
    """What turns the sum of a step into a mean; 1 if there are no tokens."""
    return tokens.clamp(min=1).float().reciprocal()


def mean_totals(sums: LossSums) -> StepTotals:
    """The figures of a step from its sums over all microbatches and ranks."""
    divisor = sums.tokens.clamp(min=1)
    return StepTotals(sums.loss / divisor, sums.z_loss / divisor, sums.tokens, sums.load_LE)


def norm_of_norms(gradients: Iterable[Tensor]) -> Tensor:
    """The norm of the norms of all gradients, in float32."""
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
