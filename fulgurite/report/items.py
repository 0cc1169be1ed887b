"""A trace as boxes to draw, at a chosen depth of module paths.

In: a trace and a depth. Out: items in program order and the values that flow between them. With a depth,
neighbouring ops of one module become one item: a run of neighbours in a valid order can't be left and entered
again, so the smaller graph has no cycles either. Items of a tuple are part of the call that made it.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import fx

from fulgurite.trace import Trace, describe, source_of
from fulgurite.trace.cost import format_flops, is_view, node_bytes, node_flops
from fulgurite.trace.node_meta import aten_op, captured_value, executor_of, fake_value
from fulgurite.trace.region import Region
from fulgurite.units import format_bytes

ItemKind = Literal["op", "view", "input", "region", "module"]


@dataclass(frozen=True)
class Item:
    """One box of the drawing."""

    kind: ItemKind
    nodes: list[str]  # the names of the nodes it stands for
    values: list[str]  # what a trace's line calls its result; for a module nothing
    first: int  # the first and the last of its calls, counted as boxes of the level that shows every op
    last: int
    label: str
    detail: str
    executor: str
    about: str  # the lines of its tooltip
    returned: bool


@dataclass(frozen=True)
class Flow:
    """An edge: values that go from one item to another."""

    source: int
    target: int
    values: list[str]  # "h: f32[8, 64]"


@dataclass(frozen=True)
class Level:
    """The graph at one module depth; depth None: one box per op."""

    depth: int | None
    items: list[Item]
    flows: list[Flow]


def build_levels(trace: Trace) -> list[Level]:
    """Levels from modules to ops; a depth that adds few boxes is skipped."""
    deepest = max((len(_module_path(node)) for node in trace.ops), default=0)
    full = build_level(trace, None)
    levels: list[Level] = []
    for depth in range(1, deepest + 1):
        level = build_level(trace, depth)
        calls = _count_calls(level)
        if calls >= 2 and calls <= 0.6 * _count_calls(full):
            if not levels or calls >= 1.25 * _count_calls(levels[-1]):
                levels.append(level)
    return [*levels, full]


def build_level(trace: Trace, depth: int | None) -> Level:
    """Items and edges at one depth."""
    nodes = [n for n in trace.graph.nodes if n.op != "output" and not _is_getitem(n)]
    returned = {_producer(node) for node in trace.outputs if isinstance(node, fx.Node)}
    groups = _group_nodes(nodes, depth, trace.kind == "backward")
    number = {node: n for n, group in enumerate(_group_nodes(nodes, None, False)) for node in group}
    items = [_make_item(group, depth, not returned.isdisjoint(group), number) for group in groups]
    owner = {node: index for index, group in enumerate(groups) for node in group}
    return Level(depth, items, _find_flows(trace, owner))


def _count_calls(level: Level) -> int:
    return sum(item.kind != "input" for item in level.items)


def _is_getitem(node: fx.Node) -> bool:
    """Whether the node is a `getitem` on a tuple output."""
    if node.target is not operator.getitem or not isinstance(node.args[0], fx.Node):
        return False
    source = node.args[0]
    return source.op not in ("placeholder", "get_attr") and isinstance(
        fake_value(source), (tuple, list)
    )


def _producer(node: fx.Node) -> fx.Node:
    """The node whose box produces a value."""
    while _is_getitem(node):
        source = node.args[0]
        assert isinstance(source, fx.Node), "an item is picked out of a node"
        node = source
    return node


# ---- grouping ------------------------------------------------------------------------------------


def _module_path(node: fx.Node) -> tuple[str, ...]:
    module = source_of(node).module
    return tuple(module.split(".")) if module else ()


def _module_prefixes(calls: Sequence[fx.Node], depth: int, backward: bool) -> list[tuple[str, ...]]:
    """Module paths cut to a depth. Gradient accumulation has none; it belongs to the enclosing module."""
    prefixes = [_module_path(node)[:depth] for node in calls]
    for position in range(1, len(calls) - 1) if backward else ():
        before, after = prefixes[position - 1], prefixes[position + 1]
        if not prefixes[position] and before == after:
            prefixes[position] = before
    return prefixes


def _is_input(node: fx.Node) -> bool:
    return node.op in ("placeholder", "get_attr")


def _group_nodes(
    nodes: Sequence[fx.Node], depth: int | None, backward: bool
) -> list[list[fx.Node]]:
    """Group nodes into boxes. Inputs that only one module uses are part of its box."""
    inputs = [node for node in nodes if _is_input(node)]
    calls = [node for node in nodes if not _is_input(node)]
    if depth is None:
        return [[node] for node in (*inputs, *calls)]
    runs: list[list[fx.Node]] = []
    previous: tuple[str, ...] = ()
    for node, prefix in zip(calls, _module_prefixes(calls, depth, backward), strict=True):
        if runs and len(prefix) == depth and prefix == previous:
            runs[-1].append(node)
        else:
            runs.append([node])
        previous = prefix
    run_of = {node: number for number, run in enumerate(runs) for node in run}
    free: list[list[fx.Node]] = []
    inner: list[list[fx.Node]] = [[] for _ in runs]
    for node in inputs:
        users = {run_of[_producer(user)] for user in node.users if _producer(user) in run_of}
        only = users.pop() if len(users) == 1 else None
        if only is not None and len(runs[only]) > 1:
            inner[only].append(node)
        else:
            free.append([node])
    return [*free, *([*own, *run] for own, run in zip(inner, runs, strict=True))]


def _find_flows(trace: Trace, owner: dict[fx.Node, int]) -> list[Flow]:
    values: dict[tuple[int, int], dict[str, None]] = {}
    for node in trace.graph.nodes:
        if node.op == "output" or _is_getitem(node):
            continue
        for source in node.all_input_nodes:
            edge = (owner[_producer(source)], owner[node])
            if edge[0] != edge[1]:
                text = f"{source.name}: {describe(fake_value(source))}"
                values.setdefault(edge, {})[text] = None
    return [Flow(source, target, list(texts)) for (source, target), texts in values.items()]


# ---- what a box says -----------------------------------------------------------------------------


def _make_item(
    group: Sequence[fx.Node], depth: int | None, returned: bool, number: dict[fx.Node, int]
) -> Item:
    if len(group) > 1:
        return _make_module_item(group, depth, returned, number)
    (node,) = group
    names, first = [node.name], number[node]
    values = [node.name, *(user.name for user in node.users if _is_getitem(user))]
    shape = _format_shape(node)
    if _is_input(node):
        what = "input" if node.op == "placeholder" else "constant"
        about = f"{node.name}\n{what}   {shape}"
        return Item("input", names, values, first, first, node.name, shape, "", about, returned)
    executor = executor_of(node)
    about = _describe(node, shape, executor, returned)
    if isinstance(node.target, Region):
        detail = node.target.summary
        return Item(
            "region",
            names,
            values,
            first,
            first,
            node.target.name,
            detail,
            executor,
            about,
            returned,
        )
    kind: ItemKind = "view" if is_view(node) else "op"
    return Item(
        kind, names, values, first, first, call_name(node), shape, executor, about, returned
    )


def _make_module_item(
    group: Sequence[fx.Node], depth: int | None, returned: bool, number: dict[fx.Node, int]
) -> Item:
    calls = [node for node in group if not _is_input(node)]
    path = ".".join(_module_path(calls[0])[:depth])
    computing = [node for node in calls if not is_view(node)]
    executors = {executor_of(node) for node in computing or calls}
    moved = format_bytes(sum(map(node_bytes, computing)))
    held = len(group) - len(calls)
    about = "\n".join(
        [
            path,
            f"{_format_count(len(computing), 'op')}, {_format_count(len(calls) - len(computing), 'view')}, "
            f"{_format_count(held, 'input')} of its own",
            f"{', '.join(sorted(executors))}   {moved} moved",
            f"from {calls[0].name} to {calls[-1].name}",
            *(["returned"] if returned else []),
        ]
    )
    views = f"{path} {_format_count(len(calls), 'view')}"
    return Item(
        kind="module" if computing else "view",
        nodes=[node.name for node in group],
        values=[],
        first=number[calls[0]],
        last=number[calls[-1]],
        label=path if computing else views,
        detail=f"{_format_count(len(computing), 'op')}   {moved}" if computing else "",
        executor=executors.pop() if len(executors) == 1 else "",
        about=about,
        returned=returned,
    )


def _format_count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _format_shape(node: fx.Node) -> str:
    """Type and shape of a node's value; for a tuple the first entry and the count of others."""
    value = captured_value(node)
    if not isinstance(value, (tuple, list)):
        return describe(value)
    held = [entry for entry in value if entry is not None]
    if len(held) > 1:
        return f"{describe(held[0])} +{len(held) - 1}"
    return describe(held[0] if held else None)


def call_name(node: fx.Node) -> str:
    """The short name of the callee, such as `addmm`."""
    if node.op == "call_function":
        schema = getattr(aten_op(node), "_schema", None)
        if schema is not None:
            return str(schema.name).rpartition("::")[2]
        return str(getattr(node.target, "__name__", node.target))
    return str(node.target)


def _describe(node: fx.Node, shape: str, executor: str, returned: bool) -> str:
    place = source_of(node)
    called = node.target.name if isinstance(node.target, Region) else call_name(node)
    costs = [executor]
    if isinstance(node.target, Region):
        costs.append(node.target.summary)
    elif is_view(node):
        costs.append("view")
    else:
        costs += [format_flops(node_flops(node))] if node_flops(node) else []
        costs += [format_bytes(node_bytes(node))]
    lines = [
        f"{node.name} = {called}({', '.join(source.name for source in node.all_input_nodes)})",
        shape,
        "   ".join(filter(None, costs)),
        "   ".join(filter(None, [place.module, place.location])),
        place.code,
        "returned" if returned else "",
    ]
    return "\n".join(filter(None, lines))
