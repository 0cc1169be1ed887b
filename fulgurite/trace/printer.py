"""Trace → Python.

In: a graph module. Out: a `Program`: source text and the objects it refers to by name. Two styles of the
same lines: "text" is for people and stands alone in a file (imports, typed signature, comments); "boxed" is
what runs: inputs come in a list that is emptied, and every callee is a global bound beforehand.

    # self.mlp             model.py:57   return self.down(F.silu(self.up(h)))
    up = torch.ops.aten.mm(h, up_w.t())                         # torch   275.0 GFLOP
"""

from __future__ import annotations

import builtins
import keyword
import operator
import types
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import fx

from fulgurite.trace.comments import annotation, cost_comment, place_comment
from fulgurite.trace.describe import Source, source_of
from fulgurite.trace.literal import constant, literal
from fulgurite.trace.qualified import qualified_name
from fulgurite.trace.region import Region

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
class Program:
    """Source text, and what its free names stand for when it is run rather than read."""

    text: str
    bindings: dict[str, Any] = field(default_factory=dict)


def render(module: fx.GraphModule, title: str, notes: Iterable[str], style: Style) -> Program:
    """The whole program of a graph module in one of the two styles."""
    writer = _Writer(style)
    forward = writer.function("forward", module)
    if style == "boxed":
        return Program("\n".join(forward) + "\n", writer.bindings)
    head = [f"# {title}", *(f"# {note}" for note in notes)]
    imports = [f"import {name}" for name in sorted(writer.imports | {"torch"})]
    prelude = [line for block in writer.prelude for line in (*block, "")]
    return Program("\n".join([*head, *imports, "", *prelude, *forward]) + "\n", {})


class _Writer:
    """Collects what the functions of one program share: imports, constants, nested functions."""

    def __init__(self, style: Style) -> None:
        self.style = style
        self.imports: set[str] = set()
        self.prelude: list[list[str]] = []
        self.bindings: dict[str, Any] = {}
        self.names: dict[int, str] = {}  # id of a bound object → its name
        self.taken: set[str] = set(RESERVED)  # names outside functions
        self.locals: set[str] = set()  # names inside any of them

    # ---- functions -------------------------------------------------------------------------------

    def function(self, name: str, module: fx.GraphModule, decorator: str = "") -> list[str]:
        """`def name(...)` with its body, one line an op."""
        scope = _Scope(self, module)
        body = scope.body()
        boxed = self.style == "boxed"
        head = scope.boxed_head(name) if boxed else scope.head(name)
        return [*([decorator] if decorator else []), *head, *(f"    {line}" for line in body)]

    def nested(self, name: str, module: fx.GraphModule, decorator: str = "") -> str:
        """The name of a function of its own above the one being printed."""
        known = self.names.get(id(module))
        if known is None:
            known = self.names[id(module)] = self.fresh(name)
            self.prelude.append(self.function(known, module, decorator))
        return known

    # ---- names of things outside the function ------------------------------------------------------

    def fresh(self, wanted: str) -> str:
        name = "".join(c if c.isalnum() or c == "_" else "_" for c in wanted) or "value"
        name = f"_{name}" if name[0].isdigit() else name
        unique, count = name, 1
        avoid = self.taken | self.locals
        while unique in avoid or keyword.iskeyword(unique) or hasattr(builtins, unique):
            unique, count = f"{name}_{count}", count + 1
        self.taken.add(unique)
        return unique

    def bound(self, wanted: str, value: Any) -> str:
        """A global name for an object, the same one every time."""
        name = self.names.get(id(value))
        if name is None:
            name = self.names[id(value)] = self.fresh(wanted)
            self.bindings[name] = value
        return name

    def callee(self, target: Any) -> str:
        """How to spell a function."""
        if isinstance(target, Region):
            if self.style == "boxed":
                return self.bound(target.name, target.call)
            self.imports.add("fulgurite")
            return self.nested(
                target.name, target.module, f"@fulgurite.region({target.executor!r})"
            )
        spelled = qualified_name(target)
        if self.style == "boxed":
            return self.bound((spelled or "function").removeprefix("torch.ops."), target)
        if spelled is None:
            return self.unprintable(target)
        root = spelled.split(".")[0]
        if "." in spelled:
            self.imports.add(root if root == "torch" else spelled.rpartition(".")[0])
        return spelled

    def unprintable(self, value: Any) -> str:
        """A name for something that has no text; reading the text back says so where it is used."""
        known = self.names.get(id(value))
        if known is None:
            self.imports.add("fulgurite")
            known = self.names[id(value)] = self.fresh("object")
            self.prelude.append([f"{known} = fulgurite.unprintable({repr(value)[:80]!r})"])
        return known

    def attribute(self, wanted: str, value: Any) -> str:
        """The name of something the graph module holds: a constant, or a nested graph."""
        if isinstance(value, fx.GraphModule) and self.style == "text":
            self.imports.add("fulgurite")
            # not by its own name: capturing the text again, TorchDynamo gives that to a graph of its own
            return self.nested(f"sub_{wanted}", value, "@fulgurite.subgraph")
        if self.style == "boxed":
            return self.bound(wanted, value)
        known = self.names.get(id(value))
        if known is not None:
            return known
        text = constant(value) if isinstance(value, torch.Tensor) else None
        if text is None:
            return self.unprintable(value)
        known = self.names[id(value)] = self.fresh(wanted)
        self.prelude.append([f"{known} = {text}"])
        self.imports |= {name for name in ("zlib", "base64", "math") if f"{name}." in text}
        return known


