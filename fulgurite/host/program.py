"""Host programs: a final trace that runs without Python between its kernels.

In: a trace that has run once, so that its kernels are compiled, and its Python form. Out:
`HostProgram`, whose `run` takes the inputs in a list, which it clears, and returns a tuple, as the
Python form does.

The program has one step for each line of the trace (`str(program)` prints them side by side). A
line runs natively if the program has instructions for it: fused kernels, GEMMs and other library
calls, views, sizes. All others call Python. The whole program runs as Python under a profiler, a
dispatch mode or a recording, and for inputs that are no plain tensors.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from fulgurite.host.expression import Unsupported
from fulgurite.host.lower import LoweredTrace, lower_steps
from fulgurite.host_api import load_library
from fulgurite.trace import Trace
from fulgurite.trace.cost import format_count
from fulgurite.trace.steps import StepList

BoxedFunction = Callable[[list[Any]], Any]
COLUMN = 64
MAX_REASONS = 4


@dataclass(frozen=True)
class HostProgram:
    """A trace as a host program."""

    run: BoxedFunction
    python_form: BoxedFunction
    steps: StepList
    lowered: LoweredTrace

    @property
    def num_native(self) -> int:
        """Number of steps that run without Python."""
        return self.lowered.num_native

    @property
    def summary(self) -> str:
        """How many steps run without Python, and which don't."""
        runs = self.lowered.runs
        text = f"{self.num_native} of {format_count(len(runs), 'step')} without Python"
        others = collections.Counter(run for run in runs if run.startswith("python"))
        reasons = ", ".join(
            f"{count} × {run[8:-1]}" for run, count in others.most_common(MAX_REASONS)
        )
        return f"{text}; Python: {reasons}" if reasons else text

    def __str__(self) -> str:
        """The lines of the trace, each with how it runs."""
        pairs = zip(self.steps.lines(), self.lowered.runs, strict=True)
        return "\n".join(f"{line:<{COLUMN}}  # {run}" for line, run in pairs)

    def __repr__(self) -> str:
        return f"<host program of {len(self.lowered.runs)} steps, {self.num_native} native>"


class StepFunction:
    """A step as Python, compiled when it first runs: native steps seldom need it."""

    def __init__(self, steps: StepList, position: int, filename: str) -> None:
        self.steps, self.position, self.filename = steps, position, filename
        self.function: Callable[..., Any] | None = None

    def compile(self) -> Callable[..., Any]:
        if self.function is None:
            self.function = self.steps.compile(self.position, self.filename)
        return self.function

    def __call__(self, *inputs: Any) -> Any:
        return self.compile()(*inputs)


def build_host_program(trace: Trace, python_form: BoxedFunction) -> HostProgram | None:
    """The host program of a trace, or None where it would save nothing or can't run.

    python_form   the trace as a Python function, with cached launches bound to the regions' names
    """
    library = load_library()
    if library is None or not isinstance(python_form, FunctionType):
        return None
    steps = StepList(trace.module)
    filename = python_form.__code__.co_filename
    functions = [StepFunction(steps, k, filename) for k in range(len(steps.steps))]
    try:
        lowered = lower_steps(steps, functions)
    except Unsupported:
        return None
    if not lowered.num_native:
        return None
    for function, run in zip(functions, lowered.runs, strict=True):
        if run.startswith("python"):
            position = lowered.program.objects.index(function)
            lowered.program.objects[position] = function.compile()
    words = lowered.program.pack(len(steps.inputs), lowered.outputs, lowered.device, python_form)
    return HostProgram(library.make_callable("run_program", words), python_form, steps, lowered)
