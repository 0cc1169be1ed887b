"""Lower a claimed trace: regions become calls.

In: a claimed Trace. Out: the final Trace. Ops that one fusing executor claimed are grouped into regions
(`group_ops`). Each region is extracted (`extract_subgraph`), lowered by its executor, and becomes one
call. Ops of the torch executor stay single calls.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx
from torch.fx._lazy_graph_module import _LazyGraphModule

from fulgurite.errors import CompileError, FulguriteError
from fulgurite.executors.base import ClaimedRegion, Executor, ExecutorChoice
from fulgurite.executors.composite import restore_composite_ops
from fulgurite.executors.donation import find_donations
from fulgurite.executors.fallback import (
    TORCH_OPS,
    Fallback,
    GuardedRegion,
    InputForm,
    ReportFallback,
    is_error_of_device,
    raise_or_report,
)
from fulgurite.executors.grouping import Group, group_ops, sort_topologically
from fulgurite.executors.input_writes import fuse_input_writes
from fulgurite.executors.memory_order import reorder_for_memory
from fulgurite.executors.torch import TORCH, TorchExecutor
from fulgurite.trace import Trace, describe, source_of
from fulgurite.trace.cost import (
    format_count,
    is_view,
    iter_tensors,
    value_bytes,
)
from fulgurite.trace.extract import Subgraph, extract_subgraph
from fulgurite.trace.mutations import mutated_inputs
from fulgurite.trace.node_meta import (
    composite_of,
    copy_location,
    copy_meta,
    executor_of,
    fake_value,
    mark_donated,
    set_comment,
    set_executor,
    set_fake_value,
)
from fulgurite.trace.op_names import GENERIC_OPS, name_from_ops, name_of_op
from fulgurite.trace.region import Region
from fulgurite.trace.trace import copy_module
from fulgurite.units import format_bytes

ChooseExecutor = Callable[[ClaimedRegion], ExecutorChoice]
MAX_COMMENT = 120  # characters of a reason in the trace
GENERIC_REGION_OPS = GENERIC_OPS | {
    *("neg", "convert_element_type", "copy", "sum", "mean", "getitem")
}


def lower_trace(
    trace: Trace,
    executors: Sequence[Executor],
    choose_executor: ChooseExecutor | None = None,
    allow_donation: bool = False,
    report: ReportFallback | None = None,
) -> Trace:
    """Return the final trace: regions are lowered, single ops are direct calls of torch.

    choose_executor   picks the executor of a region; None: the one that claimed it
    allow_donation    regions may overwrite inputs that nobody reads afterwards. Then no later step may
                      add readers to the trace.
    report            told of each region that falls back to torch because lowering it failed; None:
                      such a failure is raised
    """
    by_name = {executor.name: executor for executor in executors}
    groups = group_ops(trace, by_name)
    if all(group.executor is None for group in groups):
        module = copy_module(trace.module)
    else:
        ordered = reorder_for_memory(sort_topologically(groups))
        builder = _GraphBuilder(trace, choose_executor or _use_claiming_executor, report)
        module = builder.build(ordered, find_donations(ordered) if allow_donation else {})
    fuse_input_writes(module)
    for node in module.graph.nodes:
        executor = by_name.get(executor_of(node))
        if isinstance(executor, TorchExecutor):
            executor.use_direct_function(module, node)
    module.graph.lint()
    return trace.with_module(module)


@dataclass
class _GraphBuilder:
    """Builds the graph of the final trace, group by group."""

    trace: Trace
    choose_executor: ChooseExecutor
    report: ReportFallback | None

    def __post_init__(self) -> None:
        self.graph = fx.Graph()
        self.failures: dict[int, Exception] = {}  # by group index: it could not start to compile
        self.value_of: dict[
            fx.Node, fx.Node
        ] = {}  # node of the claimed trace → node of the new graph

    def build(self, groups: list[Group], donations: dict[int, set[fx.Node]]) -> fx.GraphModule:
        for node in self.trace.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                self._copy(node)
        subgraphs = {  # all of them first: executors compile in the background
            group.index: self._extract_region(group, donations.get(group.index, set()))
            for group in groups
            if _is_region(group)
        }
        numbers = itertools.count()
        for group in groups:
            if group.index in subgraphs:
                self._add_region(group, subgraphs[group.index], next(numbers))
                continue
            for node in group.nodes:
                set_executor(self._copy(node), _executor_of_single_op(node))
        old_output = self.trace.graph.output_node()
        results = fx.node.map_arg(old_output.args[0], lambda n: self.value_of[n])
        copy_meta(old_output, self.graph.output(results))
        module = _LazyGraphModule(self.trace.module, self.graph, class_name="Trace")
        module.meta = dict(self.trace.module.meta)
        return module

    def _copy(self, node: fx.Node) -> fx.Node:
        copy = self.graph.node_copy(node, lambda n: self.value_of[n])
        self.value_of[node] = copy
        return copy

    def _extract_region(self, group: Group, donated: set[fx.Node]) -> Subgraph:
        """Extract a region and let its executor start compiling it."""
        assert group.executor is not None, "only fusing executors have regions"
        subgraph = extract_subgraph(self.trace, group.nodes)
        placeholders = subgraph.module.graph.find_nodes(op="placeholder")
        for placeholder, source in zip(placeholders, subgraph.inputs, strict=True):
            if source in donated:
                mark_donated(placeholder)
        try:
            group.executor.start_lowering(subgraph.module)
        except Exception as error:  # see executors/fallback.py
            self.failures[group.index] = error
        return subgraph

    def _add_region(self, group: Group, subgraph: Subgraph, number: int) -> None:
        """Lower a region and add its call, or its ops if it falls back to torch."""
        assert group.executor is not None, "only fusing executors have regions"
        module, inputs, outputs = subgraph
        name = f"{group.executor.region_name or _name_region(group.nodes)}_{number}"
        restore = functools.partial(restore_composite_ops, self.trace, group.nodes, inputs, outputs)
        claimed = ClaimedRegion(
            name, group.executor, module, restore, self._make_guard(name, group, inputs, restore)
        )
        choice = self._lower_or_fall_back(group, claimed)
        if choice.call is None:
            self._add_fallback_ops(restore(), subgraph, choice.comment)
            return
        summary = _summarize_region(group, subgraph, choice.call)
        region = Region(name, choice.executor.name, module, choice.call, summary)
        call = self.graph.call_function(region, tuple(self.value_of[n] for n in inputs))
        copy_location(group.nodes[0], call)
        set_fake_value(call, tuple(fake_value(n) for n in outputs))
        set_executor(call, choice.executor.name)
        for position, output in enumerate(outputs):
            item = self.graph.create_node(
                "call_function", operator.getitem, (call, position), name=output.name
            )
            copy_meta(output, item)
            self.value_of[output] = item

    def _make_guard(
        self,
        name: str,
        group: Group,
        inputs: Sequence[fx.Node],
        restore: Callable[[], fx.GraphModule],
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """A function that adds the fallback of this region to what its executor lowered it to."""
        assert group.executor is not None, "only fusing executors have regions"
        can_fall_back = group.executor.falls_back_if_failed

        def guard(lowered: Callable[..., Any]) -> Callable[..., Any]:
            if getattr(lowered, "has_lookups", False):  # composite ops have errors of their own
                lowered.reference = restore().forward  # type: ignore[attr-defined]
            if not can_fall_back or not hasattr(lowered, "can_rerun"):
                return lowered
            return GuardedRegion(
                name,
                lowered,
                make_torch_call=lambda: TORCH.lower(restore()),
                make_error=functools.partial(_lowering_error, group),
                report=self.report,
                forms=[_known_form(fake_value(node)) for node in inputs],
            )

        return guard

    def _lower_or_fall_back(self, group: Group, region: ClaimedRegion) -> ExecutorChoice:
        """Lower a region; if that fails, or failed when it started, fall back to torch."""
        failure = self.failures.get(group.index)
        if failure is None:
            try:
                choice = self.choose_executor(region)
            except Exception as error:  # see executors/fallback.py
                failure = error
            else:
                return _replace_failed(choice)
        if is_error_of_device(failure):
            raise failure
        problem = _lowering_error(group, failure)
        problem.may_fall_back = region.executor.falls_back_if_failed
        if not problem.may_fall_back:
            raise problem from (None if problem is failure else failure)
        fallback = Fallback(region.name, problem, TORCH_OPS)
        raise_or_report(fallback, self.report, failure)
        return _run_torch(fallback)

    def _add_fallback_ops(
        self, torch_module: fx.GraphModule, subgraph: Subgraph, comment: str
    ) -> None:
        """Add the ops of a region as torch runs them; the first one carries the comment."""
        copied: dict[fx.Node, fx.Node] = {}
        inputs = iter(subgraph.inputs)
        for node in torch_module.graph.nodes:
            if node.op == "placeholder":
                copied[node] = self.value_of[next(inputs)]
            elif node.op == "output":
                for output, result in zip(subgraph.outputs, node.args[0], strict=True):
                    self.value_of[output] = copied[result]
            else:
                copied[node] = self.graph.node_copy(node, lambda n: copied[n])
                if not is_view(node) and comment:
                    set_comment(copied[node], comment)
                    comment = ""


def _known_form(value: Any) -> InputForm | None:
    """The dtype of a tensor, and its sizes that are numbers; None: it is no tensor."""
    if not isinstance(value, Tensor):
        return None
    sizes = tuple(size if isinstance(size, int) else None for size in value.shape)
    return InputForm(sizes, value.dtype)


def _summarize_region(group: Group, subgraph: Subgraph, call: Callable[..., Any]) -> str:
    """`4 ops   64.0 MiB   donated: conv`, the comment of a region's call."""
    computing = sum(not is_view(node) for node in group.nodes)
    moved = sum(value_bytes(fake_value(n)) for n in {*subgraph.inputs, *subgraph.outputs})
    summary = f"{format_count(computing, 'op')}   {format_bytes(moved)}"
    overwritten = [subgraph.inputs[k].name for k in getattr(call, "overwritten_inputs", ())]
    return f"{summary}   donated: {', '.join(overwritten)}" if overwritten else summary


