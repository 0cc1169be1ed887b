"""What is legal at each stage, and the check that it is so.

In: a Trace, and the one it was made from. Out: nothing, or a VerifyError that names the transform, the rule
and the node. Runs after every transform in the tests and under FULGURITE_VERIFY=1.

    rule             holds from      says
    defined once     captured        every name is defined once, before it is used
    callable         captured        every target can be called
    metadata         functional      every op has metadata, and it is what the op gives on FakeTensors
    functional       functional      no op writes to its arguments, but the last ones to inputs
    claimed          claimed         every op has an executor
    same interface   each transform  as many inputs and outputs, of the same dtype, shape, strides, device
    same history     each transform  the trace it was given is as it was
    same aliases     each transform  outputs share memory with inputs and each other just as before
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from fulgurite.errors import VerifyError
from fulgurite.trace.cost import op_of
from fulgurite.trace.describe import describe, source_of
from fulgurite.trace.metadata import evaluate, same_metadata
from fulgurite.trace.region import Region
from fulgurite.trace.trace import Trace
from fulgurite.trace.writes import writes_only_inputs

Problem = tuple[str, fx.Node | None]  # what is wrong, and with which node
CLAIMED_STAGES = ("claimed", "final")
# What verify found of each module: a stage is checked against the one before, whose values are known already.
_KNOWN_ALIASES: WeakKeyDictionary[fx.GraphModule, list[str]] = WeakKeyDictionary()


def verify(trace: Trace, before: Trace | None = None) -> None:
    """Raise VerifyError if the trace breaks a rule of its stage or differs from `before` in interface."""
    for rule in _rules(trace):
        _raise_first(trace, rule.__name__, rule(trace))
    before = before if before is not None and before.kind == trace.kind else None
    values: dict[fx.Node, Any] = {}
    if trace.kind != "captured":
        values = evaluate(trace.module, _recorded_where_opaque)
        _raise_first(trace, "metadata", _wrong_metadata(trace, values))
    if before is not None:
        _raise_first(trace, "same interface", _changed_interface(trace, before))
    if trace.kind == "captured":
        return
    aliases = _KNOWN_ALIASES[trace.module] = _aliases(trace, values)
    if before is not None:
        _raise_first(trace, "same aliases", _changed_aliases(trace, aliases, before))


def contents(trace: Trace) -> list[Any]:
    """What a graph says, to see later whether it still says it."""
    return [(n, n.op, n.target, n.args, n.kwargs) for n in trace.graph.nodes]


def verify_kept(trace: Trace, known: list[Any], name: str) -> None:
    """Raise VerifyError if `name` wrote to the trace it was given."""
    if contents(trace) != known:
        raise VerifyError(
            f"{name} changed the trace it was given; the history would show its work as older",
            trace=trace.name,
            next=f"let {name} work on a copy: return trace.edited(change), where change gets the graph",
        )


def _rules(trace: Trace) -> list[Callable[[Trace], Iterator[Problem]]]:
    rules: list[Callable[[Trace], Iterator[Problem]]] = [defined_once, callable_targets]
    if trace.kind != "captured":
        rules += [has_metadata, functional]
    if trace.stage in CLAIMED_STAGES:
        rules += [claimed]
    return rules


def defined_once(trace: Trace) -> Iterator[Problem]:
    seen: dict[str, fx.Node] = {}
    for node in trace.graph.nodes:
        if node.name in seen:
            yield f"the name {node.name} is defined twice", node
        for source in node.all_input_nodes:
            if seen.get(source.name) is not source:
                yield f"{node.name} uses {source.name} before it is defined", node
        seen[node.name] = node


def callable_targets(trace: Trace) -> Iterator[Problem]:
    for node in trace.graph.nodes:
        if node.op == "call_function" and not callable(node.target):
            yield f"{node.name} calls {node.target!r}, which can't be called", node


def has_metadata(trace: Trace) -> Iterator[Problem]:
    for node in trace.ops:
        if "val" not in node.meta:
            yield f"{node.name} has no metadata", node


def functional(trace: Trace) -> Iterator[Problem]:
    for node in trace.graph.nodes:
        if node.op in ("call_method", "call_module"):
            what = node.op.removeprefix("call_")
            yield f"{node.name} calls the {what} {node.target}; only functions are left here", node
        schema = getattr(node.target, "_schema", None)
        if schema is None or not schema.is_mutable or node.meta.get("effect"):
            continue
        if not writes_only_inputs(node):
            yield f"{node.name} writes to its arguments ({schema.name})", node


def claimed(trace: Trace) -> Iterator[Problem]:
    for node in trace.ops:
        if "executor" not in node.meta:
            yield f"{node.name} has no executor", node


def _recorded_where_opaque(node: fx.Node, computed: Any, values: dict[fx.Node, Any]) -> Any:
    """Higher-order ops and fresh symbols are taken as recorded: running them again proves nothing."""
    maker = node.args[0] if node.target is operator.getitem else node
    opaque = isinstance(getattr(maker, "target", None), torch._ops.HigherOrderOperator)
    recorded = node.meta.get("val")
    return recorded if opaque or _has_fresh_symbols(recorded) else computed


def _has_fresh_symbols(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(_has_fresh_symbols(item) for item in value)
    symbolic = isinstance(value, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool))
    return symbolic and bool(free_unbacked_symbols(value))


def _wrong_metadata(trace: Trace, values: dict[fx.Node, Any]) -> Iterator[Problem]:
    for node in trace.ops:
        recorded = node.meta.get("val")
        if not same_metadata(recorded, values[node]):
            text = f"{node.name} is recorded as {describe(recorded)} and gives"
            yield f"{text} {describe(values[node])}", node


def _changed_interface(trace: Trace, before: Trace) -> Iterator[Problem]:
    for what, new, old in (
        ("input", trace.inputs, before.inputs),
        ("output", trace.outputs, before.outputs),
    ):
        if len(new) != len(old):
            yield f"{len(new)} {what}s where there were {len(old)}", None
            return
        for position, (now, then) in enumerate(zip(new, old, strict=True)):
            if isinstance(now, fx.Node) != isinstance(then, fx.Node):
                was = _recorded(then)
                if isinstance(was, torch.Tensor) or isinstance(_recorded(now), torch.Tensor):
                    yield f"{what} {position} is {now} and was {describe(was)}", None
                continue  # a number that folded to a constant
            if isinstance(now, fx.Node) and not same_metadata(
                now.meta.get("val"), then.meta.get("val")
            ):
                is_, was = describe(now.meta.get("val")), describe(then.meta.get("val"))
                yield f"{what} {position} is {is_} and was {was}", now


def _recorded(value: Any) -> Any:
    return value.meta.get("val") if isinstance(value, fx.Node) else value


def _changed_aliases(trace: Trace, aliases: list[str], before: Trace) -> Iterator[Problem]:
    old = _KNOWN_ALIASES.get(before.module)
    if old is None:
        old = _aliases(before, evaluate(before.module, _recorded_where_opaque))
    for position, (now, then) in enumerate(zip(aliases, old, strict=True)):
        if now != then:
            node = trace.outputs[position]
            yield (
                f"output {position} shares memory with {now or 'nothing'}; before, with "
                f"{then or 'nothing'}",
                node if isinstance(node, fx.Node) else None,
            )


def _aliases(trace: Trace, values: dict[fx.Node, Any]) -> list[str]:
    """For each output, the first input or earlier output whose memory it shares."""
    owner: dict[int, str] = {}
    for position, node in enumerate(trace.inputs):
        storage = _storage(values[node])
        if storage is not None:
            owner.setdefault(storage, f"input {position}")
    shares: list[str] = []
    for position, node in enumerate(trace.outputs):
        storage = _storage(values[node]) if isinstance(node, fx.Node) else None
        shares.append(owner.get(storage, "") if storage is not None else "")
        if storage is not None:
            owner.setdefault(storage, f"output {position}")
    return shares


def _storage(value: Any) -> int | None:
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    return value.untyped_storage()._cdata


def _raise_first(trace: Trace, rule: str, problems: Iterator[Problem]) -> None:
    for what, node in problems:
        where = str(source_of(node)) if node is not None else ""
        target = f"{_target_name(node)}" if node is not None else None
        raise VerifyError(
            f"{trace.stage} made a trace that breaks the rule '{rule.replace('_', ' ')}': {what}",
            trace=trace.name,
            op=target,
            where=where,
            next=f"mend {trace.stage}, or leave it out; print(trace) shows what it made",
        )


def _target_name(node: fx.Node) -> str:
    if isinstance(node.target, Region):
        return node.target.name
    return f"{node.name} = {op_of(node)}"
