"""Reads a region's fx graph into the IR.

In: a GraphModule of functional ATen nodes with FakeTensor metadata. Out: an `ir.Region`, and, per
node, whether it can be read at all (`readable`). Every op is a row in one of three tables:
`pointwise_rules.RULES` (elementwise), `view_rules.RULES` (index maps, no memory) and
`statement_rules.RULES` (reductions, copies with another order, gathers, factories).
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND as PROMOTION
from torch._prims_common import elementwise_dtypes

from . import index as indices
from . import pointwise_rules, statement_rules, values, view_rules
from .index import Index
from .ir import (
    Constant,
    Expression,
    Operation,
    Output,
    Position,
    Reduction,
    Region,
    Statement,
    Tensor,
    statement,
    value_type,
)
from .pointwise_rules import Unsupported
from .values import Value, from_size, from_stride

VALUE_TYPES = {
    torch.bool,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float32,
    torch.float64,
}

SIZE_ARITHMETIC = {"add", "sub", "mul", "floordiv", "mod", "sym_size", "neg"}


def op_name(target: Any) -> str | None:
    """`add` for aten.add.Tensor; None for what is not an ATen or prims op."""
    if not isinstance(target, torch._ops.OpOverload):
        return None
    if target.namespace not in ("aten", "prims"):
        return None
    return target._schema.name.split("::")[1]


def arguments(node: torch.fx.Node) -> dict[str, Any]:
    """The node's arguments by their schema names, defaults filled in."""
    assert isinstance(node.target, torch._ops.OpOverload), f"{node} is not an ATen call"
    bound: dict[str, Any] = {}
    for position, argument in enumerate(node.target._schema.arguments):
        if position < len(node.args):
            bound[argument.name] = node.args[position]
        elif argument.name in node.kwargs:
            bound[argument.name] = node.kwargs[argument.name]
        elif argument.has_default_value():
            bound[argument.name] = argument.default_value
    return bound


class Reader:
    """Values of the nodes read so far, and the statements they need."""

    def __init__(self) -> None:
        self.values: dict[torch.fx.Node, Any] = {}
        self.statements: list[Statement] = []
        self.tensors: dict[str, Tensor] = {}
        self.origin = ""

    # what rules call

    def value(self, node: Any) -> Value:
        found = self.values.get(node)
        if not isinstance(found, Value):
            raise Unsupported("an argument that is not a tensor")
        return found

    def integer(self, argument: Any) -> Index:
        """An int argument of an op: a number, or a node that computes a dynamic size."""
        if isinstance(argument, torch.fx.Node):
            found = self.values[argument]
            if not isinstance(found, Index):
                raise Unsupported("a size that is not an integer")
            return found
        if isinstance(argument, torch.SymInt):
            return from_size(argument)
        return Index(int(argument))

    def sizes(self, arguments: Sequence[Any]) -> tuple[Index, ...]:
        return tuple(self.integer(argument) for argument in arguments)

    def meta(self, node: torch.fx.Node) -> Any:
        return node.meta["val"]

    def store(
        self,
        name: str,
        dtype: torch.dtype,
        axes: tuple[indices.Axis, ...],
        expression: Expression,
        reduction: Reduction | None = None,
        strides: tuple[Index, ...] | None = None,
    ) -> Value:
        """Adds the statement name[axes] = expression."""
        if strides is None:
            inner = indices.ONE
            backwards: list[Index] = []
            for axis in reversed(axes):
                backwards.append(inner)
                inner = inner * axis.size
            strides = tuple(reversed(backwards))
        while name in self.tensors:
            name += "_"
        # dimensions of one element are no loops: the statement has none, its value has them again
        kept = [k for k, axis in enumerate(axes) if axis.size != 1]
        single = {axis: indices.ZERO for axis in axes if axis.size == 1}
        if single:
            expression = expression.substitute(single)
        if reduction is not None:
            over = tuple(axis for axis in reduction.axes if axis.size != 1)
            ones = {axis: indices.ZERO for axis in reduction.axes if axis.size == 1}
            expression = expression.substitute(ones) if ones else expression
            reduction = replace(reduction, axes=over) if over else None
        loops = tuple(axes[k] for k in kept)
        tensor = Tensor(name, dtype, tuple(a.size for a in loops), tuple(strides[k] for k in kept))
        self.tensors[name] = tensor
        self.statements.append(statement(tensor, loops, expression, reduction, self.origin))
        value = values.of_tensor(tensor)
        if not single:
            return value
        return value.view([axis.size for axis in axes], lambda new: [new[k] for k in kept])

    def result(self, node: torch.fx.Node, expression_at: Any, fake: Any = None) -> Value:
        """A statement with the node's own sizes, strides and dtype."""
        fake = self.meta(node) if fake is None else fake
        sizes = tuple(from_size(size) for size in fake.shape)
        axes = values.fresh_axes(sizes)
        strides = tuple(from_stride(stride) for stride in fake.stride())
        expression = convert(expression_at(axes), fake.dtype)
        return self.store(node.name, fake.dtype, axes, expression, strides=strides)

    def operand(
        self, argument: Any, axes: tuple[indices.Axis, ...], dtype: torch.dtype
    ) -> Expression:
        """A tensor or number as an expression at the axes of a result, in a value type."""
        if isinstance(argument, torch.fx.Node):
            found = self.values[argument]
            if isinstance(found, Index):
                return convert(Position(found, torch.int64), dtype)
            return convert(self.value(argument).broadcast(axes), dtype)
        if isinstance(argument, torch.SymInt):
            return convert(Position(from_size(argument), torch.int64), dtype)
        if isinstance(argument, bool | int | float):
            return constant(argument, dtype)
        raise Unsupported(f"an argument {argument!r}")


