"""Backward of a compiled graph inside `vmap`: many gradients of one forward pass at once.

In: gradients of outputs that are batched tensors, and the inputs of the call. Out: batched gradients of
the inputs. `torch.autograd.grad(..., is_grads_batched=True)`, `jacobian(..., vectorize=True)` and `vmap`
over a function that calls `torch.autograd.grad` come here. A compiled backward graph is traced for
gradients of one shape, and its kernels can't read batched tensors. So the captured graph runs again in
eager mode, and autograd differentiates it: the same restrictions as for `double_backward` apply.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._C import _are_functorch_transforms_active
from torch._C import _dispatch_tls_is_dispatch_key_included as _is_included

from fulgurite.capture.double_backward import CallInputs, needs_gradient, rerun_with_autograd


def is_inside_vmap() -> bool:
    """Whether backward runs inside `vmap`, torch's own (`is_grads_batched`) or functorch's."""
    return _is_included("VmapMode") or _are_functorch_transforms_active()


def run_captured_backward(
    call: CallInputs, outputs: Sequence[int], gradients: Sequence[Any]
) -> tuple[Any, ...]:
    """The gradients of a call's inputs, by autograd through its captured graph.

    outputs     the outputs of the captured graph that have gradients
    gradients   the gradients of all outputs
    """
    call.check("backward inside vmap")
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        inputs, results = rerun_with_autograd(call, [x for x in call.values if needs_gradient(x)])
        known = [k for k in outputs if gradients[k] is not None]
        found = torch.autograd.grad(
            [results[k] for k in known],
            inputs,
            [gradients[k] for k in known],
            create_graph=create_graph,
            allow_unused=True,
        )
    remaining = iter(found)
    return tuple(next(remaining) if needs_gradient(value) else None for value in call.values)
