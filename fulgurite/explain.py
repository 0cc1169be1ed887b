"""`explain`: what was compiled, which executor runs each op, what it costs, where the graph broke.

In: a `Session` whose function was called. Out: an `Explanation`. It prints as text, and the HTML report
draws it.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from fulgurite import timing
from fulgurite.capture.blocks import BlockGroup, find_sibling_modules
from fulgurite.capture.dynamo import GraphBreak
from fulgurite.capture.outer_graph import OuterGraphBackend
from fulgurite.capture.units import UnitGroup
from fulgurite.compiled_graph import GraphRecord
from fulgurite.executors.cudagraph import find_cuda_graphs
from fulgurite.executors.fallback import Fallback as FailedPart
from fulgurite.executors.fuser import describe_torch_ops, kernels_of
from fulgurite.executors.torch import TORCH
from fulgurite.fuser import Kernel
from fulgurite.fuser.segment.finalize import OUTPUT_LEAVES_REGION
from fulgurite.host.timing import HostTime, measure_host_time, uses_gpu
from fulgurite.kernels.registry import describe_arguments, fallbacks
from fulgurite.session import Session
from fulgurite.trace import Kind, Trace, source_of
from fulgurite.trace.cost import format_count, format_seconds, is_view, value_bytes
from fulgurite.trace.decisions import Decision
from fulgurite.trace.frozen import describe_frozen_regions
from fulgurite.trace.node_meta import executor_of, fake_value, set_comment
from fulgurite.transforms.remat import REMAT_POLICIES
from fulgurite.units import format_bytes

OURS = "fulgurite"  # the candidate whose host time is measured


@dataclass(frozen=True)
class KernelSummary:
    """One generated kernel of a compiled graph."""

    name: str
    call: str  # the region of the final trace that runs it
    kernel: Kernel
    reason: str  # why fusion stopped here
    seconds: float | None = None  # measured on request

    @property
    def roofline_fraction(self) -> float | None:
        """Predicted (roofline) time over measured time: 1.0 is the hardware limit."""
        return self.kernel.predicted_seconds / self.seconds if self.seconds else None


@dataclass(frozen=True)
class CompiledGraphSummary:
    """One compiled graph: the forward, backward or inference of a captured graph."""

    kind: Kind
    captured_ops: int  # functional ops before simplification and fusion
    calls: dict[str, int]  # calls in the final trace, by executor; without views
    bytes_in: int
    bytes_out: int
    stages: list[tuple[str, float]]
    kernels: list[KernelSummary] = field(default_factory=list)
    cuda_graphs: list[str] = field(default_factory=list)
    packed_weights: list[str] = field(default_factory=list)
    torch_ops: list[str] = field(default_factory=list)  # with the reasons why they are not fused
    host_program: str = ""  # how many steps run without Python, and which don't

    @property
    def seconds(self) -> float:
        """Compile time."""
        return sum(seconds for _, seconds in self.stages)

    def with_measured_kernels(self) -> CompiledGraphSummary:
        return replace(self, kernels=[replace(k, seconds=k.kernel.measure()) for k in self.kernels])


@dataclass(frozen=True)
class GraphSummary:
    """One captured graph."""

    index: int
    where: str  # the user's line that the graph starts at
    seconds: float  # compile time
    compiled_graphs: list[CompiledGraphSummary]
    saved_bytes: dict[str, int]  # by remat policy; empty without a backward
    decisions: list[Decision]
    notes: list[str] = field(default_factory=list)  # what transforms say of the captured program
    failures: list[FailedPart] = field(default_factory=list)  # what could not be compiled
    captured_calls: list[str] = field(default_factory=list)  # why some calls run as captured
    called_for: str = ""  # the layers that a sub-graph is called for; empty: no sub-graph


@dataclass(frozen=True)
class Explanation:
    """Everything `explain` reports."""

    options: str
    remat: str
    granularity: str  # what was compiled as one graph: repeated layers, or the model
    graphs: list[GraphSummary]
    breaks: list[GraphBreak]
    times: dict[str, float]  # seconds per call, if example inputs were given
    traces: list[Trace]
    fallbacks: list[str] = field(default_factory=list)  # calls that no kernel supports
    units: list[str] = field(default_factory=list)  # what distributed wrappers run compiled
    host_time: HostTime | None = None  # of the compiled call, if example inputs were given

    def with_measured_kernels(self) -> Explanation:
        """A copy in which every generated kernel is timed alone, on buffers of its own."""
        graphs = [
            replace(
                graph, compiled_graphs=[g.with_measured_kernels() for g in graph.compiled_graphs]
            )
            for graph in self.graphs
        ]
        return replace(self, graphs=graphs)

    def __str__(self) -> str:
        lines = [f"{self.options}", f"granularity           {self.granularity}"]
        lines += _unit_lines(self.units)
        for graph in self.graphs:
            lines += ["", *_graph_lines(graph, self.remat)]
        lines += ["", *_break_lines(self.breaks), *_fallback_lines(self.fallbacks)]
        if self.times:
            lines.append(
                " · ".join(f"{name} {format_seconds(time)}" for name, time in self.times.items())
            )
        if self.host_time is not None:
            lines.append(str(self.host_time))
        return "\n".join(lines)


def explain(
    session: Session,
    blocks: Sequence[BlockGroup],
    candidates: Mapping[str, Callable[..., Any]],
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    outer: OuterGraphBackend | None = None,
    units: Sequence[UnitGroup] = (),
    why_blocks: str | None = None,
) -> Explanation:
    """Summarize a session. With arguments, also time the candidates on them."""
    times: dict[str, float] = {}
    host_time = None
    if args or kwargs:  # in the caller's gradient mode
        calls = {k: functools.partial(f, *args, **(kwargs or {})) for k, f in candidates.items()}
        with _restore_tensors(args, kwargs, *candidates.values()):
            times = timing.median_times(calls)
            is_gpu = uses_gpu((args, kwargs))
            host_time = measure_host_time(calls[OURS], is_gpu) if OURS in calls else None
    return Explanation(
        options=str(session.options),
        remat=session.options.remat,
        granularity=_granularity_text(session, blocks, outer, why_blocks),
        units=[str(group) for group in units],
        graphs=[summarize_graph(record) for record in session.graphs],
        breaks=session.breaks + (outer.unintended_breaks if outer else []),
        times=times,
        host_time=host_time,
        traces=session.history,
        fallbacks=_annotate_fallbacks(session),
    )


@contextmanager
def _restore_tensors(*values: Any) -> Iterator[None]:
    """Restore the values of tensors and of module buffers that are written to inside the block."""
    leaves = pytree.tree_leaves(values)
    buffers = [b for module in leaves if isinstance(module, nn.Module) for b in module.buffers()]
    tensors = [leaf for leaf in (*leaves, *buffers) if _is_writable(leaf)]
    saved = [tensor.detach().clone() for tensor in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, before in zip(tensors, saved, strict=True):
                if not torch.equal(tensor, before):
                    tensor.copy_(before)


def _is_writable(value: Any) -> bool:
    """Whether in-place ops accept it: not if several elements share memory (`expand`)."""
    if type(value) not in (Tensor, nn.Parameter) or value.layout is not torch.strided:
        return False
    return not value.is_inference() and all(
        stride or size < 2 for size, stride in zip(value.shape, value.stride(), strict=True)
    )


def _annotate_fallbacks(session: Session) -> list[str]:
    """Find calls that no kernel supported when they ran, and add a comment to each in its trace."""
    known = {case.arguments: case for case in fallbacks()}
    found: dict[str, None] = {}
    for record in session.graphs:
        for kind in record.compiled_graphs:
            for node in record.final_trace(kind).ops:
                if getattr(node.target, "namespace", "") != "fulgurite":
                    continue
                values = fx.node.map_arg(node.args, fake_value)
                defaults = node.target._schema.arguments[len(node.args) :]
                values = (*values, *(argument.default_value for argument in defaults))
                case = known.get(describe_arguments(values))
                if case is not None:
                    set_comment(node, f"fallback to torch: {case.reason}")
                    found[str(case)] = None
    return list(found)


def summarize_graph(record: GraphRecord) -> GraphSummary:
    """Summarize one captured graph and its compiled graphs."""
    kinds: list[Kind] = ["inference", "forward", "backward"]
    kinds = [kind for kind in kinds if kind in record.compiled_graphs]
    saved = {}
    if record.saved_bytes is not None and "forward" in kinds:
        saved = {policy: record.saved_bytes.for_policy(policy) for policy in REMAT_POLICIES}
    return GraphSummary(
        index=record.index,
        where=_first_location(record.captured),
        called_for=record.called_for,
        seconds=record.seconds,
        compiled_graphs=[_summarize_compiled_graph(record, kind) for kind in kinds],
        saved_bytes=saved,
        decisions=list(record.decisions),
        failures=list(record.fallbacks),
        captured_calls=list(record.captured_calls),
        notes=[note for trace in record.stages("captured") for note in trace.notes],
    )


def _summarize_compiled_graph(record: GraphRecord, kind: Kind) -> CompiledGraphSummary:
    stages = record.stages(kind)
    final = record.final_trace(kind)
    calls = Counter(executor_of(n) or "?" for n in final.ops if not is_view(n))
    return CompiledGraphSummary(
        kind=kind,
        captured_ops=sum(not is_view(n) for n in stages[0].ops),
        calls=dict(calls),
        bytes_in=_total_bytes(final.inputs),
        bytes_out=_total_bytes(final.outputs),
        stages=[(trace.stage, trace.seconds) for trace in stages],
        kernels=[_summarize_kernel(node, kernel) for node, kernel in kernels_of(final)],
        cuda_graphs=_describe_cuda_graphs(record, kind),
        packed_weights=describe_frozen_regions(final.graph),
        host_program=_describe_host_program(record, kind),
        torch_ops=[text for t in stages if t.stage == "claimed" for text in describe_torch_ops(t)],
    )


def _describe_host_program(record: GraphRecord, kind: Kind) -> str:
    """How many steps of a compiled graph run without Python, and what the others are."""
    program = record.compiled_graphs[kind].host_program
    return program.summary if program is not None else ""


def _describe_cuda_graphs(record: GraphRecord, kind: Kind) -> list[str]:
    """The captures of a compiled graph: of the whole, or of its parts."""
    compiled = record.compiled_graphs[kind]
    if compiled.graphed is not None:
        return [str(compiled.graphed)]
    return [f"{graph.name}: {graph}" for graph in find_cuda_graphs(compiled.trace)]


def _summarize_kernel(node: fx.Node, kernel: Kernel) -> KernelSummary:
    reason = kernel.reason
    if reason == OUTPUT_LEAVES_REGION:
        reason = _describe_reader(node) or reason
    return KernelSummary(kernel.name, node.target.name, kernel, reason)  # type: ignore[union-attr]


def _describe_reader(node: fx.Node) -> str:
    """Who reads the outputs of a region: `mm needs h in memory`."""
    for item in node.users:
        for user in item.users:
            if user.op == "output":
                return f"{item.name} is an output"
            reader = getattr(user.target, "__name__", str(user.target))
            return f"{reader} needs {item.name} in memory"
    return ""


def _total_bytes(values: Sequence[Any]) -> int:
    nodes = {value for value in values if isinstance(value, fx.Node)}
    return sum(value_bytes(fake_value(node)) for node in nodes)


def _first_location(trace: Trace) -> str:
    """The user's line that the graph starts at."""
    for node in trace.ops:
        source = source_of(node)
        if source.location or source.module:
            return source.location or source.module
    return ""


