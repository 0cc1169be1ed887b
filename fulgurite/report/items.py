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
from fulgurite.trace.cost import (
    bytes_text,
    flops_text,
    is_view,
    node_bytes,
    node_flops,
    op_of,
)
from fulgurite.trace.region import Region

ItemKind = Literal["op", "view", "input", "region", "module"]


@dataclass(frozen=True)
class Item:
    """One box: what it says, and what is known about it."""

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
    """Values that go from one item to another."""

    source: int
    target: int
    values: list[str]  # "h: f32[8, 64]"


@dataclass(frozen=True)
class Level:
    """The graph at one depth; depth None: every op by itself."""

    depth: int | None
    items: list[Item]
    flows: list[Flow]


def levels_of(trace: Trace) -> list[Level]:
    """From modules to ops; a depth is left out where it shows hardly more than the one before it."""
    deepest = max((len(_path(node)) for node in trace.ops), default=0)
    full = level_of(trace, None)
    levels: list[Level] = []
    for depth in range(1, deepest + 1):
        level = level_of(trace, depth)
        calls = _calls(level)
        if calls >= 2 and calls <= 0.6 * _calls(full):
            if not levels or calls >= 1.25 * _calls(levels[-1]):
                levels.append(level)
    return [*levels, full]


def level_of(trace: Trace, depth: int | None) -> Level:
    """Items and flows at one depth."""
    nodes = [n for n in trace.graph.nodes if n.op != "output" and not _is_item(n)]
    returned = {_maker(node) for node in trace.outputs if isinstance(node, fx.Node)}
    groups = _group(nodes, depth, trace.kind == "backward")
    number = {node: n for n, group in enumerate(_group(nodes, None, False)) for node in group}
    items = [_item(group, depth, not returned.isdisjoint(group), number) for group in groups]
    owner = {node: index for index, group in enumerate(groups) for node in group}
    return Level(depth, items, _flows(trace, owner))


def _calls(level: Level) -> int:
    return sum(item.kind != "input" for item in level.items)


def _is_item(node: fx.Node) -> bool:
    """A node that picks one entry out of the tuple another call made."""
    if node.target is not operator.getitem or not isinstance(node.args[0], fx.Node):
        return False
    source = node.args[0]
    return source.op not in ("placeholder", "get_attr") and isinstance(
        source.meta.get("val"), (tuple, list)
    )


def _maker(node: fx.Node) -> fx.Node:
    """The node whose box a value comes out of."""
    while _is_item(node):
        source = node.args[0]
        assert isinstance(source, fx.Node), "an item is picked out of a node"
        node = source
    return node


# ---- grouping ------------------------------------------------------------------------------------


def _path(node: fx.Node) -> tuple[str, ...]:
    module = source_of(node).module
    return tuple(module.split(".")) if module else ()


def _prefixes(calls: Sequence[fx.Node], depth: int, backward: bool) -> list[tuple[str, ...]]:
    """Module paths to a depth. A sum of gradients has none; it counts to the module around it."""
    prefixes = [_path(node)[:depth] for node in calls]
    for position in range(1, len(calls) - 1) if backward else ():
        before, after = prefixes[position - 1], prefixes[position + 1]
        if not prefixes[position] and before == after:
            prefixes[position] = before
    return prefixes


def _is_input(node: fx.Node) -> bool:
    return node.op in ("placeholder", "get_attr")


def _group(nodes: Sequence[fx.Node], depth: int | None, backward: bool) -> list[list[fx.Node]]:
    """Nodes that share a box. Inputs that only one module uses are inside that module's box."""
    inputs = [node for node in nodes if _is_input(node)]
    calls = [node for node in nodes if not _is_input(node)]
    if depth is None:
        return [[node] for node in (*inputs, *calls)]
    runs: list[list[fx.Node]] = []
    previous: tuple[str, ...] = ()
    for node, prefix in zip(calls, _prefixes(calls, depth, backward), strict=True):
        if runs and len(prefix) == depth and prefix == previous:
            runs[-1].append(node)
        else:
            runs.append([node])
        previous = prefix
    run_of = {node: number for number, run in enumerate(runs) for node in run}
    free: list[list[fx.Node]] = []
    inner: list[list[fx.Node]] = [[] for _ in runs]
    for node in inputs:
        users = {run_of[_maker(user)] for user in node.users if _maker(user) in run_of}
        only = users.pop() if len(users) == 1 else None
        if only is not None and len(runs[only]) > 1:
            inner[only].append(node)
        else:
            free.append([node])
    return [*free, *([*own, *run] for own, run in zip(inner, runs, strict=True))]


