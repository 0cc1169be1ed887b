"""The step "gemm_fusion": GEMMs take the elementwise ops that read them into their own kernel.

In: a claimed Trace on a GPU. Out: the same trace, with some GEMMs and the generated ops that read them marked
as one region each, with its schedule. Other GEMMs stay with the library; a comment in the trace says why.

A GEMM is a candidate if all generated ops that read it are elementwise (bias, activation, gate, residual,
cast) or reduce blocks of columns (to quantize). Whether one kernel is faster than the library's GEMM and a
kernel is measured under `autotune=True`, once per shape and device, and otherwise estimated
(`heuristics.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from fulgurite import timing
from fulgurite.fuser.gemm.calls import is_gemm, read_gemm, unsupported_reason
from fulgurite.fuser.gemm.frontend import lower_gemm_graph
from fulgurite.fuser.gemm.heuristics import estimate_fusion
from fulgurite.fuser.gemm.lower import (
    FusionSchedule,
    LibraryGemmRegion,
    lower_gemm_region,
    node_names,
)
from fulgurite.fuser.gemm.schedule import schedule_gemms
from fulgurite.fuser.ir.errors import Unsupported
from fulgurite.fuser.lowering import gpu_info
from fulgurite.kernels.tuning.heuristics import heuristics_for
from fulgurite.trace import Trace
from fulgurite.trace.cost import is_view, iter_tensors, size_hint
from fulgurite.trace.decisions import (
    Decision,
    decision_key,
    read_decision,
    run_on_example_inputs,
    write_decision,
)
from fulgurite.trace.extract import extract_subgraph
from fulgurite.trace.node_meta import (
    executor_of,
    fake_value,
    fusion_group,
    set_comment,
    set_executor,
    set_fusion_group,
    set_fusion_schedule,
)
from fulgurite.trace.purity import is_ordered
from fulgurite.trace.signature import region_signature
from fulgurite.trace.trace import copy_module
from fulgurite.version import VERSION

FUSED, UNFUSED = "fused GEMM", "library GEMM and kernel"
MAX_EPILOGUE_OPS = 24
MIN_SPEEDUP = 1.02  # one kernel must be faster by this factor: less is noise
MAX_RELATIVE_ERROR = 0.05  # between the two results; outputs may be rounded to float8


@dataclass(frozen=True)
class FusionOptions:
    """Who runs what, and how fusion is decided."""

    fuser: str  # name of the executor that runs fused GEMMs
    library: str  # name of the executor that runs views of their operands
    library_names: Collection[str]  # executors whose GEMMs may be fused
    autotune: bool = False  # measure instead of estimating


@dataclass(frozen=True)
class FusionCandidate:
    """GEMMs and the ops that read them, in program order, and the views that are their operands."""

    nodes: list[fx.Node]
    views: list[fx.Node]

    @property
    def gemms(self) -> list[fx.Node]:
        return [node for node in self.nodes if is_gemm(node)]


def has_gpu_gemms(trace: Trace) -> bool:
    return any(is_gemm(node) and _is_on_gpu(node) for node in trace.graph.nodes)


def fuse_gemm_epilogues(trace: Trace, options: FusionOptions) -> tuple[Trace, list[Decision]]:
    """Mark the GEMMs to fuse. Return the new trace and the measured decisions."""
    trace = trace.with_module(copy_module(trace.module))
    decisions: list[Decision] = []
    seen: set[fx.Node] = set()
    for node in list(trace.graph.nodes):
        if not is_gemm(node) or node in seen or not _is_on_gpu(node):
            continue
        if executor_of(node) not in options.library_names:
            continue
        candidate = find_candidate(trace, node, options.fuser)
        if isinstance(candidate, FusionCandidate):
            seen.update(candidate.gemms)
            decisions += _fuse_if_faster(trace, candidate, options)
        elif candidate:
            set_comment(node, f"library: {candidate}")
    return trace, decisions


def _is_on_gpu(node: fx.Node) -> bool:
    return any(tensor.device.type == "cuda" for tensor in iter_tensors(fake_value(node)))


# ---- candidates ----------------------------------------------------------------------------------


def find_candidate(trace: Trace, gemm: fx.Node, fuser: str) -> FusionCandidate | str:
    """What could become one kernel with the GEMM; or why nothing can, "" if nothing reads it."""
    inside = _collect_epilogue(gemm, fuser)
    if all(is_view(node) for node in inside if node is not gemm):
        return ""
    reason = unsupported_reason(gemm)
    if reason:
        return reason
    if len(inside) > MAX_EPILOGUE_OPS:
        return f"{len(inside)} ops read it"
    dependents = _find_dependents(trace, inside)
    _add_exclusive_producers(inside, dependents, read_gemm(gemm).lhs_operands, fuser)
    if any(source in dependents for node in inside for source in node.all_input_nodes):
        return "the epilogue needs the result of another call that depends on it"
    nodes = [node for node in trace.graph.nodes if node in inside]
    if any(map(is_ordered, nodes)):
        return "an op that must keep its order reads it"
    gemms = [node for node in nodes if is_gemm(node)]
    return FusionCandidate(nodes, [view for node in gemms for view in _operand_views(node, fuser)])


def _collect_epilogue(gemm: fx.Node, fuser: str) -> set[fx.Node]:
    """The GEMM and every generated op that reads it, directly or through others."""
    inside, stack = {gemm}, [gemm]
    while stack:
        for user in stack.pop().users:
            if user not in inside and executor_of(user) == fuser:
                inside.add(user)
                stack.append(user)
    return inside


def _find_dependents(trace: Trace, inside: set[fx.Node]) -> set[fx.Node]:
    """The nodes outside that depend on these nodes."""
    found: set[fx.Node] = set()
    for node in trace.graph.nodes:
        if node not in inside and any(s in inside or s in found for s in node.all_input_nodes):
            found.add(node)
    return found


def _add_exclusive_producers(
    inside: set[fx.Node], dependents: set[fx.Node], lhs: tuple[fx.Node, ...], fuser: str
) -> None:
    """Add what only these nodes read: GEMMs of the same left matrix, and generated ops."""
    stack = [source for node in inside for source in _epilogue_inputs(node)]
    while stack:
        source = stack.pop()
        if source in inside or source in dependents:
            continue
        if not all(user in inside for user in source.users) or _is_library_input(source):
            continue
        if is_gemm(source):
            is_free = unsupported_reason(source) is None and fusion_group(source) is None
            if is_free and read_gemm(source).lhs_operands == lhs:
                inside.add(source)
                stack += _epilogue_inputs(source)
        elif executor_of(source) == fuser and source.op == "call_function":
            inside.add(source)
            stack += source.all_input_nodes


def _is_library_input(node: fx.Node) -> bool:
    """Whether a GEMM reads the node: it must then be an input of the region."""
    return any(is_gemm(user) and node in read_gemm(user).library_inputs for user in node.users)


def _epilogue_inputs(node: fx.Node) -> list[fx.Node]:
    """What a node reads, without the inputs of the library's GEMM."""
    outside = read_gemm(node).library_inputs if is_gemm(node) else ()
    return [source for source in node.all_input_nodes if source not in outside]