def _granularity_text(
    session: Session,
    blocks: Sequence[BlockGroup],
    outer: OuterGraphBackend | None,
    why_blocks: str | None,
) -> str:
    """What was compiled as one graph: the model, with repeated layers as sub-graphs, or the layers.

    why_blocks   why the layers are separate graphs; None: the option says so
    """
    if not blocks or why_blocks == "":
        layers = [f"{r.called_for}, one sub-graph" for r in session.graphs if r.is_subgraph]
        return "; ".join(["model: one graph between graph breaks", *dict.fromkeys(layers)])
    groups = ", ".join(map(str, blocks))
    if siblings := find_sibling_modules(blocks):
        groups += f", siblings {', '.join(type(module).__name__ for module in siblings)}"
    rest = "the rest of the model runs in eager mode"
    if outer and outer.parent_paths:
        outside = f"with the outer graph of {', '.join(outer.parent_paths)}"
        rest = f"{outside} (except for inference with a cache); {rest}"
    if why_blocks:
        rest += f"; the model is not one graph because: {why_blocks}"
    return f"blocks: {groups}; {len(session.graphs)} graphs compiled, {rest}"


def _unit_lines(units: Sequence[str]) -> list[str]:
    """What distributed wrappers run compiled. The wrappers' hooks and collectives run in eager mode."""
    heads = ["distributed units", *[""] * len(units)]
    return [f"{head:<20}  {unit}" for head, unit in zip(heads, units, strict=False)]


