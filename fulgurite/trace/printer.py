"""Trace → Python source.

In: a graph module. Out: a `PythonSource`: text, and the objects it refers to by name. There are two styles
of the same lines. "text" is for people: a standalone file with imports, a typed signature and comments.
"boxed" is what runs: inputs come in a list, which is cleared, and every callee is a bound global.

    # self.mlp             model.py:57   return self.down(F.silu(self.up(h)))
    up = torch.ops.aten.mm(h, up_w.t())                         # torch   275.0 GFLOP
"""

from __future__ import annotations

import builtins
import keyword
import math
import operator
import types
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import fx

from fulgurite.trace.comments import cost_comment, source_comment, type_annotation
from fulgurite.trace.describe import Source, source_of
from fulgurite.trace.literal import format_constant, format_literal
from fulgurite.trace.node_meta import captured_value, executor_of, fake_value
from fulgurite.trace.qualified_name import qualified_name
from fulgurite.trace.region import Region
from fulgurite.trace.subgraph import SUBGRAPH_EXECUTOR

Style = Literal["text", "boxed"]
WIDTH = 100
COMMENT_COLUMN = 64

INFIX = {
    operator.add: "+",
    operator.sub: "-",
    operator.mul: "*",
    operator.truediv: "/",
    operator.floordiv: "//",
    operator.mod: "%",
    operator.pow: "**",
    operator.eq: "==",
    operator.ne: "!=",
    operator.lt: "<",
    operator.le: "<=",
    operator.gt: ">",
    operator.ge: ">=",
    operator.and_: "&",
    operator.or_: "|",
    operator.xor: "^",
    operator.matmul: "@",
    operator.lshift: "<<",
    operator.rshift: ">>",
}
PREFIX = {operator.neg: "-", operator.pos: "+", operator.invert: "~"}
RESERVED = {"torch", "math", "operator", "fulgurite", "base64", "zlib", "args", "device"}


@dataclass
class PythonSource:
    """Python text, and the objects that its free names refer to (empty in the "text" style)."""

    text: str
    bindings: dict[str, Any] = field(default_factory=dict)


def render(module: fx.GraphModule, title: str, notes: Iterable[str], style: Style) -> PythonSource:
    """Print a graph module in one of the two styles."""
    writer = _Writer(style)
    forward = writer.format_function("forward", module)
    if style == "boxed":
        return PythonSource("\n".join(forward) + "\n", writer.bindings)
    head = [f"# {title}", *(f"# {note}" for note in notes)]
    imports = [f"import {name}" for name in sorted(writer.imports | {"torch"})]
    prelude = [line for block in writer.prelude for line in (*block, "")]
    return PythonSource("\n".join([*head, *imports, "", *prelude, *forward]) + "\n", {})


