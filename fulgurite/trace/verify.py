"""The verifier: the rules of each stage.

In: a Trace, and the one it was made from. Out: nothing, or a VerifyError that names the transform, the
rule and the node. Runs after every transform in the tests and under FULGURITE_VERIFY=1.

    rule              from stage      meaning
    defined once      captured        every name is defined once, before its uses
    callable targets  captured        every target is callable
    has metadata      functional      every op has metadata
    metadata          functional      the metadata is what the op returns on FakeTensors
    functional        functional      no op mutates its arguments, except input mutations
    claimed           claimed         every op has an executor
    same interface    each transform  the same inputs and outputs: dtype, shape, strides, device
    same aliases      each transform  outputs alias inputs and each other as before
    unmodified input  each transform  the transform did not change the trace it was given
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from fulgurite.errors import VerifyError
from fulgurite.trace.cost import is_view
from fulgurite.trace.describe import describe, source_of
from fulgurite.trace.metadata import find_fake_mode, run_node, same_metadata, use_fake_mode
from fulgurite.trace.mutations import is_input_mutation
from fulgurite.trace.node_meta import (
    aten_op,
    fake_value,
    has_fake_value,
    has_side_effect,
    is_claimed,
)
from fulgurite.trace.region import Region
from fulgurite.trace.trace import Trace

Problem = tuple[str, fx.Node | None]  # what is wrong, and with which node
LAST_STAGE = "final"
CLAIMED_STAGES = ("claimed", "gemm_fusion", LAST_STAGE)


@dataclass(frozen=True)
class Evaluation:
    """What an op returned on FakeTensors."""

    value: Any
    recorded: Any  # the metadata of its node
    sources: tuple[Any, ...]  # the values it was run on; kept alive, since keys have their ids


@dataclass
class Evaluations:
    """The fake values of a graph. Ops that a transform did not touch have the values of `before`.

    An op is untouched if its name, target, arguments and metadata are the same objects as before. Its
    metadata was compared with its value then.
    """

    values: dict[fx.Node, Any] = field(default_factory=dict)
    by_key: dict[Hashable, Evaluation] = field(default_factory=dict)
    touched: list[fx.Node] = field(default_factory=list)


# of verified modules, until the next stage is compared with them. The keys hold what a graph calls, and so may
# keep the graph alive: nothing is stored of the last stage.
_EVALUATION_CACHE: WeakKeyDictionary[fx.GraphModule, dict[Hashable, Evaluation]] = (
    WeakKeyDictionary()
)
_ALIAS_CACHE: WeakKeyDictionary[fx.GraphModule, list[str]] = WeakKeyDictionary()


def verify(trace: Trace, before: Trace | None = None) -> None:
    """Raise VerifyError if the trace breaks a rule of its stage, or its interface is not `before`'s."""
    for rule in _rules_of_stage(trace):
        _raise_first(trace, rule.__name__, rule(trace))
    before = before if before is not None and before.kind == trace.kind else None
    values: dict[fx.Node, Any] = {}
    if trace.kind != "captured":
        known = _EVALUATION_CACHE.pop(trace.module if before is None else before.module, {})
        found = _evaluate(trace.module, known)
        values = found.values
        _raise_first(trace, "metadata", _wrong_metadata(found))
        if trace.stage != LAST_STAGE:
            _EVALUATION_CACHE[trace.module] = found.by_key
    if before is not None:
        _raise_first(trace, "same interface", _changed_interface(trace, before))
    if trace.kind == "captured":
        return
    aliases = _ALIAS_CACHE[trace.module] = _aliases(trace, values)
    if before is not None:
        _raise_first(trace, "same aliases", _changed_aliases(trace, aliases, before))


def snapshot_graph(trace: Trace) -> list[Any]:
    """The contents of a graph, to detect modifications."""
    return [(n, n.op, n.target, n.args, n.kwargs) for n in trace.graph.nodes]


