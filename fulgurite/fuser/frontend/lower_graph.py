"""Lowers a region's fx graph to the IR.

In: a GraphModule of functional ATen nodes with FakeTensor metadata. Out: a `Region`; or, for a
single node, why it can't be lowered (`find_unsupported_reason`). Every op has an entry in one of
three tables: `ELEMENTWISE_LOWERINGS` (formulas), `VIEW_LOWERINGS` (index maps, no memory) and
`STATEMENT_LOWERINGS` (reductions, scans, copies, gathers, factories, random numbers).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND as PROMOTION
from torch._prims_common import elementwise_dtypes
from torch.fx.experimental.symbolic_shapes import guard_or_false

from fulgurite.fuser.frontend import complex_numbers, input_mutations, tensor_value
from fulgurite.fuser.frontend.activations import ACTIVATION_LOWERINGS
from fulgurite.fuser.frontend.copies import COPY_LOWERINGS
from fulgurite.fuser.frontend.data_movement import DATA_MOVEMENT_LOWERINGS
from fulgurite.fuser.frontend.embedding_bag_gradients import EMBEDDING_BAG_GRADIENT_LOWERINGS
from fulgurite.fuser.frontend.embedding_bags import EMBEDDING_BAG_LOWERINGS
from fulgurite.fuser.frontend.factories import FACTORY_LOWERINGS
from fulgurite.fuser.frontend.gathers import GATHER_LOWERINGS
from fulgurite.fuser.frontend.grid_sample import GRID_SAMPLE_LOWERINGS
from fulgurite.fuser.frontend.index_gradients import INDEX_GRADIENT_LOWERINGS
from fulgurite.fuser.frontend.interpolate import INTERPOLATE_LOWERINGS
from fulgurite.fuser.frontend.lowering_context import (
    SUPPORTED_OPMATH_DTYPES,
    LoweringContext,
    ScalarValue,
    call_lowering,
    is_symbolic,
)
from fulgurite.fuser.frontend.padding import PADDING_LOWERINGS
from fulgurite.fuser.frontend.pointwise import POINTWISE_LOWERINGS, PointwiseLowering
from fulgurite.fuser.frontend.pooling import POOLING_LOWERINGS, POOLING_OPERATORS
from fulgurite.fuser.frontend.pooling_gradients import (
    POOLING_GRADIENT_LOWERINGS,
    POOLING_GRADIENT_OPERATORS,
)
from fulgurite.fuser.frontend.random import RANDOM_LOWERINGS
from fulgurite.fuser.frontend.reductions import REDUCTION_LOWERINGS
from fulgurite.fuser.frontend.scans import SCAN_LOWERINGS
from fulgurite.fuser.frontend.scatters import SCATTER_LOWERINGS
from fulgurite.fuser.frontend.search import SEARCH_LOWERINGS
from fulgurite.fuser.frontend.sort import SORT_LOWERINGS
from fulgurite.fuser.frontend.special import SPECIAL_LOWERINGS
from fulgurite.fuser.frontend.symbolic_sizes import (
    float_to_expression,
    float_to_index,
    size_to_index,
    sizes_to_indices,
    strides_to_indices,
)
from fulgurite.fuser.frontend.tensor_value import ComplexValue, TensorValue
from fulgurite.fuser.frontend.unfold import UNFOLD_LOWERINGS
from fulgurite.fuser.frontend.variance import VARIANCE_LOWERINGS
from fulgurite.fuser.frontend.views import VIEW_LOWERINGS
from fulgurite.fuser.ir import index as indices
from fulgurite.fuser.ir.errors import Unsupported
from fulgurite.fuser.ir.expression import PACKED_DTYPES, Expression, opmath_dtype
from fulgurite.fuser.ir.index import Index
from fulgurite.fuser.ir.statement import Output, Region, Statement, Tensor
from fulgurite.trace.cost import iter_tensors
from fulgurite.trace.node_meta import fake_value, is_donated
from fulgurite.trace.op_names import name_of_op

ELEMENTWISE_LOWERINGS: dict[str, PointwiseLowering] = {
    **POINTWISE_LOWERINGS,
    **ACTIVATION_LOWERINGS,
    **SPECIAL_LOWERINGS,
}
CUSTOM_OPERATORS = {**POOLING_OPERATORS, **POOLING_GRADIENT_OPERATORS}
# Each is called with the context, the node and the op's arguments by name (`self` is `source`).
STATEMENT_LOWERINGS: dict[str, Callable[..., Any]] = {
    **REDUCTION_LOWERINGS,
    **VARIANCE_LOWERINGS,
    **SCAN_LOWERINGS,
    **SORT_LOWERINGS,
    **SEARCH_LOWERINGS,
    **DATA_MOVEMENT_LOWERINGS,
    **GATHER_LOWERINGS,
    **SCATTER_LOWERINGS,
    **INDEX_GRADIENT_LOWERINGS,
    **EMBEDDING_BAG_LOWERINGS,
    **EMBEDDING_BAG_GRADIENT_LOWERINGS,
    **INTERPOLATE_LOWERINGS,
    **PADDING_LOWERINGS,
    **POOLING_LOWERINGS,
    **POOLING_GRADIENT_LOWERINGS,
    **CUSTOM_OPERATORS,
    **UNFOLD_LOWERINGS,
    **GRID_SAMPLE_LOWERINGS,
    **RANDOM_LOWERINGS,
    **COPY_LOWERINGS,
    **FACTORY_LOWERINGS,
}

# Prims that differ from the ATen op of the same name: integer division, other arguments.
PRIMS_UNLIKE_ATEN = {
    *("div", "pow", "where", "reshape", "squeeze", "transpose", "amax", "amin", "var")
}
# ATen's names for the arguments of prims reductions
PRIM_ARGUMENT_NAMES = {"inp": "self", "dims": "dim", "output_dtype": "dtype"}


# What torch does with the bytes of a packed format.
PACKED_OPS = {*VIEW_LOWERINGS, "clone", "contiguous"}


def get_op_name(target: Any) -> str | None:
    """Returns `add` for aten.add.Tensor; None if the target is not an ATen or prims op."""
    if not isinstance(target, torch._ops.OpOverload):
        return None
    name = target._schema.name.split("::")[1]
    if target.namespace == "prims" and name not in PRIMS_UNLIKE_ATEN:
        return name
    return name if target.namespace == "aten" or name in CUSTOM_OPERATORS else None


def resolve_constants(argument: Any) -> Any:
    """Replaces symbolic integers whose value a guard has fixed by that value."""

    def resolve(node: torch.fx.Node) -> Any:
        value = fake_value(node)
        known = value.node.maybe_as_int() if isinstance(value, torch.SymInt) else None
        return node if known is None else known

    return torch.fx.node.map_arg(argument, resolve)


def _takes_symbols(kind: Any) -> bool:
    """Whether an argument of this type may be symbolic: SymInt or Scalar, not int or float."""
    if isinstance(kind, torch.OptionalType | torch.ListType):
        return _takes_symbols(kind.getElementType())
    return kind.kind() in ("SymIntType", "NumberType", "TensorType")


def bind_arguments(node: torch.fx.Node) -> dict[str, Any]:
    """Returns the node's arguments by schema name, including defaults."""
    assert isinstance(node.target, torch._ops.OpOverload), f"{node} is not an ATen call"
    bound: dict[str, Any] = {}
    renamed = PRIM_ARGUMENT_NAMES if node.target.namespace == "prims" else {}
    for position, argument in enumerate(node.target._schema.arguments):
        name = renamed.get(argument.name, argument.name)
        if position < len(node.args):
            bound[name] = resolve_constants(node.args[position])
        elif argument.name in node.kwargs:
            bound[name] = resolve_constants(node.kwargs[argument.name])
        elif argument.has_default_value():
            bound[name] = argument.default_value
        if is_symbolic(bound.get(name)) and not _takes_symbols(argument.real_type):
            raise Unsupported(f"the symbolic argument {name}")
    if renamed and bound.get("dim", "some") in (None, [], ()):
        # ATen would reduce over all dimensions.
        raise Unsupported("a prims reduction over an empty list of dimensions")
    return bound


