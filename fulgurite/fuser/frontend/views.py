"""Lowerings of views: index maps that need no statement and no memory.

Every lowering is called with the context, the node and the op's arguments by name (`self` is called
`source`). It returns a `TensorValue`, or a tuple of them for an op with several outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import Node

from fulgurite.fuser.frontend import tensor_value
from fulgurite.fuser.frontend.bitcast import bitcast_value
from fulgurite.fuser.frontend.lowering_context import LoweringContext
from fulgurite.fuser.frontend.symbolic_sizes import size_to_index
from fulgurite.fuser.frontend.tensor_value import (
    TensorValue,
    canonicalize_dim,
    negate,
    reshape_value,
)
from fulgurite.fuser.ir import index as indices
from fulgurite.fuser.ir.cost import size_hint
from fulgurite.fuser.ir.errors import Unsupported
from fulgurite.fuser.ir.expression import (
    Load,
)
from fulgurite.fuser.ir.host_symbols import clamp_slice_start, wrap_position
from fulgurite.fuser.ir.index import Index
from fulgurite.fuser.ir.statement import Tensor
from fulgurite.trace.node_meta import fake_value


def _sizes_of(node: Node) -> tuple[Index, ...]:
    return tuple(size_to_index(size) for size in fake_value(node).shape)


def lower_alias(ctx: LoweringContext, node: Node, source: Any, **_: Any) -> TensorValue:
    return ctx.get_value(source)


def lower_neg_view(ctx: LoweringContext, node: Node, source: Any) -> TensorValue:
    return negate(ctx.get_value(source))


def lower_reshape(ctx: LoweringContext, node: Node, source: Any, **_: Any) -> TensorValue:
    have, want = fake_value(source).dtype, fake_value(node).dtype
    if have != want:
        return bitcast_value(ctx.get_value(source), have, want, _sizes_of(node))
    return reshape_value(ctx.get_value(source), _sizes_of(node))


def permute_value(value: TensorValue, order: Sequence[int]) -> TensorValue:
    """Reorders dimensions."""
    order = [canonicalize_dim(dim, len(value.axes)) for dim in order]
    sizes = [value.sizes[dim] for dim in order]

    def index_of(new: tuple[Index, ...]) -> list[Index]:
        result = [indices.ZERO] * len(order)
        for position, dim in zip(new, order, strict=True):
            result[dim] = position
        return result

    return value.reindex(sizes, index_of)


def lower_permute(
    ctx: LoweringContext, node: Node, source: Any, dims: Sequence[int]
) -> TensorValue:
    return permute_value(ctx.get_value(source), dims)


def lower_transpose(
    ctx: LoweringContext, node: Node, source: Any, dim0: int, dim1: int
) -> TensorValue:
    value = ctx.get_value(source)
    order = list(range(len(value.axes)))
    if order:
        dim0, dim1 = canonicalize_dim(dim0, len(order)), canonicalize_dim(dim1, len(order))
        order[dim0], order[dim1] = order[dim1], order[dim0]
    return permute_value(value, order)


def lower_t(ctx: LoweringContext, node: Node, source: Any) -> TensorValue:
    value = ctx.get_value(source)
    return permute_value(value, list(reversed(range(len(value.axes)))))


def lower_expand(ctx: LoweringContext, node: Node, source: Any, **_: Any) -> TensorValue:
    value = ctx.get_value(source)
    sizes = _sizes_of(node)
    skipped = len(sizes) - len(value.axes)

    def index_of(new: tuple[Index, ...]) -> list[Index]:
        return [
            indices.ZERO if own.size == 1 and size != 1 else position
            for own, position, size in zip(value.axes, new[skipped:], sizes[skipped:], strict=True)
        ]

    return value.reindex(sizes, index_of)


def lower_slice(
    ctx: LoweringContext,
    node: Node,
    source: Any,
    dim: int = 0,
    start: Any = None,
    end: Any = None,
    step: Any = 1,
) -> TensorValue:
    value = ctx.get_value(source)
    dim = canonicalize_dim(dim, len(value.axes))
    begin = clamp_slice_start(ctx.to_index(0 if start is None else start), value.sizes[dim])
    stride = ctx.to_index(step)

    def index_of(new: tuple[Index, ...]) -> list[Index]:
        result = list(new)
        result[dim] = new[dim] * stride + begin
        return result

    return value.reindex(_sizes_of(node), index_of)


def lower_select(
    ctx: LoweringContext, node: Node, source: Any, dim: int, index: Any
) -> TensorValue:
    value = ctx.get_value(source)
    dim = canonicalize_dim(dim, len(value.axes))
    position = wrap_position(ctx.to_index(index), value.sizes[dim])
    return value.reindex(_sizes_of(node), lambda new: (*new[:dim], position, *new[dim:]))


def lower_unsqueeze(ctx: LoweringContext, node: Node, source: Any, dim: int) -> TensorValue:
    value = ctx.get_value(source)
    return unsqueeze_value(value, canonicalize_dim(dim, len(value.axes) + 1))


def unsqueeze_value(value: TensorValue, dim: int) -> TensorValue:
    """Inserts a dimension of size 1."""
    sizes = (*value.sizes[:dim], indices.ONE, *value.sizes[dim:])
    return value.reindex(sizes, lambda new: (*new[:dim], *new[dim + 1 :]))


def lower_squeeze(ctx: LoweringContext, node: Node, source: Any, dim: Any = None) -> TensorValue:
    value = ctx.get_value(source)
    rank = len(value.axes)
    wanted = range(rank) if dim is None else [dim] if isinstance(dim, int) else dim
    named = {canonicalize_dim(d, rank) for d in wanted} if rank else set()
    removed = {d for d in named if value.sizes[d] == 1}
    sizes = [size for d, size in enumerate(value.sizes) if d not in removed]

    def index_of(new: tuple[Index, ...]) -> list[Index]:
        left = iter(new)
        return [indices.ZERO if d in removed else next(left) for d in range(rank)]

    return value.reindex(sizes, index_of)


def _split_value(value: TensorValue, dim: int, lengths: Sequence[Index]) -> tuple[TensorValue, ...]:
    parts: list[TensorValue] = []
    start = indices.ZERO
    for length in lengths:
        sizes = (*value.sizes[:dim], length, *value.sizes[dim + 1 :])

        def index_of(new: tuple[Index, ...], begin: Index = start) -> tuple[Index, ...]:
            return (*new[:dim], new[dim] + begin, *new[dim + 1 :])

        parts.append(value.reindex(sizes, index_of))
        start = start + length
    return tuple(parts)


def lower_split(
    ctx: LoweringContext, node: Node, source: Any, dim: int = 0, **_: Any
) -> tuple[TensorValue, ...]:
    value = ctx.get_value(source)
    dim = canonicalize_dim(dim, len(value.axes))
    return _split_value(value, dim, [size_to_index(part.shape[dim]) for part in fake_value(node)])


def lower_unbind(
    ctx: LoweringContext, node: Node, source: Any, dim: int = 0
) -> tuple[TensorValue, ...]:
    value = ctx.get_value(source)
    dim = canonicalize_dim(dim, len(value.axes))
    sizes = (*value.sizes[:dim], *value.sizes[dim + 1 :])
    return tuple(
        value.reindex(sizes, lambda new, k=k: (*new[:dim], Index(k), *new[dim:]))
        for k in range(len(fake_value(node)))
    )


def lower_diagonal(
    ctx: LoweringContext, node: Node, source: Any, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> TensorValue:
    value = ctx.get_value(source)
    rank = len(value.axes)
    first, second = canonicalize_dim(dim1, rank), canonicalize_dim(dim2, rank)
    rest = [d for d in range(rank) if d not in (first, second)]

    def index_of(new: tuple[Index, ...]) -> list[Index]:
        result = [indices.ZERO] * rank
        for d, position in zip(rest, new, strict=False):
            result[d] = position
        result[first] = new[-1] + max(-offset, 0)
        result[second] = new[-1] + max(offset, 0)
        return result

    return value.reindex(_sizes_of(node), index_of)


def lower_unfold(
    ctx: LoweringContext, node: Node, source: Any, dimension: int, size: int, step: int
) -> TensorValue:
    value = ctx.get_value(source)
    if not value.axes:
        raise Unsupported("unfold of a 0-d tensor")
    dim = canonicalize_dim(dimension, len(value.axes))

    def index_of(new: tuple[Index, ...]) -> list[Index]:
        result = list(new[:-1])
        result[dim] = new[dim] * step + new[-1]
        return result

    return value.reindex(_sizes_of(node), index_of)


def lower_as_strided(
    ctx: LoweringContext,
    node: Node,
    source: Any,
    size: Sequence[Any],
    stride: Sequence[Any],
    storage_offset: Any = None,
) -> TensorValue:
    """Lowers as_strided of a tensor whose memory is known and dense."""
    value = ctx.get_value(source)
    name = getattr(value.expression, "name", "")
    tensor = ctx.tensors.get(name)
    view = tensor_value.find_strides(value, tensor) if tensor is not None else None
    if tensor is None or view is None:
        raise Unsupported("as_strided of a value that is not a strided view of memory")
    address = view[1]
    if storage_offset is not None:
        begin = size_to_index(fake_value(source).storage_offset())
        address = ctx.to_index(storage_offset) - begin + view[1]
    axes = indices.make_axes(_sizes_of(node))
    for axis, axis_stride in zip(axes, ctx.to_indices(stride), strict=True):
        address = address + indices.from_atom(axis) * axis_stride
    index = _unravel_address(address, tensor)
    return TensorValue(axes, Load(name, index, tensor.dtype), value.dtype)


def _unravel_address(address: Index, tensor: Tensor) -> tuple[Index, ...]:
    """Converts an address to the index of an element of a dense tensor."""
    low, high = address.bounds()
    count = indices.product(tensor.sizes)
    if low is None or high is None or low < 0 or not count.is_constant or high >= count.constant:
        raise Unsupported("as_strided that may go out of bounds")
    index = [indices.ZERO] * len(tensor.sizes)
    order = [d for d, size in enumerate(tensor.sizes) if size != 1]
    order.sort(key=lambda d: -size_hint(tensor.strides[d]))
    inner = count
    for d in order:
        rest = indices.divide_exactly(inner, tensor.sizes[d])
        if rest is None or rest != tensor.strides[d]:
            raise Unsupported("as_strided of a tensor that is not dense")
        inner = rest
        index[d] = indices.floordiv(address, inner)
        address = indices.modulo(address, inner)
    return tuple(index)


VIEW_LOWERINGS: dict[str, Callable[..., Any]] = {
    "alias": lower_alias,
    "detach": lower_alias,
    "resolve_neg": lower_alias,
    "resolve_conj": lower_alias,
    "_neg_view": lower_neg_view,
    "view": lower_reshape,
    "_unsafe_view": lower_reshape,
    "reshape": lower_reshape,
    "permute": lower_permute,
    "transpose": lower_transpose,
    "t": lower_t,
    "expand": lower_expand,
    "slice": lower_slice,
    "select": lower_select,
    "unsqueeze": lower_unsqueeze,
    "squeeze": lower_squeeze,
    "split": lower_split,
    "split_with_sizes": lower_split,
    "unsafe_split": lower_split,
    "unsafe_split_with_sizes": lower_split,
    "unbind": lower_unbind,
    "diagonal": lower_diagonal,
    "unfold": lower_unfold,
    "as_strided": lower_as_strided,
}