def _operand_views(gemm: fx.Node, fuser: str) -> list[fx.Node]:
    """The views that are inputs of the GEMM: torch makes them outside of the region."""
    views = []
    for matrix in read_gemm(gemm).library_inputs:
        while executor_of(matrix) == fuser and is_view(matrix):
            views.append(matrix)
            matrix = matrix.all_input_nodes[0]
    return views


# ---- the decision --------------------------------------------------------------------------------


def _fuse_if_faster(
    trace: Trace, candidate: FusionCandidate, options: FusionOptions
) -> list[Decision]:
    """Mark a candidate as one region if that is faster; return the decision if it was measured."""
    module = extract_subgraph(trace, candidate.nodes).module
    first = candidate.gemms[0]
    device = fake_value(first).device
    decisions: list[Decision] = []
    try:
        with _disable_current_modes():  # the step runs while torch traces on FakeTensors
            device_info = gpu_info(device)
            scheduled = schedule_gemms(
                lower_gemm_graph(module), device_info, heuristics_for(device)
            )
            estimate = estimate_fusion(module, scheduled, device, device_info)
    except Unsupported as reason:
        set_comment(first, f"library: {reason}")
        return decisions
    schedule = FusionSchedule(scheduled, node_names(module))
    is_faster, reason_text = estimate.is_profitable, estimate.reason
    if options.autotune:
        set_fusion_schedule(next(filter(is_gemm, module.graph.nodes)), schedule)
        decisions.append(measure_fusion(module, device, scheduled.kernel_name))
        is_faster = decisions[0].winner == FUSED
        reason_text = _describe_times(decisions[0])
    if not is_faster:
        set_comment(first, f"library: {reason_text}")
        return decisions
    set_fusion_schedule(first, schedule)
    for node in candidate.nodes:
        set_executor(node, options.fuser)
        set_fusion_group(node, first.name)
    for view in candidate.views:
        set_executor(view, options.library)
    return decisions


def measure_fusion(module: fx.GraphModule, device: torch.device, name: str) -> Decision:
    """Which of the two is faster: from the cache, or by the clock."""
    key = _make_key(module, device)
    cached = read_decision(key, name, (FUSED, UNFUSED))
    if cached is not None:
        return cached
    with _disable_current_modes():
        calls: dict[str, Callable[..., Any]] = {
            FUSED: lower_gemm_region(module, device, autotune=True),
            UNFUSED: LibraryGemmRegion(module, device),
        }

    def measure(*inputs: Any) -> dict[str, float]:
        seconds = timing.median_times_on(calls, *inputs)
        if not _results_agree(calls[FUSED](*inputs), calls[UNFUSED](*inputs)):
            seconds[FUSED] = math.inf
        return seconds

    seconds = run_on_example_inputs(module, measure)
    winner = FUSED if MIN_SPEEDUP * seconds[FUSED] <= seconds[UNFUSED] else UNFUSED
    decision = Decision(name, winner, seconds, cached=False)
    write_decision(key, decision)
    return decision


def _results_agree(fused: Sequence[Any], unfused: Sequence[Any]) -> bool:
    """Whether results are nearly equal: compilers for new GPU instructions have miscompiled."""
    for ours, reference in zip(fused, unfused, strict=True):
        if isinstance(ours, torch.Tensor) and ours.is_floating_point():
            error = (ours.double() - reference.double()).norm()
            if not bool(error <= MAX_RELATIVE_ERROR * reference.double().norm()):  # also for NaN
                return False
    return True


def _describe_times(decision: Decision) -> str:
    ratio = decision.seconds[FUSED] / decision.seconds[UNFUSED]
    if ratio == math.inf:
        return "the fused kernel's results were wrong"
    return f"the fused kernel takes {ratio:.2f}×"


def _make_key(module: fx.GraphModule, device: torch.device) -> str:
    """Everything the decision depends on; a dynamic size by its power of two."""
    sizes = [
        1 << max(size_hint(size) - 1, 0).bit_length()
        for node in module.graph.nodes
        for tensor in iter_tensors(fake_value(node))
        for size in tensor.shape
        if isinstance(size, torch.SymInt)
    ]
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    signature = region_signature(module)
    return decision_key("gemm fusion", VERSION, torch.__version__, name, signature, str(sizes))
