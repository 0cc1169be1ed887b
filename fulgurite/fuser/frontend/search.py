"""Lowerings of searchsorted and bucketize as unrolled binary searches. Same calling convention as
`views.py`.

Each step halves the interval [start, end) of every element: three elementwise statements, one of
which gathers a boundary. The steps probe the boundaries that torch's search probes. So the results
are the same where boundaries are not in order or NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from fulgurite.fuser.frontend.lowering_context import LoweringContext, convert_dtype
from fulgurite.fuser.frontend.symbolic_sizes import size_to_index
from fulgurite.fuser.frontend.tensor_value import Axes, TensorValue, axis_indices
from fulgurite.fuser.ir import index as indices
from fulgurite.fuser.ir.build_expression import add, apply, sub, where
from fulgurite.fuser.ir.errors import Unsupported
from fulgurite.fuser.ir.expression import Constant, Expression, IndexValue
from fulgurite.fuser.ir.index import IndirectIndex
from fulgurite.trace.node_meta import fake_value

MAX_STEPS = 40  # of a search in a sequence of dynamic size; no memory holds 2**40 elements
INT = torch.int64


class _BinarySearch:
    """Adds the statements of one search."""

    def __init__(
        self,
        ctx: LoweringContext,
        node: Node,
        boundaries: TensorValue,
        sorter: TensorValue | None,
        value_at: Callable[[Axes], Expression],
        is_upper: bool,
    ) -> None:
        self.ctx, self.node, self.boundaries, self.sorter = ctx, node, boundaries, sorter
        self.value_at = value_at
        self.comparison = "gt" if is_upper else "ge"
        self.size = boundaries.sizes[-1]
        self.axes = indices.make_axes([size_to_index(n) for n in fake_value(node).shape])

    def run(self) -> TensorValue:
        """Returns the first position whose boundary is not below the value."""
        start: Expression = Constant(0, INT)
        end: Expression = IndexValue(self.size, INT)
        if self.size.is_constant:
            end = Constant(self.size.constant, INT)
        steps = self.size.constant.bit_length() if self.size.is_constant else MAX_STEPS
        for step in range(steps):
            start, end = self.halve(step, start, end)
        return self.ctx.add_result(self.node, lambda axes: self.at(start, axes))

    def halve(self, step: int, start: Expression, end: Expression) -> tuple[Expression, Expression]:
        one = Constant(1, INT)
        middle = add(start, apply("shift_right", sub(end, start), one))
        is_open = apply("lt", start, end)
        stops = self.statement(f"stops{step}", torch.bool, self.compare(middle))
        to_right = apply("and", is_open, apply("not", stops))
        to_left = apply("and", is_open, stops)
        start_at = self.statement(f"start{step}", INT, where(to_right, add(middle, one), start))
        return start_at, self.statement(f"end{step}", INT, where(to_left, middle, end))

    def compare(self, middle: Expression) -> Expression:
        """Whether the boundary in the middle stops the search to the right of it."""
        last = sub(IndexValue(self.size, INT), Constant(1, INT))
        clamped = apply("minimum", middle, last)  # an empty interval may be at the end
        leading = axis_indices(self.axes)[: len(self.boundaries.axes) - 1]

        def element(sequence: TensorValue, position: Expression, is_checked: bool) -> Expression:
            index = IndirectIndex(position, self.size, False, is_checked)
            return sequence.load_at([*leading, indices.from_atom(index)])

        if self.sorter is None:
            boundary = element(self.boundaries, clamped, False)
        else:
            boundary = element(self.boundaries, element(self.sorter, clamped, False), True)
        value = self.value_at(self.axes)
        return apply(self.comparison, convert_dtype(boundary, value.dtype), value)

    def statement(self, name: str, dtype: torch.dtype, expression: Expression) -> Expression:
        found = self.ctx.add_statement(f"{self.node.name}_{name}", dtype, self.axes, expression)
        return found.load_at(axis_indices(self.axes))

    def at(self, expression: Expression, axes: Axes) -> Expression:
        moved = dict(zip(self.axes, axis_indices(axes), strict=True))
        return convert_dtype(expression.substitute(moved), fake_value(self.node).dtype)


def lower_search(
    ctx: LoweringContext,
    node: Node,
    boundaries: Any,
    value: Any,
    is_upper: bool,
    sorter: Any = None,
) -> TensorValue:
    sequence = ctx.get_value(boundaries)
    if sequence.dtype in (torch.uint16, torch.uint32, torch.uint64):
        raise Unsupported(f"a search in {sequence.dtype}")
    order = None if sorter is None else ctx.get_value(sorter)
    dtype = _find_comparison_dtype(boundaries, value)

    def value_at(axes: Axes) -> Expression:
        return ctx.read_operand(value, axes, dtype)

    return _BinarySearch(ctx, node, sequence, order, value_at, is_upper).run()


def _find_comparison_dtype(boundaries: Any, value: Any) -> torch.dtype:
    """Returns the dtype in which values are compared; only a number may have another one."""
    sides = [fake_value(side) if isinstance(side, Node) else side for side in (boundaries, value)]
    tensors = [side for side in sides if isinstance(side, torch.Tensor)]
    if any(side.dtype.is_floating_point and side.dtype.itemsize == 1 for side in tensors):
        raise Unsupported("a search of 8-bit floats")  # eager accepts them if there are none
    return torch.result_type(*sides)


def lower_searchsorted(
    ctx: LoweringContext,
    node: Node,
    sorted_sequence: Any,
    source: Any,
    right: bool = False,
    side: str | None = None,
    sorter: Any = None,
    **_: Any,
) -> TensorValue:
    is_upper = right or side == "right"
    return lower_search(ctx, node, sorted_sequence, source, is_upper, sorter)


def lower_bucketize(
    ctx: LoweringContext, node: Node, source: Any, boundaries: Any, right: bool = False, **_: Any
) -> TensorValue:
    if len(ctx.get_value(boundaries).axes) != 1:
        raise Unsupported("boundaries of several dimensions, which torch refuses")
    return lower_search(ctx, node, boundaries, source, right)


SEARCH_LOWERINGS: dict[str, Callable[..., Any]] = {
    "searchsorted": lower_searchsorted,
    "bucketize": lower_bucketize,
}