def _graph_lines(graph: GraphSummary, remat: str) -> list[str]:
    head = f"graph {graph.index} · {graph.where}"
    head += f" · {graph.called_for}, one sub-graph" if graph.called_for else ""
    lines = [f"{head:<40}  compiled in {format_seconds(graph.seconds)}"]
    lines += [f"  {'note':<18}  {note}" for note in graph.notes]
    for compiled in graph.compiled_graphs:
        total = sum(compiled.calls.values())
        by = ", ".join(f"{name} {count}" for name, count in sorted(compiled.calls.items()))
        bytes_in, bytes_out = format_bytes(compiled.bytes_in), format_bytes(compiled.bytes_out)
        lines += [
            f"  {compiled.kind:<18}  {compiled.captured_ops} ops → {total} calls ({by or 'none'})",
            f"  {'':<18}  {bytes_in} in, {bytes_out} out",
            f"  {'':<18}  {_stage_text(compiled)}",
            *_kernel_lines(compiled.kernels),
            *_torch_op_lines(compiled.torch_ops),
            *(
                [f"  {'host program':<18}  {compiled.host_program}"]
                if compiled.host_program
                else []
            ),
            *(f"  {'weights packed':<18}  {text}" for text in compiled.packed_weights),
            *(f"  {'CUDA graph':<18}  {text}" for text in compiled.cuda_graphs),
        ]
    if graph.saved_bytes:
        lines.append(f"  {'saved for backward':<18}  {_saved_text(graph.saved_bytes, remat)}")
    lines += [f"  {'runs as captured':<18}  {reason}" for reason in graph.captured_calls]
    return lines + _decision_lines(graph.decisions) + _failure_lines(graph.failures)