def promote_operands(lowering: PointwiseLowering, tensors: list[Any], node: torch.fx.Node) -> Any:
    """Returns the opmath dtype of an elementwise op, by torch's type promotion."""
    kinds = {
        "default": PROMOTION.DEFAULT,
        "float": PROMOTION.INT_TO_FLOAT,
        "bool": PROMOTION.DEFAULT,
        "where": PROMOTION.DEFAULT,
    }
    kind = lowering.promotion
    if kind == "masked_fill":
        return opmath_dtype(fake_value(node).dtype)
    if kind == "division":
        mode = bind_arguments(node).get("rounding_mode")
        kind = "float" if mode is None else "default"
    computed, _ = elementwise_dtypes(*tensors, type_promotion_kind=kinds[kind])
    return opmath_dtype(computed)


def _check_operands(
    node: torch.fx.Node, lowering: PointwiseLowering, bound: dict[str, Any]
) -> None:
    """Raises for an overload without these operands; asserts that some overload has them."""
    missing = [name for name in lowering.operands if name not in bound]
    if not missing:
        return
    packet = node.target.overloadpacket  # type: ignore[union-attr]
    schemas = [getattr(packet, overload)._schema for overload in packet.overloads()]
    known = {argument.name for schema in schemas for argument in schema.arguments}
    unknown = [name for name in missing if name not in known]
    assert not unknown, (
        f"the PointwiseLowering of {packet} has the operands {lowering.operands}, and no overload "
        f"has an argument named {' or '.join(unknown)}: {schemas[0]}"
    )
    raise Unsupported(f"{node.target}, which has no argument {' or '.join(missing)}")