class _Writer:
    """Collects what the functions of one file share: imports, constants, nested functions."""

    def __init__(self, style: Style) -> None:
        self.style = style
        self.imports: set[str] = set()
        self.prelude: list[list[str]] = []
        self.bindings: dict[str, Any] = {}
        self.names: dict[int, str] = {}  # id of a bound object → its name
        self.taken: set[str] = set(RESERVED)  # global names
        self.locals: set[str] = set()  # local names of any function

    # ---- functions -------------------------------------------------------------------------------

    def format_function(self, name: str, module: fx.GraphModule, decorator: str = "") -> list[str]:
        """`def name(...)` with its body, one line per op."""
        scope = _Scope(self, module)
        body = scope.format_body()
        boxed = self.style == "boxed"
        head = scope.format_boxed_signature(name) if boxed else scope.format_signature(name)
        return [*([decorator] if decorator else []), *head, *(f"    {line}" for line in body)]

    def add_nested_function(self, name: str, module: fx.GraphModule, decorator: str = "") -> str:
        """Print a nested graph as a function above the current one; returns its name."""
        assigned = self.names.get(id(module))
        if assigned is None:
            assigned = self.names[id(module)] = self.unique_name(name)
            self.prelude.append(self.format_function(assigned, module, decorator))
        return assigned

    # ---- global names ------------------------------------------------------------------------------

    def unique_name(self, hint: str) -> str:
        name = "".join(c if c.isalnum() or c == "_" else "_" for c in hint) or "value"
        name = f"_{name}" if name[0].isdigit() else name
        unique, count = name, 1
        avoid = self.taken | self.locals
        while unique in avoid or keyword.iskeyword(unique) or hasattr(builtins, unique):
            unique, count = f"{name}_{count}", count + 1
        self.taken.add(unique)
        return unique

    def bind_global(self, hint: str, value: Any) -> str:
        """A global name for an object; the same object always gets the same name."""
        name = self.names.get(id(value))
        if name is None:
            name = self.names[id(value)] = self.unique_name(hint)
            self.bindings[name] = value
        return name

    def format_callee(self, target: Any) -> str:
        """The expression for a function that is called."""
        if isinstance(target, Region):
            if self.style == "boxed":
                return self.bind_global(target.name, target.call)
            self.imports.add("fulgurite")
            is_subgraph = target.executor == SUBGRAPH_EXECUTOR
            decorator = "subgraph" if is_subgraph else f"region({target.executor!r})"
            return self.add_nested_function(target.name, target.module, f"@fulgurite.{decorator}")
        dotted = qualified_name(target)
        if self.style == "boxed":
            return self.bind_global((dotted or "function").removeprefix("torch.ops."), target)
        if dotted is None:
            return self.add_unprintable(target)
        root = dotted.split(".")[0]
        if "." in dotted:
            self.imports.add(root if root == "torch" else dotted.rpartition(".")[0])
        return dotted

    def add_unprintable(self, value: Any) -> str:
        """A name for an object that can't be written down. The loaded text raises where it is used."""
        name = self.names.get(id(value))
        if name is None:
            self.imports.add("fulgurite")
            name = self.names[id(value)] = self.unique_name("object")
            self.prelude.append([f"{name} = fulgurite.unprintable({repr(value)[:80]!r})"])
        return name

    def format_attribute(self, hint: str, value: Any) -> str:
        """The name of an attribute of the graph module: a constant, or a nested graph."""
        if isinstance(value, fx.GraphModule) and self.style == "text":
            self.imports.add("fulgurite")
            # a prefix, because TorchDynamo uses the plain name for its own graphs if it captures the text
            return self.add_nested_function(f"sub_{hint}", value, "@fulgurite.subgraph")
        if self.style == "boxed":
            return self.bind_global(hint, value)
        name = self.names.get(id(value))
        if name is not None:
            return name
        text = format_constant(value) if isinstance(value, torch.Tensor) else None
        if text is None:
            return self.add_unprintable(value)
        name = self.names[id(value)] = self.unique_name(hint)
        self.prelude.append([f"{name} = {text}"])
        self.imports |= {name for name in ("zlib", "base64", "math") if f"{name}." in text}
        return name


