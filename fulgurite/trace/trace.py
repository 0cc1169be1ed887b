"""Trace: one stage of one captured graph, as an immutable value.

In: a `torch.fx.GraphModule` whose nodes have metadata. Out: its text (`str(trace)`), the function that the
text defines (`trace.compile()`), and a new Trace for each change (`trace.edit()`, `trace.at_stage()`). The
graph of a Trace is never changed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule

from fulgurite.files import write_atomically
from fulgurite.trace.metadata import fill_metadata
from fulgurite.trace.node_meta import copy_meta
from fulgurite.trace.printer import render
from fulgurite.trace.source import compile_source, load_source

Kind = Literal["captured", "forward", "backward", "inference"]
BoxedFunction = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class Trace:
    """One stage of one graph. `module` must not be modified."""

    module: fx.GraphModule
    kind: Kind
    stage: str
    index: int = 0  # number of the captured graph
    seconds: float = 0.0  # time of the step that produced this stage
    notes: tuple[str, ...] = field(default=())  # comment lines below the title

    @property
    def graph(self) -> fx.Graph:
        return self.module.graph

    @property
    def name(self) -> str:
        """Kind, number and stage: `forward 0 · claimed`."""
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
        """The trace as standalone Python source."""
        return render(self.module, self.name, self.notes, style="text").text

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"Trace({self.name!r}, {len(self.ops)} ops)"

    def _repr_markdown_(self) -> str:
        return f"```python\n{self.text}\n```"

    def compile(self) -> BoxedFunction:
        """Compile the trace to a function that takes its inputs in a list, which it clears."""
        source = render(self.module, self.name, self.notes, style="boxed")
        return compile_source(source, f"<fulgurite {self.name}>")

    def run(self, *inputs: Any) -> Any:
        """Run the trace on real inputs."""
        return self.compile()(list(inputs))

    def save(self, path: str | Path) -> Path:
        """Write the text to a file, atomically. The file defines `forward`."""
        return write_atomically(Path(path), self.text)

    def load(self) -> Callable[..., Any]:
        """The function `forward` that the printed text defines."""
        return load_source(self.text, f"<fulgurite {self.name}, from its text>")

    def at_stage(self, stage: str, seconds: float = 0.0) -> Trace:
        return replace(self, stage=stage, seconds=seconds)

    def with_module(self, module: fx.GraphModule) -> Trace:
        return replace(self, module=module)

    def with_note(self, note: str) -> Trace:
        return replace(self, notes=(*self.notes, note))

    def edit(self, change: Callable[[fx.Graph], None]) -> Trace:
        """A new Trace whose graph is a copy that `change` modified in place.

        Nodes that `change` adds get their metadata here.
        """
        module = copy_module(self.module)
        change(module.graph)
        fill_metadata(module)
        return replace(self, module=module)


def copy_module(module: fx.GraphModule) -> fx.GraphModule:
    """Copy a GraphModule. The copy shares constants and metadata values with the original."""
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    result = graph.graph_copy(module.graph, values)
    old = module.graph.output_node()
    new = graph.output(result)
    copy_meta(old, new)
    graph._codegen = fx.graph.CodeGen()
    copied = _LazyGraphModule(
        module, graph, class_name="Trace"
    )  # its Python code is never generated
    copied.meta = dict(module.meta)
    return copied