READS_STORAGE_DTYPE = (
    "nan_to_num",
    "nextafter",
    "fmax",
    "fmin",
)  # whose formulas depend on the dtype of the result


def lower_elementwise(
    ctx: LoweringContext, node: torch.fx.Node, lowering: PointwiseLowering
) -> TensorValue:
    """Lowers an elementwise op to one statement."""
    bound = bind_arguments(node)
    _check_operands(node, lowering, bound)
    operand_metas = []
    for name in lowering.operands:
        argument = bound.get(name)
        if isinstance(argument, torch.fx.Node):
            operand_metas.append(fake_value(argument))
        elif argument is not None:
            operand_metas.append(argument)
    dtype = promote_operands(lowering, operand_metas, node)
    if dtype not in SUPPORTED_OPMATH_DTYPES:
        raise Unsupported(f"dtype {dtype}")
    extra = {name: value for name, value in bound.items() if name not in lowering.operands}

    def expression_at(axes: tuple[indices.Axis, ...]) -> Expression:
        operands = [
            None if bound.get(name) is None else ctx.read_operand(bound[name], axes, dtype)
            for name in lowering.operands
        ]
        for name, value in extra.items():
            if isinstance(value, torch.fx.Node):
                if not isinstance(fake_value(value), torch.Tensor):
                    raise Unsupported(f"the symbolic argument {name}")
                extra[name] = ctx.read_operand(value, axes, torch.bool)
        if get_op_name(node.target) in READS_STORAGE_DTYPE:
            extra["storage"] = fake_value(node).dtype
        if get_op_name(node.target) == "div":
            extra["by_reciprocal"] = _is_scalar_of_host(bound["other"], fake_value(node).device)
        return lowering.formula(*operands, **extra)

    return ctx.add_result(node, expression_at)


def _is_scalar_of_host(argument: Any, device: torch.device) -> bool:
    """Whether an operand of an op on a GPU is a number, or a tensor of one element on the CPU."""
    value = fake_value(argument) if isinstance(argument, torch.fx.Node) else argument
    is_on_host = not isinstance(value, torch.Tensor) or value.device.type == "cpu"
    return device.type == "cuda" and is_on_host


def _leaves_indices_unchecked(node: torch.fx.Node) -> bool:
    """Whether a gather reads nothing, but has positions: eager checks them all the same."""
    if not any(guard_or_false(t.numel() == 0) for t in iter_tensors(fake_value(node))):
        return False
    operands = [t for source in node.all_input_nodes for t in iter_tensors(fake_value(source))]
    indices = [t for t in operands if not t.is_floating_point() and not t.is_complex()]
    return any(not guard_or_false(t.numel() == 0) for t in indices)


