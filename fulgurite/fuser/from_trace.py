"""Reads a region's fx graph into the IR.

In: a GraphModule of functional ATen nodes with FakeTensor metadata. Out: an `ir.Region`, and, per
node, whether it can be read at all (`readable`). Every op is a row in one of three tables:
`pointwise_rules.RULES` and `special_rules.RULES` (elementwise), `view_rules.RULES` (index maps, no memory) and
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

from . import (
    complex_rules,
    pointwise_rules,
    special_rules,
    statement_rules,
    values,
    view_rules,
    write_rules,
)
from . import index as indices
from .index import Index
from .ir import (
    Constant,
    Expression,
    Operation,
    Output,
    Position,
    Reduction,
    Region,
    Scan,
    Statement,
    Tensor,
    statement,
    value_type,
)
from .pointwise_rules import Unsupported
from .values import Complex, Value, from_size, from_stride

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

POINTWISE = {**pointwise_rules.RULES, **special_rules.RULES}

# prims that mean something else than the ATen op of that name: whole division, other arguments
OTHER_PRIMS = {"div", "pow", "where", "reshape", "squeeze", "transpose", "amax", "amin"}
# what the reductions among the prims call the arguments of the ATen ops
PRIM_NAMES = {"inp": "self", "dims": "dim", "output_dtype": "dtype"}


def op_name(target: Any) -> str | None:
    """`add` for aten.add.Tensor; None for what is not an ATen or prims op."""
    if not isinstance(target, torch._ops.OpOverload):
        return None
    name = target._schema.name.split("::")[1]
    if target.namespace == "prims" and name not in OTHER_PRIMS:
        return name
    return name if target.namespace == "aten" else None


def arguments(node: torch.fx.Node) -> dict[str, Any]:
    """The node's arguments by their schema names, defaults filled in."""
    assert isinstance(node.target, torch._ops.OpOverload), f"{node} is not an ATen call"
    bound: dict[str, Any] = {}
    renamed = PRIM_NAMES if node.target.namespace == "prims" else {}
    for position, argument in enumerate(node.target._schema.arguments):
        name = renamed.get(argument.name, argument.name)
        if position < len(node.args):
            bound[name] = node.args[position]
        elif argument.name in node.kwargs:
            bound[name] = node.kwargs[argument.name]
        elif argument.has_default_value():
            bound[name] = argument.default_value
    if renamed and bound.get("dim", "some") in (None, [], ()):
        raise Unsupported("a reduction over no dimensions")  # ATen reads that as all of them
    return bound


class Reader:
    """Values of the nodes read so far, and the statements they need."""

    def __init__(self) -> None:
        self.values: dict[torch.fx.Node, Any] = {}
        self.statements: list[Statement] = []
        self.tensors: dict[str, Tensor] = {}
        self.writes: list[tuple[str, str]] = []  # a statement, and the input that gets its values
        self.origin = ""
        self.reading: torch.fx.Node | None = None
        self.maker: dict[str, torch.fx.Node | None] = {}  # the node that a statement was made for
        self.streams = 0
        self.part: str | None = None  # of complex numbers, the one that is being read

    # what rules call

    def value(self, node: Any) -> Value:
        found = self.values.get(node)
        if isinstance(found, Complex):
            if self.part is None:
                raise Unsupported("a complex number among real ones")
            return found.real if self.part == "real" else found.imaginary
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

    def next_stream(self) -> int:
        """A number for the next op that draws random numbers."""
        self.streams += 1
        return self.streams - 1

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
        scan: Scan | None = None,
        pairs: bool = False,
    ) -> Value:
        """Adds the statement name[axes] = expression."""
        if strides is None or any(axis.size == 0 for axis in axes):
            # strides of nothing may all be 0, and a loop that no index depends on would be left out
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
        steps = tuple(strides[k] for k in kept)
        tensor = Tensor(name, dtype, tuple(a.size for a in loops), steps, pairs)
        self.tensors[name] = tensor
        self.maker[name] = self.reading
        along = scan if scan is not None and scan.axis in loops else None
        self.statements.append(statement(tensor, loops, expression, reduction, self.origin, along))
        value = values.of_tensor(tensor)
        if not single:
            return value
        return value.view([axis.size for axis in axes], lambda new: [new[k] for k in kept])

    def result(
        self, node: torch.fx.Node, expression_at: Any, fake: Any = None, part: str = ""
    ) -> Value:
        """A statement with the sizes, strides and dtype of the node, or of `fake`, a part of it."""
        fake = self.meta(node) if fake is None else fake
        sizes = tuple(from_size(size) for size in fake.shape)
        axes = values.fresh_axes(sizes)
        strides = tuple(from_stride(stride) for stride in fake.stride())
        expression = convert(expression_at(axes), fake.dtype)
        name = f"{node.name}_{part}" if part else node.name
        return self.store(name, fake.dtype, axes, expression, strides=strides)

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
    if torch.Tag.data_dependent_output in getattr(node.target, "tags", ()):
        raise Unsupported("a number that is read from data")
    if isinstance(fake, int | torch.SymInt) and not isinstance(fake, bool):
        return from_size(fake)
    name = op_name(node.target)
    if name is None:
        raise Unsupported(f"a call of {node.target}")
    if name == "copy_":
        return write_rules.read_write(reader, node)
    if node.target._schema.is_mutable:  # type: ignore[union-attr]
        raise Unsupported(f"{name}, which writes to its argument")
    reader.origin, reader.reading = name, node
    if complex_rules.concerns(reader, node):
        return complex_rules.read(reader, node, name, arguments(node))
    for value in fake if isinstance(fake, tuple | list) else (fake,):
        if isinstance(value, torch.Tensor):
            _check_tensor(value)
    if name in POINTWISE:
        return read_pointwise(reader, node, POINTWISE[name])
    if name in view_rules.RULES:
        return view_rules.RULES[name](reader, node, **_python_names(arguments(node)))
    if name in statement_rules.RULES:
        made = statement_rules.RULES[name](reader, node, **_python_names(arguments(node)))
        if isinstance(made, tuple):
            return tuple(_own(reader, node, *pair) for pair in zip(made, fake, strict=True))
        return _own(reader, node, made, fake)
    raise Unsupported(f"{name}")


