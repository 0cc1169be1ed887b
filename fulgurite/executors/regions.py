"""Claimed neighbours → regions → calls.

In: a claimed Trace. Out: the final Trace. Ops that one fusing executor claimed are gathered into regions as
large as order allows (no value may leave a region and come back into it), each is lowered and becomes one call.
Ops of the torch executor stay single calls. Randomness, collectives and other ordered ops keep their order.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import SymInt, Tensor, fx, ops
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.experimental.symbolic_shapes import free_symbols

from fulgurite.errors import CompileError, FulguriteError
from fulgurite.executors.base import Chosen, Executor
from fulgurite.executors.torch import TorchExecutor
from fulgurite.executors.whole import as_torch
from fulgurite.executors.writes import gather_writes
from fulgurite.trace import Trace, describe, source_of
from fulgurite.trace.cost import (
    bytes_text,
    count_text,
    is_view,
    op_of,
    strides,
    tensors,
    value_bytes,
)
from fulgurite.trace.region import Region
from fulgurite.trace.trace import copy_module
from fulgurite.trace.writes import written
from fulgurite.transforms.purity import is_ordered, readers

aten = ops.aten
Lower = Callable[[str, Executor, fx.GraphModule, Callable[[], fx.GraphModule]], Chosen]


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
    gather_writes(module)
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
    latest: dict[tuple[object, ...], list[Group]] = {}  # open regions of an executor on a device
    previous_ordered: fx.Node | None = None
    outside = _views_for_torch(trace, by_name)
    for node in trace.graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        sources = [group_of[s] for s in node.all_input_nodes if s in group_of]
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
    return groups


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
    extracted = {g.index: _begun(trace, g) for g in groups if _is_region(g)}
    serial = 0
    for group in groups:
        if not _is_region(group):
            for node in group.nodes:
                value_of[node] = graph.node_copy(node, lambda n: value_of[n])
                value_of[node].meta["executor"] = _alone(node, group)
            continue
        _add_region(trace, graph, group, extracted[group.index], value_of, serial, choose)
        serial += 1
    old = trace.graph.output_node()
    result = graph.output(fx.node.map_arg(old.args[0], lambda n: value_of[n]))
    result.meta = dict(old.meta)
    module = _LazyGraphModule(trace.module, graph, class_name="Trace")
    module.meta = dict(trace.module.meta)
    return module


def _alone(node: fx.Node, group: Group) -> str:
    """Who runs a node that is not in a region: what is free, or only a write, torch does."""
    own = not _moves_nothing(node) and not written(node)
    return str(node.meta["executor"]) if own else TorchExecutor.name


def _moves_nothing(node: fx.Node) -> bool:
    """A view, or arithmetic with sizes."""
    return is_view(node) or not any(True for _ in tensors(node.meta.get("val")))


def _is_region(group: Group) -> bool:
    return group.executor is not None and not all(map(_moves_nothing, group.nodes))


Extracted = tuple[fx.GraphModule, list[fx.Node], list[fx.Node]]


def _begun(trace: Trace, group: Group) -> Extracted:
    """The region as a module with its inputs and outputs, its lowering under way."""
    assert group.executor is not None, "only fusing executors have regions"
    extracted = extract(trace, group.nodes)
    try:
        group.executor.begin(extracted[0])
    except FulguriteError:
        raise
    except Exception as error:
        raise _lowering_failed(group, error) from error
    return extracted


def _add_region(
    trace: Trace,
    graph: fx.Graph,
    group: Group,
    extracted: Extracted,
    value_of: dict[fx.Node, fx.Node],
    serial: int,
    choose: Lower,
) -> None:
    assert group.executor is not None, "only fusing executors have regions"
    module, inputs, outputs = extracted
    plain = functools.partial(as_torch, trace, group.nodes, inputs, outputs)
    name = f"{group.executor.region_name or _telling_name(group.nodes)}_{serial}"
    try:
        chosen = choose(name, group.executor, module, plain)
    except FulguriteError:
        raise
    except Exception as error:
        raise _lowering_failed(group, error) from error
    if chosen.call is None:
        _give_back(graph, plain(), inputs, outputs, value_of, chosen.remark)
        return
    executor = chosen.executor
    computing = sum(not is_view(node) for node in group.nodes)
    moved = sum(value_bytes(n.meta.get("val")) for n in {*inputs, *outputs})
    summary = f"{count_text(computing, 'op')}   {bytes_text(moved)}"
    region = Region(name, executor.name, module, chosen.call, summary)
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


DULL = [
    "add",
    "sub",
    "mul",
    "div",
    "neg",
    "to_copy",
    "convert_element_type",
    "clone",
    "copy",
    "full",
    "where",
    "sum",
    "mean",
    "getitem",
]


def _telling_name(nodes: list[fx.Node]) -> str:
    """A name from what the user would call the region: ops that were taken apart first, then telling ones."""
    wholes = [_op_name(n.meta["whole"].target) for n in nodes if "whole" in n.meta]
    rest = [n for n in nodes if not _moves_nothing(n) and "whole" not in n.meta]
    ops = [_op_name(n.target) for n in rest]
    telling = [name for name in ops if name not in DULL]
    named = list(dict.fromkeys([*wholes, *telling])) or list(dict.fromkeys(ops)) or ["region"]
    return "_".join(named[:2])


def _op_name(target: Any) -> str:
    schema = getattr(target, "_schema", None)
    full = schema.name.split("::")[1] if schema else getattr(target, "__name__", "region")
    name = full.strip("_").removeprefix("native_")
    return name if name.isidentifier() else "region"


def _give_back(
    graph: fx.Graph,
    plain: fx.GraphModule,
    inputs: list[fx.Node],
    outputs: list[fx.Node],
    value_of: dict[fx.Node, fx.Node],
    remark: str,
) -> None:
    """The ops of a region as torch runs them, in the place of the region."""
    copied: dict[fx.Node, fx.Node] = {}
    given = iter(inputs)
    for node in plain.graph.nodes:
        if node.op == "placeholder":
            copied[node] = value_of[next(given)]
        elif node.op == "output":
            for output, result in zip(outputs, node.args[0], strict=True):
                value_of[output] = copied[result]
        else:
            copied[node] = graph.node_copy(node, lambda n: copied[n])
            if not is_view(node) and remark:
                copied[node].meta["remark"], remark = remark, ""


def extract(
    trace: Trace, nodes: list[fx.Node]
) -> tuple[fx.GraphModule, list[fx.Node], list[fx.Node]]:
    """The nodes as a graph module of their own, with the nodes it reads and the ones it gives."""
    inside = set(nodes)
    read = {s: None for node in nodes for s in node.all_input_nodes if s not in inside}
    nested = {s for s in read if s.op == "get_attr" and not isinstance(s.meta.get("val"), Tensor)}
    inputs = [source for source in read if source not in nested]  # constants are inputs, too
    inputs += _hidden_sizes(trace, nodes, inputs)
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


def _hidden_sizes(trace: Trace, nodes: list[fx.Node], inputs: list[fx.Node]) -> list[fx.Node]:
    """Dynamic sizes that the region's values depend on and its inputs don't show as they are."""
    shown = {symbol for source in inputs for symbol in _plain_sizes(source.meta.get("val"))}
    needed = {symbol for node in nodes for symbol in free_symbols(_sizes(node.meta.get("val")))}
    missing = needed - shown
    if not missing:
        return []
    inside = set(nodes)
    found: dict[Any, fx.Node] = {}
    for node in trace.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, SymInt) and node not in inside and value.node.expr in missing:
            found.setdefault(value.node.expr, node)
    return list(found.values())


def _sizes(value: Any) -> list[Any]:
    """Sizes and strides inside a metadata value, and the value itself where it is a size."""
    held = [value] if isinstance(value, SymInt) else []
    return held + [n for t in tensors(value) for n in (*t.shape, *strides(t))]


def _plain_sizes(value: Any) -> list[Any]:
    """The symbols among them that stand alone."""
    symbolic = [size.node.expr for size in _sizes(value) if isinstance(size, SymInt)]
    return [expression for expression in symbolic if expression.is_Symbol]


def _lower_with(
    name: str, executor: Executor, module: fx.GraphModule, plain: Callable[[], fx.GraphModule]
) -> Chosen:
    return Chosen(executor, executor.lower(module))


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