def lower_node(ctx: LoweringContext, node: torch.fx.Node) -> Any:
    """Lowers one call_function node and returns its value."""
    if node.target is operator.getitem:
        source = ctx.values.get(node.args[0])  # type: ignore[call-overload]
        if not isinstance(source, tuple):
            raise Unsupported("getitem of something other than a tuple of tensors")
        return source[node.args[1]]
    fake = fake_value(node)
    if torch.Tag.data_dependent_output in getattr(node.target, "tags", ()):
        raise Unsupported("a data-dependent scalar")
    if isinstance(fake, int | torch.SymInt) and not isinstance(fake, bool):
        return size_to_index(fake)
    name = get_op_name(node.target)
    if name is None:
        raise Unsupported(f"a call to {node.target}")
    if name == "copy_":
        return input_mutations.lower_input_copy(ctx, node)
    if node.target._schema.is_mutable:  # type: ignore[union-attr]
        raise Unsupported(f"{name}, which mutates its argument")
    if name in GATHER_LOWERINGS and _leaves_indices_unchecked(node):
        raise Unsupported(f"{name} with an empty result: no kernel would check its indices")
    ctx.origin, ctx.current_node = name_of_op(node), node
    if complex_numbers.involves_complex(ctx, node, name):
        return complex_numbers.lower_complex_node(ctx, node, name, bind_arguments(node))
    for value in fake if isinstance(fake, tuple | list) else (fake,):
        if isinstance(value, torch.Tensor):
            _check_tensor(value)
    if name not in PACKED_OPS:
        _check_not_packed(name, [fake, *map(fake_value, node.all_input_nodes)])
    if name in ELEMENTWISE_LOWERINGS:
        return lower_elementwise(ctx, node, ELEMENTWISE_LOWERINGS[name])
    if name in VIEW_LOWERINGS:
        return call_lowering(VIEW_LOWERINGS[name], ctx, node, bind_arguments(node))
    if name in STATEMENT_LOWERINGS:
        values = call_lowering(STATEMENT_LOWERINGS[name], ctx, node, bind_arguments(node))
        if isinstance(values, tuple):
            return tuple(
                _copy_if_aliased(ctx, node, *pair) for pair in zip(values, fake, strict=True)
            )
        return _copy_if_aliased(ctx, node, values, fake)
    raise Unsupported(f"{name}")


def _check_not_packed(name: str, values: list[Any]) -> None:
    """Leaves other ops on packed formats to torch, which refuses most of them."""
    for tensor in (t for value in values for t in iter_tensors(value)):
        if tensor.dtype in PACKED_DTYPES:
            raise Unsupported(f"{name} of {tensor.dtype}")


def _copy_if_aliased(ctx: LoweringContext, node: torch.fx.Node, value: Any, fake: Any) -> Any:
    """Copies a value that is in the buffer of another node. Only views may alias their argument."""
    source = getattr(value.expression, "name", None) if isinstance(value, TensorValue) else None
    if source is None or ctx.producers.get(source) is node:
        return value
    return ctx.add_result(node, value.broadcast_to, fake)


def _check_tensor(fake: torch.Tensor) -> None:
    if fake.device.type not in ("cpu", "cuda"):
        raise Unsupported(f"a tensor on device {fake.device}")
    if fake.layout != torch.strided:
        raise Unsupported(f"tensor layout {fake.layout}")
    if opmath_dtype(fake.dtype) not in SUPPORTED_OPMATH_DTYPES:
        raise Unsupported(f"dtype {fake.dtype}")


def lower_placeholder(ctx: LoweringContext, name: str, fake: Any) -> Tensor | Index:
    """Creates the tensor or symbol of a placeholder."""
    if isinstance(fake, int | torch.SymInt):
        return size_to_index(fake)
    if isinstance(fake, torch.SymFloat):
        return float_to_index(fake)
    if not isinstance(fake, torch.Tensor):
        raise Unsupported(f"an input of type {type(fake).__name__}")
    _check_tensor(fake)
    sizes = sizes_to_indices(fake)
    strides = strides_to_indices(fake)
    if any(size == 0 for size in sizes):
        strides = tensor_value.contiguous_strides(sizes)
    tensor = Tensor(name, fake.dtype, sizes, strides, is_negated=fake.is_neg())
    if fake.dtype.is_complex:
        strides = (*(stride * 2 for stride in strides), indices.ONE)
        tensor = replace(
            tensor,
            dtype=fake.dtype.to_real(),
            sizes=(*sizes, Index(2)),
            strides=strides,
            is_view_as_real=True,
        )
    ctx.tensors[name] = tensor
    return tensor


def find_unsupported_reason(node: torch.fx.Node, use_triton: bool = False) -> str | None:
    """Returns why this node can't be part of a generated kernel; None if it can.

    `use_triton` asks for a Triton kernel where tensors are on a CPU, too.
    """
    is_on_gpu = any(t.device.type == "cuda" for t in iter_tensors(fake_value(node)))
    ctx = LoweringContext(uses_atomics=use_triton or is_on_gpu)
    try:
        for argument in node.all_input_nodes:
            fake = fake_value(argument)
            if isinstance(fake, tuple | list):
                ctx.values[argument] = tuple(
                    _load_argument(lower_placeholder(ctx, f"{argument.name}_{k}", part), part)
                    for k, part in enumerate(fake)
                )
            else:
                declared = lower_placeholder(ctx, argument.name, fake)
                ctx.values[argument] = _load_argument(declared, fake)
        lower_node(ctx, node)
    except Unsupported as reason:
        return str(reason)
    return None