def verify_unmodified(trace: Trace, snapshot: list[Any], name: str) -> None:
    """Raise VerifyError if the transform `name` modified the trace it was given."""
    if snapshot_graph(trace) != snapshot:
        raise VerifyError(
            f"{name} modified the trace it was given, which the history still shows",
            trace=trace.name,
            next=f"let {name} modify a copy: return trace.edit(change), where change gets the graph",
        )


def _rules_of_stage(trace: Trace) -> list[Callable[[Trace], Iterator[Problem]]]:
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
        if not has_fake_value(node):
            yield f"{node.name} has no metadata", node


def _replaces_input(node: fx.Node) -> bool:
    """Whether the node gives an input other memory (`x.data = y`), at the end of a graph."""
    target = node.args[0] if node.target is torch.ops.aten.set_.source_Tensor else None
    return isinstance(target, fx.Node) and target.op == "placeholder"


def functional(trace: Trace) -> Iterator[Problem]:
    for node in trace.graph.nodes:
        if node.op in ("call_method", "call_module"):
            kind = node.op.removeprefix("call_")
            yield f"{node.name} calls the {kind} {node.target}; only functions are allowed", node
        schema = getattr(node.target, "_schema", None)
        if schema is None or not schema.is_mutable or has_side_effect(node):
            continue
        if not (is_input_mutation(node) or _replaces_input(node)):
            yield f"{node.name} mutates its arguments ({schema.name})", node


def claimed(trace: Trace) -> Iterator[Problem]:
    for node in trace.ops:
        if not is_claimed(node):
            yield f"{node.name} has no executor", node


def _evaluate(module: fx.GraphModule, known: dict[Hashable, Evaluation]) -> Evaluations:
    """Run the graph on its inputs' fake values, except for the ops whose evaluation is known."""
    found = Evaluations()
    values = found.values
    with use_fake_mode(find_fake_mode(module)):
        for node in module.graph.nodes:
            if node.op == "placeholder" or has_side_effect(node):
                values[node] = fake_value(node)
            elif node.op == "get_attr":
                values[node] = _keep_opaque_value(node, run_node(module, node, values))
            elif node.op != "output":
                key = _evaluation_key(node, values)
                old = known.get(key)
                if old is None or old.recorded is not fake_value(node):
                    computed = _keep_opaque_value(node, run_node(module, node, values))
                    computed = _with_own_memory(node, computed, values)
                    sources = tuple(values[source] for source in node.all_input_nodes)
                    old = Evaluation(computed, fake_value(node), sources)
                    found.touched.append(node)
                found.by_key[key] = old
                values[node] = old.value
    return found


def _evaluation_key(node: fx.Node, values: dict[fx.Node, Any]) -> Hashable:
    """Equal for two nodes if they run the same op on the same objects.

    The name is part of it: two equal allocations in one graph don't share memory.
    """

    def key_of(argument: Any) -> Hashable:
        if isinstance(argument, fx.Node):
            return fx.Node, id(values[argument])
        if isinstance(argument, (list, tuple)):
            return tuple, *map(key_of, argument)
        if isinstance(argument, dict):
            return dict, *((name, key_of(value)) for name, value in argument.items())
        if isinstance(argument, slice):
            return slice, *map(key_of, (argument.start, argument.stop, argument.step))
        # 1, 1.0 and True are equal, but give results of other dtypes
        return type(argument), argument if isinstance(argument, Hashable) else id(argument)

    return node.name, node.op, node.target, key_of(node.args), key_of(node.kwargs)


def _keep_opaque_value(node: fx.Node, computed: Any) -> Any:
    """Keep the recorded values of higher-order ops and unbacked symbols: they can't be recomputed."""
    producer = node.args[0] if node.target is operator.getitem else node
    opaque = isinstance(getattr(producer, "target", None), torch._ops.HigherOrderOperator)
    recorded = fake_value(node)
    return recorded if opaque or _has_unbacked_symbols(recorded) else computed