def constant(number: float | int | bool, dtype: torch.dtype) -> Constant:
    if dtype.is_floating_point:
        return Constant(float(number), dtype)
    if dtype == torch.bool:
        return Constant(bool(number), dtype)
    if isinstance(number, float) and (number != number or number in (float("inf"), -float("inf"))):
        raise Unsupported(f"{number} as an integer")
    info = torch.iinfo(dtype)
    whole = int(number)
    if not info.min <= whole <= info.max:
        whole = (whole - info.min) % (info.max - info.min + 1) + info.min
    return Constant(whole, dtype)


def convert(expression: Expression, dtype: torch.dtype) -> Expression:
    """The expression in the value type of `dtype`; rounds only where value types differ."""
    if value_type(expression.dtype) == value_type(dtype):
        return expression
    if value_type(dtype) not in VALUE_TYPES:
        raise Unsupported(f"{dtype} values")
    if isinstance(expression, Constant):
        return constant(expression.value, value_type(dtype))
    return Operation("cast", (expression,), value_type(dtype))


def compute_type(rule: pointwise_rules.Rule, tensors: list[Any], node: torch.fx.Node) -> Any:
    """The value type an elementwise op computes in, by torch's promotion."""
    kinds = {
        "default": PROMOTION.DEFAULT,
        "float": PROMOTION.INT_TO_FLOAT,
        "bool": PROMOTION.DEFAULT,
        "where": PROMOTION.DEFAULT,
    }
    kind = rule.promotion
    if kind == "masked_fill":
        return value_type(node.meta["val"].dtype)
    if kind == "division":
        mode = arguments(node).get("rounding_mode")
        kind = "float" if mode is None else "default"
    computed, _ = elementwise_dtypes(*tensors, type_promotion_kind=kinds[kind])
    return value_type(computed)


def read_pointwise(reader: Reader, node: torch.fx.Node, rule: pointwise_rules.Rule) -> Value:
    bound = arguments(node)
    metas = []
    for name in rule.operands:
        argument = bound.get(name)
        if isinstance(argument, torch.fx.Node):
            metas.append(argument.meta["val"])
        elif argument is not None:
            metas.append(argument)
    dtype = compute_type(rule, metas, node)
    if dtype not in VALUE_TYPES:
        raise Unsupported(f"{dtype} values")
    extra = {name: value for name, value in bound.items() if name not in rule.operands}

    def expression_at(axes: tuple[indices.Axis, ...]) -> Expression:
        operands = [
            None if bound.get(name) is None else reader.operand(bound[name], axes, dtype)
            for name in rule.operands
        ]
        for name, value in extra.items():
            if isinstance(value, torch.fx.Node):
                extra[name] = reader.operand(value, axes, torch.bool)
        if node.target._schema.name == "aten::nan_to_num":  # type: ignore[union-attr]
            extra["storage"] = node.meta["val"].dtype
        return rule.formula(*operands, **extra)

    return reader.result(node, expression_at)


def read_node(reader: Reader, node: torch.fx.Node) -> Any:
    """The value of one call_function node."""
    if node.target is operator.getitem:
        source = reader.values.get(node.args[0])  # type: ignore[call-overload]
        if not isinstance(source, tuple):
            raise Unsupported("an item of something that is not a tuple of tensors")
        return source[node.args[1]]
    fake = node.meta.get("val")
    if isinstance(fake, int | torch.SymInt) and not isinstance(fake, bool):
        return from_size(fake)
    name = op_name(node.target)
    if name is None:
        raise Unsupported(f"a call of {node.target}")
    for value in fake if isinstance(fake, tuple | list) else (fake,):
        if isinstance(value, torch.Tensor):
            _check_tensor(value)
    reader.origin = name
    if name in pointwise_rules.RULES:
        return read_pointwise(reader, node, pointwise_rules.RULES[name])
    if name in view_rules.RULES:
        return view_rules.RULES[name](reader, node, **_python_names(arguments(node)))
    if name in statement_rules.RULES:
        return statement_rules.RULES[name](reader, node, **_python_names(arguments(node)))
    raise Unsupported(f"{name}")