def _executor_of_single_op(node: fx.Node) -> str:
    """The executor of a node outside of regions: torch for free ops and writes."""
    is_torch = _is_free(node) or mutated_inputs(node)
    return TorchExecutor.name if is_torch else executor_of(node)


def _is_free(node: fx.Node) -> bool:
    """Whether the node moves no data: a view, or arithmetic on sizes."""
    return is_view(node) or not any(True for _ in iter_tensors(fake_value(node)))


def _is_region(group: Group) -> bool:
    return group.executor is not None and not all(map(_is_free, group.nodes))


def _name_region(nodes: list[fx.Node]) -> str:
    """A name that the user recognizes: composite ops first, then specific ops."""
    composites = [name_of_op(n) for n in nodes if composite_of(n) is not None]
    names = [name_of_op(n) for n in nodes if not _is_free(n) and composite_of(n) is None]
    return name_from_ops(names, first=composites, generic=GENERIC_REGION_OPS, max_ops=2)


def _use_claiming_executor(region: ClaimedRegion) -> ExecutorChoice:
    return ExecutorChoice(region.executor, region.guard(region.executor.lower(region.module)))


def _replace_failed(choice: ExecutorChoice) -> ExecutorChoice:
    """The choice, or torch's ops if the region fell back while it was timed."""
    fallback: Fallback | None = getattr(choice.call, "fallback", None)
    if fallback is None or fallback.instead != TORCH_OPS:
        return choice
    return _run_torch(fallback)


def _run_torch(fallback: Fallback) -> ExecutorChoice:
    """The choice of a region that failed: its ops, with the reason as comment."""
    return ExecutorChoice(TORCH, None, f"fallback: {fallback.reason[:MAX_COMMENT]}")


def _lowering_error(group: Group, error: Exception) -> FulguriteError:
    """The error of a region that can't be lowered or launched: what failed, and on which ops."""
    if isinstance(error, FulguriteError):
        return error
    assert group.executor is not None, "only fusing executors have regions"
    node = group.nodes[-1]
    inputs = [f"{n.name}: {describe(fake_value(n))}" for n in node.all_input_nodes]
    return CompileError(
        f"the executor {group.executor.name!r} failed on a region of {len(group.nodes)} ops that ends "
        f"in {node.target}: {type(error).__name__}: {str(error)[:400]}",
        where=str(source_of(node)),
        input="\n".join(inputs),
        next=f"compile with executors that leave out {group.executor.name!r}",
    )
