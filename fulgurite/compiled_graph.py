"""Compiled graphs and their records: what a session makes of each captured graph.

In: a final trace. Out: `CompiledGraph`, a callable of a list of inputs. Its first call runs the trace's
Python; later calls run the host program, or replay a CUDA graph. `GraphRecord` holds the traces of every
stage of one captured graph, and what was decided on the way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from fulgurite import repro
from fulgurite.capture.autograd import BoxedFunction
from fulgurite.cudagraph import GraphedFunction
from fulgurite.executors.fallback import Fallback, ReportFallback, raise_or_report
from fulgurite.failures import PYTHON_FORM, as_compile_error
from fulgurite.host import HostProgram, build_host_program
from fulgurite.trace import Kind, Trace
from fulgurite.trace.decisions import Decision
from fulgurite.trace.region import bind_cached_launches
from fulgurite.trace.subgraph import inline_subgraphs, subgraph_calls
from fulgurite.transforms.remat import SavedBytes

CUDA_GRAPH = "CUDA graph"  # how a trace's note about its capture starts
CAPTURED_CALLS = "some calls run as captured"  # how a trace's note about other inputs starts


class CompiledGraph:
    """A final trace compiled to a Python function. An edited trace can replace the function."""

    def __init__(
        self,
        trace: Trace,
        wrap: Callable[..., GraphedFunction] | None = None,
        is_subgraph: bool = False,
        report: ReportFallback | None = None,
    ) -> None:
        self.is_subgraph = is_subgraph  # the graphs that call it inline it after their first call
        self._boxed_call = True  # tells AOTAutograd to pass inputs in a list, which is cleared
        self.trace = trace
        self.graphed: GraphedFunction | None = None  # if the trace is captured as a CUDA graph
        # makes it from the function that runs and the Python function of the trace
        self._wrap = wrap
        self._report = report
        self._compiled = trace.compile()
        self.host_program: HostProgram | None = None  # the trace without Python, once it has run
        self.run: BoxedFunction = self._first_call

    def __call__(self, inputs: list[Any]) -> Any:
        return self.run(inputs)

    def call(self, *inputs: Any) -> Any:
        """Run with inputs that the caller keeps: for traces that call this graph."""
        return self.run([*inputs])

    def _first_call(self, inputs: list[Any]) -> Any:
        """The first call waits for kernels to compile; later calls launch them directly."""
        result = self._compiled(inputs)
        if self.run == self._first_call:
            self.run = self._bind_kernels()
        return result

    def _bind_kernels(self) -> BoxedFunction:
        """What runs from the second call on: the trace, with its sub-graphs inlined, without Python."""
        flat = inline_subgraphs_of(self.trace)
        python_form = self._compiled if flat is self.trace else flat.compile()
        python_form = bind_cached_launches(python_form)
        if self.is_subgraph:
            return python_form
        self.host_program = self._build_host_program(flat, python_form)
        plain = self.host_program.run if self.host_program is not None else python_form
        return self._capture_later(flat, plain, python_form)

    def _build_host_program(self, trace: Trace, python_form: BoxedFunction) -> HostProgram | None:
        """The host program; if it can't be built, the Python of the trace keeps running."""
        try:
            return build_host_program(trace, python_form)
        except (
            Exception
        ) as error:  # ours, which must not become the user's; see executors/fallback.py
            failure = as_compile_error(error, f"the host program of {trace.name} failed")
            raise_or_report(Fallback("host program", failure, PYTHON_FORM), self._report, error)
            return None

    def _capture_later(
        self, flat: Trace, plain: BoxedFunction, python_form: BoxedFunction
    ) -> BoxedFunction:
        """The function, captured as a CUDA graph after some calls if that is possible.

        flat   the trace with its sub-graphs inlined
        """
        if self._wrap is None:
            return plain
        self.graphed = self._wrap(flat, plain, python_form)
        return self.graphed.make_callable()

    def replace(self, forward: Callable[..., Any]) -> None:
        """Run `forward` instead of the trace."""

        def run(inputs: list[Any]) -> Any:
            return forward(*inputs)

        self.run, self.graphed, self.host_program = run, None, None

    def keep_subgraphs(self) -> None:
        """Run the sub-graphs that the trace calls as they are now: one of them was replaced."""
        self.run, self.graphed, self.host_program = self._compiled, None, None

    def restore(self) -> None:
        """Run the trace again."""
        self._compiled = self.trace.compile()
        self.run, self.graphed, self.host_program = self._first_call, None, None


@dataclass
class GraphRecord:
    """One captured graph: its traces at every stage, and its compiled graphs by kind."""

    index: int
    history: list[Trace] = field(default_factory=list)
    compiled_graphs: dict[Kind, CompiledGraph] = field(default_factory=dict)
    saved_bytes: SavedBytes | None = None
    decisions: list[Decision] = field(default_factory=list)
    fallbacks: list[Fallback] = field(default_factory=list)  # what failed, and runs with torch
    captured_calls: list[str] = field(default_factory=list)  # why torch runs it for some inputs
    seconds: float = 0.0  # compile time; includes backward once that is built
    called_for: str = ""  # the layers that this graph is called for: "12 × ViTLayer"
    # settings of torch at the capture, for scripts that reproduce a failure
    state: repro.TorchState = field(default_factory=repro.TorchState.read)

    @property
    def is_subgraph(self) -> bool:
        """Whether other graphs call this one: a repeated layer of a model."""
        return bool(self.called_for)

    def stages(self, kind: Kind) -> list[Trace]:
        """The traces of one kind, in order."""
        return [trace for trace in self.history if trace.kind == kind]

    def final_trace(self, kind: Kind) -> Trace:
        return self.compiled_graphs[kind].trace

    def refresh_final_traces(self) -> None:
        """Print final traces anew: regions that fell back at a call, CUDA graphs and other inputs."""
        for compiled in self.compiled_graphs.values():
            old = compiled.trace
            notes = [
                note for note in old.notes if not note.startswith((CUDA_GRAPH, CAPTURED_CALLS))
            ]
            notes += [f"{CAPTURED_CALLS}: {reason}" for reason in self.captured_calls]
            if compiled.graphed is not None:
                notes.append(f"{CUDA_GRAPH}: {compiled.graphed.describe()}")
            compiled.trace = replace(old, notes=tuple(notes))
            self.history = [compiled.trace if trace is old else trace for trace in self.history]

    @property
    def captured(self) -> Trace:
        return self.history[0]

    def __repr__(self) -> str:
        return f"GraphRecord({self.index}, {', '.join(self.compiled_graphs)})"


def inline_subgraphs_of(trace: Trace) -> Trace:
    """The trace with the lines of its sub-graphs in place of their calls."""
    if not subgraph_calls(trace.graph):
        return trace
    return trace.with_module(inline_subgraphs(trace.module))
