"""Code sinking: in which region an op that depends on graph inputs alone is computed.

In: the graph of a claimed trace. Out: the ops to sink. Such an op could run anywhere. `grouping` places it
last: in the region of a reader, or in one that reads the same inputs. The typical case is an activation
that backward recomputes. Where the program has it, it would be a kernel of its own that writes the
activation for another kernel. In the region of its gradient it is one more line of a kernel that reads
the same tensors anyway.

    h = silu(g) * u        read by the matmul of the weight's gradient
    dg, du = …dh, g, u     one kernel reads dh, g, u and writes h, dg, du
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, fx

from fulgurite.trace.cost import value_bytes
from fulgurite.trace.node_meta import fake_value, fusion_group

MIN_SHARED_INPUT_BYTES = 1 << 16  # reading smaller inputs twice costs next to nothing


@dataclass
class InputReads:
    """The large graph inputs that each node reads, directly or through independent nodes."""

    large_inputs: dict[fx.Node, frozenset[fx.Node]]
    independent: set[fx.Node]  # nodes that depend on graph inputs alone

    def shared_bytes(self, nodes: Iterable[fx.Node], node: fx.Node) -> int:
        """Bytes of the large inputs that both `node` and some of `nodes` read."""
        read = {source for other in nodes for source in self.large_inputs.get(other, ())}
        return sum(value_bytes(fake_value(source)) for source in self.large_inputs[node] & read)


def collect_input_reads(graph: fx.Graph, movable: set[fx.Node]) -> InputReads:
    """Find what each node reads; only `movable` nodes can be independent."""
    large_inputs: dict[fx.Node, frozenset[fx.Node]] = {}
    independent: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        inputs = [n for n in node.all_input_nodes if n.op in ("placeholder", "get_attr")]
        large = {n for n in inputs if _is_large(n)}
        for source in node.all_input_nodes:
            if source in independent:
                large |= large_inputs[source]
        large_inputs[node] = frozenset(large)
        if node in movable and all(n in independent or n in inputs for n in node.all_input_nodes):
            independent.add(node)
    return InputReads(large_inputs, independent)


def _is_large(node: fx.Node) -> bool:
    return value_bytes(fake_value(node)) >= MIN_SHARED_INPUT_BYTES


def find_sinkable_ops(graph: fx.Graph, reads: InputReads, fusing: set[fx.Node]) -> set[fx.Node]:
    """The independent nodes that a later region can compute.

    A fused op must read the same inputs, without waiting for an unfused op that reads the node. (A
    residual connection waits for the whole layer that reads its input.) Nodes that read next to nothing,
    such as positions and rotary angles, go with their readers.
    """
    ancestors = _unfused_ancestors(graph, fusing)
    waits_of_readers: dict[fx.Node, list[int]] = {}  # by input: what its fused readers wait for
    for node in fusing - reads.independent:
        for source in reads.large_inputs[node]:
            waits_of_readers.setdefault(source, []).append(ancestors[node])
    unfused_users: dict[fx.Node, int] = {}  # directly or through independent nodes, one bit each
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node not in reads.independent:
            continue
        users = 0
        for user in node.users:
            if user in reads.independent:
                users |= unfused_users[user]
            else:
                users |= _unfused_bit(user, ancestors, fusing)
        unfused_users[node] = users
        inputs = reads.large_inputs[node]
        waits = (mask for source in inputs for mask in waits_of_readers.get(source, ()))
        if not inputs or any(not mask & users for mask in waits):
            found.add(node)
    return found


def _unfused_ancestors(graph: fx.Graph, fusing: set[fx.Node]) -> dict[fx.Node, int]:
    """For each node the unfused ops that it waits for, itself included, as a bit mask."""
    masks: dict[fx.Node, int] = {}
    for position, node in enumerate(graph.nodes):
        mask = 1 << position if node.op == "call_function" and node not in fusing else 0
        for source in node.all_input_nodes:
            mask |= masks[source]
        masks[node] = mask
    return masks


def _unfused_bit(user: fx.Node, ancestors: dict[fx.Node, int], fusing: set[fx.Node]) -> int:
    """The bit of an unfused op: the highest of its mask, as it comes after its ancestors."""
    if user in fusing or not ancestors[user] or user.op != "call_function":
        return 0
    return 1 << (ancestors[user].bit_length() - 1)


def is_single_tensor(node: fx.Node) -> bool:
    """Whether the value is a tensor, no item of a tuple, and not bound to a fusion group."""
    return (
        isinstance(fake_value(node), Tensor)
        and node.target is not operator.getitem
        and fusion_group(node) is None
    )


def resolve_sources(node: fx.Node, sunk: set[fx.Node]) -> list[fx.Node]:
    """What a node reads; a sunk node is replaced by what it reads, since it has no group yet."""
    found: dict[fx.Node, None] = {}
    seen: set[fx.Node] = set()
    stack = list(node.all_input_nodes)
    while stack:
        source = stack.pop()
        if source not in sunk:
            found[source] = None
        elif source not in seen:
            seen.add(source)
            stack.extend(source.all_input_nodes)
    return list(found)