def _flows(trace: Trace, owner: dict[fx.Node, int]) -> list[Flow]:
    values: dict[tuple[int, int], dict[str, None]] = {}
    for node in trace.graph.nodes:
        if node.op == "output" or _is_item(node):
            continue
        for source in node.all_input_nodes:
            edge = (owner[_maker(source)], owner[node])
            if edge[0] != edge[1]:
                text = f"{source.name}: {describe(source.meta.get('val'))}"
                values.setdefault(edge, {})[text] = None
    return [Flow(source, target, list(texts)) for (source, target), texts in values.items()]


# ---- what a box says -----------------------------------------------------------------------------


def _item(
    group: Sequence[fx.Node], depth: int | None, returned: bool, number: dict[fx.Node, int]
) -> Item:
    if len(group) > 1:
        return _module_item(group, depth, returned, number)
    (node,) = group
    names, first = [node.name], number[node]
    values = [node.name, *(user.name for user in node.users if _is_item(user))]
    shape = _shape(node)
    if _is_input(node):
        what = "input" if node.op == "placeholder" else "constant"
        about = f"{node.name}\n{what}   {shape}"
        return Item("input", names, values, first, first, node.name, shape, "", about, returned)
    executor = str(node.meta.get("executor", ""))
    about = _about(node, shape, executor, returned)
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


def _module_item(
    group: Sequence[fx.Node], depth: int | None, returned: bool, number: dict[fx.Node, int]
) -> Item:
    calls = [node for node in group if not _is_input(node)]
    path = ".".join(_path(calls[0])[:depth])
    computing = [node for node in calls if not is_view(node)]
    executors = {str(node.meta.get("executor", "")) for node in computing or calls}
    moved = bytes_text(sum(map(node_bytes, computing)))
    held = len(group) - len(calls)
    about = "\n".join(
        [
            path,
            f"{_count(len(computing), 'op')}, {_count(len(calls) - len(computing), 'view')}, "
            f"{_count(held, 'input')} of its own",
            f"{', '.join(sorted(executors))}   {moved} moved",
            f"from {calls[0].name} to {calls[-1].name}",
            *(["returned"] if returned else []),
        ]
    )
    views = f"{path} {_count(len(calls), 'view')}"
    return Item(
        kind="module" if computing else "view",
        nodes=[node.name for node in group],
        values=[],
        first=number[calls[0]],
        last=number[calls[-1]],
        label=path if computing else views,
        detail=f"{_count(len(computing), 'op')}   {moved}" if computing else "",
        executor=executors.pop() if len(executors) == 1 else "",
        about=about,
        returned=returned,
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _shape(node: fx.Node) -> str:
    """What a node's value looks like; of a tuple, its first entry and how many more."""
    value = node.meta.get("val", node.meta.get("example_value"))
    if not isinstance(value, (tuple, list)):
        return describe(value)
    held = [entry for entry in value if entry is not None]
    if len(held) > 1:
        return f"{describe(held[0])} +{len(held) - 1}"
    return describe(held[0] if held else None)


def call_name(node: fx.Node) -> str:
    """`addmm`: what is called, without where it lives."""
    if node.op == "call_function":
        schema = getattr(op_of(node), "_schema", None)
        if schema is not None:
            return str(schema.name).rpartition("::")[2]
        return str(getattr(node.target, "__name__", node.target))
    return str(node.target)


def _about(node: fx.Node, shape: str, executor: str, returned: bool) -> str:
    place = source_of(node)
    called = node.target.name if isinstance(node.target, Region) else call_name(node)
    costs = [executor]
    if isinstance(node.target, Region):
        costs.append(node.target.summary)
    elif is_view(node):
        costs.append("view")
    else:
        costs += [flops_text(node_flops(node))] if node_flops(node) else []
        costs += [bytes_text(node_bytes(node))]
    lines = [
        f"{node.name} = {called}({', '.join(source.name for source in node.all_input_nodes)})",
        shape,
        "   ".join(filter(None, costs)),
        "   ".join(filter(None, [place.module, place.place])),
        place.code,
        "returned" if returned else "",
    ]
    return "\n".join(filter(None, lines))