def _own(reader: Reader, node: torch.fx.Node, value: Any, fake: Any) -> Any:
    """The value in memory of its own: an op that is no view never gives its argument back."""
    source = getattr(value.expression, "name", None) if isinstance(value, Value) else None
    if source is None or reader.maker.get(source) is node:
        return value
    return reader.result(node, value.broadcast, fake)


def _python_names(bound: dict[str, Any]) -> dict[str, Any]:
    return {"source" if name == "self" else name: value for name, value in bound.items()}


def _check_tensor(fake: torch.Tensor) -> None:
    if fake.device.type not in ("cpu", "cuda"):
        raise Unsupported(f"a tensor on {fake.device}")
    if fake.layout != torch.strided:
        raise Unsupported(f"a tensor of layout {fake.layout}")
    if value_type(fake.dtype) not in VALUE_TYPES:
        raise Unsupported(f"{fake.dtype} tensors")
    if fake.dtype.is_complex and fake.device.type != "cpu":
        raise Unsupported("complex numbers on a GPU")
    if fake.is_conj() or fake.is_neg():
        raise Unsupported("a lazily conjugated or negated tensor")


def input_value(reader: Reader, name: str, fake: Any) -> Tensor | Index:
    """What a placeholder is."""
    if isinstance(fake, int | torch.SymInt):
        return from_size(fake)
    if not isinstance(fake, torch.Tensor):
        raise Unsupported(f"an input that is a {type(fake).__name__}")
    _check_tensor(fake)
    sizes = tuple(from_size(size) for size in fake.shape)
    strides = tuple(from_stride(stride) for stride in fake.stride())
    tensor = Tensor(name, fake.dtype, sizes, strides)
    if fake.dtype.is_complex:
        steps = (*(stride * 2 for stride in strides), indices.ONE)
        tensor = Tensor(name, fake.dtype.to_real(), (*sizes, Index(2)), steps, pairs=True)
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


def _as_value(argument: Tensor | Index) -> Value | Complex | Index:
    if isinstance(argument, Index):
        return argument
    value = values.of_tensor(argument)
    return complex_rules.halves(value, argument.dtype.to_complex()) if argument.pairs else value


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
    writes = tuple(reader.writes)
    return Region(tuple(taken), _needed(reader.statements, outputs, writes), outputs, writes)


def _output(reader: Reader, result: Any) -> Output:
    if result is None:
        return Output()
    if isinstance(result, int):
        return Output(size=Index(result))
    value = reader.values[result]
    if isinstance(value, Index):
        return Output(size=value)
    if isinstance(value, Complex):
        return complex_rules.output(reader, value, result)
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


def _needed(
    statements: list[Statement], outputs: tuple[Output, ...], writes: tuple[tuple[str, str], ...]
) -> tuple[Statement, ...]:
    """The statements that some output or write depends on."""
    wanted = {output.name for output in outputs} | {name for name, _ in writes}
    kept: list[Statement] = []
    for s in reversed(statements):
        if s.name in wanted:
            kept.append(s)
            wanted.update(load.name for load in s.loads)
    return tuple(reversed(kept))
