"""Results that are views made without gradients: AOTAutograd records their gradients all the same.

In: a captured graph, whose inference mode is `torch.no_grad` (`inference_mode.py`). Out: the same graph, in
which such a result is detached. In eager mode a view of `x` that is made inside `torch.no_grad` has no
`grad_fn`, so nothing flows from it to `x`. AOTAutograd makes such a result anew from its base after the call,
with a `grad_fn`: a loss that reads it would add to the gradient of `x`.
"""

from __future__ import annotations

import torch
from torch import fx

from fulgurite.trace.node_meta import example_value


def detach_results(module: fx.GraphModule) -> None:
    """Detach every result of the graph that is a view without `grad_fn` of a tensor that needs a gradient."""
    output = module.graph.output_node()
    inputs = {id(example_value(node)) for node in module.graph.nodes if not _is_computed(node)}
    views = [
        node
        for node in output.all_input_nodes
        if _is_computed(node) and id(example_value(node)) not in inputs and _is_leaf_view(node)
    ]
    for node in views:
        with module.graph.inserting_before(output):
            detached = module.graph.call_method("detach", (node,))
        detached.meta = {**node.meta, "example_value": example_value(node).detach()}
        output.replace_input_with(node, detached)
    if views:
        module.recompile()


def _is_computed(node: fx.Node) -> bool:
    return node.op.startswith("call_")


def _is_leaf_view(node: fx.Node) -> bool:
    """Whether a value is a view that needs a gradient and has no `grad_fn`.

    `x.flatten()` may be `x` itself: no view, or an input of the graph.
    """
    value = example_value(node)
    is_tensor = isinstance(value, torch.Tensor) and value.requires_grad
    return is_tensor and value.grad_fn is None and value._is_view()
