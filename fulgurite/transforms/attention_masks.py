"""Constant-fold attention masks that depend on no input.

In: a functional graph: forward, backward or joint. Out: the same, with attention masks replaced by what
they evaluate to:

    causal mask             is_causal=True, which halves the work
    mask that hides nothing no mask

Models that support padding and sliding windows build such masks from positions (`arange`) at every call.
The mask is computed once, on its own device, while the graph is compiled. A hidden score no longer takes
part at all; with an added mask, an infinite hidden score would make its row NaN.

`capture/attention_masks.py` does the same before torch chooses an attention kernel, for masks that it can
tell to be constant there.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from fulgurite.trace import Trace
from fulgurite.trace.metadata import run_node
from fulgurite.trace.purity import is_pure
from fulgurite.transforms.base import transform

MaskPattern = Literal["causal", "all_visible"]
# a key with at most this added to its score is hidden: what torch uses for cuDNN (the lowest float16)
MASKED_SCORE = -65504.0


@transform
def fold_attention_masks(trace: Trace) -> Trace:
    """Replace attention masks that depend on no input."""
    if not any(_find_mask(node) for node in trace.graph.nodes):
        return trace
    return trace.edit(fold_masks_in_graph)


def fold_masks_in_graph(graph: fx.Graph) -> None:
    """The same on a graph in place, for the joint graph before it is partitioned."""
    attentions = {node: masked for node in graph.nodes if (masked := _find_mask(node)) is not None}
    if not attentions:
        return
    constant = _find_constant_nodes(graph)
    found: dict[fx.Node, MaskPattern | None] = {}
    for node, (name, mask) in attentions.items():
        if mask in constant:
            if mask not in found:
                found[mask] = classify_constant_mask(graph, mask)
            if (pattern := found[mask]) is not None:
                _set_argument(node, "is_causal", pattern == "causal")
                _set_argument(node, name, None)


def classify_constant_mask(graph: fx.Graph, mask: fx.Node) -> MaskPattern | None:
    """Evaluate a mask that depends on no input, and recognize it."""
    with _disable_current_modes(), torch.no_grad():  # TorchDynamo calls us in fake mode
        return _classify_mask(_evaluate_constant(graph, mask))


def _find_mask(node: fx.Node) -> tuple[str, fx.Node] | None:
    """The name and the node of the mask argument of an attention op, forward or backward.

    None for other ops, and for attention that also has `is_causal` or dropout.
    """
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or "_scaled_dot_product_" not in str(target):
        return None
    names = {argument.name for argument in target._schema.arguments}
    name = next((name for name in ("attn_bias", "attn_mask") if name in names), None)
    if name is None or "is_causal" not in names:
        return None
    mask = _get_argument(node, name)
    only_mask = isinstance(mask, fx.Node) and not _get_argument(node, "is_causal")
    return (name, mask) if only_mask and not _get_argument(node, "dropout_p") else None


def _get_argument(node: fx.Node, name: str) -> Any:
    """An argument of an op by its name."""
    arguments = node.target._schema.arguments  # type: ignore[union-attr]
    position = [argument.name for argument in arguments].index(name)
    if position < len(node.args):
        return node.args[position]
    return node.kwargs.get(name, arguments[position].default_value)


def _set_argument(node: fx.Node, name: str, value: Any) -> None:
    """Set an argument of an op by its name."""
    arguments = node.target._schema.arguments  # type: ignore[union-attr]
    position = [argument.name for argument in arguments].index(name)
    if position < len(node.args):
        node.update_arg(position, value)
        return
    rest = {key: argument for key, argument in node.kwargs.items() if key != name}
    is_default = value == arguments[position].default_value
    node.kwargs = rest if is_default else {**rest, name: value}


def _find_constant_nodes(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that depend on no input."""
    module = graph.owning_module
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "get_attr":
            is_constant = not isinstance(run_node(module, node, {}), FakeTensor)
        else:
            is_constant = is_pure(node) and all(source in found for source in node.all_input_nodes)
        if is_constant:
            found.add(node)
    return found


def _evaluate_constant(graph: fx.Graph, wanted: fx.Node) -> Any:
    """The value of a node that depends on no input."""
    needed = {wanted}
    for node in reversed(graph.nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
    values: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        if node in needed:
            values[node] = run_node(graph.owning_module, node, values)
    return values[wanted]


def _classify_mask(mask: Any) -> MaskPattern | None:
    """Recognize a mask: bools (True is visible), or numbers that are added to the scores."""
    if not isinstance(mask, Tensor) or mask.dim() < 2:
        return None
    for dim in range(mask.dim() - 2):
        if mask.stride(dim) == 0:  # broadcast over batch or heads
            mask = mask.narrow(dim, 0, min(mask.shape[dim], 1))
    if mask.dtype == torch.bool:
        visible, hidden = mask, ~mask
    else:
        visible, hidden = mask == 0, mask <= MASKED_SCORE
    if visible.all():
        return "all_visible"
    if mask.shape[-1] != mask.shape[-2]:
        return None
    causal = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).tril()
    return "causal" if ((visible == causal) & (hidden != causal)).all() else None