def _with_own_memory(node: fx.Node, computed: Any, values: dict[fx.Node, Any]) -> Any:
    """The result of an op that is no view, in memory of its own.

    On FakeTensors an op may run as its decomposition, which returns a view of the input where nothing moves:
    `channel_shuffle` with one group. The op itself copies.
    """
    schema = getattr(node.target, "_schema", None)
    if schema is None or is_view(node) or any(r.alias_info is not None for r in schema.returns):
        return computed
    sources = {_storage_id(values[source]) for source in node.all_input_nodes} - {None}
    if _storage_id(computed) not in sources:
        return computed
    return torch.empty_strided(
        computed.shape, computed.stride(), dtype=computed.dtype, device=computed.device
    )


def _has_unbacked_symbols(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(_has_unbacked_symbols(item) for item in value)
    symbolic = isinstance(value, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool))
    return symbolic and bool(free_unbacked_symbols(value))


def _wrong_metadata(found: Evaluations) -> Iterator[Problem]:
    for node in found.touched:
        recorded = fake_value(node)
        if not same_metadata(recorded, found.values[node], allow_fresh_symbols=True):
            computed = describe(found.values[node])
            yield f"{node.name} is recorded as {describe(recorded)} but is {computed}", node


def _changed_interface(trace: Trace, before: Trace) -> Iterator[Problem]:
    for role, new, old in (
        ("input", trace.inputs, before.inputs),
        ("output", trace.outputs, before.outputs),
    ):
        if len(new) != len(old):
            yield f"{len(new)} {role}s instead of {len(old)}", None
            return
        for position, (now, then) in enumerate(zip(new, old, strict=True)):
            if isinstance(now, fx.Node) != isinstance(then, fx.Node):
                was = _metadata_of(then)
                if isinstance(was, torch.Tensor) or isinstance(_metadata_of(now), torch.Tensor):
                    yield f"{role} {position} is {now} and was {describe(was)}", None
                continue  # a number that was folded to a constant
            if isinstance(now, fx.Node) and not same_metadata(fake_value(now), fake_value(then)):
                is_, was = describe(fake_value(now)), describe(fake_value(then))
                yield f"{role} {position} is {is_} and was {was}", now


def _metadata_of(value: Any) -> Any:
    return fake_value(value) if isinstance(value, fx.Node) else value


def _changed_aliases(trace: Trace, aliases: list[str], before: Trace) -> Iterator[Problem]:
    old = _ALIAS_CACHE.get(before.module)
    if old is None:
        old = _aliases(before, _evaluate(before.module, {}).values)
    for position, (now, then) in enumerate(zip(aliases, old, strict=True)):
        if now != then:
            node = trace.outputs[position]
            yield (
                f"output {position} shares memory with {now or 'nothing'}; before, with "
                f"{then or 'nothing'}",
                node if isinstance(node, fx.Node) else None,
            )


def _aliases(trace: Trace, values: dict[fx.Node, Any]) -> list[str]:
    """For each output, the first input or earlier output that it shares memory with."""
    owner: dict[int, str] = {}
    for position, node in enumerate(trace.inputs):
        storage = _storage_id(values[node])
        if storage is not None:
            owner.setdefault(storage, f"input {position}")
    aliases: list[str] = []
    for position, node in enumerate(trace.outputs):
        storage = _storage_id(values[node]) if isinstance(node, fx.Node) else None
        aliases.append(owner.get(storage, "") if storage is not None else "")
        if storage is not None:
            owner.setdefault(storage, f"output {position}")
    return aliases


def _storage_id(value: Any) -> int | None:
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    return value.untyped_storage()._cdata


def _raise_first(trace: Trace, rule: str, problems: Iterator[Problem]) -> None:
    for problem, node in problems:
        where = str(source_of(node)) if node is not None else ""
        target = f"{_target_name(node)}" if node is not None else None
        raise VerifyError(
            f"{trace.stage} returned a trace that breaks the rule "
            f"'{rule.replace('_', ' ')}': {problem}",
            trace=trace.name,
            op=target,
            where=where,
            next=f"fix or remove {trace.stage}; print(trace) shows what it returned",
        )


def _target_name(node: fx.Node) -> str:
    if isinstance(node.target, Region):
        return node.target.name
    return f"{node.name} = {aten_op(node)}"
