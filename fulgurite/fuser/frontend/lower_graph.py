"""Reads a region's fx graph into the IR.

In: a GraphModule of functional ATen nodes with FakeTensor metadata. Out: an `ir.Region`, and, per
node, why it can't be read (`unreadable`). Every op is a row in a table: of `pointwise_rules`, `activation_rules` and
`special_rules` (elementwise), of `view_rules` (index maps, no memory) or of `statement_rules` (reductions, copies with
another order, gathers, factories).
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND as PROMOTION
from torch._prims_common import elementwise_dtypes

from fulgurite.fuser.frontend import (
    activations,
    complex,
    copies,
    input_mutations,
    pointwise,
    special,
    tensor_value,
    views,
)
from fulgurite.fuser.frontend.lowering_context import VALUE_TYPES, Reader
from fulgurite.fuser.frontend.pointwise import Unsupported
from fulgurite.fuser.frontend.tensor_value import Complex, Value, from_size, from_stride
from fulgurite.fuser.ir import index as indices
from fulgurite.fuser.ir.expression import Expression, value_type
from fulgurite.fuser.ir.index import Index
from fulgurite.fuser.ir.statement import Output, Region, Statement, Tensor

POINTWISE = {**pointwise.RULES, **activations.RULES, **special.RULES}

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


def compute_type(rule: pointwise.Rule, tensors: list[Any], node: torch.fx.Node) -> Any:
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


def read_pointwise(reader: Reader, node: torch.fx.Node, rule: pointwise.Rule) -> Value:
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
        return input_mutations.read_write(reader, node)
    if node.target._schema.is_mutable:  # type: ignore[union-attr]
        raise Unsupported(f"{name}, which writes to its argument")
    reader.origin, reader.reading = name, node
    if complex.concerns(reader, node):
        return complex.read(reader, node, name, arguments(node))
    for value in fake if isinstance(fake, tuple | list) else (fake,):
        if isinstance(value, torch.Tensor):
            _check_tensor(value)
    if name in POINTWISE:
        return read_pointwise(reader, node, POINTWISE[name])
    if name in views.RULES:
        return views.RULES[name](reader, node, **_python_names(arguments(node)))
    if name in copies.RULES:
        made = copies.RULES[name](reader, node, **_python_names(arguments(node)))
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
    if any(size == 0 for size in sizes):
        strides = tensor_value.dense_strides(sizes)
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
    value = tensor_value.of_tensor(argument)
    return complex.halves(value, argument.dtype.to_complex()) if argument.pairs else value


def read(region: torch.fx.GraphModule, corrects: bool = False) -> Region:
    """The whole region; `corrects` makes variances right about means that are far from 0."""
    reader = Reader(corrects)
    taken: list[Tensor | Index] = []
    lent: set[str] = set()
    outputs: tuple[Output, ...] = ()
    for node in region.graph.nodes:
        if node.op == "placeholder":
            argument = input_value(reader, node.name, node.meta["val"])
            taken.append(argument)
            lent |= {node.name} if node.meta.get("lent") else set()
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
    needed = _needed(reader.statements, outputs, writes)
    return Region(tuple(taken), needed, outputs, writes, frozenset(lent))


def _output(reader: Reader, result: Any) -> Output:
    if result is None:
        return Output()
    if isinstance(result, int):
        return Output(size=Index(result))
    value = reader.values[result]
    if isinstance(value, Index):
        return Output(size=value)
    if isinstance(value, Complex):
        return complex.output(reader, value, result)
    if not isinstance(value, Value):
        raise Unsupported("a tuple among the outputs")
    fake = result.meta["val"]
    sizes = tuple(from_size(size) for size in fake.shape)
    strides = tuple(from_stride(stride) for stride in fake.stride())
    source = getattr(value.expression, "name", None)
    found = tensor_value.window(value, reader.tensors[source]) if source in reader.tensors else None
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
