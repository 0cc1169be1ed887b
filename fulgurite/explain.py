"""explain: what was compiled, by whom each op runs, what it costs, and where Python took over.

In: a Session after its function was called. Out: an `Explanation`, a value that prints as a table and that the
HTML report draws.
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
from fulgurite.capture.around import Around
from fulgurite.capture.blocks import Blocks, beside
from fulgurite.capture.dynamo import GraphBreak
from fulgurite.executors.cudagraph import cuda_graphs_of
from fulgurite.executors.fuser import kernels_of
from fulgurite.executors.torch import TORCH
from fulgurite.executors.tune import Decision
from fulgurite.fuser import Kernel
from fulgurite.kernels.registry import describe, handovers
from fulgurite.session import GraphRecord, Session
from fulgurite.trace import Kind, Trace, source_of
from fulgurite.trace.cost import bytes_text, count_text, is_view, seconds_text, value_bytes
from fulgurite.transforms.remat import REMAT

LEAVES = "its results leave the region"  # what the fuser says, which doesn't see further


@dataclass(frozen=True)
class KernelSummary:
    """One generated kernel of a program."""

    name: str
    call: str  # the call of the final trace that runs it
    kernel: Kernel
    reason: str  # why it ends where it does
    seconds: float | None = None  # measured on request

    @property
    def of_limit(self) -> float | None:
        """The roofline's time over the measured one: 1.0 is the limit."""
        return self.kernel.predicted / self.seconds if self.seconds else None


@dataclass(frozen=True)
class ProgramSummary:
    """One program of one graph: its forward, backward or inference."""

    kind: Kind
    captured_ops: int  # functional ops before anything was simplified or fused
    calls: dict[str, int]  # calls in the final trace, by executor; views don't count
    bytes_in: int
    bytes_out: int
    stages: list[tuple[str, float]]
    kernels: list[KernelSummary] = field(default_factory=list)
    cuda_graphs: list[str] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return sum(seconds for _, seconds in self.stages)

    def measured(self) -> ProgramSummary:
        return replace(self, kernels=[replace(k, seconds=k.kernel.measure()) for k in self.kernels])


@dataclass(frozen=True)
class GraphSummary:
    index: int
    where: str
    seconds: float
    programs: list[ProgramSummary]
    saved_bytes: dict[str, int]  # by policy; empty without a backward
    decisions: list[Decision]


@dataclass(frozen=True)
class Explanation:
    options: str
    remat: str
    regions: str
    graphs: list[GraphSummary]
    breaks: list[GraphBreak]
    times: dict[str, float]  # seconds a call, where example inputs were given
    traces: list[Trace]
    handovers: list[str] = field(default_factory=list)  # cases of our operators that torch runs

    def measured(self) -> Explanation:
        """The same with every generated kernel timed by itself, on memory of its own."""
        graphs = [replace(g, programs=[p.measured() for p in g.programs]) for g in self.graphs]
        return replace(self, graphs=graphs)

    def __str__(self) -> str:
        lines = [f"{self.options}", f"regions               {self.regions}"]
        for graph in self.graphs:
            lines += ["", *_graph_lines(graph, self.remat)]
        lines += ["", *_break_lines(self.breaks), *_handover_lines(self.handovers)]
        if self.times:
            lines.append(
                " · ".join(f"{name} {seconds_text(time)}" for name, time in self.times.items())
            )
        return "\n".join(lines)


def explain(
    session: Session,
    blocks: Sequence[Blocks],
    candidates: Mapping[str, Callable[..., Any]],
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    around: Around | None = None,
) -> Explanation:
    """Sum up a session, and what is around its blocks; with arguments, time the candidates on them."""
    times: dict[str, float] = {}
    if args or kwargs:  # as the user calls it: with gradients where they are recorded
        calls = {k: functools.partial(f, *args, **(kwargs or {})) for k, f in candidates.items()}
        with _left_as_they_are(args, kwargs, *candidates.values()):
            times = timing.compare(calls)
    return Explanation(
        options=str(session.options),
        remat=session.options.remat,
        regions=_regions_text(session, blocks, around),
        graphs=[summarize(record) for record in session.graphs],
        breaks=session.breaks + (around.unmeant if around else []),
        times=times,
        traces=session.history,
        handovers=_mark_handovers(session),
    )


