"""Trace: one stage of one captured graph, as a value.

In: a `torch.fx.GraphModule` whose nodes carry metadata. Out: its text (`str(trace)`), the function that text
stands for (`trace.compile()`), and a new Trace for each change (`trace.edited()`, `trace.at_stage()`); the graph
inside a Trace is never changed once the Trace exists.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule

from fulgurite.trace.metadata import fill_metadata
from fulgurite.trace.printer import render
from fulgurite.trace.text import bind, load, write_text

Kind = Literal["captured", "forward", "backward", "inference"]
BoxedFunction = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class Trace:
    """One stage of one graph. `module` is read, never written."""

    module: fx.GraphModule
    kind: Kind
    stage: str
    index: int = 0  # which graph of the compiled function
    seconds: float = 0.0  # what making this stage took
    notes: tuple[str, ...] = field(default=())  # decisions worth a line at the top of the text

    @property
    def graph(self) -> fx.Graph:
        return self.module.graph

    @property
    def name(self) -> str:
        """`forward 0 · simplify`."""
        return f"{self.kind} {self.index} · {self.stage}"

    @property
    def inputs(self) -> list[fx.Node]:
        return [node for node in self.graph.nodes if node.op == "placeholder"]

    @property
    def outputs(self) -> list[Any]:
        """The entries of the returned tuple: nodes, constants or None."""
        (result,) = self.graph.output_node().args
        return list(result) if isinstance(result, (list, tuple)) else [result]

    @property
    def ops(self) -> list[fx.Node]:
        """The nodes that compute something."""
        return [n for n in self.graph.nodes if n.op in ("call_function", "call_method")]

    @cached_property
    def text(self) -> str:
        """The program as Python that runs by itself."""
        return render(self.module, self.name, self.notes, style="text").text

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"Trace({self.name!r}, {len(self.ops)} ops)"

    def _repr_markdown_(self) -> str:
        return f"```python\n{self.text}\n```"

    def compile(self) -> BoxedFunction:
        """The function this trace stands for; it takes its inputs in a list, which it empties."""
        program = render(self.module, self.name, self.notes, style="boxed")
        return bind(program, f"<fulgurite {self.name}>")

    def run(self, *inputs: Any) -> Any:
        """Run this stage on real inputs."""
        return self.compile()(list(inputs))

    def save(self, path: str | Path) -> Path:
        """Write the text to a file (whole or not at all); importing that file gives `forward`."""
        return write_text(Path(path), self.text)

    def load(self) -> Callable[..., Any]:
        """`forward` as the printed text defines it: the way back from print."""
        return load(self.text, f"<fulgurite {self.name}, from its text>")

    def at_stage(self, stage: str, seconds: float = 0.0) -> Trace:
        return replace(self, stage=stage, seconds=seconds)

    def with_module(self, module: fx.GraphModule) -> Trace:
        return replace(self, module=module)

    def with_note(self, note: str) -> Trace:
        return replace(self, notes=(*self.notes, note))

    def edited(self, change: Callable[[fx.Graph], None]) -> Trace:
        """A new Trace whose graph is a copy that `change` has worked on.

        Nodes that `change` adds need no metadata: it is filled in here.
        """
        module = copy_module(self.module)
        change(module.graph)
        fill_metadata(module)
        return replace(self, module=module)


def copy_module(module: fx.GraphModule) -> fx.GraphModule:
    """A GraphModule of its own, sharing constants and metadata values with the old one."""
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    result = graph.graph_copy(module.graph, values)
    old = module.graph.output_node()
    new = graph.output(result)
    new.meta = dict(old.meta)
    graph._codegen = fx.graph.CodeGen()
    copied = _LazyGraphModule(module, graph, class_name="Trace")  # its Python is never asked for
    copied.meta = dict(module.meta)
    return copied
