"""Resampling that is separable: each dimension has its own source positions and weights.

In: for each resampled dimension the taps of a result position. Out: the statement

    result[n, c, y, x] = sum over taps (a, b) of  weight_y[y, a] * weight_x[x, b]
                                                * source[n, c, position_y[y, a], position_x[x, b]]

Interpolation, padding and their gradients have this form. A gradient is written as a gather too: each
input position reads the few outputs that read it, so nothing is scattered. Positions and weights are
small statements over one axis. Code generators compute them once, outside the loops over images.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from fulgurite.fuser.frontend.lowering_context import LoweringContext, convert_dtype
from fulgurite.fuser.frontend.symbolic_sizes import size_to_index
from fulgurite.fuser.frontend.tensor_value import Axes, TensorValue, axis_indices
from fulgurite.fuser.ir import index as indices
from fulgurite.fuser.ir.build_expression import apply, constant_like, mul, where
from fulgurite.fuser.ir.expression import (
    BoundsCheck,
    Constant,
    Expression,
    IndexValue,
    make_masked,
    opmath_dtype,
)
from fulgurite.fuser.ir.index import Axis, Index, IndirectIndex
from fulgurite.fuser.ir.statement import Reduction
from fulgurite.trace.node_meta import fake_value

MAX_UNROLLED_TAPS = 64  # of all dimensions together; more become a reduction
# The value of a result position and a tap number.
ValueOf = Callable[[Index, Index], Expression]
# The element at a point of the result: of the source index and the tap number of each dimension.
ElementAt = Callable[[Axes, list[Index], list[Index]], Expression]


@dataclass(frozen=True)
class AxisTaps:
    """The taps of one dimension.

    position   in the source: an index, or an expression for which a table is made. It is a valid
               index of the source whether the tap counts or not.
    weight     None: 1
    is_used    whether the tap counts; None: always
    interior   a check, and the position of the only tap, of weight 1, where it holds; None: nowhere
    """

    count: int
    position: Callable[[Index, Index], Index | Expression]
    weight: ValueOf | None = None
    is_used: ValueOf | None = None
    interior: Callable[[Index], tuple[BoundsCheck, Index]] | None = None


IDENTITY = AxisTaps(1, lambda at, tap: at)


@dataclass(frozen=True)
class TapReduction:
    """What is made of the taps: their sum or maximum, and a last step."""

    kind: str = "sum"  # or max
    finish: Callable[[Expression, Axes], Expression] = lambda total, axes: total
    element_at: ElementAt | None = None  # None: the element of the source


def lower_taps(
    ctx: LoweringContext,
    node: Node,
    source: TensorValue,
    taps: Sequence[AxisTaps],
    reduction: TapReduction = TapReduction(),  # noqa: B008  (frozen)
) -> TensorValue:
    """Adds the statement of a resampled tensor. `taps` are those of the last dimensions."""
    fake = fake_value(node)
    return TapLowering(ctx, node.name, source, taps).lower(
        reduction, fake[0] if isinstance(fake, tuple) else fake, node
    )


class TapLowering:
    """Lowers resamplings that read the source through the same taps: they share tables."""

    def __init__(
        self, ctx: LoweringContext, name: str, source: TensorValue, taps: Sequence[AxisTaps]
    ) -> None:
        self.ctx, self.name, self.source, self.taps = ctx, name, source, taps
        self.dtype = opmath_dtype(source.dtype)
        self.leading = len(source.axes) - len(taps)
        self.tables: dict[str, TensorValue] = {}
        self.reduction = TapReduction()

    @property
    def is_unrolled(self) -> bool:
        return math.prod(taps.count for taps in self.taps) <= MAX_UNROLLED_TAPS

    def lower(self, reduction: TapReduction, fake: Any, node: Node, part: str = "") -> TensorValue:
        """Adds the statement of a result `fake` of `node`."""
        self.reduction = reduction
        if self.is_unrolled:
            return self.ctx.add_result(
                node, lambda axes: reduction.finish(self.unrolled(axes, [], []), axes), fake, part
            )
        total = self.reduced(fake)
        return self.ctx.add_result(
            node, lambda axes: reduction.finish(total.broadcast_to(axes), axes), fake, part
        )

    def element(self, axes: Axes, at: list[Index], taps: list[Index]) -> Expression:
        if self.reduction.element_at is not None:
            return self.reduction.element_at(axes, at, taps)
        return convert_dtype(self.source.load_at(at), self.dtype)

    def unrolled(self, axes: Axes, at: list[Index], taps: list[Index]) -> Expression:
        """The taps of all dimensions after those in `at`, reduced to one value."""
        dim = len(taps)
        if dim == len(self.taps):
            return self.element(axes, [*axis_indices(axes)[: self.leading], *at], taps)
        terms = []
        for tap in map(Index, range(self.taps[dim].count)):
            loops = self.loops(axes, dim, tap)
            inner = self.unrolled(axes, [*at, self.position(dim, loops, tap)], [*taps, tap])
            terms.append(self.weighted(inner, dim, loops, tap))
        name = "add" if self.reduction.kind == "sum" else "maximum"
        general = functools.reduce(lambda a, b: apply(name, a, b), terms)
        interior = self.taps[dim].interior
        if interior is None or self.ctx.uses_atomics:  # GPU kernels have no loops to split
            return general
        check, position = interior(indices.from_atom(axes[self.leading + dim]))
        inside = self.unrolled(axes, [*at, position], [*taps, indices.ZERO])
        return make_masked((check,), inside, general)

    def loops(self, axes: Axes, dim: int, tap: Index) -> list[tuple[Index, Axis]]:
        """The axes of a table of this dimension: positions, and taps if they are a loop."""
        axis = axes[self.leading + dim]
        over = [(tap, tap.single_axis)] if tap.single_axis is not None else []
        return [(indices.from_atom(axis), axis), *over]

    def position(self, dim: int, loops: list[tuple[Index, Axis]], tap: Index) -> Index:
        """The index of a tap in the source."""
        position = self.taps[dim].position(loops[0][0], tap)
        if isinstance(position, Index):
            return position

        def value_of(at: Index, tap: Index) -> Expression:
            value = self.taps[dim].position(at, tap)
            assert not isinstance(value, Index), "some positions are indices, others are not"
            return value

        value = self.table(f"position{dim}", value_of, loops, tap, torch.int64)
        return make_position(value, self.source.sizes[self.leading + dim])

    def weighted(
        self, value: Expression, dim: int, loops: list[tuple[Index, Axis]], tap: Index
    ) -> Expression:
        """A value with the weight of a tap; neutral where the tap does not count."""
        taps = self.taps[dim]
        if taps.weight is not None:
            weight = self.table(f"weight{dim}", taps.weight, loops, tap, self.dtype)
            value = mul(value, convert_dtype(weight, self.dtype))
        is_used = self.is_used(dim, loops, tap)
        if is_used is None:
            return value
        neutral = 0 if self.reduction.kind == "sum" else lowest(value.dtype)
        return where(is_used, value, constant_like(neutral, value))

    def is_used(self, dim: int, loops: list[tuple[Index, Axis]], tap: Index) -> Expression | None:
        """Whether a tap counts; None if it always does."""
        test = self.taps[dim].is_used
        if test is None:
            return None
        is_used = self.table(f"used{dim}", test, loops, tap, torch.bool)
        return None if is_used == Constant(True, torch.bool) else is_used

    def table(
        self,
        name: str,
        value_of: ValueOf,
        loops: list[tuple[Index, Axis]],
        tap: Index,
        dtype: torch.dtype,
    ) -> Expression:
        """An element of the small statement that holds this value for every position."""
        suffix = f"_{tap}" if tap.is_constant else ""
        key = f"{self.name}_{name}{suffix}"
        if key in self.tables:
            return self.tables[key].load_at([index for index, _ in loops])
        axes = indices.make_axes([axis.size for _, axis in loops])
        own = dict(zip((axis for _, axis in loops), axis_indices(axes), strict=True))
        expression = value_of(own[loops[0][1]], tap.substitute(own))
        if isinstance(expression, Constant):
            return expression
        expression = convert_dtype(expression, dtype)
        self.tables[key] = self.ctx.add_statement(key, dtype, axes, expression)
        return self.tables[key].load_at([index for index, _ in loops])

    def reduced(self, fake: Any) -> TensorValue:
        """Many taps: a statement that reduces over axes of taps."""
        axes = indices.make_axes([size_to_index(size) for size in fake.shape])
        over = tuple(Axis(f"r{d}", Index(taps.count)) for d, taps in enumerate(self.taps))
        taps = axis_indices(over)
        loops = [self.loops(axes, dim, tap) for dim, tap in enumerate(taps)]
        at = [self.position(dim, loops[dim], tap) for dim, tap in enumerate(taps)]
        value = self.element(axes, [*axis_indices(axes)[: self.leading], *at], taps)
        for dim, tap in enumerate(taps):
            value = self.weighted(value, dim, loops[dim], tap)
        kind = self.reduction.kind
        return self.ctx.add_statement(
            f"{self.name}_{kind}", value.dtype, axes, value, Reduction(kind, over)
        )


def lowest(dtype: torch.dtype) -> float | int:
    """The neutral element of a maximum."""
    return -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min


# ---- positions and their numbers -----------------------------------------------------------------


def add_position_table(
    ctx: LoweringContext,
    name: str,
    result_size: Index,
    source_size: Index,
    position_at: Callable[[Index], Expression],
) -> Callable[[Index], Index]:
    """Adds the statement of source positions (int64, in range), and returns how to look one up."""
    (axis,) = indices.make_axes([result_size])
    table = ctx.add_statement(name, torch.int64, (axis,), position_at(indices.from_atom(axis)))
    return lambda at: make_position(table.load_at([at]), source_size)


def make_position(value: Expression, size: Index) -> Index:
    """An index that is computed, and known to be in range."""
    if isinstance(value, Constant):
        return Index(int(value.value))
    if isinstance(value, IndexValue):
        return value.index
    return indices.from_atom(IndirectIndex(value, size, wraps_negative=False, is_checked=False))


def integer(index: Index | int) -> Expression:
    """An index as a number."""
    index = indices.as_index(index)
    if index.is_constant:
        return Constant(index.constant, torch.int64)
    return IndexValue(index, torch.int64)


def to_float(index: Index, dtype: torch.dtype) -> Expression:
    return convert_dtype(integer(index), dtype)


def clamp_position(value: Expression, size: Index) -> Expression:
    """An integer between 0 and size - 1."""
    return apply("maximum", apply("minimum", value, integer(size - 1)), integer(0))


def is_between(index: Index, low: Index | int, high: Index | int) -> Expression:
    """Whether low <= index < high."""
    above = apply("ge", integer(index), integer(low))
    return apply("and", above, apply("lt", integer(index), integer(high)))
