"""Ops that wait for no other: which region computes what backward makes of saved tensors.

In: a claimed trace, and the groups of everything else. Out: each op that depends on the graph's inputs alone, in the
group of what reads it, or of what reads the same inputs. Such an op could run anywhere. Put where the program has it,
an activation that is computed again for backward is a kernel of its own, which writes it for another to read; in the
region of its gradient it is one more line of a kernel that reads the same tensors.

    h = silu(g) * u        read by the product that makes the weight's gradient
    dg, du = …dh, g, u     one kernel reads dh, g, u and writes h, dg, du
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, fx

from fulgurite.trace.cost import value_bytes

LEAST_SHARED = 1 << 16  # bytes of an input that is worth being read once


@dataclass
class Inputs:
    """The large inputs of a graph that nodes read, directly or through nodes that wait for nothing else."""

    of: dict[fx.Node, frozenset[fx.Node]]
    free: set[fx.Node]  # wait for no other node

    def shared(self, nodes: Iterable[fx.Node], with_node: fx.Node) -> int:
        """Bytes that a node and others read both."""
        read = {source for node in nodes for source in self.of.get(node, ())}
        return sum(value_bytes(source.meta["val"]) for source in self.of[with_node] & read)


def inputs_of(graph: fx.Graph, movable: set[fx.Node]) -> Inputs:
    """What nodes read; `movable` are those that may be computed anywhere once their inputs are there."""
    of: dict[fx.Node, frozenset[fx.Node]] = {}
    free: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        given = [n for n in node.all_input_nodes if n.op in ("placeholder", "get_attr")]
        large = {n for n in given if _is_large(n)}
        for source in node.all_input_nodes:
            if source in free:
                large |= of[source]
        of[node] = frozenset(large)
        if node in movable and all(n in free or n in given for n in node.all_input_nodes):
            free.add(node)
    return Inputs(of, free)


def _is_large(node: fx.Node) -> bool:
    return value_bytes(node.meta.get("val")) >= LEAST_SHARED


def deferred(graph: fx.Graph, inputs: Inputs, fusing: set[fx.Node]) -> set[fx.Node]:
    """The free nodes that a later region can have: something fused reads the same inputs, and does not wait for a
    single op that reads the node (as a layer's sum with its input waits for the layer). Those that read next to nothing,
    such as positions and their angles, go with their readers."""
    before = _single_ops_before(graph, fusing)
    reading: dict[fx.Node, list[int]] = {}  # by input, what its fused readers wait for
    for node in fusing - inputs.free:
        for source in inputs.of[node]:
            reading.setdefault(source, []).append(before[node])
    after: dict[fx.Node, int] = {}  # single ops that read a node, directly or through free ones
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node not in inputs.free:
            continue
        after[node] = 0
        for user in node.users:
            after[node] |= after[user] if user in inputs.free else _own(user, before, fusing)
        waiting = (mask for source in inputs.of[node] for mask in reading.get(source, ()))
        if not inputs.of[node] or any(not mask & after[node] for mask in waiting):
            found.add(node)
    return found


def _single_ops_before(graph: fx.Graph, fusing: set[fx.Node]) -> dict[fx.Node, int]:
    """For each node the ops outside of regions that it waits for, itself among them, a bit each."""
    found: dict[fx.Node, int] = {}
    for position, node in enumerate(graph.nodes):
        own = 1 << position if node.op == "call_function" and node not in fusing else 0
        for source in node.all_input_nodes:
            own |= found[source]
        found[node] = own
    return found


def _own(user: fx.Node, before: dict[fx.Node, int], fusing: set[fx.Node]) -> int:
    """The bit of an op outside of regions: the highest one, as it comes after all that it waits for."""
    if user in fusing or not before[user] or user.op != "call_function":
        return 0
    return 1 << (before[user].bit_length() - 1)


def is_plain(node: fx.Node) -> bool:
    """A tensor that is no item of a tuple, and belongs to no kernel of its own."""
    value = node.meta.get("val")
    return (
        isinstance(value, Tensor)
        and node.target is not operator.getitem
        and "apart" not in node.meta
    )


def waited_for(node: fx.Node, later: set[fx.Node]) -> list[fx.Node]:
    """What a node reads; in the place of nodes that have no group yet, what those read."""
    found: dict[fx.Node, None] = {}
    seen: set[fx.Node] = set()
    stack = list(node.all_input_nodes)
    while stack:
        source = stack.pop()
        if source not in later:
            found[source] = None
        elif source not in seen:
            seen.add(source)
            stack.extend(source.all_input_nodes)
    return list(found)
