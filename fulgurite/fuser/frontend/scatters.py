"""Lowerings of ops that store at indices which a tensor holds. Same calling convention as `views.py`.

`scatter` and its variants have an index for every element; `index_add` and its variants one for
every row of a dimension; `index_put` indexes several dimensions at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import guard_or_false

from fulgurite.fuser.frontend.gathers import load_checked
from fulgurite.fuser.frontend.indexed_store import (
    IndexedStore,
    ResultLayout,
    add_indexed_store,
    identity_element,
    make_index,
    node_layout,
)
from fulgurite.fuser.frontend.lowering_context import LoweringContext, convert_dtype
from fulgurite.fuser.frontend.ranked_scatter import lower_ranked_scatter
from fulgurite.fuser.frontend.symbolic_sizes import size_to_index
from fulgurite.fuser.frontend.tensor_value import (
    Axes,
    TensorValue,
    axis_indices,
    canonicalize_dim,
    reshape_value,
)
from fulgurite.fuser.ir import index as indices
from fulgurite.fuser.ir.build_expression import apply, mul, where
from fulgurite.fuser.ir.errors import Unsupported
from fulgurite.fuser.ir.expression import Constant, Expression
from fulgurite.fuser.ir.index import Index
from fulgurite.fuser.ir.statement import Scan
from fulgurite.trace.node_meta import fake_value

# How reductions of torch's ops are combined.
KINDS = {
    "sum": "sum",
    "add": "sum",
    "mean": "sum",
    "prod": "prod",
    "multiply": "prod",
    "amax": "max",
    "amin": "min",
}
INDEX_REDUCTIONS = ("prod", "mean", "amax", "amin")


def lower_scatter(
    ctx: LoweringContext,
    node: Node,
    source: Any,
    dim: int,
    index: Any,
    src: Any = None,
    value: Any = None,
    reduce: str | None = None,
) -> TensorValue:
    base = ctx.get_value(source)
    given = src if src is not None else value
    if reduce is None:
        ranked = lower_ranked_scatter(ctx, node, base, dim, ctx.get_value(index), given)
        if ranked is not None:
            return ranked
    kind = "set" if reduce is None else KINDS[reduce]
    store = _scatter_along(ctx, base, dim, index, given, kind, fake_value(node).dtype)
    return _add_store(ctx, node, base, store)


def lower_scatter_add(
    ctx: LoweringContext, node: Node, source: Any, dim: int, index: Any, src: Any
) -> TensorValue:
    return lower_scatter(ctx, node, source, dim, index, src, reduce="add")


def lower_scatter_reduce(
    ctx: LoweringContext,
    node: Node,
    source: Any,
    dim: int,
    index: Any,
    src: Any,
    reduce: str,
    include_self: bool = True,
) -> TensorValue:
    base, dtype = ctx.get_value(source), fake_value(node).dtype
    store = _scatter_along(ctx, base, dim, index, src, KINDS[reduce], dtype)
    return _add_reducing_store(ctx, node, base, store, reduce, include_self)


def _scatter_along(
    ctx: LoweringContext,
    base: TensorValue,
    dim: int,
    index: Any,
    given: Any,
    kind: str,
    dtype: torch.dtype,
) -> IndexedStore:
    """The store of `scatter`: only the position along `dim` comes from the index."""
    index_value = _at_least_1d(ctx.get_value(index))
    sizes = _at_least_1d(base).sizes
    dim = canonicalize_dim(dim, len(sizes))
    if len(index_value.sizes) != len(sizes):
        raise Unsupported("scatter with an index of another rank")
    if _is_tensor(ctx, given) and len(_at_least_1d(ctx.get_value(given)).sizes) != len(sizes):
        raise Unsupported(
            "scatter with a source of another rank"
        )  # torch takes it if the index is empty

    def index_at(axes: Axes) -> Sequence[Index]:
        at = axis_indices(axes)
        at[dim] = make_index(index_value.load_at(axis_indices(axes)), sizes[dim])
        return at

    def value_at(axes: Axes) -> Expression:
        if _is_tensor(ctx, given):
            return _at_least_1d(ctx.get_value(given)).load_at(axis_indices(axes))
        return ctx.read_operand(given, (), dtype)

    return IndexedStore(kind, index_value.sizes, index_at, value_at)


def _is_tensor(ctx: LoweringContext, argument: Any) -> bool:
    return isinstance(argument, Node) and isinstance(ctx.values.get(argument), TensorValue)


def _at_least_1d(value: TensorValue) -> TensorValue:
    return value if value.axes else value.reindex((indices.ONE,), lambda _: [])


def _add_store(
    ctx: LoweringContext, node: Node, base: TensorValue, store: IndexedStore
) -> TensorValue:
    return add_indexed_store(ctx, node_layout(node, fake_value(node)), base.broadcast_to, store)


def _add_reducing_store(
    ctx: LoweringContext,
    node: Node,
    base: TensorValue,
    store: IndexedStore,
    reduce: str,
    include_self: bool,
) -> TensorValue:
    """A store that reduces. Without `include_self`, elements that are stored to start afresh."""
    fake = fake_value(node)
    if reduce == "mean" and fake.dtype == torch.bool:
        raise Unsupported("a mean of bool, which torch refuses")
    start = base
    if not include_self:
        clear = replace(
            store, kind="set", value_at=lambda _: identity_element(store.kind, fake.dtype)
        )
        layout = node_layout(node, fake, "cleared")
        start = add_indexed_store(ctx, layout, base.broadcast_to, clear)
    if reduce != "mean":
        return _add_store(ctx, node, start, store)
    total = add_indexed_store(ctx, node_layout(node, fake, "sum"), start.broadcast_to, store)
    layout = replace(node_layout(node, fake, "count"), dtype=torch.int64)
    ones = replace(store, value_at=lambda _: Constant(1, torch.int64))
    first = Constant(int(include_self), torch.int64)
    count = add_indexed_store(ctx, layout, lambda _: first, ones)

    def mean_at(axes: Axes) -> Expression:
        number = apply("maximum", count.broadcast_to(axes), Constant(1, torch.int64))
        divisor = convert_dtype(number, fake.dtype)
        division = "div" if fake.dtype.is_floating_point else "floor_divide"
        return apply(division, total.broadcast_to(axes), divisor)

    return ctx.add_result(node, mean_at)


# ---- one index for every row of a dimension ------------------------------------------------------


def _index_rows(
    ctx: LoweringContext,
    base: TensorValue,
    dim: int,
    index: Any,
    kind: str,
    value_at: Callable[[Axes], Expression],
    wraps_negative: bool = False,
) -> IndexedStore:
    """The store of `index_add` and its variants: row k of the values goes to row index[k]."""
    index_value, sizes = _at_least_1d(ctx.get_value(index)), list(_at_least_1d(base).sizes)
    dim = canonicalize_dim(dim, len(sizes))
    size = sizes[dim]
    sizes[dim] = index_value.sizes[0]

    def index_at(axes: Axes) -> Sequence[Index]:
        at = axis_indices(axes)
        at[dim] = make_index(index_value.load_at([at[dim]]), size, wraps_negative)
        return at

    return IndexedStore(kind, tuple(sizes), index_at, value_at)


def _read_rows(
    ctx: LoweringContext, base: TensorValue, dim: int, index: Any, tensor: Any
) -> Callable[[Axes], Expression]:
    """The values of a source tensor. A 0-d source is one row."""
    source = ctx.get_value(tensor)
    value, sizes = _at_least_1d(source), list(_at_least_1d(base).sizes)
    sizes[canonicalize_dim(dim, len(sizes))] = _at_least_1d(ctx.get_value(index)).sizes[0]
    is_wider = not base.axes and source.axes
    if is_wider or value.sizes != tuple(sizes) or source.dtype != base.dtype:
        raise Unsupported("a source of other sizes or of another dtype, which torch refuses")

    def value_at(axes: Axes) -> Expression:
        return value.load_at(axis_indices(axes))

    return value_at


def lower_index_add(
    ctx: LoweringContext,
    node: Node,
    source: Any,
    dim: int,
    index: Any,
    update: Any,
    alpha: Any = 1,
) -> TensorValue:
    base, dtype = ctx.get_value(source), fake_value(node).dtype
    rows = _read_rows(ctx, base, dim, index, update)

    def value_at(axes: Axes) -> Expression:
        value = convert_dtype(rows(axes), dtype)
        is_one = isinstance(alpha, int | float) and alpha == 1
        return value if is_one else mul(value, ctx.read_operand(alpha, (), dtype))

    return _add_store(ctx, node, base, _index_rows(ctx, base, dim, index, "sum", value_at))


def lower_index_copy(
    ctx: LoweringContext, node: Node, source: Any, dim: int, index: Any, update: Any
) -> TensorValue:
    base = ctx.get_value(source)
    rows = _read_rows(ctx, base, dim, index, update)
    return _add_store(ctx, node, base, _index_rows(ctx, base, dim, index, "set", rows))


def lower_index_fill(
    ctx: LoweringContext, node: Node, source: Any, dim: int, index: Any, value: Any
) -> TensorValue:
    base, dtype = ctx.get_value(source), fake_value(node).dtype

    def value_at(axes: Axes) -> Expression:
        return ctx.read_operand(value, (), dtype)

    store = _index_rows(ctx, base, dim, index, "set", value_at, wraps_negative=True)
    return _add_store(ctx, node, base, store)


def lower_index_reduce(
    ctx: LoweringContext,
    node: Node,
    source: Any,
    dim: int,
    index: Any,
    update: Any,
    reduce: str,
    include_self: bool = True,
) -> TensorValue:
    base = ctx.get_value(source)
    rows = _read_rows(ctx, base, dim, index, update)
    if reduce not in INDEX_REDUCTIONS or (base.dtype == torch.bool and not include_self):
        raise Unsupported(f"index_reduce {reduce} of {base.dtype}, which torch refuses")
    store = _index_rows(ctx, base, dim, index, KINDS[reduce], rows)
    return _add_reducing_store(ctx, node, base, store, reduce, include_self)


# ---- several indexed dimensions ------------------------------------------------------------------


def lower_index_put(
    ctx: LoweringContext,
    node: Node,
    source: Any,
    indices: Sequence[Any],
    values: Any,
    accumulate: bool = False,
) -> TensorValue:
    base, stored = ctx.get_value(source), ctx.get_value(values)
    if stored.dtype != base.dtype:
        raise Unsupported("index_put of another dtype, which torch refuses")
    index_values = [None if i is None else ctx.get_value(i) for i in indices]
    given = [i for i in index_values if i is not None]
    if any(i.dtype in (torch.bool, torch.uint8) for i in given):
        return _put_where(ctx, node, base, index_values, stored, accumulate)
    index_values += [None] * (len(base.axes) - len(index_values))
    dims = [d for d, i in enumerate(index_values) if i is not None]
    common = _broadcast_sizes([i.sizes for i in given])
    # Like numpy: the indexed dimensions go to the front unless they are adjacent.
    is_adjacent = dims == list(range(dims[0], dims[-1] + 1))
    front = dims[0] if is_adjacent else 0
    rest = [base.sizes[d] for d, i in enumerate(index_values) if i is None]
    sizes = (*rest[:front], *common, *rest[front:])
    tensors = [fake_value(i) for i in (source, values, *indices) if i is not None]
    if not _broadcasts_to(stored.sizes, sizes, [size for t in tensors for size in t.shape]):
        raise Unsupported("index_put of values that don't broadcast, which torch refuses")

    def index_at(axes: Axes) -> Sequence[Index]:
        inner = axes[front : front + len(common)]
        outer = iter([*axes[:front], *axes[front + len(common) :]])
        at: list[Index] = []
        for size, value in zip(base.sizes, index_values, strict=True):
            if value is None:
                at.append(axis_indices((next(outer),))[0])
            else:
                at.append(make_index(value.broadcast_to(inner), size, wraps_negative=True))
        return at

    store = IndexedStore("sum" if accumulate else "set", sizes, index_at, stored.broadcast_to)
    return _add_store(ctx, node, base, store)


def _broadcast_sizes(shapes: Sequence[tuple[Index, ...]]) -> tuple[Index, ...]:
    rank = max(len(shape) for shape in shapes)
    padded = [(indices.ONE,) * (rank - len(shape)) + shape for shape in shapes]
    common = tuple(
        next((size for size in sizes if size != 1), indices.ONE)
        for sizes in zip(*padded, strict=True)
    )
    if not all(_broadcasts_to(shape, common) for shape in shapes):
        raise Unsupported("index tensors that don't broadcast, which torch refuses")
    return common


def _broadcasts_to(
    shape: Sequence[Index], sizes: Sequence[Index], given: Sequence[Any] = ()
) -> bool:
    """Whether a shape broadcasts to these sizes: certainly, or by a guard on symbols among `given`.

    torch's FakeTensor rule of `index_put` does not compare the sizes.
    """
    if len(shape) > len(sizes):
        return False
    symbols = {size_to_index(size): size for size in given if isinstance(size, torch.SymInt)}

    def is_equal(own: Index, size: Index) -> bool:
        if own == size or own not in symbols or size not in symbols:
            return own == size
        return guard_or_false(symbols[own] == symbols[size])

    pairs = zip(reversed(shape), reversed(sizes), strict=False)
    return all(own == 1 or is_equal(own, size) for own, size in pairs)


def _put_where(
    ctx: LoweringContext,
    node: Node,
    base: TensorValue,
    index_values: Sequence[TensorValue | None],
    stored: TensorValue,
    accumulate: bool,
) -> TensorValue:
    """`x[:, mask] = value` as a selection, where each element gets a value that the mask can't move."""
    given = [(d, i) for d, i in enumerate(index_values) if i is not None]
    start, mask = given[0]
    if len(given) > 1 or mask.dtype != torch.bool:
        raise Unsupported("index_put with a mask and another index")
    end = start + len(mask.axes)
    after = len(base.axes) - end
    dims = list(stored.sizes)
    if mask.sizes != base.sizes[start:end]:
        raise Unsupported("a mask of other sizes, which torch refuses")
    if not _broadcasts_to(dims, (*base.sizes[:start], indices.ONE, *base.sizes[end:])):
        raise Unsupported("index_put with a mask, whose values depend on how many are selected")
    dtype = fake_value(node).dtype

    def expression_at(axes: Axes) -> Expression:
        at = axis_indices(axes)
        # dimensions of the values: those before the mask, one for all selected, those after it
        position = [*at[:start], indices.ZERO, *at[end:]][start + 1 + after - len(dims) :]
        pairs = zip(dims, position, strict=True)
        new = stored.load_at([indices.ZERO if size == 1 else index for size, index in pairs])
        new, old = convert_dtype(new, dtype), base.broadcast_to(axes)
        if accumulate:
            new = apply("or" if dtype == torch.bool else "add", old, new)
        return where(mask.load_at(at[start:end]), new, old)

    return ctx.add_result(node, expression_at)