class _Scope:
    """One function being printed."""

    def __init__(self, writer: _Writer, module: fx.GraphModule) -> None:
        self.writer = writer
        self.module = module
        self.nodes = list(module.graph.nodes)
        self.local: dict[fx.Node, str] = {}
        self.unpacked: dict[fx.Node, list[fx.Node | None]] = {}
        self._name_locals()
        self.dies_after = self._last_uses()

    def _name_locals(self) -> None:
        taken: set[str] = set()
        for node in self.nodes:
            if node.op == "get_attr":
                continue
            name, count = node.name, 1
            while name in self.writer.taken or name in taken or keyword.iskeyword(name):
                name, count = f"{node.name}_{count}", count + 1
            items = _items_of(node)
            if items is not None:
                self.unpacked[node] = items
                continue
            taken.add(name)
            self.local[node] = name
        self.writer.locals |= taken

    def _last_uses(self) -> dict[fx.Node, list[fx.Node]]:
        """For each node, the values that nobody needs after it."""
        last: dict[fx.Node, fx.Node] = {}
        made_by = {item: node for node, items in self.unpacked.items() for item in items if item}
        for node in self.nodes:
            for source in node.all_input_nodes:
                if source.op != "get_attr" and source not in self.unpacked:
                    last[source] = made_by.get(node, node)
        dies: dict[fx.Node, list[fx.Node]] = {}
        for value, user in last.items():
            if user.op != "output":
                dies.setdefault(user, []).append(value)
        return dies

    # ---- head --------------------------------------------------------------------------------------

    def head(self, name: str) -> list[str]:
        parameters = []
        for node in self.nodes:
            if node.op == "placeholder":
                value = node.meta.get("val", node.meta.get("example_value"))
                known = value is not None
                parameters.append(self.local[node] + (f': "{annotation(value)}"' if known else ""))
        line = f"def {name}({', '.join(parameters)}):"
        if len(line) <= WIDTH:
            return [line]
        return [f"def {name}(", *(f"    {parameter}," for parameter in parameters), "):"]

    def boxed_head(self, name: str) -> list[str]:
        names = [self.local[node] for node in self.nodes if node.op == "placeholder"]
        unpack = [f"    {', '.join(names)}, = args"] if names else []
        return [f"def {name}(args):", *unpack, "    args.clear()"]

    # ---- body --------------------------------------------------------------------------------------

    def body(self) -> list[str]:
        lines: list[str] = []
        place = Source()
        skipped = {item for items in self.unpacked.values() for item in items if item is not None}
        for node in self.nodes:
            if node.op in ("placeholder", "get_attr") or node in skipped:
                continue
            if self.writer.style == "text" and node.op != "output":
                here = source_of(node)
                if (here.file or here.module) and here != place:
                    place = here
                    lines.append(place_comment(here))
            lines += self.returns(node) if node.op == "output" else [self.statement(node)]
        return lines

    def returns(self, node: fx.Node) -> list[str]:
        """`return (...)`, folded where it is long."""
        result = _plain(node.args[0])
        line = f"return {self.value(result)}"
        if len(line) <= WIDTH - 4 or not isinstance(result, tuple) or self.writer.style == "boxed":
            return [line]
        lines, current = ["return ("], "   "
        for item in map(self.value, result):
            if len(current) + len(item) + 2 > WIDTH - 4:
                lines.append(current)
                current = "   "
            current += f" {item},"
        return [*lines, current, ")"]

    def statement(self, node: fx.Node) -> str:
        line = self.assignment(node)
        dead = [self.local[value] for value in self.dies_after.get(node, [])]
        if "_" in self.targets(node):
            dead.append("_")
        if dead:
            line += f"; del {', '.join(dead)}"
        executor = node.meta.get("executor")
        if executor and self.writer.style == "text":
            line = f"{line:<{COMMENT_COLUMN}}  # {cost_comment(node, executor)}"
        return line

    def assignment(self, node: fx.Node) -> str:
        if node.op == "call_function" and node.target is operator.setitem:
            target, index, new = node.args
            return f"{self.value(target)}[{self.index(index)}] = {self.value(new)}"
        expression = self.expression(node)
        if not node.users:
            return expression
        targets = self.targets(node)
        left = f"{targets[0]}," if len(targets) == 1 and node in self.unpacked else None
        return f"{left or ', '.join(targets)} = {expression}"

    def targets(self, node: fx.Node) -> list[str]:
        items = self.unpacked.get(node)
        if items is None:
            return [self.local[node]]
        return [self.local[item] if item is not None else "_" for item in items]

    def expression(self, node: fx.Node) -> str:
        if node.op == "call_method":
            receiver, *arguments = node.args
            return f"{self.value(receiver)}.{node.target}({self.arguments(arguments, node.kwargs)})"
        if node.op == "call_module":
            module = self.module.get_submodule(str(node.target))
            callee = self.writer.attribute(str(node.target), module)
            return f"{callee}({self.arguments(node.args, node.kwargs)})"
        target = node.target
        if target is operator.getitem:
            source, index = node.args
            return f"{self.value(source)}[{self.index(index)}]"
        if target in INFIX and len(node.args) == 2 and not node.kwargs:
            left, right = map(self.value, node.args)
            return f"{left} {INFIX[target]} {right}"  # type: ignore[index]
        if target in PREFIX and len(node.args) == 1 and not node.kwargs:
            return f"{PREFIX[target]}{self.value(node.args[0])}"  # type: ignore[index]
        if isinstance(target, types.MethodDescriptorType) and self.writer.style == "text":
            method: str = target.__name__
            if getattr(torch.Tensor, method, None) is target and node.args:
                rest = self.arguments(node.args[1:], node.kwargs)
                return f"{self.value(node.args[0])}.{method}({rest})"
        if target is getattr and len(node.args) == 2:
            return f"{self.value(node.args[0])}.{node.args[1]}"
        return f"{self.writer.callee(target)}({self.arguments(node.args, node.kwargs)})"

    def arguments(self, args: Iterable[Any], kwargs: dict[str, Any]) -> str:
        parts = [self.value(argument) for argument in args]
        parts += [f"{key}={self.value(argument)}" for key, argument in kwargs.items()]
        return ", ".join(parts)

    def index(self, index: Any) -> str:
        if isinstance(index, slice):
            bounds = ["" if b is None else self.value(b) for b in (index.start, index.stop)]
            step = "" if index.step is None else f":{self.value(index.step)}"
            return ":".join(bounds) + step
        if isinstance(index, tuple) and index:
            return ", ".join(self.index(item) for item in index) + ("," * (len(index) == 1))
        return self.value(index)

    def value(self, value: Any) -> str:
        text = literal(value, self.name)
        if text is None and isinstance(value, (list, tuple)):
            inner = ", ".join(self.value(item) for item in value)
            return f"[{inner}]" if isinstance(value, list) else f"({inner},)"
        if text is None and isinstance(value, dict):
            return "{" + ", ".join(f"{k!r}: {self.value(v)}" for k, v in value.items()) + "}"
        if text is None and self.writer.style == "boxed":
            return self.writer.bound(type(value).__name__.lower(), value)
        if text is None:
            spelled = qualified_name(value) if callable(value) else None
            return self.writer.callee(value) if spelled else self.writer.unprintable(value)
        if "math." in text:
            if self.writer.style == "boxed":
                self.writer.bindings["math"] = __import__("math")
            self.writer.imports.add("math")
        if "torch." in text and self.writer.style == "boxed":
            self.writer.bindings["torch"] = torch
        return text

    def name(self, node: fx.Node) -> str:
        if node.op == "get_attr":
            wanted = str(node.target)
            held: Any = self.module
            for part in wanted.split("."):
                held = getattr(held, part)
            return self.writer.attribute(wanted, held)
        return self.local[node]


# ---- small things --------------------------------------------------------------------------------


def _items_of(node: fx.Node) -> list[fx.Node | None] | None:
    """The getitem nodes of a tuple, by position, if unpacking it says the same thing."""
    value = node.meta.get("val")
    if node.op != "call_function" or not isinstance(value, (tuple, list)) or not value:
        return None
    if node.target is operator.getitem:  # a tuple inside a tuple is picked apart item by item
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


def _plain(value: Any) -> Any:
    """Output structures are printed as tuples."""
    return tuple(value) if isinstance(value, (list, tuple)) else value