def _torch_op_lines(torch_ops: Sequence[str]) -> list[str]:
    return [f"  {'torch ops':<18}  {', '.join(torch_ops)}"] if torch_ops else []


def _failure_lines(failures: Sequence[FailedPart]) -> list[str]:
    """What could not be compiled, what runs instead, and the script that reproduces it."""
    lines = []
    for failure in failures:
        lines += [f"  {'failed':<18}  {failure}", f"  {'':<18}  repro: {failure.repro}"]
    return lines


def _decision_lines(decisions: Sequence[Decision]) -> list[str]:
    """How many regions each executor won, and the regions that fell back to torch."""
    if not decisions:
        return []
    wins = Counter(decision.winner for decision in decisions)
    won = ", ".join(f"{name} {count}" for name, count in wins.most_common())
    lines = [f"  {'autotuned':<18}  {format_count(len(decisions), 'region')}: {won}"]
    fell_back = dict.fromkeys(str(d) for d in decisions if d.winner == TORCH.name)
    return lines + [f"  {'fallback to torch':<18}  {text}" for text in fell_back]


def _kernel_lines(kernels: Sequence[KernelSummary]) -> list[str]:
    """The table of generated kernels. Equal kernels (of repeated layers) share a line with a count.

    The region is the number in its name in the final trace, of the first of equal kernels.
    """
    if not kernels:
        return []
    has_times = any(summary.seconds is not None for summary in kernels)
    head = ["kernel", "region", "ops", "bytes", "predicted"]
    head += ["measured", "roofline"] if has_times else []
    rows = [[*head, "fusion boundary"]]
    for summary, count in group_equal_kernels(kernels):
        made = summary.kernel
        name = f"{summary.name} ×{count}" if count > 1 else summary.name
        predicted = format_seconds(made.predicted_seconds)
        row = [name, summary.call.rpartition("_")[2], str(len(made.ops))]
        row += [format_bytes(made.bytes_moved), predicted]
        if has_times:
            row += [format_seconds(summary.seconds or 0.0), format_roofline_fraction(summary)]
        rows.append([*row, summary.reason])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    lines = []
    for first, *numbers, reason in rows:
        cells = [c.rjust(width) for c, width in zip(numbers, widths[1:], strict=True)]
        lines.append(f"    {first:<{widths[0]}}   {'   '.join(cells)}   {reason}")
    return lines


def format_roofline_fraction(summary: KernelSummary) -> str:
    """The measured speed in percent of the roofline; above it, the data stays in the cache."""
    fraction = summary.roofline_fraction
    if fraction is None:
        return ""
    return "in cache" if fraction > 1.1 else f"{100 * fraction:.0f}%"


def group_equal_kernels(kernels: Sequence[KernelSummary]) -> list[tuple[KernelSummary, int]]:
    """Each distinct kernel with the number of its occurrences."""
    groups: dict[Any, list[KernelSummary]] = {}
    for summary in kernels:
        kernel = summary.kernel
        key = (summary.name, kernel.ops, kernel.bytes_moved, str(kernel.schedule))
        groups.setdefault(key, []).append(summary)
    return [(equal[0], len(equal)) for equal in groups.values()]


def _stage_text(compiled: CompiledGraphSummary) -> str:
    return " · ".join(f"{stage} {1e3 * seconds:.1f} ms" for stage, seconds in compiled.stages)


def _saved_text(saved: dict[str, int], remat: str) -> str:
    used = f"{format_bytes(saved[remat])} ({remat})"
    other = [
        f"{policy} {format_bytes(count)}" for policy, count in saved.items() if policy != remat
    ]
    return " · ".join([used, *other])


def _fallback_lines(cases: Sequence[str]) -> list[str]:
    return [f"{'fallback to torch':<20}  {case}" for case in cases]


def _break_lines(breaks: Sequence[GraphBreak]) -> list[str]:
    if not breaks:
        return ["graph breaks          none"]
    rows = [line for found in breaks for line in str(found).splitlines()]
    return [f"graph breaks {len(breaks)}", *(f"  {row}" for row in rows)]
