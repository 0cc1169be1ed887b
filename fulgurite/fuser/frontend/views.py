"""ATen's views as index maps: no statement, no memory, only other indices in the loads.

Each rule gets the reader, the node and the op's arguments by name (`self` is called `source`) and
gives a `Value`, or a tuple of them for ops with several results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node

from fulgurite.fuser.cost import number
from fulgurite.fuser.frontend import tensor_value
from fulgurite.fuser.frontend.lowering_context import Reader
from fulgurite.fuser.frontend.pointwise import Unsupported
from fulgurite.fuser.frontend.tensor_value import Value, dimension, from_size, reshape
from fulgurite.fuser.ir import index as indices
from fulgurite.fuser.ir.expression import (
    NARROW_FLOATS,
    Constant,
    Expression,
    Load,
    Operation,
    Position,
    value_type,
)
from fulgurite.fuser.ir.index import Index
from fulgurite.fuser.ir.statement import Tensor


def _shape(node: Node) -> tuple[Index, ...]:
    return tuple(from_size(size) for size in node.meta["val"].shape)


def _same(reader: Reader, node: Node, source: Any, **_: Any) -> Value:
    return reader.value(source)


def _reshape(reader: Reader, node: Node, source: Any, **_: Any) -> Value:
    have, want = source.meta["val"].dtype, node.meta["val"].dtype
    if have != want:
        return bits_as(reader.value(source), have, want, _shape(node))
    return reshape(reader.value(source), _shape(node))


def permuted(value: Value, order: Sequence[int]) -> Value:
    order = [dimension(dim, len(value.axes)) for dim in order]
    sizes = [value.sizes[dim] for dim in order]

    def index_of(new: tuple[Index, ...]) -> list[Index]:
        result = [indices.ZERO] * len(order)
        for position, dim in zip(new, order, strict=True):
            result[dim] = position
        return result

    return value.view(sizes, index_of)


def _permute(reader: Reader, node: Node, source: Any, dims: Sequence[int]) -> Value:
    return permuted(reader.value(source), dims)


def _transpose(reader: Reader, node: Node, source: Any, dim0: int, dim1: int) -> Value:
    value = reader.value(source)
    order = list(range(len(value.axes)))
    if order:
        dim0, dim1 = dimension(dim0, len(order)), dimension(dim1, len(order))
        order[dim0], order[dim1] = order[dim1], order[dim0]
    return permuted(value, order)


def _t(reader: Reader, node: Node, source: Any) -> Value:
    value = reader.value(source)
    return permuted(value, list(reversed(range(len(value.axes)))))


def _expand(reader: Reader, node: Node, source: Any, **_: Any) -> Value:
    value = reader.value(source)
    sizes = _shape(node)
    skipped = len(sizes) - len(value.axes)

    def index_of(new: tuple[Index, ...]) -> list[Index]:
        return [
            indices.ZERO if own.size == 1 and size != 1 else position
            for own, position, size in zip(value.axes, new[skipped:], sizes[skipped:], strict=True)
        ]

    return value.view(sizes, index_of)


def _slice(
    reader: Reader,
    node: Node,
    source: Any,
    dim: int = 0,
    start: Any = None,
    end: Any = None,
    step: Any = 1,
) -> Value:
    value = reader.value(source)
    dim = dimension(dim, len(value.axes))
    begin = clamped_start(reader, start, value.sizes[dim])
    stride = reader.integer(step)

    def index_of(new: tuple[Index, ...]) -> list[Index]:
        result = list(new)
        result[dim] = new[dim] * stride + begin
        return result

    return value.view(_shape(node), index_of)


def clamped_start(reader: Reader, start: Any, size: Index) -> Index:
    """A slice's start as an index from the front."""
    begin = reader.integer(0 if start is None else start)
    if begin == 0:
        return begin
    if not begin.is_constant:
        return begin
    if begin.constant < 0:
        begin = begin + size
        if begin.is_constant:
            return Index(max(begin.constant, 0))
        raise Unsupported("a slice from the end of a dynamic size")
    if size.is_constant:
        return Index(min(begin.constant, size.constant))
    return begin


