"""Complex numbers as pairs of real values: the IR itself knows none.

A complex tensor in memory is its real view, one more dimension of two; inside a region a complex value is
two real ones, with statements of their own, and only what leaves the region is woven together again.
Ops that move, copy or add elements are done to both parts alike (`ALIKE`); the others are formulas of pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from fulgurite.fuser.frontend import data_movement, reductions, scans, views
from fulgurite.fuser.frontend.complex_formulas import FORMULAS, Pair
from fulgurite.fuser.frontend.lowering_context import Reader
from fulgurite.fuser.frontend.pointwise import Unsupported, apply
from fulgurite.fuser.frontend.tensor_value import (
    Axes,
    Complex,
    Value,
    cast_to,
    fresh_axes,
    from_size,
    from_stride,
    positions,
    reshape,
    window,
)
from fulgurite.fuser.ir import index as indices
from fulgurite.fuser.ir.expression import Bound, Constant, Expression, Load, guard, value_type
from fulgurite.fuser.ir.index import Index
from fulgurite.fuser.ir.statement import Output

PARTS = ("real", "imaginary")


@dataclass(frozen=True)
class Part:
    """One part of a node, as the rules of real ops look at nodes."""

    node: Node
    part: str

    @property
    def name(self) -> str:
        return f"{self.node.name}_{self.part}"

    @property
    def meta(self) -> dict[str, Any]:
        fakes = self.node.meta["val"]
        if isinstance(fakes, tuple | list):
            return {"val": [_part_of(fake) for fake in fakes]}
        return {"val": _part_of(fakes)}


def _part_of(fake: Any) -> Any:
    if not fake.dtype.is_complex:
        return fake
    return fake.new_empty_strided(fake.shape, fake.stride(), dtype=fake.dtype.to_real())


def concerns(reader: Reader, node: Node) -> bool:
    """Does the node read or make complex numbers?"""
    fakes = node.meta.get("val")
    made = fakes if isinstance(fakes, tuple | list) else (fakes,)
    if any(isinstance(fake, torch.Tensor) and fake.dtype.is_complex for fake in made):
        return True
    return any(isinstance(reader.values.get(n), Complex) for n in node.all_input_nodes)


def read(reader: Reader, node: Node, name: str, bound: dict[str, Any]) -> Any:
    """The value of a node that has to do with complex numbers."""
    named = {"source" if key == "self" else key: value for key, value in bound.items()}
    if name in ALIKE:
        return _alike(reader, node, name, named)
    if name in WHOLE:
        return WHOLE[name](reader, node, named)
    if name in FORMULAS:
        return _formula(reader, node, name, bound)
    raise Unsupported(f"{name} of complex numbers")


# both parts alike


def _alike(reader: Reader, node: Node, name: str, bound: dict[str, Any]) -> Any:
    if name == "constant_pad_nd" and bound.get("value"):
        raise Unsupported("complex numbers padded with something else than 0")
    if name in ("cat", "stack") and not all(
        isinstance(reader.values.get(n), Complex) for n in node.all_input_nodes
    ):
        raise Unsupported("complex numbers joined with real ones")
    found = []
    for part in PARTS:
        reader.part = part
        try:
            found.append(ALIKE[name](reader, Part(node, part), **bound))
        finally:
            reader.part = None
    fakes = node.meta["val"]
    if isinstance(found[0], tuple):
        pairs = zip(found[0], found[1], fakes, strict=True)
        return tuple(Complex(real, other, fake.dtype) for real, other, fake in pairs)
    return Complex(found[0], found[1], fakes.dtype)


def _copied(reader: Reader, node: Any, source: Any, **_: Any) -> Value:
    return reader.result(node, reader.value(source).broadcast)


def _reshaped(reader: Reader, node: Any, source: Any, **_: Any) -> Value:
    return reshape(reader.value(source), tuple(from_size(size) for size in node.meta["val"].shape))


def _chosen(names: str, rules: dict[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    return {name: rules[name] for name in names.split()}


ALIKE: dict[str, Callable[..., Any]] = {
    **_chosen(
        "alias detach permute transpose t expand slice select unsqueeze squeeze split split_with_sizes "
        "unsafe_split unbind diagonal unfold",
        views.RULES,
    ),
    **_chosen(
        "flip repeat roll cat stack constant_pad_nd tril triu slice_scatter select_scatter "
        "diagonal_scatter gather take index_select embedding index",
        data_movement.RULES,
    ),
    **_chosen("sum mean", reductions.RULES),
    **_chosen("cumsum", scans.RULES),
    **dict.fromkeys(("view", "_unsafe_view", "reshape"), _reshaped),
    **dict.fromkeys(("clone", "contiguous", "lift_fresh_copy"), _copied),
}


# ops that make complex tensors of real ones, and the other way round


def _view_as_real(reader: Reader, node: Node, bound: dict[str, Any]) -> Value:
    value = reader.values[bound["source"]]
    axes = fresh_axes([from_size(size) for size in node.meta["val"].shape])
    real, imaginary = (part.at(positions(axes[:-1])) for part in (value.real, value.imaginary))
    which = indices.of_atom(axes[-1])
    if _neighbours(real, imaginary):
        assert isinstance(real, Load), "neighbours are loads"
        joined: Expression = Load(real.name, (*real.index[:-1], which), real.dtype)
    else:
        joined = guard((Bound(which, indices.ONE),), real, imaginary)
    return Value(axes, joined, node.meta["val"].dtype)


def _neighbours(real: Expression, imaginary: Expression) -> bool:
    """Are they the two numbers of one complex number in memory?"""
    if not (isinstance(real, Load) and isinstance(imaginary, Load) and real.index):
        return False
    same = real.name == imaginary.name and real.index[:-1] == imaginary.index[:-1]
    return same and real.index[-1] == 0 and bool(imaginary.index) and imaginary.index[-1] == 1


def _view_as_complex(reader: Reader, node: Node, bound: dict[str, Any]) -> Complex:
    return halves(reader.value(bound["source"]), node.meta["val"].dtype)


def halves(value: Value, dtype: torch.dtype) -> Complex:
    """A real value whose last dimension is the two parts."""
    sizes = value.sizes[:-1]
    real = value.view(sizes, lambda new: (*new, indices.ZERO))
    return Complex(real, value.view(sizes, lambda new: (*new, indices.ONE)), dtype)


def output(reader: Reader, value: Complex, node: Node) -> Output:
    """A window onto an input where the parts lie there side by side, else both parts woven together."""
    fake = node.meta["val"]
    sizes = (*(from_size(size) for size in fake.shape), Index(2))
    strides = (*(from_stride(stride) * 2 for stride in fake.stride()), indices.ONE)
    name = getattr(value.real.expression, "name", "")
    tensor = reader.tensors.get(name)
    if tensor is not None and getattr(value.imaginary.expression, "name", "") == name:
        seen = [window(part, tensor) for part in (value.real, value.imaginary)]
        if seen[0] and seen[1] and seen[1] == (seen[0][0], seen[0][1] + 1):
            if all(s is None or s == want for s, want in zip(seen[0][0], strides, strict=False)):
                return Output(name, sizes, strides, seen[0][1], pairs=True)
    axes = fresh_axes(sizes)
    parts = (value.real.broadcast(axes[:-1]), value.imaginary.broadcast(axes[:-1]))
    expression = guard((Bound(indices.of_atom(axes[-1]), indices.ONE),), *parts)
    name, dtype = f"{node.name}_pairs", value.dtype.to_real()
    made = reader.store(name, dtype, axes, expression, strides=strides, pairs=True).expression
    assert isinstance(made, Load), "a stored value is a load"
    return Output(made.name, sizes, strides, whole=True, pairs=True)


def _cast(reader: Reader, node: Node, bound: dict[str, Any]) -> Any:
    """_to_copy: to another precision, to complex numbers, to their real parts, or whether they are not zero."""
    target = node.meta["val"].dtype
    wide = value_type(target)

    def pair(axes: Axes) -> Pair:
        return operand(reader, bound.get("source", bound.get("a")), axes, wide)

    if target.is_complex:
        return stored(reader, node, pair)
    if target == torch.bool:
        return reader.result(node, lambda axes: not_zero(reader, bound, axes))
    return reader.result(node, lambda axes: pair(axes).real)


def not_zero(reader: Reader, bound: dict[str, Any], axes: Axes) -> Expression:
    """Is either part?"""
    source = reader.values[bound.get("source", bound.get("a"))]
    wide = value_type(source.dtype)
    both = operand(reader, bound.get("source", bound.get("a")), axes, wide)
    zero = Constant(0.0, wide)
    return apply("or", apply("ne", both.real, zero), apply("ne", both.imaginary, zero))


def _filled(fill: Any) -> Callable[..., Complex]:
    def rule(reader: Reader, node: Node, bound: dict[str, Any]) -> Complex:
        given = next((bound[k] for k in ("fill_value", "value", "s") if k in bound), fill)
        wide = value_type(node.meta["val"].dtype)
        return stored(reader, node, lambda axes: operand(reader, given, axes, wide))

    return rule


WHOLE: dict[str, Callable[..., Any]] = {
    "view_as_real": _view_as_real,
    "view_as_complex": _view_as_complex,
    "_to_copy": _cast,
    "convert_element_type": _cast,
    **{name: _filled(0) for name in ("zeros", "zeros_like", "new_zeros", "empty", "empty_like")},
    **{name: _filled(1) for name in ("ones", "ones_like", "new_ones")},
    **{name: _filled(0) for name in ("full", "full_like", "new_full", "fill", "scalar_tensor")},
}


# formulas


def operand(reader: Reader, argument: Any, axes: Axes, wide: torch.dtype) -> Pair:
    """A tensor or number as a pair at the axes of a result."""
    found = reader.values.get(argument) if isinstance(argument, Node) else None
    if isinstance(found, Complex):
        cast = cast_to(wide)
        return Pair(
            cast(found.real.broadcast(axes), axes), cast(found.imaginary.broadcast(axes), axes)
        )
    if isinstance(argument, complex):
        return Pair(Constant(argument.real, wide), Constant(argument.imag, wide))
    return Pair(reader.operand(argument, axes, wide), Constant(0.0, wide))


def stored(reader: Reader, node: Node, pair_at: Callable[[Axes], Pair]) -> Complex:
    """Two statements, one for each part."""
    real = reader.result(Part(node, "real"), lambda axes: pair_at(axes).real)
    other = reader.result(Part(node, "imaginary"), lambda axes: pair_at(axes).imaginary)
    return Complex(real, other, node.meta["val"].dtype)


def _formula(reader: Reader, node: Node, name: str, bound: dict[str, Any]) -> Any:
    operands, formula = FORMULAS[name]
    fakes = [n.meta["val"] for n in node.all_input_nodes]
    parts = [fake.dtype for fake in fakes if isinstance(fake, torch.Tensor)]
    made = node.meta["val"].dtype
    wide = value_type(made)
    if (
        not made.is_complex
        and made != torch.bool
        and value_type(made) not in (torch.float32, torch.float64)
    ):
        raise Unsupported(f"{name} of complex numbers as {made}")
    if made == torch.bool:
        doubles = (torch.float64, torch.complex128)
        wide = torch.float64 if any(dtype in doubles for dtype in parts) else torch.float32
    extra = {key: value for key, value in bound.items() if key not in operands}

    def result(axes: Axes) -> Any:
        pairs = [operand(reader, bound[key], axes, wide) for key in operands]
        rest = {  # a node among them is the condition of a where
            key: reader.operand(value, axes, torch.bool) if isinstance(value, Node) else value
            for key, value in extra.items()
        }
        return formula(*pairs, **rest)

    if made.is_complex:
        return stored(reader, node, result)
    return reader.result(node, result)
