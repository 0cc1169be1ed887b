"""Lowerings of `embedding_bag`. Same calling convention as `views.py`.

Bag b holds the lookups from offsets[b] to offsets[b + 1]. A scan finds the bag of each lookup, and the
results are indexed stores:

    bag[k]    = (how many bags start at k or before) - 1
    out[b, j] = sum, mean or max of weight[indices[k], j] over all k with bag[k] == b

Bags of equal length, which a matrix of indices has, need no scan, and their sums are reductions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from fulgurite.fuser.frontend.index_gradients import ONE, ZERO
from fulgurite.fuser.frontend.indexed_store import (
    IndexedStore,
    ResultLayout,
    add_indexed_store,
    identity_element,
    make_index,
)
from fulgurite.fuser.frontend.lowering_context import LoweringContext, convert_dtype, make_constant
from fulgurite.fuser.frontend.tensor_value import Axes, TensorValue, axis_indices
from fulgurite.fuser.ir import index as indices
from fulgurite.fuser.ir.build_expression import apply, div, mul, where
from fulgurite.fuser.ir.errors import Unsupported
from fulgurite.fuser.ir.expression import (
    BoundsCheck,
    Constant,
    Expression,
    IndexValue,
    make_masked,
    opmath_dtype,
)
from fulgurite.fuser.ir.index import Index, IndirectIndex
from fulgurite.fuser.ir.statement import Reduction, Scan
from fulgurite.trace.node_meta import fake_value

INT = torch.int64
SUM, MEAN, MAX = 0, 1, 2  # modes
# dtypes whose sums torch's CPU kernel adds from the offsets alone, if there is no padding index
FAST_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def find_bags(
    ctx: LoweringContext, node: Node, offsets: TensorValue, count: Index, num_bags: Index
) -> TensorValue:
    """The bag of each lookup: how many bags start there or before, less one.

    The first bag must start at 0, and none before the one in front of it: torch raises then.
    """

    def index_at(axes: Axes) -> Sequence[Index]:
        (bag,) = axis_indices(axes)
        start = convert_dtype(offsets.load_at([bag]), INT)
        before = convert_dtype(offsets.load_at([bag - 1]), INT)
        before = make_masked((BoundsCheck(bag - 1, offsets.sizes[0]),), before, ZERO)
        is_first = apply("eq", IndexValue(bag, INT), ZERO)
        is_zero, is_after = apply("eq", start, ZERO), apply("ge", start, before)
        is_valid = where(is_first, is_zero, is_after)
        return [make_index(where(is_valid, start, Constant(-1, INT)), count + 1)]

    store = IndexedStore("sum", (num_bags,), index_at, lambda _: ONE)
    layout = ResultLayout(f"{node.name}_starts", INT, (count + 1,))
    starts = add_indexed_store(ctx, layout, lambda _: ZERO, store)
    (axis,) = axes = indices.make_axes((count,))
    started = starts.load_at(axis_indices(axes))
    name = f"{node.name}_started"
    scanned = ctx.add_statement(name, INT, axes, started, scan=Scan("sum", axis))
    bag = apply("sub", scanned.broadcast_to(axes), ONE)
    return TensorValue(axes, bag, INT)


def lower_embedding_bag(
    ctx: LoweringContext,
    node: Node,
    weight: Any,
    indices: Any,
    offsets: Any,
    scale_grad_by_freq: bool = False,
    mode: int = SUM,
    sparse: bool = False,
    per_sample_weights: Any = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> tuple[TensorValue, ...]:
    scales = None if per_sample_weights is None else ctx.get_value(per_sample_weights)
    lookup = _BagLookup(
        ctx,
        node,
        ctx.get_value(weight),
        ctx.get_value(indices),
        ctx.get_value(offsets),
        scales,
        mode,
        include_last_offset,
        padding_idx,
    )
    return lookup.run()


@dataclass(frozen=True)
class _BagLookup:
    """Adds the statements of one `embedding_bag`: its results are those of torch's op."""

    ctx: LoweringContext
    node: Node
    table: TensorValue
    rows: TensorValue
    offsets: TensorValue
    scales: TensorValue | None
    mode: int
    has_last_offset: bool
    padding_idx: int

    @property
    def wide(self) -> torch.dtype:
        return opmath_dtype(self.table.dtype)

    @property
    def count(self) -> Index:
        """How many lookups there are."""
        return self.rows.sizes[0]

    @property
    def num_bags(self) -> Index:
        return self.offsets.sizes[0] - int(self.has_last_offset)

    @property
    def is_on_cpu(self) -> bool:
        return bool(fake_value(self.node)[0].device.type == "cpu")

    def run(self) -> tuple[TensorValue, ...]:
        low, _ = self.count.bounds()
        if self.num_bags == 0 or (low or 0) < 1:
            raise Unsupported("embedding_bag without bags or, perhaps, lookups")
        if self.length is None:
            bags = find_bags(self.ctx, self.node, self.offsets, self.count, self.num_bags)
        else:
            axes = indices.make_axes((self.count,))
            position = indices.from_atom(axes[0])
            bags = TensorValue(axes, IndexValue(indices.floordiv(position, self.length), INT), INT)
        sizes = self.count_lookups(bags)
        if self.mode == MAX:
            result, largest = self.find_maxima(bags, sizes)
        else:
            result, largest = self.add_sums(bags, sizes), None
        return (result, *self.auxiliary_results(bags, sizes, largest))

    @functools.cached_property
    def length(self) -> Index | None:
        """The length of all bags, if the offsets are multiples of it; otherwise None."""
        source = getattr(self.offsets.expression, "name", None)
        statement = next((s for s in self.ctx.statements if s.name == source), None)
        if self.has_last_offset or statement is None or self.offsets.axes != statement.axes:
            return None
        start, (bag,) = statement.expression, statement.axes
        if not isinstance(start, IndexValue):
            return None
        step = start.index.coefficient(bag)
        if step is None or start.index != indices.from_atom(bag) * step:
            return None
        return step if step * self.num_bags == self.count else None

    def is_padding(self, k: Index) -> Expression:
        row = convert_dtype(self.rows.load_at([k]), INT)
        return apply("eq", row, Constant(self.padding_idx, INT))

    def without_padding(self, k: Index, value: Expression, other: Expression) -> Expression:
        return value if self.padding_idx < 0 else where(self.is_padding(k), other, value)

    def element(self, k: Index, column: Index) -> Expression:
        row = make_index(self.rows.load_at([k]), self.table.sizes[0])
        return convert_dtype(self.table.load_at([row, column]), self.wide)

    def bag_of(self, bags: TensorValue, k: Index) -> Index:
        return make_index(bags.load_at([k]), self.num_bags)

    def count_lookups(self, bags: TensorValue) -> TensorValue:
        """How many lookups each bag has, without the padding."""
        if self.length is not None and self.padding_idx < 0:
            axes = indices.make_axes((self.num_bags,))
            return TensorValue(axes, IndexValue(self.length, INT), INT)

        def index_at(axes: Axes) -> Sequence[Index]:
            return [self.bag_of(bags, axis_indices(axes)[0])]

        def value_at(axes: Axes) -> Expression:
            return self.without_padding(axis_indices(axes)[0], ONE, ZERO)

        store = IndexedStore("sum", (self.count,), index_at, value_at)
        layout = ResultLayout(f"{self.node.name}_sizes", INT, (self.num_bags,))
        return add_indexed_store(self.ctx, layout, lambda _: ZERO, store)

    def store(
        self,
        name: str,
        kind: str,
        dtype: torch.dtype,
        bags: TensorValue,
        initial: Expression,
        value_at: Callable[[Index, Index], Expression],
    ) -> TensorValue:
        """A value for each bag and column, combined from those of its lookups."""

        def index_at(axes: Axes) -> Sequence[Index]:
            k, column = axis_indices(axes)
            return [self.bag_of(bags, k), column]

        def at_point(axes: Axes) -> Expression:
            k, column = axis_indices(axes)
            return value_at(k, column)

        columns = self.table.sizes[1]
        store = IndexedStore(kind, (self.count, columns), index_at, at_point)
        layout = ResultLayout(f"{self.node.name}_{name}", dtype, (self.num_bags, columns))
        return add_indexed_store(self.ctx, layout, lambda _: initial, store)

    def add_sums(self, bags: TensorValue, sizes: TensorValue) -> TensorValue:
        zero = make_constant(0, self.wide)
        ends_early = (
            self.has_last_offset
            and self.is_on_cpu
            and self.padding_idx < 0
            and self.table.dtype in FAST_DTYPES
        )

        def value_at(k: Index, column: Index) -> Expression:
            value = self.element(k, column)
            if self.scales is not None:
                value = mul(value, convert_dtype(self.scales.load_at([k]), self.wide))
            if ends_early:  # lookups from the last offset on are in no bag
                end = convert_dtype(self.offsets.load_at([self.num_bags]), INT)
                value = where(apply("lt", IndexValue(k, INT), end), value, zero)
            return self.without_padding(k, value, zero)

        if self.length is None:
            total = self.store("sum", "sum", self.wide, bags, zero, value_at)
        else:
            bag, column = axes = indices.make_axes((self.num_bags, self.table.sizes[1]))
            (position,) = indices.make_axes((self.length,), "r")
            k = indices.from_atom(bag) * self.length + indices.from_atom(position)
            total = self.ctx.add_statement(
                f"{self.node.name}_sum",
                self.wide,
                axes,
                value_at(k, indices.from_atom(column)),
                Reduction("sum", (position,)),
            )

        def result_at(axes: Axes) -> Expression:
            value = total.load_at(axis_indices(axes))
            if self.mode != MEAN:
                return value
            number = sizes.load_at([indices.from_atom(axes[0])])
            return div(value, convert_dtype(apply("maximum", number, ONE), self.wide))

        return self.ctx.add_result(self.node, result_at, fake_value(self.node)[0])

    def find_maxima(
        self, bags: TensorValue, sizes: TensorValue
    ) -> tuple[TensorValue, Callable[[Index, Index], Expression]]:
        """The largest elements, and the rows where they are.

        torch keeps the first element of a bag until another is greater. So only a NaN that comes
        first stays.
        """
        none = IndexValue(self.count, INT)
        lowest = identity_element("max", self.wide)
        firsts = self.find_first_lookups(bags)

        def value_at(k: Index, column: Index) -> Expression:
            value = self.element(k, column)
            first = firsts.load_at([self.bag_of(bags, k)])
            is_later = apply("ne", first, IndexValue(k, INT))
            is_skipped = apply("and", apply("ne", value, value), is_later)
            return self.without_padding(k, where(is_skipped, lowest, value), lowest)

        top = self.store("max", "max", self.wide, bags, lowest, value_at)

        def position_at(k: Index, column: Index) -> Expression:
            best, value = top.load_at([self.bag_of(bags, k), column]), self.element(k, column)
            is_best = apply("or", apply("eq", value, best), apply("ne", best, best))
            return self.without_padding(k, where(is_best, IndexValue(k, INT), none), none)

        positions = self.store("position", "min", INT, bags, none, position_at)

        def has_lookups(bag: Index) -> Expression:
            return apply("gt", sizes.load_at([bag]), ZERO)

        def result_at(axes: Axes) -> Expression:
            at = axis_indices(axes)
            return where(has_lookups(at[0]), top.load_at(at), make_constant(0, self.wide))

        def row_at(bag: Index, column: Index) -> Expression:
            position = where(has_lookups(bag), positions.load_at([bag, column]), ZERO)
            k = indices.from_atom(IndirectIndex(position, self.count, False, is_checked=False))
            none_found = Constant(0 if self.is_on_cpu else -1, INT)
            row = convert_dtype(self.rows.load_at([k]), INT)
            return where(has_lookups(bag), row, none_found)

        result = self.ctx.add_result(self.node, result_at, fake_value(self.node)[0])
        return result, row_at

    def find_first_lookups(self, bags: TensorValue) -> TensorValue:
        """The first lookup of each bag that is no padding."""
        none = IndexValue(self.count, INT)

        def index_at(axes: Axes) -> Sequence[Index]:
            return [self.bag_of(bags, axis_indices(axes)[0])]

        def value_at(axes: Axes) -> Expression:
            (k,) = axis_indices(axes)
            return self.without_padding(k, IndexValue(k, INT), none)

        store = IndexedStore("min", (self.count,), index_at, value_at)
        layout = ResultLayout(f"{self.node.name}_first", INT, (self.num_bags,))
        return add_indexed_store(self.ctx, layout, lambda _: none, store)

    def auxiliary_results(
        self,
        bags: TensorValue,
        sizes: TensorValue,
        largest: Callable[[Index, Index], Expression] | None,
    ) -> tuple[TensorValue, ...]:
        """Bags of lookups, sizes of bags and rows of maxima, which gradients read.

        The kernels of CPUs leave the sizes of sums 0, and return those of means twice.
        """
        _, *fakes = fake_value(self.node)

        def bag_at(axes: Axes) -> Expression:
            return bags.load_at(axis_indices(axes))

        def size_at(axes: Axes) -> Expression:
            if self.mode == SUM and self.is_on_cpu:
                return ZERO
            (bag,) = axis_indices(axes)
            inside = (
                BoundsCheck(bag, self.num_bags),
            )  # results may have one more: the last offset
            return make_masked(inside, sizes.load_at([bag]), ZERO)

        def largest_at(axes: Axes) -> Expression:
            return size_at(axes) if largest is None else largest(*axis_indices(axes))

        values = zip(("bags", "bag_size", "max_indices"), (bag_at, size_at, largest_at), fakes)
        return tuple(
            self.ctx.add_result(self.node, value_at, fake, part) for part, value_at, fake in values
        )


EMBEDDING_BAG_LOWERINGS: dict[str, Callable[..., Any]] = {
    "_embedding_bag": lower_embedding_bag,
    "_embedding_bag_forward_only": lower_embedding_bag,
}