def _select(reader: Reader, node: Node, source: Any, dim: int, index: Any) -> Value:
    value = reader.value(source)
    dim = dimension(dim, len(value.axes))
    position = reader.integer(index)
    if position.is_constant and position.constant < 0:
        position = position + value.sizes[dim]
    if not position.is_constant and not value.sizes[dim].is_constant and position.symbols():
        low, _ = position.bounds()
        if low is None or low < 0:
            raise Unsupported("a select at a dynamic position")
    return value.view(_shape(node), lambda new: (*new[:dim], position, *new[dim:]))


def _unsqueeze(reader: Reader, node: Node, source: Any, dim: int) -> Value:
    value = reader.value(source)
    return unsqueezed(value, dimension(dim, len(value.axes) + 1))


def unsqueezed(value: Value, dim: int) -> Value:
    sizes = (*value.sizes[:dim], indices.ONE, *value.sizes[dim:])
    return value.view(sizes, lambda new: (*new[:dim], *new[dim + 1 :]))


def _squeeze(reader: Reader, node: Node, source: Any, dim: Any = None) -> Value:
    value = reader.value(source)
    rank = len(value.axes)
    wanted = range(rank) if dim is None else [dim] if isinstance(dim, int) else dim
    named = {dimension(d, rank) for d in wanted} if rank else set()
    gone = {d for d in named if value.sizes[d] == 1}
    sizes = [size for d, size in enumerate(value.sizes) if d not in gone]

    def index_of(new: tuple[Index, ...]) -> list[Index]:
        left = iter(new)
        return [indices.ZERO if d in gone else next(left) for d in range(rank)]

    return value.view(sizes, index_of)


def _pieces(value: Value, dim: int, lengths: Sequence[Index]) -> tuple[Value, ...]:
    pieces: list[Value] = []
    start = indices.ZERO
    for length in lengths:
        sizes = (*value.sizes[:dim], length, *value.sizes[dim + 1 :])

        def index_of(new: tuple[Index, ...], begin: Index = start) -> tuple[Index, ...]:
            return (*new[:dim], new[dim] + begin, *new[dim + 1 :])

        pieces.append(value.view(sizes, index_of))
        start = start + length
    return tuple(pieces)


def _split(reader: Reader, node: Node, source: Any, dim: int = 0, **_: Any) -> tuple[Value, ...]:
    value = reader.value(source)
    dim = dimension(dim, len(value.axes))
    return _pieces(value, dim, [from_size(part.shape[dim]) for part in node.meta["val"]])


def _unbind(reader: Reader, node: Node, source: Any, dim: int = 0) -> tuple[Value, ...]:
    value = reader.value(source)
    dim = dimension(dim, len(value.axes))
    sizes = (*value.sizes[:dim], *value.sizes[dim + 1 :])
    return tuple(
        value.view(sizes, lambda new, k=k: (*new[:dim], Index(k), *new[dim:]))
        for k in range(len(node.meta["val"]))
    )


