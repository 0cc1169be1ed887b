"""Group claimed ops into regions.

In: a claimed Trace. Out: `Group`s, each a region to be or a single op. Ops that one fusing executor
claimed form regions as large as dependencies allow: no value may leave a region and come back into it.
Random ops, collectives and other ordered ops keep their order. Ops that depend on graph inputs alone are
placed last, next to what reads them or reads the same inputs (`sinking`).
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field

from torch import Tensor, fx, ops

from fulgurite.executors.base import Executor
from fulgurite.executors.sinking import (
    InputReads,
    collect_input_reads,
    find_sinkable_ops,
    is_single_tensor,
    resolve_sources,
)
from fulgurite.executors.torch import TorchExecutor
from fulgurite.trace import Trace
from fulgurite.trace.cost import is_view, value_bytes
from fulgurite.trace.mutations import mutated_inputs
from fulgurite.trace.node_meta import aten_op, executor_of, fake_value, fusion_group
from fulgurite.trace.purity import is_ordered, memory_readers

aten = ops.aten


@dataclass
class Group:
    """Nodes that run together: a region to be, or a single op."""

    index: int
    executor: Executor | None  # None: runs op by op
    nodes: list[fx.Node] = field(default_factory=list)
    needs: set[int] = field(default_factory=set)  # indices of the groups that this one reads from


def group_ops(trace: Trace, by_name: dict[str, Executor]) -> list[Group]:
    """Put every op of the trace into a group, and record which groups each group needs."""
    return _Grouper(trace, by_name).run()


class _Grouper:
    """The groups so far, and where the next op may go."""

    def __init__(self, trace: Trace, by_name: dict[str, Executor]) -> None:
        self.graph, self.by_name = trace.graph, by_name
        self.groups: list[Group] = []
        self.group_of: dict[fx.Node, Group] = {}
        # regions that may still grow, by executor, device and fusion group
        self.open_regions: dict[tuple[object, ...], list[Group]] = {}
        self.previous_ordered: fx.Node | None = None
        self.torch_only_views = _find_torch_only_views(trace, by_name)
        self.input_reads, self.sunk = self._find_sunk_ops()

    def run(self) -> list[Group]:
        for node in self.graph.nodes:
            if node.op not in ("placeholder", "get_attr", "output") and node not in self.sunk:
                self._add(node)
        for node in reversed([n for n in self.graph.nodes if n in self.sunk]):
            self._add_sunk(node)
        order = {node: position for position, node in enumerate(self.graph.nodes)}
        for group in self.groups:
            group.nodes.sort(key=order.__getitem__)
        return self.groups

    def _find_sunk_ops(self) -> tuple[InputReads, set[fx.Node]]:
        """Which graph inputs the nodes read, and which nodes are grouped after all others."""
        calls = [node for node in self.graph.nodes if node.op == "call_function"]
        fusing = {
            node
            for node in calls
            if not isinstance(self.by_name[executor_of(node)], TorchExecutor)
            and node not in self.torch_only_views
        }
        read_before_write = {
            reader
            for node in calls
            for target in mutated_inputs(node)
            for reader in memory_readers(target)
        }
        movable = {
            node
            for node in fusing - read_before_write
            if is_single_tensor(node)
            and not (is_ordered(node) or any(True for _ in mutated_inputs(node)))
            and not any(map(_is_input_write, node.users))
        }
        input_reads = collect_input_reads(self.graph, movable)
        return input_reads, find_sinkable_ops(self.graph, input_reads, fusing)

    def _add(self, node: fx.Node) -> None:
        """Add a node to an open region, or start a group."""
        sources = self._source_groups(node)
        name = executor_of(node)
        executor = self.by_name[name]
        reads_region = any(source.executor is executor for source in sources)
        is_single = isinstance(executor, TorchExecutor) or (
            node in self.torch_only_views and not reads_region
        )
        fusing = None if is_single else executor
        key = (name, _device_of(node), fusion_group(node))
        open_regions = self.open_regions.setdefault(key, [])
        candidates = self._candidate_groups(node, executor, open_regions, sources)
        group = _find_joinable_group(candidates, sources, self.groups) if fusing else None
        if fusing and node.target is operator.getitem:
            group = self.group_of[node.args[0]]  # a tuple never crosses a region's boundary
        if group is None:
            fusing = None if _is_input_write(node) else fusing
            group = Group(len(self.groups), fusing)
            self.groups.append(group)
            if fusing:
                open_regions.append(group)
        group.nodes.append(node)
        group.needs |= {source.index for source in sources} - {group.index}
        self.group_of[node] = group

    def _source_groups(self, node: fx.Node) -> list[Group]:
        """The groups that must run before the node."""
        sources = [self.group_of[s] for s in self._resolve_sources(node) if s in self.group_of]
        if is_ordered(node):
            if self.previous_ordered is not None:
                sources.append(self.group_of[self.previous_ordered])
            self.previous_ordered = node
        for target in mutated_inputs(node):
            sources += [self.group_of[reader] for reader in memory_readers(target)]
        return sources

    def _resolve_sources(self, node: fx.Node) -> list[fx.Node]:
        return resolve_sources(node, self.sunk)

    def _candidate_groups(
        self, node: fx.Node, executor: Executor, open_regions: list[Group], sources: list[Group]
    ) -> list[Group]:
        """The regions that a node may join; the last one is tried first."""
        if _is_input_write(node):  # only the region that computes the written value
            value = node.args[1]
            if not isinstance(value, fx.Node) or fusion_group(value) is not None:
                return []
            producer = self.group_of.get(value)
            return [producer] if producer is not None and producer.executor is executor else []
        value = fake_value(node)
        is_counter = (
            isinstance(value, Tensor) and value.dim() == 0 and any(map(_is_input_write, node.users))
        )
        if is_counter and not sources:
            return open_regions[:1]  # the step counters of all layers share one kernel
        return open_regions

    def _add_sunk(self, node: fx.Node) -> None:
        """Add a node that depends on graph inputs alone.

        It joins the region of a reader, or one that reads the same inputs, or one before its first
        reader.
        """
        key = (executor_of(node), _device_of(node), None)
        regions = self.open_regions.setdefault(key, [])
        groups = self.groups
        users = {self.group_of[user].index for user in node.users if user in self.group_of}
        resolved = self._resolve_sources(node)
        sources = {self.group_of[s].index for s in resolved if s in self.group_of}

        def can_join(group: Group) -> bool:
            """The group needs no reader of the node, and no source of the node needs the group."""
            if (users - {group.index}) & _reachable_groups({group.index}, groups):
                return False
            return group.index not in _reachable_groups(sources - {group.index}, groups)

        shared = {
            id(g): self.input_reads.shared_bytes(g.nodes, node)
            + _shared_pending_bytes(g, node, self.sunk)
            for g in regions
        }
        first_user = min(users, default=len(groups))
        candidates = [
            *sorted((g for g in regions if g.index in users), key=lambda g: g.index),
            *sorted((g for g in regions if shared[id(g)]), key=lambda g: -shared[id(g)]),
            *sorted((g for g in regions if g.index <= first_user), key=lambda g: -g.index),
        ]
        group = next((g for g in candidates if can_join(g)), None)
        if group is None:
            group = Group(len(groups), self.by_name[executor_of(node)])
            groups.append(group)
            regions.append(group)
        group.nodes.append(node)
        group.needs |= sources - {group.index}
        for user in users - {group.index}:
            groups[user].needs.add(group.index)
        self.group_of[node] = group


def _shared_pending_bytes(group: Group, node: fx.Node, sunk: set[fx.Node]) -> int:
    """Bytes of ungrouped values that node and region both read; they join where both are."""
    inside = set(group.nodes)
    shared = [s for s in node.all_input_nodes if s in sunk and not inside.isdisjoint(s.users)]
    return sum(value_bytes(fake_value(source)) for source in shared)


def _is_input_write(node: fx.Node) -> bool:
    """`input.copy_(value)`."""
    return aten_op(node) is aten.copy_.default and bool(mutated_inputs(node))


def _device_of(node: fx.Node) -> object:
    """The device of the tensors that a node returns; a region stays on one device."""
    value = fake_value(node)
    first = value[0] if isinstance(value, tuple | list) and value else value
    return getattr(first, "device", None)


def _find_torch_only_views(trace: Trace, by_name: dict[str, Executor]) -> set[fx.Node]:
    """Views that only single ops read. Inside a region they would make those ops wait for it."""
    found: set[fx.Node] = set()
    for node in reversed(trace.graph.nodes):
        users = [user for user in node.users if user not in found]
        if is_view(node) and not any(
            user.op == "call_function" and not isinstance(by_name[executor_of(user)], TorchExecutor)
            for user in users
        ):
            found.add(node)
    return found


def _find_joinable_group(
    candidates: list[Group], sources: list[Group], groups: list[Group]
) -> Group | None:
    """The latest region that a node can join without a cycle; its sources' regions come first."""
    direct = {source.index for source in sources}
    upstream = _reachable_groups(direct, groups)
    for group in [*(g for g in reversed(candidates) if g.index in direct), *reversed(candidates)]:
        others = direct - {group.index}
        beyond = _reachable_groups(others, groups) if group.index in upstream else set()
        if group.index not in beyond:
            return group
    return None


def _reachable_groups(start: set[int], groups: list[Group]) -> set[int]:
    """The groups in `start` and all that they need, directly or not."""
    seen = set(start)
    stack = list(start)
    while stack:
        new = groups[stack.pop()].needs - seen
        seen |= new
        stack.extend(new)
    return seen


def sort_topologically(groups: list[Group]) -> list[Group]:
    """Sort groups so that each comes after what it needs; ties keep the program's order."""
    done: set[int] = set()
    ordered: list[Group] = []

    def visit(first: int) -> None:
        stack = [(first, iter(sorted(groups[first].needs)))]
        while stack:
            index, needs = stack[-1]
            missing = next((n for n in needs if n not in done), None)
            if missing is not None:
                stack.append((missing, iter(sorted(groups[missing].needs))))
                assert len(stack) <= len(groups), "regions depend on each other in a cycle"
                continue
            stack.pop()
            if index not in done:
                done.add(index)
                ordered.append(groups[index])

    for group in sorted(groups, key=lambda g: g.index):
        visit(group.index)
    return ordered
