"""The state of lowering one region: the `LoweringContext` that every lowering gets.

In: calls of lowerings, one per node of an fx graph. Out: the value of each node, and the statements
that compute them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fulgurite.fuser.frontend import tensor_value
from fulgurite.fuser.frontend.symbolic_sizes import (
    size_to_index,
    sizes_to_indices,
    strides_to_indices,
)
from fulgurite.fuser.frontend.tensor_value import ComplexValue, TensorValue
from fulgurite.fuser.ir import index as indices
from fulgurite.fuser.ir.errors import Unsupported
from fulgurite.fuser.ir.expression import (
    NARROW_FLOATS,
    Constant,
    Expression,
    IndexValue,
    Load,
    Operation,
    opmath_dtype,
)
from fulgurite.fuser.ir.expression_rewrites import rewrite_expression
from fulgurite.fuser.ir.index import Index
from fulgurite.fuser.ir.statement import (
    Reduction,
    Scan,
    Scatter,
    Statement,
    Tensor,
    make_statement,
)
from fulgurite.trace.node_meta import fake_value

SUPPORTED_OPMATH_DTYPES = {
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


# The parameters of lowerings that have other names than an op's arguments.
PARAMETER_NAMES = {"self": "source", "source": "update"}


@dataclass(frozen=True, slots=True)
class ScalarValue:
    """A symbolic floating-point number, as an expression of float64."""

    expression: Expression


class LoweringContext:
    """The values of all nodes lowered so far, and their statements.

    `corrects_means` makes variances exact for the rounding error of their mean, with one more sum.
    `uses_atomics` says that indexed stores are atomic operations, in any order: on a GPU.
    """

    def __init__(self, corrects_means: bool = False, uses_atomics: bool = False) -> None:
        self.corrects_means = corrects_means
        self.uses_atomics = uses_atomics
        self.values: dict[torch.fx.Node, Any] = {}
        self.statements: list[Statement] = []
        self.tensors: dict[str, Tensor] = {}
        self.writes: list[tuple[str, str]] = []  # (statement, input that it overwrites)
        self.origin = ""  # the name of the op that is being lowered
        self.current_node: torch.fx.Node | None = None
        self.producers: dict[str, torch.fx.Node | None] = {}  # the node of each statement
        self.pairs: dict[tuple[str, str], Tensor] = {}  # both parts of complex results, interleaved
        self.num_random_streams = 0
        self.complex_part: str | None = None  # "real" or "imaginary" while a part is lowered

    def get_value(self, node: Any) -> TensorValue:
        """Returns the value of a tensor argument."""
        found = self.values.get(node)
        if isinstance(found, ComplexValue):
            if self.complex_part is None:
                raise Unsupported("mixed complex and real operands")
            return found.real if self.complex_part == "real" else found.imaginary
        if not isinstance(found, TensorValue):
            raise Unsupported("a non-tensor argument")
        return found

    def to_index(self, argument: Any) -> Index:
        """Converts an int argument of an op: a number, or a node that computes a dynamic size."""
        if isinstance(argument, torch.fx.Node):
            found = self.values[argument]
            if not isinstance(found, Index):
                raise Unsupported("a non-integer size")
            return found
        if isinstance(argument, torch.SymInt):
            return size_to_index(argument)
        return Index(int(argument))

    def to_indices(self, arguments: Sequence[Any]) -> tuple[Index, ...]:
        return tuple(self.to_index(argument) for argument in arguments)

    def next_random_stream(self) -> int:
        """Returns the stream number of the next op that draws random numbers."""
        self.num_random_streams += 1
        return self.num_random_streams - 1

    def add_statement(
        self,
        name: str,
        dtype: torch.dtype,
        axes: tuple[indices.Axis, ...],
        expression: Expression,
        reduction: Reduction | None = None,
        strides: tuple[Index, ...] | None = None,
        scan: Scan | None = None,
        is_view_as_real: bool = False,
    ) -> TensorValue:
        """Adds the statement `name[axes] = expression` and returns its value."""
        is_empty = any(axis.size == 0 for axis in axes)
        if is_empty:  # no element is ever read
            expression, reduction, scan = make_constant(0, opmath_dtype(dtype)), None, None
        if strides is None or is_empty:
            strides = tensor_value.contiguous_strides([axis.size for axis in axes])
        while name in self.tensors:
            name += "_"
        # Dimensions with one element, or with stride 0, are no loops. Only the value has them.
        loop_dims = [
            k for k, axis in enumerate(axes) if axis.size != 1 and (is_empty or strides[k] != 0)
        ]
        unit_axes = {axis: indices.ZERO for k, axis in enumerate(axes) if k not in loop_dims}
        if unit_axes:
            expression = expression.substitute(unit_axes)
            if reduction is not None and reduction.rank is not None:
                reduction = replace(reduction, rank=reduction.rank.substitute(unit_axes))
        if reduction is not None and any(axis.size == 0 for axis in reduction.axes):
            expression, reduction = reduce_empty(reduction.kind, expression.dtype), None
        if reduction is not None:
            over = tuple(axis for axis in reduction.axes if axis.size != 1)
            ones = {axis: indices.ZERO for axis in reduction.axes if axis.size == 1}
            expression = expression.substitute(ones) if ones else expression
            if not over:
                expression = reduce_single_element(reduction.kind, expression)
            reduction = replace(reduction, axes=over) if over else None
        if scan is not None and scan.axis.size == 1:
            expression, scan = reduce_single_element(scan.kind, expression), None
        loops = tuple(axes[k] for k in loop_dims)
        loop_strides = tuple(strides[k] for k in loop_dims)
        tensor = Tensor(name, dtype, tuple(a.size for a in loops), loop_strides, is_view_as_real)
        self.tensors[name] = tensor
        self.producers[name] = self.current_node
        self.statements.append(
            make_statement(tensor, loops, expression, reduction, self.origin, scan)
        )
        value = tensor_value.load_tensor(tensor)
        if not unit_axes:
            return value
        return value.reindex([axis.size for axis in axes], lambda new: [new[k] for k in loop_dims])

    def add_scatter(
        self,
        name: str,
        dtype: torch.dtype,
        axes: tuple[indices.Axis, ...],
        initial: Expression,
        scatter: Scatter,
        strides: tuple[Index, ...] | None = None,
    ) -> TensorValue:
        """Adds an indexed store on top of the values `initial`, and returns its result.

        Its tensor keeps dimensions of size 1, because their indices are checked too.
        """
        if any(axis.size == 0 for axis in (*axes, *scatter.axes)):
            return self.add_statement(name, dtype, axes, initial, strides=strides)
        is_scalar = not axes
        if is_scalar:
            axes = indices.make_axes([indices.ONE])
            scatter = replace(scatter, index=scatter.index or (indices.ZERO,))
            strides = None
        sizes = tuple(axis.size for axis in axes)
        is_expanded = strides is not None and any(stride == 0 for stride in strides)
        if strides is None or is_expanded:
            strides = tensor_value.contiguous_strides(sizes)
        while name in self.tensors:
            name += "_"
        tensor = Tensor(name, dtype, sizes, strides)
        self.tensors[name] = tensor
        self.producers[name] = self.current_node
        self.statements.append(
            make_statement(
                tensor,
                axes,
                self.inline_constants(initial),
                origin=self.origin,
                scatter=drop_unit_axes(scatter),
            )
        )
        value = tensor_value.load_tensor(tensor)
        return value.reindex((), lambda _: [indices.ZERO]) if is_scalar else value

    def inline_constants(self, expression: Expression) -> Expression:
        """Replaces loads of statements that read nothing, such as zeros, by their expressions."""
        known = {
            s.name: s for s in self.statements if not (s.loads or s.scan) and s.all_axes == s.axes
        }

        def inline(part: Expression) -> Expression | None:
            s = known.get(part.name) if isinstance(part, Load) else None
            if s is None or not isinstance(part, Load):
                return None
            value = s.expression.substitute(dict(zip(s.axes, part.index, strict=True)))
            return round_to_storage(value, s.tensor.dtype)

        return rewrite_expression(expression, inline, lambda index: index)

    def add_result(
        self, node: torch.fx.Node, expression_at: Any, fake: Any = None, part: str = ""
    ) -> TensorValue:
        """Adds a statement with the layout and dtype of the node, or of its output `fake`."""
        fake = fake_value(node) if fake is None else fake
        sizes = sizes_to_indices(fake)
        axes = indices.make_axes(sizes)
        strides = strides_to_indices(fake)
        expression = convert_dtype(expression_at(axes), fake.dtype)
        name = f"{node.name}_{part}" if part else node.name
        return self.add_statement(name, fake.dtype, axes, expression, strides=strides)

    def read_operand(
        self, argument: Any, axes: tuple[indices.Axis, ...], dtype: torch.dtype
    ) -> Expression:
        """Returns a tensor or number as an expression at the axes of a result, cast to `dtype`."""
        if isinstance(argument, torch.fx.Node):
            found = self.values[argument]
            if isinstance(found, Index):
                return convert_dtype(IndexValue(found, torch.int64), dtype)
            if isinstance(found, ScalarValue):
                return convert_dtype(found.expression, dtype)
            return convert_dtype(self.get_value(argument).broadcast_to(axes), dtype)
        if isinstance(argument, torch.SymInt):
            return convert_dtype(IndexValue(size_to_index(argument), torch.int64), dtype)
        if isinstance(argument, bool | int | float):
            return make_constant(argument, dtype)
        raise Unsupported(f"the argument {argument!r}")


def call_lowering(
    lowering: Callable[..., Any], ctx: LoweringContext, node: Any, bound: dict[str, Any]
) -> Any:
    """Calls the lowering of a view or statement with an op's arguments, by `PARAMETER_NAMES`.

    Symbolic numbers go to parameters that are annotated with Any, and to `**_`, which is not read.
    """
    arguments = {PARAMETER_NAMES.get(name, name): value for name, value in bound.items()}
    for name, argument in arguments.items():
        if is_symbolic(argument) and not _takes_symbols(lowering, name):
            raise Unsupported(f"the symbolic argument {name}")
    return lowering(ctx, node, **arguments)


def is_symbolic(argument: Any) -> bool:
    """Whether an argument is a symbolic number, or a list with one."""
    if isinstance(argument, tuple | list):
        return any(map(is_symbolic, argument))
    value = fake_value(argument) if isinstance(argument, torch.fx.Node) else argument
    return isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)


@functools.cache
def _takes_symbols(lowering: Callable[..., Any], name: str) -> bool:
    parameters = inspect.signature(lowering).parameters
    found = parameters.get(name)
    return "_" in parameters if found is None else "Any" in str(found.annotation)


def round_to_storage(expression: Expression, dtype: torch.dtype) -> Expression:
    """Returns the value that is read back after it was stored with this dtype."""
    if dtype not in NARROW_FLOATS:
        return expression
    if isinstance(expression, Constant):
        rounded = torch.tensor(expression.value, dtype=torch.float64).to(dtype)
        return Constant(float(rounded), opmath_dtype(dtype))
    return Operation("cast", (expression,), dtype)


def drop_unit_axes(scatter: Scatter) -> Scatter:
    """Returns the indexed store without its axes of size 1."""
    ones = {axis: indices.ZERO for axis in scatter.axes if axis.size == 1}
    if not ones:
        return scatter
    return replace(
        scatter,
        axes=tuple(axis for axis in scatter.axes if axis not in ones),
        index=tuple(index.substitute(ones) for index in scatter.index),
        value=scatter.value.substitute(ones),
    )


def reduce_single_element(kind: str, expression: Expression) -> Expression:
    """Returns the reduction or scan of one element. Sums start with 0, so the sum of -0 is 0."""
    dtype = opmath_dtype(expression.dtype)
    if kind == "argsort":
        return Constant(0, torch.int64)
    if kind != "sum" or not dtype.is_floating_point:
        return expression
    return Operation("add", (expression, Constant(0.0, dtype)), dtype)


def reduce_empty(kind: str, dtype: torch.dtype) -> Expression:
    """Returns the reduction of no elements.

    Max and min of bools are any and all; others have none.
    """
    dtype = opmath_dtype(dtype)
    if kind not in ("sum", "prod") and dtype != torch.bool:
        raise Unsupported(f"{kind} of an empty tensor")
    return make_constant(kind in ("prod", "min"), dtype)


def make_constant(number: float | int | bool, dtype: torch.dtype) -> Constant:
    """Creates a constant. Integers wrap to the range of the dtype."""
    if dtype.is_floating_point:
        return Constant(float(number), dtype)
    if dtype == torch.bool:
        return Constant(bool(number), dtype)
    if isinstance(number, float) and (number != number or number in (float("inf"), -float("inf"))):
        raise Unsupported(f"{number} converted to an integer")
    info = torch.iinfo(dtype)
    whole = int(number)
    if not info.min <= whole <= info.max:
        whole = (whole - info.min) % (info.max - info.min + 1) + info.min
    return Constant(whole, dtype)


def convert_dtype(expression: Expression, dtype: torch.dtype) -> Expression:
    """Casts to the opmath dtype of `dtype`, if the expression has another one."""
    if opmath_dtype(expression.dtype) == opmath_dtype(dtype):
        return expression
    if opmath_dtype(dtype) not in SUPPORTED_OPMATH_DTYPES:
        raise Unsupported(f"dtype {dtype}")
    if isinstance(expression, Constant):
        return make_constant(expression.value, opmath_dtype(dtype))
    return Operation("cast", (expression,), opmath_dtype(dtype))
