"""Claimed neighbours → regions → calls.

In: a claimed Trace. Out: the final Trace. Ops that one fusing executor claimed are gathered into regions (`gather`),
each is taken out (`extract`), lowered and becomes one call. Ops of the torch executor stay single calls.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx, ops
from torch.fx._lazy_graph_module import _LazyGraphModule

from fulgurite.errors import CompileError, FulguriteError
from fulgurite.executors.base import Chosen, Executor
from fulgurite.executors.extract import Extracted, extract
from fulgurite.executors.gather import Group, gather, in_order
from fulgurite.executors.lend import lend
from fulgurite.executors.order import for_memory
from fulgurite.executors.torch import TorchExecutor
from fulgurite.executors.whole import as_torch
from fulgurite.executors.writes import gather_writes
from fulgurite.trace import Trace, describe, source_of
from fulgurite.trace.cost import (
    bytes_text,
    count_text,
    is_view,
    tensors,
    value_bytes,
)
from fulgurite.trace.region import Region
from fulgurite.trace.trace import copy_module
from fulgurite.trace.writes import written

aten = ops.aten
Lower = Callable[[str, Executor, fx.GraphModule, Callable[[], fx.GraphModule]], Chosen]


def lower(
    trace: Trace, executors: Sequence[Executor], choose: Lower | None = None, lends: bool = False
) -> Trace:
    """The final trace: regions lowered, single ops spelled as directly as torch allows.

    lends   whether regions may overwrite what nobody reads after them: nothing is to be added to the trace, then
    """
    by_name = {executor.name: executor for executor in executors}
    groups = gather(trace, by_name)
    if all(group.executor is None for group in groups):
        module = copy_module(trace.module)
    else:
        module = _assemble(trace, for_memory(in_order(groups)), choose or _lower_with, lends)
    gather_writes(module)
    for node in module.graph.nodes:
        executor = by_name.get(node.meta.get("executor", ""))
        if isinstance(executor, TorchExecutor):
            executor.spell(module, node)
    module.graph.lint()
    return trace.with_module(module)


def _assemble(trace: Trace, groups: list[Group], choose: Lower, lends: bool) -> fx.GraphModule:
    graph = fx.Graph()
    value_of: dict[fx.Node, fx.Node] = {}
    for node in trace.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            value_of[node] = graph.node_copy(node, lambda n: value_of[n])
    lent = lend(groups) if lends else {}
    extracted = {g.index: _begun(trace, g, lent.get(g.index)) for g in groups if _is_region(g)}
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


def _begun(trace: Trace, group: Group, lent: set[fx.Node] | None) -> Extracted:
    """The region as a module with its inputs and outputs, its lowering under way."""
    assert group.executor is not None, "only fusing executors have regions"
    extracted = extract(trace, group.nodes)
    places = [node for node in extracted[0].graph.nodes if node.op == "placeholder"]
    for place, source in zip(places, extracted[1], strict=True):
        if lent and source in lent:
            place.meta["lent"] = True
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
    overwritten = [inputs[k].name for k in getattr(chosen.call, "overwritten", ())]
    if overwritten:
        summary += f"   in the place of {', '.join(overwritten)}"
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