def _diagonal(
    reader: Reader, node: Node, source: Any, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> Value:
    value = reader.value(source)
    rank = len(value.axes)
    first, second = dimension(dim1, rank), dimension(dim2, rank)
    rest = [d for d in range(rank) if d not in (first, second)]

    def index_of(new: tuple[Index, ...]) -> list[Index]:
        result = [indices.ZERO] * rank
        for d, position in zip(rest, new, strict=False):
            result[d] = position
        result[first] = new[-1] + max(-offset, 0)
        result[second] = new[-1] + max(offset, 0)
        return result

    return value.view(_shape(node), index_of)


def _unfold(reader: Reader, node: Node, source: Any, dimension: int, size: int, step: int) -> Value:
    value = reader.value(source)
    if not value.axes:
        raise Unsupported("unfold of a number")
    dim = tensor_value.dimension(dimension, len(value.axes))

    def index_of(new: tuple[Index, ...]) -> list[Index]:
        result = list(new[:-1])
        result[dim] = new[dim] * step + new[-1]
        return result

    return value.view(_shape(node), index_of)


def _as_strided(
    reader: Reader,
    node: Node,
    source: Any,
    size: Sequence[Any],
    stride: Sequence[Any],
    storage_offset: Any = None,
) -> Value:
    """Other steps through the same memory, where all of that memory is known and dense."""
    value = reader.value(source)
    name = getattr(value.expression, "name", "")
    tensor = reader.tensors.get(name)
    seen = tensor_value.window(value, tensor) if tensor is not None else None
    if tensor is None or seen is None:
        raise Unsupported("as_strided of something that is not in memory as it is")
    address = seen[1]
    if storage_offset is not None:
        begin = from_size(source.meta["val"].storage_offset())
        address = reader.integer(storage_offset) - begin + seen[1]
    axes = tensor_value.fresh_axes(_shape(node))
    for axis, step in zip(axes, reader.sizes(stride), strict=True):
        address = address + indices.of_atom(axis) * step
    place = _unravelled(address, tensor)
    return Value(axes, Load(name, place, tensor.dtype), value.dtype)


def _unravelled(address: Index, tensor: Tensor) -> tuple[Index, ...]:
    """The position in a dense tensor that lies at an address."""
    low, high = address.bounds()
    count = indices.product(tensor.sizes)
    if low is None or high is None or low < 0 or not count.is_constant or high >= count.constant:
        raise Unsupported("as_strided that may reach past the tensor")
    place = [indices.ZERO] * len(tensor.sizes)
    order = [d for d, size in enumerate(tensor.sizes) if size != 1]
    order.sort(key=lambda d: -number(tensor.strides[d]))
    inside = count
    for d in order:
        rest = indices.divide_exactly(inside, tensor.sizes[d])
        if rest is None or rest != tensor.strides[d]:
            raise Unsupported("as_strided of a tensor with holes")
        inside = rest
        place[d] = indices.floordiv(address, inside)
        address = indices.modulo(address, inside)
    return tuple(place)


def bits_as(value: Value, have: torch.dtype, want: torch.dtype, sizes: tuple[Index, ...]) -> Value:
    """view(dtype): the same bytes, little end first, as elements of another type."""
    if value_type(have).is_complex or value_type(want).is_complex:
        raise Unsupported("complex numbers as other numbers")
    if have.itemsize == want.itemsize:
        return Value(value.axes, _bits(value.expression, have, want), want)
    axes = tensor_value.fresh_axes(sizes)
    at = tensor_value.positions(axes)
    if have.itemsize > want.itemsize:
        ratio = have.itemsize // want.itemsize
        wide = _bits(
            value.at([*at[:-1], indices.floordiv(at[-1], Index(ratio))]), have, WHOLE[have.itemsize]
        )
        part = indices.modulo(at[-1], Index(ratio)) * (8 * want.itemsize)
        shift = Operation("cast", (Position(part, torch.int64),), wide.dtype)
        moved = Operation("shift_right", (wide, shift), wide.dtype)
        narrow = Operation("cast", (moved,), WHOLE[want.itemsize])
        return Value(axes, _bits(narrow, narrow.dtype, want), want)
    ratio = want.itemsize // have.itemsize
    whole = WHOLE[want.itemsize]
    total: Expression = Constant(0, whole)
    for k in range(ratio):
        element = value.at([*at[:-1], at[-1] * ratio + k])
        part_bits = _bits(element, have, WHOLE[have.itemsize])
        widened = Operation("cast", (part_bits,), whole)
        mask = Constant((1 << 8 * have.itemsize) - 1, whole)
        kept = Operation("and", (widened, mask), whole)
        moved = Operation("shift_left", (kept, Constant(8 * have.itemsize * k, whole)), whole)
        total = Operation("or", (total, moved), whole)
    return Value(axes, _bits(total, whole, want), want)


WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(expression: Expression, have: torch.dtype, want: torch.dtype) -> Expression:
    if have == want or value_type(have) == want or have == value_type(want):
        return expression  # packed numbers are bytes
    if isinstance(expression, Operation) and expression.name == "bitcast":
        first = expression.arguments[0]  # through `have` and on: as one, so that no NaN is touched
        return first if first.dtype == want else Operation("bitcast", (first,), want)
    if have in NARROW_FLOATS:
        expression = Operation("cast", (expression,), have)
    return Operation("bitcast", (expression,), want)


RULES: dict[str, Callable[..., Any]] = {
    "alias": _same,
    "detach": _same,
    "view": _reshape,
    "_unsafe_view": _reshape,
    "reshape": _reshape,
    "permute": _permute,
    "transpose": _transpose,
    "t": _t,
    "expand": _expand,
    "slice": _slice,
    "select": _select,
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
    "split": _split,
    "split_with_sizes": _split,
    "unsafe_split": _split,
    "unsafe_split_with_sizes": _split,
    "unbind": _unbind,
    "diagonal": _diagonal,
    "unfold": _unfold,
    "as_strided": _as_strided,
}