def lower_put(
    ctx: LoweringContext,
    node: Node,
    source: Any,
    index: Any,
    update: Any,
    accumulate: bool = False,
) -> TensorValue:
    """`put`: indices into the flattened tensor."""
    base, index_value, new = map(ctx.get_value, (source, index, update))
    dtype, size = fake_value(node).dtype, indices.product(base.sizes)
    flat = reshape_value(base, (size,))
    positions = reshape_value(index_value, (indices.product(index_value.sizes),))
    values = reshape_value(new, (indices.product(new.sizes),))
    if values.sizes != positions.sizes or new.dtype != base.dtype:
        raise Unsupported("put of another number of elements or dtype, which torch refuses")

    def index_at(axes: Axes) -> Sequence[Index]:
        return [make_index(positions.broadcast_to(axes), size, wraps_negative=True)]

    kind = "sum" if accumulate else "set"
    store = IndexedStore(kind, positions.sizes, index_at, values.broadcast_to)
    layout = ResultLayout(f"{node.name}_flat", dtype, (size,))
    result = add_indexed_store(ctx, layout, flat.broadcast_to, store)
    return reshape_value(result, base.sizes)


def lower_masked_scatter(
    ctx: LoweringContext, node: Node, source: Any, mask: Any, update: Any
) -> TensorValue:
    """Element k of the source goes to the k-th selected element: a scan of the mask and a gather."""
    base, chosen, new = map(ctx.get_value, (source, mask, update))
    fake = fake_value(node)
    sizes = node_layout(node, fake).sizes
    total, available = indices.product(sizes), indices.product(new.sizes)
    if available == 0 or total == 0:
        return ctx.add_result(node, base.broadcast_to)
    axes = indices.make_axes(sizes)
    flags = TensorValue(axes, convert_dtype(chosen.broadcast_to(axes), torch.int64), torch.int64)
    flat_flags, flat_new = reshape_value(flags, (total,)), reshape_value(new, (available,))
    (axis,) = indices.make_axes((total,))
    counted = ctx.add_statement(
        f"{node.name}_count",
        torch.int64,
        (axis,),
        flat_flags.broadcast_to((axis,)),
        scan=Scan("sum", axis),
    )
    count = reshape_value(counted, sizes)

    def expression_at(axes: Axes) -> Expression:
        is_chosen = chosen.broadcast_to(axes)
        previous = apply("sub", count.broadcast_to(axes), Constant(1, torch.int64))
        position = where(is_chosen, previous, Constant(0, torch.int64))
        value = load_checked(ctx, flat_new, [make_index(position, available)])
        return where(is_chosen, value, base.broadcast_to(axes))

    return ctx.add_result(node, expression_at)


SCATTER_LOWERINGS: dict[str, Callable[..., Any]] = {
    "scatter": lower_scatter,
    "scatter_add": lower_scatter_add,
    "scatter_reduce": lower_scatter_reduce,
    "index_add": lower_index_add,
    "index_copy": lower_index_copy,
    "index_fill": lower_index_fill,
    "index_reduce": lower_index_reduce,
    "index_put": lower_index_put,
    "_unsafe_index_put": lower_index_put,
    "put": lower_put,
    "masked_scatter": lower_masked_scatter,
}
