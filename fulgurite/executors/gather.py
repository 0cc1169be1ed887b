"""Claimed ops → groups that run together.

In: a claimed Trace. Out: `Group`s in an order in which they can run. Ops that one fusing executor claimed are gathered
into regions as large as order allows: no value may leave a region and come back into it. Randomness, collectives and
other ordered ops keep their order.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field

from torch import Tensor, fx, ops

from fulgurite.executors.base import Executor
from fulgurite.executors.deferred import Inputs, deferred, inputs_of, is_plain, waited_for
from fulgurite.executors.torch import TorchExecutor
from fulgurite.trace import Trace
from fulgurite.trace.cost import is_view, op_of, value_bytes
from fulgurite.trace.writes import written
from fulgurite.transforms.purity import is_ordered, readers

aten = ops.aten


@dataclass
class Group:
    """Nodes that run together: a region to be, or a single op."""

    index: int
    executor: Executor | None  # None: runs op by op
    nodes: list[fx.Node] = field(default_factory=list)
    needs: set[int] = field(default_factory=set)  # groups this one reads from


def gather(trace: Trace, by_name: dict[str, Executor]) -> list[Group]:
    """Every op of the trace in a group, each group with those it needs."""
    groups: list[Group] = []
    group_of: dict[fx.Node, Group] = {}
    latest: dict[tuple[object, ...], list[Group]] = {}  # open regions of an executor on a device
    previous_ordered: fx.Node | None = None
    outside = _views_for_torch(trace, by_name)
    inputs, later = _deferred(trace, by_name, outside)
    for node in trace.graph.nodes:
        if node.op in ("placeholder", "get_attr", "output") or node in later:
            continue
        sources = [group_of[s] for s in waited_for(node, later) if s in group_of]
        if is_ordered(node):
            if previous_ordered is not None:
                sources.append(group_of[previous_ordered])
            previous_ordered = node
        for target in written(node):
            sources += [group_of[reader] for reader in readers(target)]
        name = node.meta["executor"]
        executor = by_name[name]
        inside = any(source.executor is executor for source in sources)
        runs_alone = isinstance(executor, TorchExecutor) or (node in outside and not inside)
        fusing = None if runs_alone else executor
        open_here = latest.setdefault((name, _device(node), node.meta.get("apart")), [])
        candidates = _candidates(node, executor, open_here, sources, group_of)
        group = _joinable(candidates, sources, groups) if fusing else None
        if fusing and node.target is operator.getitem:
            group = group_of[node.args[0]]  # a tuple never crosses a region's border
        if group is None:
            fusing = None if _is_write(node) else fusing
            group = Group(len(groups), fusing)
            groups.append(group)
            if fusing:
                open_here.append(group)
        group.nodes.append(node)
        group.needs |= {source.index for source in sources} - {group.index}
        group_of[node] = group
    for node in reversed([n for n in trace.graph.nodes if n in later]):
        key = (node.meta["executor"], _device(node), None)
        place(node, inputs, later, groups, latest.setdefault(key, []), group_of, by_name)
    order = {node: position for position, node in enumerate(trace.graph.nodes)}
    for group in groups:
        group.nodes.sort(key=order.__getitem__)
    return groups


def _deferred(
    trace: Trace, by_name: dict[str, Executor], outside: set[fx.Node]
) -> tuple[Inputs, set[fx.Node]]:
    """What the graph's nodes read, and those whose region the others decide."""
    calls = [node for node in trace.graph.nodes if node.op == "call_function"]
    fusing = {
        node
        for node in calls
        if not isinstance(by_name[node.meta["executor"]], TorchExecutor) and node not in outside
    }
    overwritten = {r for node in calls for target in written(node) for r in readers(target)}
    movable = {
        node
        for node in fusing - overwritten  # what reads before a write has its place
        if is_plain(node)
        and not (is_ordered(node) or any(True for _ in written(node)))
        and not any(map(_is_write, node.users))
    }
    inputs = inputs_of(trace.graph, movable)
    return inputs, deferred(trace.graph, inputs, fusing)


