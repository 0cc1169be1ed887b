"""Gradients of an operator from those of its reference, which is computed again in backward.

In: the reference in plain torch ops, the operator's inputs and the gradient of its output. Out: a
gradient for each input, None where it has none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def recompute_gradients(
    reference: Callable[..., Tensor], inputs: Sequence[Any], grad_out: Tensor
) -> tuple[Tensor | None, ...]:
    """The gradients of `reference(*inputs)`."""
    is_wanted = [isinstance(x, Tensor) and x.is_floating_point() for x in inputs]
    with torch.enable_grad():
        leaves = [
            x.detach().requires_grad_() if wanted else x
            for x, wanted in zip(inputs, is_wanted, strict=True)
        ]
        out = reference(*leaves)
    wanted_leaves = [leaf for leaf, wanted in zip(leaves, is_wanted, strict=True) if wanted]
    gradients = iter(torch.autograd.grad(out, wanted_leaves, grad_out, allow_unused=True))
    return tuple(next(gradients) if wanted else None for wanted in is_wanted)
