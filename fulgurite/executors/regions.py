"""Claimed neighbours → regions → calls.

In: a claimed Trace. Out: the final Trace. Ops that one fusing executor claimed are gathered into regions as
large as order allows (no value may leave a region and come back into it), each is lowered and becomes one call.
Ops of the torch executor stay single calls. Randomness, collectives and other ordered ops keep their order.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx
from torch.fx._lazy_graph_module import _LazyGraphModule

from fulgurite.errors import CompileError, FulguriteError
from fulgurite.executors.base import Executor
from fulgurite.executors.torch import TorchExecutor
from fulgurite.trace import Trace, describe, source_of
from fulgurite.trace.cost import bytes_text, count_text, is_view, value_bytes
from fulgurite.trace.region import Region
from fulgurite.trace.trace import copy_module
from fulgurite.transforms.purity import is_ordered

Lower = Callable[[Executor, fx.GraphModule], tuple[Executor, Callable[..., Any]]]


@dataclass
class Group:
    """Nodes that run together: a region to be, or a single op."""

    index: int
    executor: Executor | None  # None: runs op by op
    nodes: list[fx.Node] = field(default_factory=list)
    needs: set[int] = field(default_factory=set)  # groups this one reads from


def lower(trace: Trace, executors: Sequence[Executor], choose: Lower | None = None) -> Trace:
    """The final trace: regions lowered, single ops spelled as directly as torch allows."""
    by_name = {executor.name: executor for executor in executors}
    groups = _gather(trace, by_name)
    if all(group.executor is None for group in groups):
        module = copy_module(trace.module)
    else:
        module = _assemble(trace, _in_order(groups), choose or _lower_with)
    for node in module.graph.nodes:
        executor = by_name.get(node.meta.get("executor", ""))
        if isinstance(executor, TorchExecutor):
            executor.spell(module, node)
    module.graph.lint()
    return trace.with_module(module)


# ---- gathering -----------------------------------------------------------------------------------


def _gather(trace: Trace, by_name: dict[str, Executor]) -> list[Group]:
    groups: list[Group] = []
    group_of: dict[fx.Node, Group] = {}
    latest: dict[str, list[Group]] = {}  # open regions of an executor
    previous_ordered: fx.Node | None = None
    for node in trace.graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        sources = [group_of[s] for s in node.all_input_nodes if s in group_of]
        if is_ordered(node):
            if previous_ordered is not None:
                sources.append(group_of[previous_ordered])
            previous_ordered = node
        name = node.meta["executor"]
        executor = by_name[name]
        fusing = None if isinstance(executor, TorchExecutor) else executor
        group = _joinable(latest.get(name, []), sources, groups) if fusing else None
        if fusing and node.target is operator.getitem:
            group = group_of[node.args[0]]  # a tuple never crosses a region's border
        if group is None:
            group = Group(len(groups), fusing)
            groups.append(group)
            if fusing:
                latest.setdefault(name, []).append(group)
        group.nodes.append(node)
        group.needs |= {source.index for source in sources} - {group.index}
        group_of[node] = group
    return groups


def _joinable(candidates: list[Group], sources: list[Group], groups: list[Group]) -> Group | None:
    """The latest region a node with these sources can join without making a cycle."""
    upstream = _reachable({source.index for source in sources}, groups)
    direct = {source.index for source in sources}
    for group in reversed(candidates):
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


def _in_order(groups: list[Group]) -> list[Group]:
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
                continue
            stack.pop()
            if index not in done:
                done.add(index)
                ordered.append(groups[index])

    for group in sorted(groups, key=lambda g: g.index):
        visit(group.index)
    return ordered


# ---- assembling ----------------------------------------------------------------------------------


def _assemble(trace: Trace, groups: list[Group], choose: Lower) -> fx.GraphModule:
    graph = fx.Graph()
    value_of: dict[fx.Node, fx.Node] = {}
    for node in trace.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            value_of[node] = graph.node_copy(node, lambda n: value_of[n])
    serial = 0
    for group in groups:
        if group.executor is None or all(map(is_view, group.nodes)):
            for node in group.nodes:
                value_of[node] = graph.node_copy(node, lambda n: value_of[n])
                if group.executor is not None:
                    value_of[node].meta["executor"] = TorchExecutor.name
            continue
        _add_region(trace, graph, group, value_of, serial, choose)
        serial += 1
    old = trace.graph.output_node()
    result = graph.output(fx.node.map_arg(old.args[0], lambda n: value_of[n]))
    result.meta = dict(old.meta)
    module = _LazyGraphModule(trace.module, graph, class_name="Trace")
    module.meta = dict(trace.module.meta)
    return module


def _add_region(
    trace: Trace,
    graph: fx.Graph,
    group: Group,
    value_of: dict[fx.Node, fx.Node],
    serial: int,
    choose: Lower,
) -> None:
    assert group.executor is not None, "only fusing executors have regions"
    module, inputs, outputs = _extract(trace, group.nodes)
    try:
        executor, call = choose(group.executor, module)
    except FulguriteError:
        raise
    except Exception as error:
        raise _lowering_failed(group, error) from error
    name = f"{executor.name}_{serial}"
    computing = sum(not is_view(node) for node in group.nodes)
    moved = sum(value_bytes(n.meta.get("val")) for n in {*inputs, *outputs})
    summary = f"{count_text(computing, 'op')}   {bytes_text(moved)}"
    region = Region(name, executor.name, module, call, summary)
    node = graph.call_function(region, tuple(value_of[n] for n in inputs))
    node.meta = {
        "val": tuple(n.meta.get("val") for n in outputs),
        "executor": executor.name,
        **{k: v for k, v in group.nodes[0].meta.items() if k in ("stack_trace", "nn_module_stack")},
    }
    for position, output in enumerate(outputs):
        picked = (operator.getitem, (node, position))
        item = graph.create_node("call_function", *picked, name=output.name)
        item.meta = dict(output.meta)
        value_of[output] = item


def _extract(
    trace: Trace, nodes: list[fx.Node]
) -> tuple[fx.GraphModule, list[fx.Node], list[fx.Node]]:
    """The nodes as a graph module of their own, with the nodes it reads and the ones it gives."""
    inside = set(nodes)
    read = {s: None for node in nodes for s in node.all_input_nodes if s not in inside}
    nested = {s for s in read if s.op == "get_attr" and not isinstance(s.meta.get("val"), Tensor)}
    inputs = [source for source in read if source not in nested]  # constants are inputs, too
    graph = fx.Graph()
    value_of: dict[fx.Node, fx.Node] = {}
    for source in inputs:
        value_of[source] = graph.placeholder(source.name)
        value_of[source].meta = {"val": source.meta.get("val")}
    for source in nested:
        value_of[source] = graph.node_copy(source)
    for node in nodes:
        value_of[node] = graph.node_copy(node, lambda n: value_of[n])
    outputs = [node for node in nodes if any(user not in inside for user in node.users)]
    graph.output(tuple(value_of[node] for node in outputs))
    return _LazyGraphModule(trace.module, graph, class_name="Region"), inputs, outputs


def _lower_with(executor: Executor, module: fx.GraphModule) -> tuple[Executor, Callable[..., Any]]:
    return executor, executor.lower(module)


def _lowering_failed(group: Group, error: Exception) -> CompileError:
    assert group.executor is not None, "only fusing executors have regions"
    node = group.nodes[-1]
    inputs = [f"{n.name}: {describe(n.meta.get('val'))}" for n in node.all_input_nodes]
    return CompileError(
        f"the executor {group.executor.name!r} failed on a region of {len(group.nodes)} ops that ends "
        f"in {node.target}: {type(error).__name__}: {str(error)[:400]}",
        where=str(source_of(node)),
        input="\n".join(inputs),
        next=f"compile with executors that leave out {group.executor.name!r}",
    )