@contextmanager
def _left_as_they_are(*values: Any) -> Iterator[None]:
    """Tensors that are written to inside, and buffers of modules, get their numbers back."""
    leaves = pytree.tree_leaves(values)
    buffers = [b for module in leaves if isinstance(module, nn.Module) for b in module.buffers()]
    tensors = [leaf for leaf in (*leaves, *buffers) if _may_be_written(leaf)]
    numbers = [tensor.detach().clone() for tensor in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, before in zip(tensors, numbers, strict=True):
                if not torch.equal(tensor, before):
                    tensor.copy_(before)


def _may_be_written(value: Any) -> bool:
    """Whether ops in place take it: not where one place is several elements (expand)."""
    if type(value) not in (Tensor, nn.Parameter) or value.layout is not torch.strided:
        return False
    return not value.is_inference() and all(
        stride or size < 2 for size, stride in zip(value.shape, value.stride(), strict=True)
    )


def _mark_handovers(session: Session) -> list[str]:
    """Calls of the final traces that no kernel took when they ran; each gets a remark in its trace."""
    noted = {case.arguments: case for case in handovers()}
    found: dict[str, None] = {}
    for record in session.graphs:
        for kind in record.programs:
            for node in record.final(kind).ops:
                if getattr(node.target, "namespace", "") != "fulgurite":
                    continue
                values = fx.node.map_arg(node.args, lambda source: source.meta.get("val"))
                left_out = node.target._schema.arguments[len(node.args) :]
                values = (*values, *(argument.default_value for argument in left_out))
                case = noted.get(describe(values))
                if case is not None:
                    node.meta["remark"] = f"plain torch: {case.reason}"
                    found[str(case)] = None
    return list(found)


def summarize(record: GraphRecord) -> GraphSummary:
    kinds: list[Kind] = ["inference", "forward", "backward"]
    programs = [_summarize_program(record, kind) for kind in kinds if kind in record.programs]
    trained = record.saved is not None and "forward" in record.programs
    saved = {p: record.saved.under(p) for p in REMAT} if trained and record.saved else {}
    return GraphSummary(
        index=record.index,
        where=_where(record.captured),
        seconds=record.seconds,
        programs=programs,
        saved_bytes=saved,
        decisions=list(record.decisions),
    )


def _summarize_program(record: GraphRecord, kind: Kind) -> ProgramSummary:
    stages = record.stages(kind)
    final = record.final(kind)
    calls = Counter(n.meta.get("executor", "?") for n in final.ops if not is_view(n))
    return ProgramSummary(
        kind=kind,
        captured_ops=sum(not is_view(n) for n in stages[0].ops),
        calls=dict(calls),
        bytes_in=_bytes(final.inputs),
        bytes_out=_bytes(final.outputs),
        stages=[(trace.stage, trace.seconds) for trace in stages],
        kernels=[_summarize_kernel(node, kernel) for node, kernel in kernels_of(final)],
        cuda_graphs=[f"{graph.name}: {graph}" for graph in cuda_graphs_of(final)],
    )


def _summarize_kernel(node: fx.Node, kernel: Kernel) -> KernelSummary:
    reason = kernel.reason
    if reason == LEAVES:
        reason = _who_needs(node) or reason
    return KernelSummary(kernel.name, node.target.name, kernel, reason)  # type: ignore[union-attr]


def _who_needs(node: fx.Node) -> str:
    """`mm needs h in memory`: who reads the results of a region."""
    for item in node.users:
        for user in item.users:
            if user.op == "output":
                return f"{item.name} is a result"
            what = getattr(user.target, "__name__", str(user.target))
            return f"{what} needs {item.name} in memory"
    return ""


def _bytes(values: Sequence[Any]) -> int:
    nodes = {value for value in values if isinstance(value, fx.Node)}
    return sum(value_bytes(node.meta.get("val")) for node in nodes)


def _where(trace: Trace) -> str:
    """The user's line the graph starts at."""
    for node in trace.ops:
        source = source_of(node)
        if source.place or source.module:
            return source.place or source.module
    return ""


def _regions_text(session: Session, blocks: Sequence[Blocks], around: Around | None) -> str:
    if not blocks:
        return "whole: one graph for everything that can be captured together"
    groups = ", ".join(map(str, blocks))
    if others := beside(blocks):
        groups += f", {', '.join(type(module).__name__ for module in others)} beside them"
    rest = "the rest of the model runs in eager"
    if around and around.bodies:
        outside = f"with what is around {', '.join(around.bodies)}"
        rest = f"{outside} (but for inference with a cache); {rest}"
    return f"blocks: {groups}; {len(session.graphs)} compiled, {rest}"


def _graph_lines(graph: GraphSummary, remat: str) -> list[str]:
    head = f"graph {graph.index} · {graph.where}"
    lines = [f"{head:<40}  compiled in {seconds_text(graph.seconds)}"]
    for program in graph.programs:
        total = sum(program.calls.values())
        by = ", ".join(f"{name} {count}" for name, count in sorted(program.calls.items()))
        lines += [
            f"  {program.kind:<18}  {program.captured_ops} ops → {total} calls ({by or 'none'})",
            f"  {'':<18}  {bytes_text(program.bytes_in)} in, {bytes_text(program.bytes_out)} out",
            f"  {'':<18}  {_stage_text(program)}",
            *_kernel_lines(program.kernels),
            *(f"  {'cuda graph':<18}  {text}" for text in program.cuda_graphs),
        ]
    if graph.saved_bytes:
        lines.append(f"  {'saved for backward':<18}  {_saved_text(graph.saved_bytes, remat)}")
    return lines + _decision_lines(graph.decisions)


def _decision_lines(decisions: Sequence[Decision]) -> list[str]:
    """How many regions each executor won, and those that the one in front lost."""
    if not decisions:
        return []
    wins = Counter(decision.winner for decision in decisions)
    won = ", ".join(f"{name} {count}" for name, count in wins.most_common())
    lines = [f"  {'compared':<18}  {count_text(len(decisions), 'region')}: {won}"]
    given = dict.fromkeys(str(d) for d in decisions if d.winner == TORCH.name)
    return lines + [f"  {'given back':<18}  {text}" for text in given]


def _kernel_lines(kernels: Sequence[KernelSummary]) -> list[str]:
    """The table of generated kernels; equal ones (of equal layers) are one line with their number."""
    if not kernels:
        return []
    measured = any(summary.seconds is not None for summary in kernels)
    head = ["kernel", "ops", "bytes", "predicted"]
    head += ["measured", "of limit"] if measured else []
    rows = [[*head, "why it ends here"]]
    for summary, count in grouped_kernels(kernels):
        kernel = summary.kernel
        name = f"{summary.name} ×{count}" if count > 1 else summary.name
        row = [name, str(len(kernel.ops)), bytes_text(kernel.bytes), seconds_text(kernel.predicted)]
        if measured:
            row += [seconds_text(summary.seconds or 0.0), of_limit_text(summary)]
        rows.append([*row, summary.reason])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    lines = []
    for first, *numbers, reason in rows:
        cells = [c.rjust(width) for c, width in zip(numbers, widths[1:], strict=True)]
        lines.append(f"    {first:<{widths[0]}}   {'   '.join(cells)}   {reason}")
    return lines


def of_limit_text(summary: KernelSummary) -> str:
    """A percentage; beyond the memory's limit where the data stay in the cache."""
    share = summary.of_limit
    if share is None:
        return ""
    return "in cache" if share > 1.1 else f"{100 * share:.0f}%"


def grouped_kernels(kernels: Sequence[KernelSummary]) -> list[tuple[KernelSummary, int]]:
    groups: dict[Any, list[KernelSummary]] = {}
    for summary in kernels:
        kernel = summary.kernel
        key = (summary.name, kernel.ops, kernel.bytes, str(kernel.schedule))
        groups.setdefault(key, []).append(summary)
    return [(same[0], len(same)) for same in groups.values()]


def _stage_text(program: ProgramSummary) -> str:
    return " · ".join(f"{stage} {1e3 * seconds:.1f} ms" for stage, seconds in program.stages)


def _saved_text(saved: dict[str, int], remat: str) -> str:
    chosen = f"{bytes_text(saved[remat])} ({remat})"
    others = [f"{policy} {bytes_text(count)}" for policy, count in saved.items() if policy != remat]
    return " · ".join([chosen, *others])


def _handover_lines(cases: Sequence[str]) -> list[str]:
    return [f"{'plain torch':<20}  {case}" for case in cases]


def _break_lines(breaks: Sequence[GraphBreak]) -> list[str]:
    if not breaks:
        return ["graph breaks          none"]
    rows = [line for found in breaks for line in str(found).splitlines()]
    return [f"graph breaks {len(breaks)}", *(f"  {row}" for row in rows)]
