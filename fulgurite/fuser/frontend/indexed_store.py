"""Adds indexed stores to the IR, for the lowerings in `scatters.py` and `index_gradients.py`.

In: what is stored where, as functions of axes. Out: the value of the result.

On a GPU, values are combined by atomic operations. Those exist for 32 and 64-bit types: narrower
types are accumulated in a wider buffer, which a second statement casts. Float sums depend on the
order, so they are refused in torch's deterministic mode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from fulgurite.fuser.frontend.lowering_context import LoweringContext, convert_dtype, make_constant
from fulgurite.fuser.frontend.symbolic_sizes import size_to_index, strides_to_indices
from fulgurite.fuser.frontend.tensor_value import Axes, TensorValue
from fulgurite.fuser.ir import index as indices
from fulgurite.fuser.ir.build_expression import apply, where
from fulgurite.fuser.ir.errors import Unsupported
from fulgurite.fuser.ir.expression import Constant, Expression, opmath_dtype
from fulgurite.fuser.ir.index import Index, IndirectIndex
from fulgurite.fuser.ir.statement import Scatter

INDEX_DTYPES = (torch.int64, torch.int32)
# The dtype in which atomic operations accumulate.
ATOMIC_DTYPES: dict[torch.dtype, torch.dtype] = {
    torch.float64: torch.float64,
    torch.float32: torch.float32,
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.int64: torch.int64,
    torch.int32: torch.int32,
    torch.int16: torch.int32,
    torch.int8: torch.int32,
    torch.uint8: torch.int32,
    torch.bool: torch.int32,
}
BOOL_KINDS = {"sum": "max", "max": "max", "prod": "min", "min": "min"}
IN_DETERMINISTIC_MODE = "in any order, in torch's deterministic mode"


@dataclass(frozen=True)
class IndexedStore:
    """`result[index_at(a)] kind= value_at(a)` for all points `a` of `sizes`."""

    kind: str  # set, sum, prod, max or min
    sizes: tuple[Index, ...]
    index_at: Callable[[Axes], Sequence[Index]]
    value_at: Callable[[Axes], Expression]


@dataclass(frozen=True)
class ResultLayout:
    """Name, dtype and layout of a statement's result."""

    name: str
    dtype: torch.dtype
    sizes: tuple[Index, ...]
    strides: tuple[Index, ...] | None = None


def node_layout(node: Node, fake: torch.Tensor, part: str = "") -> ResultLayout:
    """The layout of a node's result, or of an intermediate value of the same shape."""
    sizes = tuple(size_to_index(size) for size in fake.shape)
    strides = strides_to_indices(fake)
    return ResultLayout(f"{node.name}_{part}" if part else node.name, fake.dtype, sizes, strides)


def make_index(expression: Expression, size: Index, wraps_negative: bool = False) -> Index:
    """An index that a tensor holds, checked against the size of its dimension."""
    if expression.dtype not in INDEX_DTYPES:
        raise Unsupported(f"an index tensor of dtype {expression.dtype}")
    return indices.from_atom(IndirectIndex(expression, size, wraps_negative))


def add_indexed_store(
    ctx: LoweringContext,
    layout: ResultLayout,
    initial_at: Callable[[Axes], Expression],
    store: IndexedStore,
) -> TensorValue:
    """Adds the statement of an indexed store on top of `initial_at`."""
    if ctx.uses_atomics and store.kind != "set":
        return _add_atomic_store(ctx, layout, initial_at, store)
    axes, points = indices.make_axes(layout.sizes), indices.make_axes(store.sizes, "s")
    value = convert_dtype(store.value_at(points), layout.dtype)
    if ctx.uses_atomics and is_deterministic() and value.axes():
        raise Unsupported(f"an indexed store {IN_DETERMINISTIC_MODE}")
    initial = convert_dtype(initial_at(axes), layout.dtype)
    scatter = Scatter(store.kind, points, tuple(store.index_at(points)), value)
    return ctx.add_scatter(layout.name, layout.dtype, axes, initial, scatter, layout.strides)


def _add_atomic_store(
    ctx: LoweringContext,
    layout: ResultLayout,
    initial_at: Callable[[Axes], Expression],
    store: IndexedStore,
) -> TensorValue:
    """Adds a store by atomic operations, and the statement that converts their result.

    A minimum of floats is a maximum of negated ones. Maxima need a positive NaN in memory.
    """
    kind = BOOL_KINDS[store.kind] if layout.dtype == torch.bool else store.kind
    if kind == "prod" or layout.dtype not in ATOMIC_DTYPES:
        raise Unsupported(f"atomic {kind} of {layout.dtype}")
    wide = ATOMIC_DTYPES[layout.dtype]
    is_float = wide.is_floating_point
    if kind == "sum" and is_float and is_deterministic():
        raise Unsupported(f"an indexed sum of floats {IN_DETERMINISTIC_MODE}")
    is_negated = kind == "min" and is_float

    def encode(expression: Expression) -> Expression:
        return apply("neg", expression) if is_negated else expression

    axes, points = indices.make_axes(layout.sizes), indices.make_axes(store.sizes, "s")
    initial = encode(convert_dtype(initial_at(axes), wide))
    if kind != "sum" and is_float and not isinstance(initial, Constant):
        is_number = apply("eq", initial, initial)
        initial = where(is_number, initial, make_constant(float("nan"), wide))
    value = encode(convert_dtype(store.value_at(points), wide))
    kind = "max" if is_negated else kind
    scatter = Scatter(kind, points, tuple(store.index_at(points)), value)
    if wide == layout.dtype and not is_negated:
        return ctx.add_scatter(layout.name, wide, axes, initial, scatter, layout.strides)
    name = f"{layout.name}_wide"
    accumulated = ctx.add_scatter(name, wide, axes, initial, scatter, layout.strides)
    result = convert_dtype(encode(accumulated.broadcast_to(axes)), layout.dtype)
    return ctx.add_statement(layout.name, layout.dtype, axes, result, strides=layout.strides)


def is_deterministic() -> bool:
    """Whether torch's deterministic mode is on. Dynamo guards on it."""
    return torch.are_deterministic_algorithms_enabled()


def identity_element(kind: str, dtype: torch.dtype) -> Constant:
    """The value that does not change any other one it is combined with."""
    dtype = opmath_dtype(dtype)
    if kind in ("sum", "prod"):
        return make_constant(int(kind == "prod"), dtype)
    if dtype.is_floating_point:
        return make_constant(float("-inf") if kind == "max" else float("inf"), dtype)
    if dtype == torch.bool:
        return make_constant(kind == "min", dtype)
    info = torch.iinfo(dtype)
    return make_constant(info.min if kind == "max" else info.max, dtype)