class _Scope:
    """One function being printed."""

    def __init__(self, writer: _Writer, module: fx.GraphModule) -> None:
        self.writer = writer
        self.module = module
        self.nodes = list(module.graph.nodes)
        self.local_names: dict[fx.Node, str] = {}
        self.unpacked: dict[fx.Node, list[fx.Node | None]] = {}
        self._name_locals()
        self.dead_after = self._last_uses()

    def _name_locals(self) -> None:
        taken: set[str] = set()
        for node in self.nodes:
            if node.op == "get_attr":
                continue
            name, count = node.name, 1
            while name in self.writer.taken or name in taken or keyword.iskeyword(name):
                name, count = f"{node.name}_{count}", count + 1
            items = _unpacked_items(node)
            if items is not None:
                self.unpacked[node] = items
                continue
            taken.add(name)
            self.local_names[node] = name
        self.writer.locals |= taken

    def _last_uses(self) -> dict[fx.Node, list[fx.Node]]:
        """For each node, the values whose last use it is."""
        last: dict[fx.Node, fx.Node] = {}
        tuple_of = {item: node for node, items in self.unpacked.items() for item in items if item}
        for node in self.nodes:
            for source in node.all_input_nodes:
                if source.op != "get_attr" and source not in self.unpacked:
                    last[source] = tuple_of.get(node, node)
        dead: dict[fx.Node, list[fx.Node]] = {}
        for value, user in last.items():
            if user.op != "output":
                dead.setdefault(user, []).append(value)
        return dead

    # ---- signature ---------------------------------------------------------------------------------

    def format_signature(self, name: str) -> list[str]:
        parameters = []
        for node in self.nodes:
            if node.op == "placeholder":
                value = captured_value(node)
                annotation = "" if value is None else f': "{type_annotation(value)}"'
                parameters.append(self.local_names[node] + annotation)
        line = f"def {name}({', '.join(parameters)}):"
        if len(line) <= WIDTH:
            return [line]
        return [f"def {name}(", *(f"    {parameter}," for parameter in parameters), "):"]

    def format_boxed_signature(self, name: str) -> list[str]:
        names = [self.local_names[node] for node in self.nodes if node.op == "placeholder"]
        unpack = [f"    {', '.join(names)}, = args"] if names else []
        return [f"def {name}(args):", *unpack, "    args.clear()"]

    # ---- body --------------------------------------------------------------------------------------

    def format_body(self) -> list[str]:
        lines: list[str] = []
        current = Source()
        skipped = {item for items in self.unpacked.values() for item in items if item is not None}
        for node in self.nodes:
            if node.op in ("placeholder", "get_attr") or node in skipped:
                continue
            if self.writer.style == "text" and node.op != "output":
                source = source_of(node)
                if (source.file or source.module) and source != current:
                    current = source
                    lines.append(source_comment(source))
            lines += (
                self.format_return(node) if node.op == "output" else [self.format_statement(node)]
            )
        return lines

    def format_return(self, node: fx.Node) -> list[str]:
        """`return (...)`, wrapped if it is long."""
        result = _as_tuple(node.args[0])
        line = f"return {self.format_value(result)}"
        if len(line) <= WIDTH - 4 or not isinstance(result, tuple) or self.writer.style == "boxed":
            return [line]
        lines, current = ["return ("], "   "
        for item in map(self.format_value, result):
            if len(current) + len(item) + 2 > WIDTH - 4:
                lines.append(current)
                current = "   "
            current += f" {item},"
        return [*lines, current, ")"]

    def format_statement(self, node: fx.Node) -> str:
        line = self.format_assignment(node)
        dead = [self.local_names[value] for value in self.dead_after.get(node, [])]
        if "_" in self.assignment_targets(node):
            dead.append("_")
        if dead:
            line += f"; del {', '.join(dead)}"
        executor = executor_of(node)
        if executor and self.writer.style == "text":
            line = f"{line:<{COMMENT_COLUMN}}  # {cost_comment(node, executor)}"
        return line

    def format_assignment(self, node: fx.Node) -> str:
        if node.op == "call_function" and node.target is operator.setitem:
            target, index, new = node.args
            return f"{self.format_value(target)}[{self.format_index(index)}] = {self.format_value(new)}"
        expression = self.format_expression(node)
        if not node.users:
            return expression
        targets = self.assignment_targets(node)
        left = f"{targets[0]}," if len(targets) == 1 and node in self.unpacked else None
        return f"{left or ', '.join(targets)} = {expression}"

    def assignment_targets(self, node: fx.Node) -> list[str]:
        items = self.unpacked.get(node)
        if items is None:
            return [self.local_names[node]]
        return [self.local_names[item] if item is not None else "_" for item in items]

    def format_expression(self, node: fx.Node) -> str:
        if node.op == "call_method":
            receiver, *arguments = node.args
            return f"{self.format_value(receiver)}.{node.target}({self.format_arguments(arguments, node.kwargs)})"
        if node.op == "call_module":
            module = self.module.get_submodule(str(node.target))
            callee = self.writer.format_attribute(str(node.target), module)
            return f"{callee}({self.format_arguments(node.args, node.kwargs)})"
        target = node.target
        if target is operator.getitem:
            source, index = node.args
            return f"{self.format_value(source)}[{self.format_index(index)}]"
        if target in INFIX and len(node.args) == 2 and not node.kwargs:
            left, right = map(self.format_value, node.args)
            return f"{left} {INFIX[target]} {right}"  # type: ignore[index]
        if target in PREFIX and len(node.args) == 1 and not node.kwargs:
            return f"{PREFIX[target]}{self.format_value(node.args[0])}"  # type: ignore[index]
        if isinstance(target, types.MethodDescriptorType) and self.writer.style == "text":
            method: str = target.__name__
            if getattr(torch.Tensor, method, None) is target and node.args:
                rest = self.format_arguments(node.args[1:], node.kwargs)
                return f"{self.format_value(node.args[0])}.{method}({rest})"
        if target is getattr and len(node.args) == 2:
            return f"{self.format_value(node.args[0])}.{node.args[1]}"
        return (
            f"{self.writer.format_callee(target)}({self.format_arguments(node.args, node.kwargs)})"
        )

    def format_arguments(self, args: Iterable[Any], kwargs: dict[str, Any]) -> str:
        parts = [self.format_value(argument) for argument in args]
        parts += [f"{key}={self.format_value(argument)}" for key, argument in kwargs.items()]
        return ", ".join(parts)

    def format_index(self, index: Any) -> str:
        if isinstance(index, slice):
            bounds = ["" if b is None else self.format_value(b) for b in (index.start, index.stop)]
            step = "" if index.step is None else f":{self.format_value(index.step)}"
            return ":".join(bounds) + step
        if isinstance(index, tuple) and index:
            return ", ".join(self.format_index(item) for item in index) + ("," * (len(index) == 1))
        return self.format_value(index)

    def format_value(self, value: Any) -> str:
        text = format_literal(value, self.node_name)
        if text is None and isinstance(value, (list, tuple)):
            inner = ", ".join(self.format_value(item) for item in value)
            return f"[{inner}]" if isinstance(value, list) else f"({inner},)"
        if text is None and isinstance(value, dict):
            return "{" + ", ".join(f"{k!r}: {self.format_value(v)}" for k, v in value.items()) + "}"
        if text is None and self.writer.style == "boxed":
            return self.writer.bind_global(type(value).__name__.lower(), value)
        if text is None:
            dotted = qualified_name(value) if callable(value) else None
            return (
                self.writer.format_callee(value) if dotted else self.writer.add_unprintable(value)
            )
        if "math." in text:
            if self.writer.style == "boxed":
                self.writer.bindings["math"] = math
            self.writer.imports.add("math")
        if "torch." in text and self.writer.style == "boxed":
            self.writer.bindings["torch"] = torch
        return text

    def node_name(self, node: fx.Node) -> str:
        if node.op == "get_attr":
            path = str(node.target)
            attribute: Any = self.module
            for part in path.split("."):
                attribute = getattr(attribute, part)
            return self.writer.format_attribute(path, attribute)
        return self.local_names[node]


# ---- helpers -------------------------------------------------------------------------------------


def _unpacked_items(node: fx.Node) -> list[fx.Node | None] | None:
    """The `getitem` nodes of a tuple by position, if a tuple assignment can replace them."""
    value = fake_value(node)
    if node.op != "call_function" or not isinstance(value, (tuple, list)) or not value:
        return None
    if node.target is operator.getitem:  # a nested tuple is indexed item by item
        return None
    items: list[fx.Node | None] = [None] * len(value)
    for user in node.users:
        if user.target is not operator.getitem or user.args[0] is not node:
            return None
        position = user.args[1]
        if not isinstance(position, int) or not 0 <= position < len(value) or items[position]:
            return None
        items[position] = user
    return items if node.users else None


def _as_tuple(value: Any) -> Any:
    """Outputs are printed as tuples."""
    return tuple(value) if isinstance(value, (list, tuple)) else value
