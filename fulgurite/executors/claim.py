"""Claim: each op goes to the first executor that can run it, with late decomposition.

In: a functional Trace and the executors in priority order. Out: a Trace at stage "claimed", where every
op carries its executor's name. Suppose only the last executor would claim an op. The op is decomposed
one level if executors before the last claim all of its decomposed ops. Otherwise it stays whole. So does
an op that torch's kernel refuses (`refusals.py`), for its error.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import fx

from fulgurite.errors import CompileError, FulguriteError
from fulgurite.executors.base import Executor
from fulgurite.executors.composite import CompositeOp
from fulgurite.executors.fallback import (
    TORCH_OPS,
    Fallback,
    ReportFallback,
    is_error_of_device,
    raise_or_report,
)
from fulgurite.executors.refusals import is_refused
from fulgurite.executors.torch import TORCH, TorchExecutor
from fulgurite.trace import Trace, describe, source_of
from fulgurite.trace.cost import is_view
from fulgurite.trace.node_meta import (
    composite_of,
    executor_of,
    fake_value,
    is_claimed,
    set_executor,
)
from fulgurite.trace.purity import is_pure
from fulgurite.trace.signature import call_signature
from fulgurite.trace.trace import copy_module
from fulgurite.transforms.decompose import decompose, inline_decomposition

# views that are materialized when they are read
LAZY_VIEWS = (torch.ops.aten._conj.default, torch.ops.aten._neg_view.default)
MAX_DECOMPOSITION_DEPTH = 4  # torch's own tables end well before
DecompositionCache = dict[tuple[str, int], fx.GraphModule | None]  # by call signature and depth


def claim(
    trace: Trace, executors: Sequence[Executor], report: ReportFallback | None = None
) -> Trace:
    """Give every op an executor.

    report   told of each op that goes to the last executor because claiming it failed; None: such a
             failure is raised
    """
    module = copy_module(trace.module)
    cache: DecompositionCache = {}
    report = report if isinstance(executors[-1], TorchExecutor) else None
    for node in list(module.graph.nodes):
        if node._erased:  # a getitem, erased when its tuple was decomposed
            continue
        if node.op in ("call_function", "call_method", "call_module"):
            try:
                _claim_node(
                    module, node, _executors_of(node, executors), MAX_DECOMPOSITION_DEPTH, cache
                )
            except Exception as error:  # see executors/fallback.py
                _claim_with_torch(node, error, report)
    for node in reversed(module.graph.nodes):  # sizes that a decomposition does not read
        if not node.users and is_pure(node):
            module.graph.erase_node(node)
    composites: dict[CompositeOp, None] = {}
    for node in module.graph.nodes:
        composite = composite_of(node)
        if composite is not None:
            composite.decomposed_nodes.add(node)
            composites[composite] = None
    for composite in composites:
        composite.finalize()
    return trace.with_module(module)


def _executors_of(node: fx.Node, executors: Sequence[Executor]) -> Sequence[Executor]:
    """The executors that are offered an op: not those that generate code, if torch refuses the op."""
    if not isinstance(executors[-1], TorchExecutor) or not is_refused(node):
        return executors
    return [executor for executor in executors if not executor.accepts_decomposed_ops]


def _claim_with_torch(node: fx.Node, error: Exception, report: ReportFallback | None) -> None:
    """Report that claiming the op failed; torch runs it as it is."""
    if isinstance(error, FulguriteError) and not error.may_fall_back:
        raise error
    if report is None or node._erased or is_error_of_device(error):  # erased: decomposed in part
        raise error
    failure = error if isinstance(error, FulguriteError) else _claiming_error(node, error)
    raise_or_report(Fallback(str(node.target), failure, TORCH_OPS), report, error)
    set_executor(node, TORCH.name)


def _claiming_error(node: fx.Node, error: Exception) -> CompileError:
    return CompileError(
        f"claiming {node.target} failed: {type(error).__name__}: {str(error)[:400]}",
        where=str(source_of(node)),
        input=", ".join(f"{n.name}: {describe(fake_value(n))}" for n in node.all_input_nodes),
        next="compile with executors=['torch']; the script above reproduces the failure",
    )


def _claims(executor: Executor, node: fx.Node) -> bool:
    """`executor.claims(node)`; an error of a user's executor is never a reason to fall back."""
    try:
        return executor.claims(node)
    except Exception as error:
        if executor.falls_back_if_failed:
            raise
        failure = error if isinstance(error, FulguriteError) else _claiming_error(node, error)
        failure.may_fall_back = False
        raise failure from (None if failure is error else error)


def _claim_node(
    module: fx.GraphModule,
    node: fx.Node,
    executors: Sequence[Executor],
    depth: int,
    cache: DecompositionCache,
) -> None:
    if node.target is operator.getitem and is_claimed(node.args[0]):
        set_executor(node, executor_of(node.args[0]))  # an item stays with its tuple
        return
    *preferred, last = executors
    for executor in preferred:
        if _claims(executor, node):
            set_executor(node, executor.name)
            return
    accepting = [executor for executor in preferred if executor.accepts_decomposed_ops]
    decomposed = None
    if accepting:
        decomposed = _decompose_if_claimable(module, node, accepting, depth, cache)
    if decomposed is not None:
        composite = CompositeOp.from_node(node)
        inlined, results = inline_decomposition(node, decomposed)
        if composite_of(node) is None:  # else the node belongs to a larger composite op
            composite.track_results(inlined, results)
        for inner in inlined:
            if not inner._erased:
                _claim_node(module, inner, executors, depth - 1, cache)
        return
    if not _claims(last, node):
        raise CompileError(
            f"no executor claims {node.target}",
            where=str(source_of(node)),
            input=", ".join(f"{n.name}: {describe(fake_value(n))}" for n in node.all_input_nodes),
            next="end the list of executors with 'torch', which runs everything",
        )
    set_executor(node, last.name)


def _decompose_if_claimable(
    module: fx.GraphModule,
    node: fx.Node,
    accepting: Sequence[Executor],
    depth: int,
    cache: DecompositionCache,
) -> fx.GraphModule | None:
    """Decompose the node if the accepting executors claim every decomposed op that computes.

    Equal layers have equal ops, and tracing a decomposition takes milliseconds. So results are cached.
    """
    if depth == 0 or not isinstance(node.target, torch._ops.OpOverload):
        return None
    if _is_view_or_getitem(node) and node.target not in LAZY_VIEWS:
        return None
    call = call_signature(node)
    if call is None:  # symbolic sizes: calls are not comparable
        return _decompose_uncached(module, node, accepting, depth, cache)
    if (call, depth) not in cache:
        cache[call, depth] = _decompose_uncached(module, node, accepting, depth, cache)
    return cache[call, depth]


def _decompose_uncached(
    module: fx.GraphModule,
    node: fx.Node,
    accepting: Sequence[Executor],
    depth: int,
    cache: DecompositionCache,
) -> fx.GraphModule | None:
    decomposed = decompose(module, node)
    if decomposed is None:
        return None
    computing = [
        n for n in decomposed.graph.nodes if n.op == "call_function" and not _is_view_or_getitem(n)
    ]
    is_claimable = bool(computing) and all(
        any(_claims(executor, inner) for executor in accepting)
        or _decompose_if_claimable(decomposed, inner, accepting, depth - 1, cache) is not None
        for inner in computing
    )
    return decomposed if is_claimable else None


def _is_view_or_getitem(node: fx.Node) -> bool:
    """Views and getitem go wherever their neighbors go."""
    return node.target is operator.getitem or is_view(node)
