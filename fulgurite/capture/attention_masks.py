"""Constant-fold attention masks in a captured graph, before torch chooses an attention kernel.

In: a captured graph, changed in place. Out: nothing. Masks of `F.scaled_dot_product_attention` that
depend on no input become `is_causal=True` or no mask, as in `transforms/attention_masks.py`.
AOTAutograd chooses the kernel while it traces: a mask forbids flash attention, and one that is not
contiguous along the keys forbids every fused kernel: broadcast masks of encoders, the transposed
position bias of T5. So this has to come before it, and before repeated layers become graphs of
their own, which get the mask as an input.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

from fulgurite.trace.metadata import run_node
from fulgurite.trace.node_meta import captured_value, set_example_value
from fulgurite.transforms.attention_masks import classify_constant_mask

PARAMETERS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
IN_PLACE_OPERATORS = {
    *(operator.setitem, operator.delitem, operator.iadd, operator.isub, operator.imul),
    *(operator.itruediv, operator.ifloordiv, operator.imod, operator.ipow, operator.iand),
    *(operator.ior, operator.ixor, operator.ilshift, operator.irshift, operator.imatmul),
}
# of functions whose value their arguments don't determine
NOT_CONSTANT = ("rand", "normal", "bernoulli", "multinomial", "poisson", "dropout", "empty")
MIN_MASK_DIMS = 2


def fold_captured_masks(module: fx.GraphModule) -> None:
    """Replace masks that depend on no input; make the others contiguous along the keys."""
    attentions = {node: mask for node in module.graph.nodes if (mask := _find_mask(node))}
    if not attentions:
        return
    constant = _find_constant_nodes(module.graph)
    for node, mask in attentions.items():
        pattern = classify_constant_mask(module.graph, mask) if mask in constant else None
        if pattern is not None:
            _set_argument(node, "is_causal", pattern == "causal")
            _set_argument(node, "attn_mask", None)
        elif _is_strided_along_keys(mask):
            with module.graph.inserting_after(mask):
                dense = module.graph.call_method("contiguous", (mask,))
            set_example_value(dense, captured_value(mask).contiguous())
            _set_argument(node, "attn_mask", dense)
    module.graph.eliminate_dead_code(is_impure_node=lambda node: node not in constant)
    module.recompile()


def _find_mask(node: fx.Node) -> fx.Node | None:
    """The mask of an attention call that is not causal as well."""
    if node.op != "call_function" or node.target is not F.scaled_dot_product_attention:
        return None
    mask, is_causal = _get_argument(node, "attn_mask"), _get_argument(node, "is_causal")
    return mask if isinstance(mask, fx.Node) and not is_causal else None


def _get_argument(node: fx.Node, name: str) -> Any:
    position = PARAMETERS.index(name)
    return node.args[position] if position < len(node.args) else node.kwargs.get(name)


def _set_argument(node: fx.Node, name: str, value: Any) -> None:
    position = PARAMETERS.index(name)
    if position < len(node.args):
        node.update_arg(position, value)
    else:
        node.update_kwarg(name, value)


def _is_strided_along_keys(mask: fx.Node) -> bool:
    value = captured_value(mask)
    if not isinstance(value, Tensor) or value.dim() < MIN_MASK_DIMS or value.device.type == "cpu":
        return False
    return value.shape[-1] != 1 and value.stride(-1) != 1


def _find_constant_nodes(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that depend on no input, and whose memory no node writes to."""
    module = graph.owning_module
    assert module is not None, "a captured graph has a module"
    found: set[fx.Node] = set()
    written: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "get_attr":
            if not isinstance(run_node(module, node, {}), FakeTensor):
                found.add(node)
        elif _is_pure(node):
            if all(source in found for source in node.all_input_nodes):
                found.add(node)
        elif node.op != "output" and node.target is not F.scaled_dot_product_attention:
            written.update(source for source in node.all_input_nodes if source in found)
    return found - _connected(written, found) if written else found


def _connected(start: set[fx.Node], inside: set[fx.Node]) -> set[fx.Node]:
    """The nodes of `inside` that are reached from `start`: any of them may be a view of another."""
    seen, stack = set(start), list(start)
    while stack:
        node = stack.pop()
        new = {n for n in (*node.all_input_nodes, *node.users) if n in inside} - seen
        seen |= new
        stack.extend(new)
    return seen


def _is_pure(node: fx.Node) -> bool:
    """Whether a node of a captured graph is a function of torch or Python without effects."""
    if "out" in node.kwargs:
        return False
    if node.op == "call_method":
        return _is_pure_name(str(node.target)) and hasattr(Tensor, str(node.target))
    if node.op != "call_function":
        return False
    target: Any = node.target
    if getattr(operator, getattr(target, "__name__", ""), None) is target:
        return target not in IN_PLACE_OPERATORS
    name = getattr(target, "__name__", "_")
    return getattr(torch, name, None) is target and _is_pure_name(name)


def _is_pure_name(name: str) -> bool:
    return not name.endswith("_") and not any(part in name for part in NOT_CONSTANT)
