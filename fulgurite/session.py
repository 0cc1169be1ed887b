"""Session: everything known about one compiled function or module.

In: graphs from TorchDynamo, one at a time. Out: the functions that run them, and the record of how they came
about: every stage of every graph, graph breaks, what is saved for backward, decisions of tuning.
`Session.compile_graph` and `Session.build` are the pipeline, top to bottom.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx
from torch._guards import TracingContext

from fulgurite import repro
from fulgurite.capture.autograd import BoxedFunction, differentiate
from fulgurite.capture.dynamo import GraphBreak
from fulgurite.capture.names import Names, with_captured_names
from fulgurite.config import settings
from fulgurite.errors import ArgumentError, CompileError, FulguriteError
from fulgurite.executors import claim, lower
from fulgurite.executors.cudagraph import graphed
from fulgurite.executors.epilogue import mark_epilogues
from fulgurite.executors.tune import Decision, Tuner
from fulgurite.options import Options
from fulgurite.trace import Kind, Trace, verify
from fulgurite.trace.cost import bytes_text, count_text, is_view, node_bytes, seconds_text
from fulgurite.trace.region import Region, with_prepared
from fulgurite.trace.text import load
from fulgurite.trace.verify import contents, verify_kept
from fulgurite.transforms import SIMPLIFY
from fulgurite.transforms.attention import known_masks
from fulgurite.transforms.remat import SavedBytes, partitioner


class Program:
    """What runs: a trace compiled to a function, which an edited trace can replace."""

    def __init__(self, trace: Trace) -> None:
        self._boxed_call = True  # AOTAutograd: inputs come in a list, which may be emptied
        self.trace = trace
        self._compiled = trace.compile()
        self.run: BoxedFunction = self._first

    def __call__(self, inputs: list[Any]) -> Any:
        return self.run(inputs)

    def _first(self, inputs: list[Any]) -> Any:
        """The first call waits for the kernels; the next ones call them without a detour."""
        result = self._compiled(inputs)
        if self.run == self._first:
            self.run = with_prepared(self._compiled)
        return result

    def replace(self, forward: Callable[..., Any]) -> None:
        def run(inputs: list[Any]) -> Any:
            return forward(*inputs)

        self.run = run

    def restore(self) -> None:
        self._compiled = self.trace.compile()
        self.run = self._first


@dataclass
class GraphRecord:
    """One captured graph: its stages and its programs, by kind."""

    index: int
    history: list[Trace] = field(default_factory=list)
    programs: dict[Kind, Program] = field(default_factory=dict)
    saved: SavedBytes | None = None
    decisions: list[Decision] = field(default_factory=list)
    # from the captured graph to its functions, backward included once it is built
    seconds: float = 0.0

    def stages(self, kind: Kind) -> list[Trace]:
        return [trace for trace in self.history if trace.kind == kind]

    def final(self, kind: Kind) -> Trace:
        return self.programs[kind].trace

    @property
    def captured(self) -> Trace:
        return self.history[0]

    def __repr__(self) -> str:
        return f"GraphRecord({self.index}, {', '.join(self.programs)})"


class Session:
    """Compiles graphs by one set of options and remembers all of it."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.graphs: list[GraphRecord] = []
        self.breaks: list[GraphBreak] = []
        self.__name__ = "fulgurite"  # TorchDynamo prints its backend's name

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """The backend TorchDynamo calls with each captured graph."""
        record = GraphRecord(len(self.graphs))
        self.graphs.append(record)
        try:
            return self.compile_graph(record, module, inputs)
        except BaseException:
            self.graphs.remove(record)
            raise

    # ---- the pipeline ------------------------------------------------------------------------------

    def compile_graph(
        self, record: GraphRecord, module: fx.GraphModule, inputs: Sequence[Any]
    ) -> Callable[..., Any]:
        """Captured graph → a callable that runs it, with backward where gradients are needed."""
        started = time.perf_counter()
        captured = Trace(with_captured_names(module), "captured", "captured", record.index)
        trace = self.step(record, "captured", lambda trace: trace, captured)
        for executor in self.options.executors:
            executor.expect(captured.module, inputs)
        for transform in self.options.transforms_in("before_autograd"):
            trace = self.step(record, transform.name, transform, trace)
        names = Names(captured.module)
        result = differentiate(
            module if trace.module is captured.module else trace.module,
            trace.module,
            inputs,
            forward=lambda graph: self.build(record, "forward", graph, names),
            backward=lambda graph: self.build(record, "backward", graph, names),
            inference=lambda graph: self.build(record, "inference", graph, names),
            partition=self.partition(record),
        )
        record.seconds += time.perf_counter() - started
        return result

    def build(
        self, record: GraphRecord, kind: Kind, graph: fx.GraphModule, names: Names
    ) -> Program:
        """Functional graph → program: simplify, transform, claim, lower."""
        started = time.perf_counter()
        options = self.options
        executors = options.executors
        tuner = Tuner(executors, options.tune) if options.tune else None
        trace = Trace(names.apply(graph), kind, "functional", record.index)
        trace = self.step(record, "functional", lambda trace: trace, trace)
        for transform in [known_masks, *SIMPLIFY, *options.transforms_in("after_autograd")]:
            trace = self.step(record, transform.name, transform, trace)
        trace = self.step(
            record,
            "claimed",
            lambda trace: mark_epilogues(claim(trace, executors), executors, tuner),
            trace,
        )
        choose = tuner.choose if tuner else None
        # what runs after these steps may be run twice, or read what a region has overwritten
        lends = not options.cudagraph and not options.transforms_in("after_claim")
        trace = self.step(
            record, "final", lambda trace: lower(trace, executors, choose, lends), trace
        )
        if options.cudagraph:
            kept = _user_results(trace)
            trace = self.step(record, "cudagraph", lambda trace: graphed(trace, kept), trace)
        for transform in options.transforms_in("after_claim"):
            trace = self.step(record, transform.name, transform, trace)
        trace = record.history[-1] = trace.with_note(_sum_up(record.stages(kind)))
        program = record.programs[kind] = Program(trace)
        record.decisions += tuner.decisions if tuner else []
        if kind == "backward":
            record.seconds += time.perf_counter() - started
        return program

    def step(
        self, record: GraphRecord, name: str, change: Callable[[Trace], Trace], trace: Trace
    ) -> Trace:
        """One named, timed, verified step; its result goes into the history."""
        known = contents(trace) if settings().verify else None
        started = time.perf_counter()
        try:
            changed = change(trace).at_stage(name, time.perf_counter() - started)
            if known is not None:
                verify_kept(trace, known, name)
                verify(changed, before=trace if changed.module is not trace.module else None)
        except FulguriteError as error:
            self._with_repro(record, error)
            raise
        except Exception as error:
            failure = CompileError(
                f"{name} failed on {trace.name}: {type(error).__name__}: {error}",
                next=f"leave {name} out, or mend it; the script above runs this graph by itself",
            )
            self._with_repro(record, failure)
            raise failure from error
        record.history.append(changed)
        return changed

    def _with_repro(self, record: GraphRecord, error: FulguriteError) -> None:
        """Save a script that reproduces the failure, and name it in the error."""
        if record.history and "repro" not in error.rows:
            try:
                saved = str(repro.save_failing(record.captured, self.options))
            except OSError as problem:  # the failure itself is what the user needs to see
                saved = f"not saved ({problem}): set FULGURITE_REPRO to a writable folder"
            error.rows = {"repro": saved, **error.rows}

    def partition(self, record: GraphRecord) -> Callable[..., Any]:
        split = partitioner(self.options.remat)

        def partition(joint: fx.GraphModule, inputs: Any, **options: Any) -> Any:
            record.saved = SavedBytes(joint, inputs, options)
            return split(joint, inputs, **options)

        return partition

    # ---- looking at it -------------------------------------------------------------------------------

    @property
    def history(self) -> list[Trace]:
        return [trace for record in self.graphs for trace in record.history]

    def record(self, graph: int) -> GraphRecord:
        if not self.graphs:
            raise ArgumentError(
                "nothing is compiled yet", next="call the compiled function with inputs first"
            )
        if not -len(self.graphs) <= graph < len(self.graphs):
            raise ArgumentError(
                f"there is no graph {graph}", next=f"graphs are 0 to {len(self.graphs) - 1}"
            )
        return self.graphs[graph]

    def program(self, graph: int, kind: Kind | None) -> Program:
        record = self.record(graph)
        if kind is None:
            kind = "inference" if "inference" in record.programs else "forward"
        if kind not in record.programs:
            raise ArgumentError(
                f"graph {record.index} has no {kind}",
                next=f"one of {', '.join(record.programs)}"
                + ("; backward is built when it first runs" if kind == "backward" else ""),
            )
        return record.programs[kind]

    def replace_trace(self, text: str, graph: int, kind: Kind | None) -> None:
        """Run an edited text in the place of a final trace."""
        program = self.program(graph, kind)
        forward = load(text, f"<edited {program.trace.name}>")
        repro.check_replacement(program.trace, forward)
        program.replace(forward)


def _user_results(trace: Trace) -> int:
    """How many results of a graph the user gets; those of a training forward go on with what is saved."""
    if trace.kind != "forward":
        return len(trace.outputs)
    metadata = TracingContext.get().fw_metadata
    assert metadata is not None, "AOTAutograd builds forward without having looked at it"
    return int(metadata.num_forward_returns)


def _sum_up(stages: list[Trace]) -> str:
    """The line under a final trace's title: what runs, what it moves, what it took to compile."""
    computing = [node for node in stages[-1].ops if not is_view(node)]
    regions = sum(isinstance(node.target, Region) for node in computing)
    parts = [count_text(regions, "region")] if regions else []
    parts.append(count_text(len(computing) - regions, "library call"))
    moved = sum(node_bytes(node) for node in computing)
    parts.append(f"{bytes_text(moved)} moved")
    parts.append(f"{seconds_text(sum(trace.seconds for trace in stages))} to compile")
    return ", ".join(parts)
