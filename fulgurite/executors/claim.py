"""The priority walk: each op goes to the first executor that can run it.

In: a functional Trace and the executors in order. Out: a Trace at stage "claimed", where every op carries its
executor's name. An op that only the last resort would take is taken apart one level if all its pieces end with
the executors before it, and otherwise stays whole.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import fx

from fulgurite.errors import CompileError
from fulgurite.executors.base import Executor
from fulgurite.executors.whole import Whole
from fulgurite.trace import Trace, describe, source_of
from fulgurite.trace.cost import is_view
from fulgurite.trace.signature import call_signature
from fulgurite.trace.trace import copy_module
from fulgurite.transforms.decompose import decompose, inline

LAZY = (
    torch.ops.aten._conj.default,
    torch.ops.aten._neg_view.default,
)  # views that compute when read
DEEPEST = 4  # levels a composite op is taken apart; torch's own tables end well before
Known = dict[tuple[str, int], fx.GraphModule | None]  # pieces by call and depth


def claim(trace: Trace, executors: Sequence[Executor]) -> Trace:
    """Give every op an executor."""
    module = copy_module(trace.module)
    known: Known = {}
    for node in list(module.graph.nodes):
        taken_apart = node._erased  # with the tuple it was an item of
        if node.op in ("call_function", "call_method", "call_module") and not taken_apart:
            _claim_node(module, node, executors, DEEPEST, known)
    wholes = {node.meta["whole"]: None for node in module.graph.nodes if "whole" in node.meta}
    for node in module.graph.nodes:
        if "whole" in node.meta:
            node.meta["whole"].pieces.add(node)
    for whole in wholes:
        whole.close()
    return trace.with_module(module)


def _claim_node(
    module: fx.GraphModule, node: fx.Node, executors: Sequence[Executor], depth: int, known: Known
) -> None:
    if node.target is operator.getitem and "executor" in node.args[0].meta:
        node.meta["executor"] = node.args[0].meta["executor"]  # an item stays with its tuple
        return
    *preferred, last = executors
    for executor in preferred:
        if executor.claims(node):
            node.meta["executor"] = executor.name
            return
    wanting = [executor for executor in preferred if executor.takes_pieces]
    pieces = _wanted_pieces(module, node, wanting, depth, known) if wanting else None
    if pieces is not None:
        whole = Whole.of(node)
        made, results = inline(node, pieces)
        if "whole" not in node.meta:  # not itself a piece of something larger
            whole.open(made, results)
        for piece in made:
            if not piece._erased:  # with the tuple it was an item of
                _claim_node(module, piece, executors, depth - 1, known)
        return
    if not last.claims(node):
        raise CompileError(
            f"no executor claims {node.target}",
            where=str(source_of(node)),
            input=", ".join(
                f"{n.name}: {describe(n.meta.get('val'))}" for n in node.all_input_nodes
            ),
            next="end the list of executors with 'torch', which runs everything",
        )
    node.meta["executor"] = last.name


def _wanted_pieces(
    module: fx.GraphModule, node: fx.Node, wanting: Sequence[Executor], depth: int, known: Known
) -> fx.GraphModule | None:
    """The node's pieces, if every one that computes something ends with an executor that fuses.

    Equal layers have equal ops, and tracing the pieces of one takes milliseconds: what came out is remembered.
    """
    if depth == 0 or not isinstance(node.target, torch._ops.OpOverload):
        return None
    if _is_free(node) and node.target not in LAZY:
        return None
    call = call_signature(node)
    if call is None:  # sizes that are symbols: each call is its own
        return _taken_apart(module, node, wanting, depth, known)
    if (call, depth) not in known:
        known[call, depth] = _taken_apart(module, node, wanting, depth, known)
    return known[call, depth]


def _taken_apart(
    module: fx.GraphModule, node: fx.Node, wanting: Sequence[Executor], depth: int, known: Known
) -> fx.GraphModule | None:
    pieces = decompose(module, node)
    if pieces is None:
        return None
    computing = [n for n in pieces.graph.nodes if n.op == "call_function" and not _is_free(n)]
    wanted = bool(computing) and all(
        any(executor.claims(piece) for executor in wanting)
        or _wanted_pieces(pieces, piece, wanting, depth - 1, known) is not None
        for piece in computing
    )
    return pieces if wanted else None


def _is_free(node: fx.Node) -> bool:
    """Views and item picking go wherever their neighbours go."""
    return node.target is operator.getitem or is_view(node)