def _python_names(bound: dict[str, Any]) -> dict[str, Any]:
    return {"source" if name == "self" else name: value for name, value in bound.items()}


def _check_tensor(fake: torch.Tensor) -> None:
    if fake.device.type != "cpu":
        raise Unsupported(f"a tensor on {fake.device}")
    if fake.layout != torch.strided:
        raise Unsupported(f"a tensor of layout {fake.layout}")
    if value_type(fake.dtype) not in VALUE_TYPES:
        raise Unsupported(f"{fake.dtype} tensors")
    if fake.is_conj() or fake.is_neg():
        raise Unsupported("a lazily conjugated or negated tensor")


def input_value(reader: Reader, name: str, fake: Any) -> Tensor | Index:
    """What a placeholder is."""
    if isinstance(fake, int | torch.SymInt):
        return from_size(fake)
    if not isinstance(fake, torch.Tensor):
        raise Unsupported(f"an input that is a {type(fake).__name__}")
    _check_tensor(fake)
    tensor = Tensor(
        name,
        fake.dtype,
        tuple(from_size(size) for size in fake.shape),
        tuple(from_stride(stride) for stride in fake.stride()),
    )
    reader.tensors[name] = tensor
    return tensor


def unreadable(node: torch.fx.Node) -> str | None:
    """Why this node, alone, can't be part of a generated kernel; None where it can."""
    reader = Reader()
    try:
        for argument in node.all_input_nodes:
            fake = argument.meta.get("val")
            if isinstance(fake, tuple | list):
                reader.values[argument] = tuple(
                    _as_value(input_value(reader, f"{argument.name}_{k}", part))
                    for k, part in enumerate(fake)
                )
            else:
                reader.values[argument] = _as_value(input_value(reader, argument.name, fake))
        read_node(reader, node)
    except Unsupported as reason:
        return str(reason)
    return None


def _as_value(argument: Tensor | Index) -> Value | Index:
    return argument if isinstance(argument, Index) else values.of_tensor(argument)


def read(region: torch.fx.GraphModule) -> Region:
    """The whole region."""
    reader = Reader()
    taken: list[Tensor | Index] = []
    outputs: tuple[Output, ...] = ()
    for node in region.graph.nodes:
        if node.op == "placeholder":
            argument = input_value(reader, node.name, node.meta["val"])
            taken.append(argument)
            reader.values[node] = _as_value(argument)
        elif node.op == "call_function":
            reader.values[node] = read_node(reader, node)
        elif node.op == "output":
            results = node.args[0]
            flat = results if isinstance(results, tuple | list) else (results,)
            outputs = tuple(_output(reader, result) for result in flat)
        else:
            raise Unsupported(f"a node {node.op}")
    return Region(tuple(taken), _needed(reader.statements, outputs), outputs)


def _output(reader: Reader, result: Any) -> Output:
    if result is None:
        return Output()
    if isinstance(result, int):
        return Output(size=Index(result))
    value = reader.values[result]
    if isinstance(value, Index):
        return Output(size=value)
    if not isinstance(value, Value):
        raise Unsupported("a tuple among the outputs")
    fake = result.meta["val"]
    sizes = tuple(from_size(size) for size in fake.shape)
    strides = tuple(from_stride(stride) for stride in fake.stride())
    source = getattr(value.expression, "name", None)
    found = values.window(value, reader.tensors[source]) if source in reader.tensors else None
    empty = any(size == 0 for size in sizes)
    if found is not None and (
        empty or all(s is None or s == want for s, want in zip(found[0], strides, strict=True))
    ):
        tensor = reader.tensors[source]  # type: ignore[index]
        whole = tensor.sizes == sizes and tensor.strides == strides and found[1] == 0
        return Output(source, sizes, strides, found[1], whole=whole)
    copied = reader.result(result, value.broadcast)
    name = copied.expression.name  # type: ignore[union-attr]
    return Output(name, sizes, strides, whole=True)


def _needed(statements: list[Statement], outputs: tuple[Output, ...]) -> tuple[Statement, ...]:
    """The statements that some output depends on."""
    wanted = {output.name for output in outputs}
    kept: list[Statement] = []
    for s in reversed(statements):
        if s.name in wanted:
            kept.append(s)
            wanted.update(load.name for load in s.loads)
    return tuple(reversed(kept))