def _load_argument(
    argument: Tensor | Index, fake: Any
) -> TensorValue | ComplexValue | Index | ScalarValue:
    if isinstance(fake, torch.SymFloat):
        return ScalarValue(float_to_expression(fake))
    if isinstance(argument, Index):
        return argument
    value = tensor_value.load_tensor(argument)
    return (
        complex_numbers.split_complex(value, argument.dtype.to_complex())
        if argument.is_view_as_real
        else value
    )


def lower_graph(
    region: torch.fx.GraphModule, corrects_means: bool = False, uses_atomics: bool = False
) -> Region:
    """Lowers the whole region.

    `corrects_means` makes variances accurate for values whose mean is far from 0. `uses_atomics`
    says that indexed stores are atomic operations: on a GPU.
    """
    ctx = LoweringContext(corrects_means, uses_atomics)
    arguments: list[Tensor | Index] = []
    donated: set[str] = set()
    outputs: tuple[Output, ...] = ()
    for node in region.graph.nodes:
        if node.op == "placeholder":
            argument = lower_placeholder(ctx, node.name, fake_value(node))
            arguments.append(argument)
            donated |= {node.name} if is_donated(node) else set()
            ctx.values[node] = _load_argument(argument, fake_value(node))
        elif node.op == "call_function":
            ctx.values[node] = lower_node(ctx, node)
        elif node.op == "output":
            results = node.args[0]
            flat = results if isinstance(results, tuple | list) else (results,)
            outputs = tuple(_lower_output(ctx, result) for result in flat)
        else:
            raise Unsupported(f"an fx node of kind {node.op}")
    writes = tuple(ctx.writes)
    needed = _eliminate_dead_statements(ctx.statements, outputs, writes)
    return Region(tuple(arguments), needed, outputs, writes, frozenset(donated))


def _lower_output(ctx: LoweringContext, result: Any) -> Output:
    if result is None:
        return Output()
    if isinstance(result, int):
        return Output(size=Index(result))
    value = ctx.values[result]
    if isinstance(value, Index):
        return Output(size=value)
    if not isinstance(value, TensorValue | ComplexValue):
        raise Unsupported("a tuple as an output")
    fake = fake_value(result)
    stored = complex_numbers.remove_bits(value, fake)
    output = (
        complex_numbers.lower_complex_output(ctx, stored, result)
        if isinstance(stored, ComplexValue)
        else _lower_real_output(ctx, stored, result)
    )
    return replace(output, is_conj=fake.is_conj(), is_neg=fake.is_neg())


def _lower_real_output(ctx: LoweringContext, value: TensorValue, result: Any) -> Output:
    fake = fake_value(result)
    sizes = sizes_to_indices(fake)
    strides = strides_to_indices(fake)
    source = getattr(value.expression, "name", "")
    tensor = ctx.tensors.get(source)
    view = tensor_value.find_strides(value, tensor) if tensor is not None else None
    is_empty = any(size == 0 for size in sizes)
    if tensor is not None and view is not None:
        matches = zip(view[0], strides, strict=True)
        if is_empty or all(stride is None or stride == want for stride, want in matches):
            is_full = tensor.sizes == sizes and tensor.strides == strides and view[1] == 0
            return Output(source, sizes, strides, view[1], is_full_buffer=is_full)
    copied = ctx.add_result(result, value.broadcast_to)
    name = copied.expression.name  # type: ignore[union-attr]
    return Output(name, sizes, strides, is_full_buffer=True)


def _eliminate_dead_statements(
    statements: list[Statement], outputs: tuple[Output, ...], writes: tuple[tuple[str, str], ...]
) -> tuple[Statement, ...]:
    """Returns the statements that some output or write depends on."""
    live = {output.name for output in outputs} | {name for name, _ in writes}
    live_statements: list[Statement] = []
    for s in reversed(statements):
        if s.name in live:
            live_statements.append(s)
            live.update(load.name for load in s.loads)
    return tuple(reversed(live_statements))
