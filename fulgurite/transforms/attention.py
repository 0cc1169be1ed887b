"""Attention under a mask that is known before anything runs.

In: a functional graph, forward and backward in one or apart. Out: the same, where attention whose mask depends on no input
is told what the mask comes to, and reads none:

    hides from each token those after it    is_causal=True: half of the work
    hides nothing                           attention of all tokens

Masks that a program makes of positions (`arange`) are of this kind; models that know paddings and windows make them for every
call. Such a mask is computed once, on its own device, while its graph is compiled. Hidden scores take no part any more, where one
that is infinite makes its row NaN when a mask is added to it.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from fulgurite.trace import Trace
from fulgurite.trace.metadata import call_node
from fulgurite.transforms.base import transform
from fulgurite.transforms.purity import is_pure

Hides = Literal["later", "nothing"]
# what is added to the score of a hidden key, or less: torch's own for cuDNN where a mask is of bools (the least float16)
HIDDEN = -65504.0


@transform
def known_masks(trace: Trace) -> Trace:
    """Tell attention what its mask comes to, where that depends on no input."""
    if not any(_mask_of(node) for node in trace.graph.nodes):
        return trace
    return trace.edited(replace_known_masks)


def replace_known_masks(graph: fx.Graph) -> None:
    """The same on a graph in place, for the joint graph before it is split."""
    attentions = {node: masked for node in graph.nodes if (masked := _mask_of(node)) is not None}
    if not attentions:
        return
    constant = _constants(graph)
    found: dict[fx.Node, Hides | None] = {}
    for node, (name, mask) in attentions.items():
        if mask in constant:
            if mask not in found:
                with _disable_current_modes(), torch.no_grad():  # torch compiles in fake mode
                    found[mask] = _hides(_computed(graph, mask))
            if (hides := found[mask]) is not None:
                _give(node, "is_causal", hides == "later")
                _give(node, name, None)


def _mask_of(node: fx.Node) -> tuple[str, fx.Node] | None:
    """The mask that one of torch's attentions is given, forward or backward, and what the op calls it.

    None for other ops, and where there are more reasons than the mask why a key has no part (`is_causal`, dropout).
    """
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or "_scaled_dot_product_" not in str(target):
        return None
    names = {argument.name for argument in target._schema.arguments}
    name = next((name for name in ("attn_bias", "attn_mask") if name in names), None)
    if name is None or "is_causal" not in names:
        return None
    mask = _given(node, name)
    plain = isinstance(mask, fx.Node) and not _given(node, "is_causal")
    return (name, mask) if plain and not _given(node, "dropout_p") else None


def _given(node: fx.Node, name: str) -> Any:
    """An argument of an op by its name."""
    arguments = node.target._schema.arguments  # type: ignore[union-attr]
    place = [argument.name for argument in arguments].index(name)
    if place < len(node.args):
        return node.args[place]
    return node.kwargs.get(name, arguments[place].default_value)


def _give(node: fx.Node, name: str, value: Any) -> None:
    """Set an argument of an op by its name."""
    arguments = node.target._schema.arguments  # type: ignore[union-attr]
    place = [argument.name for argument in arguments].index(name)
    if place < len(node.args):
        node.update_arg(place, value)
    else:
        others = {key: given for key, given in node.kwargs.items() if key != name}
        node.kwargs = others if value == arguments[place].default_value else {**others, name: value}


def _constants(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that depend on no input."""
    module = graph.owning_module
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "get_attr":
            is_constant = not isinstance(call_node(module, node, {}), FakeTensor)
        else:
            is_constant = is_pure(node) and all(source in found for source in node.all_input_nodes)
        if is_constant:
            found.add(node)
    return found


def _computed(graph: fx.Graph, wanted: fx.Node) -> Any:
    """The value of a node that depends on no input."""
    needed = {wanted}
    for node in reversed(graph.nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
    values: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        if node in needed:
            values[node] = call_node(graph.owning_module, node, values)
    return values[wanted]


def _hides(mask: Any) -> Hides | None:
    """What a mask hides: bools that say what is seen, or numbers that are added to the scores."""
    if not isinstance(mask, Tensor) or mask.dim() < 2:
        return None
    for dim in range(mask.dim() - 2):
        if mask.stride(dim) == 0:  # the same for all heads
            mask = mask.narrow(dim, 0, min(mask.shape[dim], 1))
    if mask.dtype == torch.bool:
        seen, hidden = mask, ~mask
    else:
        seen, hidden = mask == 0, mask <= HIDDEN
    if seen.all():
        return "nothing"
    if mask.shape[-1] != mask.shape[-2]:
        return None
    earlier = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).tril()
    return "later" if ((seen == earlier) & (hidden != earlier)).all() else None