def place(
    node: fx.Node,
    inputs: Inputs,
    later: set[fx.Node],
    groups: list[Group],
    regions: list[Group],
    group_of: dict[fx.Node, Group],
    by_name: dict[str, Executor],
) -> None:
    """A node that waits for nothing: with what reads it, or what reads the same, or before its first reader."""
    users = {group_of[user].index for user in node.users if user in group_of}
    sources = {group_of[s].index for s in waited_for(node, later) if s in group_of}

    def fits(group: Group) -> bool:
        """No reader is needed by the group, and the group by nothing that the node reads."""
        if (users - {group.index}) & _reachable({group.index}, groups):
            return False
        return group.index not in _reachable(sources - {group.index}, groups)

    shared = {id(g): inputs.shared(g.nodes, node) + _common(g, node, later) for g in regions}
    first = min(users, default=len(groups))
    candidates = [
        *sorted((g for g in regions if g.index in users), key=lambda g: g.index),
        *sorted((g for g in regions if shared[id(g)]), key=lambda g: -shared[id(g)]),
        *sorted((g for g in regions if g.index <= first), key=lambda g: -g.index),
    ]
    group = next((g for g in candidates if fits(g)), None)
    if group is None:
        group = Group(len(groups), by_name[node.meta["executor"]])
        groups.append(group)
        regions.append(group)
    group.nodes.append(node)
    group.needs |= sources - {group.index}
    for user in users - {group.index}:
        groups[user].needs.add(group.index)
    group_of[node] = group


def _common(group: Group, node: fx.Node, later: set[fx.Node]) -> int:
    """Bytes of values without a group yet that a node and a region read both: they are computed where both are."""
    inside = set(group.nodes)
    both = [s for s in node.all_input_nodes if s in later and not inside.isdisjoint(s.users)]
    return sum(value_bytes(source.meta["val"]) for source in both)


def _candidates(
    node: fx.Node,
    executor: Executor,
    open_here: list[Group],
    sources: list[Group],
    group_of: dict[fx.Node, Group],
) -> list[Group]:
    """The regions that a node may join; the last one is tried first."""
    if _is_write(node):  # only where what is written is computed
        value = node.args[1]
        home = (
            group_of.get(value)
            if isinstance(value, fx.Node) and "apart" not in value.meta
            else None
        )
        return [home] if home is not None and home.executor is executor else []
    held = node.meta.get("val")
    counts = isinstance(held, Tensor) and held.dim() == 0 and any(map(_is_write, node.users))
    if counts and not sources:
        return open_here[:1]  # counters of steps: those of all layers in one kernel
    return open_here


def _is_write(node: fx.Node) -> bool:
    """`input.copy_(value)`."""
    return op_of(node) is aten.copy_.default and bool(written(node))


def _device(node: fx.Node) -> object:
    """Where the tensors that a node makes are; a region stays on one device."""
    value = node.meta.get("val")
    first = value[0] if isinstance(value, tuple | list) and value else value
    return getattr(first, "device", None)


def _views_for_torch(trace: Trace, by_name: dict[str, Executor]) -> set[fx.Node]:
    """Views that only single ops read: inside a region they would make those ops wait for it."""
    found: set[fx.Node] = set()
    for node in reversed(trace.graph.nodes):
        readers = [user for user in node.users if user not in found]
        if is_view(node) and not any(
            reader.op == "call_function"
            and not isinstance(by_name[reader.meta["executor"]], TorchExecutor)
            for reader in readers
        ):
            found.add(node)
    return found


def _joinable(candidates: list[Group], sources: list[Group], groups: list[Group]) -> Group | None:
    """The latest region a node with these sources can join without making a cycle: of them, or of all."""
    upstream = _reachable({source.index for source in sources}, groups)
    direct = {source.index for source in sources}
    for group in [*(g for g in reversed(candidates) if g.index in direct), *reversed(candidates)]:
        others = direct - {group.index}
        beyond = _reachable(others, groups) if group.index in upstream else set()
        if group.index not in beyond:
            return group
    return None


def _reachable(start: set[int], groups: list[Group]) -> set[int]:
    """The groups in `start` and all that they need, directly or not."""
    seen = set(start)
    stack = list(start)
    while stack:
        fresh = groups[stack.pop()].needs - seen
        seen |= fresh
        stack.extend(fresh)
    return seen


def in_order(groups: list[Group]) -> list[Group]:
    """Groups such that each comes after what it needs; among free choices the program's own order."""
    done: set[int] = set()
    ordered: list[Group] = []

    def visit(first: int) -> None:
        stack = [(first, iter(sorted(groups[first].needs)))]
        while stack:
            index, needs = stack[-1]
            missing = next((n for n in needs if n not in done), None)
            if missing is not None:
                stack.append((missing, iter(sorted(groups[missing].needs))))
                assert len(stack) <= len(groups), "regions wait for each other"
                continue
            stack.pop()
            if index not in done:
                done.add(index)
                ordered.append(groups[index])

    for group in sorted(groups, key=lambda g: g.index):
        visit(group.index)
    return ordered
