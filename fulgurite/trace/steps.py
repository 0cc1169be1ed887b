"""Steps: a trace taken apart into its lines, each a Python function of the values it reads.

In: a graph module. Out: a `StepList`. A host program runs the lines one by one: natively, or by the
function of the line. Functions have the line numbers of the trace, so that tracebacks show the trace.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import fx

from fulgurite.trace.printer import _Scope, _Writer


@dataclass(frozen=True)
class Step:
    """One line of a trace."""

    node: fx.Node
    inputs: tuple[fx.Node, ...]  # what it reads, without constants of the module
    outputs: tuple[
        fx.Node | None, ...
    ]  # what it assigns; None: an item of a tuple that nobody reads
    is_tuple: bool  # whether it assigns the items of a tuple
    dead: tuple[fx.Node, ...]  # values that nobody reads after it


class StepList:
    """The lines of a trace in order. They are printed and compiled when that is needed."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.module = module
        self._writer = _Writer("boxed")
        self._scope = _Scope(self._writer, module)
        self.inputs = tuple(node for node in self._scope.nodes if node.op == "placeholder")
        (self.outputs,) = module.graph.output_node().args  # a tuple of nodes and constants
        groups = self._scope.unpacked.values()
        items = {item for group in groups for item in group if item is not None}
        self.steps = tuple(
            self._make_step(node)
            for node in self._scope.nodes
            if node.op not in ("placeholder", "get_attr", "output") and node not in items
        )

    def _make_step(self, node: fx.Node) -> Step:
        group = self._scope.unpacked.get(node)
        return Step(
            node=node,
            inputs=tuple(n for n in node.all_input_nodes if n.op != "get_attr"),
            outputs=tuple(group) if group is not None else (node,) if node.users else (),
            is_tuple=group is not None,
            dead=tuple(self._scope.dead_after.get(node, ())),
        )

    def lines(self) -> list[str]:
        """The lines as people read them: `h = torch.mm(x, w); del x`."""
        scope = _Scope(_Writer("text"), self.module)
        return [scope.format_statement(step.node).partition("  #")[0] for step in self.steps]

    def compile(self, position: int, filename: str) -> Callable[..., Any]:
        """The function of one step. Its code has the number of the trace's line."""
        step, scope = self.steps[position], self._scope
        names = ", ".join(scope.local_names[n] for n in step.inputs)
        if step.node.op == "call_function" and step.node.target is operator.setitem:
            body = scope.format_assignment(step.node)
        else:
            body = f"return {scope.format_expression(step.node)}"
        line = len(scope.format_boxed_signature("forward")) + position
        text = "\n" * line + f"def step({names}): {body}"
        bindings = {n: _cached_launch(value) for n, value in self._writer.bindings.items()}
        exec(compile(text, filename, "exec"), bindings)  # printed by the trace
        return bindings["step"]  # type: ignore[no-any-return]


def _cached_launch(value: Any) -> Any:
    """A region's launch without the checks of its first call; other values as they are."""
    launch = getattr(value, "cached_launch", None)
    return launch if callable(launch) else value
