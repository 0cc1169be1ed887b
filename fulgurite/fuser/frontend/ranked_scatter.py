"""Lowers a scatter at the positions of a top-k of the same rows, as routers do to mask groups.

The positions are distinct and few. Each element of a row compares its own position with all of
them, so there is no indexed store, and the kernel of the top-k goes on.

    rank[i, e] = min_k where(index[i, k] == e, k, K)
    out[i, e]  = where(rank[i, e] < K, src[i, rank[i, e]], self[i, e])
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from fulgurite.fuser.frontend.lowering_context import LoweringContext, convert_dtype
from fulgurite.fuser.frontend.tensor_value import Axes, TensorValue, axis_indices, canonicalize_dim
from fulgurite.fuser.ir import index as indices
from fulgurite.fuser.ir.build_expression import apply, where
from fulgurite.fuser.ir.expression import Constant, Expression, IndexValue, Load
from fulgurite.fuser.ir.index import Axis, Index, IndirectIndex
from fulgurite.fuser.ir.statement import Reduction
from fulgurite.trace.node_meta import fake_value

MAX_POSITIONS = 16  # that each element of a row is compared with
INT = torch.int64


def lower_ranked_scatter(
    ctx: LoweringContext, node: Node, base: TensorValue, dim: int, index: TensorValue, given: Any
) -> TensorValue | None:
    """Lowers `scatter` if its index is a top-k's; returns None for another index."""
    if not base.axes or len(index.axes) != len(base.axes):
        return None
    dim = canonicalize_dim(dim, len(base.axes))
    count = index.sizes[dim]
    if not _are_top_positions(ctx, base, dim, index):
        return None
    ranks = Axis(f"r{dim}", count)
    axes = indices.make_axes(base.sizes)
    at = axis_indices(axes)
    position = index.load_at([*at[:dim], indices.from_atom(ranks), *at[dim + 1 :]])
    is_here = apply("eq", convert_dtype(position, INT), IndexValue(at[dim], INT))
    here = IndexValue(indices.from_atom(ranks), INT)
    none = Constant(count.constant, INT)
    reduction = Reduction("min", (ranks,))
    rank_of = ctx.add_statement(
        f"{node.name}_rank", INT, axes, where(is_here, here, none), reduction
    )
    dtype = fake_value(node).dtype

    def value_at(axes: Axes, rank: Expression) -> Expression:
        if not isinstance(ctx.values.get(given), TensorValue):
            return ctx.read_operand(given, (), dtype)
        source = ctx.get_value(given)
        if not source.axes:
            return source.expression
        last = Constant(count.constant - 1, INT)
        index = IndirectIndex(apply("minimum", rank, last), count, False, is_checked=False)
        at = axis_indices(axes)
        return source.load_at([*at[:dim], indices.from_atom(index), *at[dim + 1 :]])

    def expression_at(axes: Axes) -> Expression:
        rank = rank_of.load_at(axis_indices(axes))
        old = base.broadcast_to(axes)
        new = convert_dtype(value_at(axes, rank), dtype)
        return where(apply("lt", rank, none), new, convert_dtype(old, dtype))

    return ctx.add_result(node, expression_at)


def _are_top_positions(
    ctx: LoweringContext, base: TensorValue, dim: int, index: TensorValue
) -> bool:
    """Whether the index is all of a top-k along rows as long as those of the result."""
    load, count = index.expression, index.sizes[dim]
    if not isinstance(load, Load) or not count.is_constant or count.constant > MAX_POSITIONS:
        return False
    same = [Index(1) if d == dim else size for d, size in enumerate(base.sizes)]
    if [Index(1) if d == dim else size for d, size in enumerate(index.sizes)] != same:
        return False
    statement = next((s for s in ctx.statements if s.name == load.name), None)
    reduction = statement.reduction if statement is not None else None
    if reduction is None or reduction.rank is None:
        return False
    (sorted_axis,) = reduction.axes
    return sorted_axis.size == base.sizes[dim]
