"""Lowerings of complex ops. The IR has only real numbers, so each part is lowered separately.

A complex tensor in memory is its `view_as_real`, with one more dimension of size 2. Inside a region
a complex value is two real values with statements of their own. Only the region's outputs are
interleaved. Ops that move, copy or sum elements are lowered once per part (`PER_PART_LOWERINGS`).
The others have formulas of pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from fulgurite.fuser.frontend.complex_formulas import COMPLEX_FORMULAS, ComplexPair
from fulgurite.fuser.frontend.data_movement import DATA_MOVEMENT_LOWERINGS
from fulgurite.fuser.frontend.factories import FACTORY_LOWERINGS
from fulgurite.fuser.frontend.gathers import GATHER_LOWERINGS
from fulgurite.fuser.frontend.lowering_context import LoweringContext, call_lowering
from fulgurite.fuser.frontend.random import RANDOM_LOWERINGS
from fulgurite.fuser.frontend.reductions import REDUCTION_LOWERINGS
from fulgurite.fuser.frontend.scans import SCAN_LOWERINGS
from fulgurite.fuser.frontend.symbolic_sizes import sizes_to_indices, strides_to_indices
from fulgurite.fuser.frontend.tensor_value import (
    Axes,
    ComplexValue,
    TensorValue,
    axis_indices,
    find_strides,
    load_tensor,
    make_cast,
    negate,
    reshape_value,
)
from fulgurite.fuser.frontend.views import VIEW_LOWERINGS
from fulgurite.fuser.ir import index as indices
from fulgurite.fuser.ir.build_expression import apply
from fulgurite.fuser.ir.errors import Unsupported
from fulgurite.fuser.ir.expression import (
    BoundsCheck,
    Constant,
    Expression,
    Load,
    make_masked,
    opmath_dtype,
)
from fulgurite.fuser.ir.index import Index, make_axes
from fulgurite.fuser.ir.statement import Output, Tensor
from fulgurite.trace.node_meta import fake_value

PARTS = ("real", "imaginary")


@dataclass(frozen=True)
class NodePart:
    """A node as the lowerings of real ops see it while one part is lowered."""

    node: Node
    part: str

    @property
    def name(self) -> str:
        return f"{self.node.name}_{self.part}"

    @property
    def meta(self) -> dict[str, Any]:
        fakes = fake_value(self.node)
        if isinstance(fakes, tuple | list):
            return {"val": [_get_part(fake) for fake in fakes]}
        return {"val": _get_part(fakes)}


def _get_part(fake: Any) -> Any:
    if not fake.dtype.is_complex:
        return fake
    return fake.new_empty_strided(fake.shape, fake.stride(), dtype=fake.dtype.to_real())


def involves_complex(ctx: LoweringContext, node: Node, name: str) -> bool:
    """Whether the node reads or returns complex numbers."""
    fakes = fake_value(node)
    outputs = fakes if isinstance(fakes, tuple | list) else (fakes,)
    if any(isinstance(fake, torch.Tensor) and fake.dtype.is_complex for fake in outputs):
        return True
    if name in FACTORY_LOWERINGS or name in RANDOM_LOWERINGS:
        return False  # only the shape of a complex operand counts
    return any(isinstance(ctx.values.get(n), ComplexValue) for n in node.all_input_nodes)


def lower_complex_node(ctx: LoweringContext, node: Node, name: str, bound: dict[str, Any]) -> Any:
    """Lowers a node that reads or returns complex numbers."""
    if name in PER_PART_LOWERINGS:
        return _lower_per_part(ctx, node, name, bound)
    if name in COMPLEX_LOWERINGS:
        arguments = {"source" if key == "self" else key: value for key, value in bound.items()}
        return COMPLEX_LOWERINGS[name](ctx, node, arguments)
    if name in COMPLEX_FORMULAS:
        return _lower_formula(ctx, node, name, bound)
    raise Unsupported(f"{name} of complex numbers")


def _lower_per_part(ctx: LoweringContext, node: Node, name: str, bound: dict[str, Any]) -> Any:
    if name == "constant_pad_nd" and bound.get("value"):
        raise Unsupported("constant_pad_nd of complex numbers with a nonzero value")
    if name in ("cat", "stack") and not all(
        isinstance(ctx.values.get(n), ComplexValue) for n in node.all_input_nodes
    ):
        raise Unsupported(f"{name} of complex and real tensors")
    if not any(isinstance(ctx.values.get(n), ComplexValue) for n in node.all_input_nodes):
        raise Unsupported(f"{name} of real numbers as complex ones")
    fakes = fake_value(node)
    if node.target is torch.ops.aten.view.dtype:
        raise Unsupported("view(dtype) of a complex tensor")
    if isinstance(fakes, torch.Tensor) and not fakes.dtype.is_complex:
        return _lower_part(ctx, node, name, bound, "real")  # a cast to a real dtype drops the other
    parts = [_lower_part(ctx, node, name, bound, part) for part in PARTS]
    if isinstance(parts[0], tuple):
        pairs = zip(parts[0], parts[1], fakes, strict=True)
        return tuple(ComplexValue(real, other, fake.dtype) for real, other, fake in pairs)
    return ComplexValue(parts[0], parts[1], fakes.dtype)


def _lower_part(
    ctx: LoweringContext, node: Node, name: str, bound: dict[str, Any], part: str
) -> Any:
    """Lowers an op of real numbers for one part of its complex operands."""
    ctx.complex_part = part
    try:
        return call_lowering(PER_PART_LOWERINGS[name], ctx, NodePart(node, part), bound)
    finally:
        ctx.complex_part = None


def lower_clone(ctx: LoweringContext, node: Any, source: Any, **_: Any) -> TensorValue:
    return ctx.add_result(node, ctx.get_value(source).broadcast_to)


def lower_reshape(ctx: LoweringContext, node: Any, source: Any, **_: Any) -> TensorValue:
    return reshape_value(ctx.get_value(source), sizes_to_indices(fake_value(node)))


def _select_lowerings(
    names: str, lowerings: dict[str, Callable[..., Any]]
) -> dict[str, Callable[..., Any]]:
    return {name: lowerings[name] for name in names.split()}


PER_PART_LOWERINGS: dict[str, Callable[..., Any]] = {
    **_select_lowerings(
        "alias detach _neg_view permute transpose t expand slice select unsqueeze squeeze split "
        "split_with_sizes unsafe_split unbind diagonal unfold",
        VIEW_LOWERINGS,
    ),
    **DATA_MOVEMENT_LOWERINGS,
    **GATHER_LOWERINGS,
    **_select_lowerings("sum mean", REDUCTION_LOWERINGS),
    **_select_lowerings("cumsum", SCAN_LOWERINGS),
    **dict.fromkeys(("view", "_unsafe_view", "reshape"), lower_reshape),
    **dict.fromkeys(("clone", "contiguous", "lift_fresh_copy"), lower_clone),
}


def conjugate(value: ComplexValue) -> ComplexValue:
    return ComplexValue(value.real, negate(value.imaginary), value.dtype)


def get_complex_value(ctx: LoweringContext, argument: Any) -> ComplexValue:
    """Returns the value of a complex tensor. Gradients may pass a number: `_conj(1 + 2j)`."""
    value = ctx.values.get(argument) if isinstance(argument, Node) else None
    if not isinstance(value, ComplexValue):
        raise Unsupported(f"{argument}, which is no complex tensor")
    return value


def lower_conj_view(ctx: LoweringContext, node: Node, bound: dict[str, Any]) -> ComplexValue:
    return conjugate(get_complex_value(ctx, bound["source"]))


def remove_bits(
    value: TensorValue | ComplexValue, fake: torch.Tensor
) -> TensorValue | ComplexValue:
    """Returns what is in memory of a value whose tensor has a conjugate or negative bit."""
    if isinstance(value, TensorValue):
        return negate(value) if fake.is_neg() else value
    if fake.is_neg():
        value = ComplexValue(negate(value.real), negate(value.imaginary), value.dtype)
    return conjugate(value) if fake.is_conj() else value


def lower_view_as_real(ctx: LoweringContext, node: Node, bound: dict[str, Any]) -> TensorValue:
    value = get_complex_value(ctx, bound["source"])
    axes = make_axes(sizes_to_indices(fake_value(node)))
    real, imaginary = (
        part.load_at(axis_indices(axes[:-1])) for part in (value.real, value.imaginary)
    )
    part_index = indices.from_atom(axes[-1])
    if _are_interleaved(real, imaginary):
        assert isinstance(real, Load), "interleaved parts are loads"
        interleaved: Expression = Load(real.name, (*real.index[:-1], part_index), real.dtype)
    else:
        interleaved = make_masked((BoundsCheck(part_index, indices.ONE),), real, imaginary)
    return TensorValue(axes, interleaved, fake_value(node).dtype)


def _are_interleaved(real: Expression, imaginary: Expression) -> bool:
    """Whether they are the two parts of one complex number in memory."""
    if not (isinstance(real, Load) and isinstance(imaginary, Load) and real.index):
        return False
    same = real.name == imaginary.name and real.index[:-1] == imaginary.index[:-1]
    return same and real.index[-1] == 0 and bool(imaginary.index) and imaginary.index[-1] == 1


def lower_view_as_complex(ctx: LoweringContext, node: Node, bound: dict[str, Any]) -> ComplexValue:
    return split_complex(ctx.get_value(bound["source"]), fake_value(node).dtype)


def split_complex(value: TensorValue, dtype: torch.dtype) -> ComplexValue:
    """Splits a real value whose last dimension has the two parts."""
    sizes = value.sizes[:-1]
    real = value.reindex(sizes, lambda new: (*new, indices.ZERO))
    return ComplexValue(real, value.reindex(sizes, lambda new: (*new, indices.ONE)), dtype)


def lower_complex_output(ctx: LoweringContext, value: ComplexValue, node: Node) -> Output:
    """Returns a view if the parts are interleaved in memory, otherwise interleaves them."""
    fake = fake_value(node)
    sizes = (*sizes_to_indices(fake), Index(2))
    strides = (*(stride * 2 for stride in strides_to_indices(fake)), indices.ONE)
    name = getattr(value.real.expression, "name", "")
    tensor = ctx.tensors.get(name)
    if tensor is not None and getattr(value.imaginary.expression, "name", "") == name:
        part_views = [find_strides(part, tensor) for part in (value.real, value.imaginary)]
        real, imaginary = part_views
        if real and imaginary and imaginary == (real[0], real[1] + 1):
            matches = zip(real[0], strides, strict=False)
            if all(stride is None or stride == want for stride, want in matches):
                return Output(name, sizes, strides, real[1], is_view_as_real=True)
    view = _find_view_of_parts(ctx, value, strides_to_indices(fake))
    if view is not None:
        offset = view[1] * 2
        stored = _interleave(ctx, node, *view[0])
        loops = [pair for pair in zip(sizes, strides, strict=True) if pair[0] != 1]
        is_full = offset == 0 and loops == list(zip(stored.sizes, stored.strides, strict=True))
        return Output(
            stored.name, sizes, strides, offset, is_full_buffer=is_full, is_view_as_real=True
        )
    axes = make_axes(sizes)
    parts = (value.real.broadcast_to(axes[:-1]), value.imaginary.broadcast_to(axes[:-1]))
    name = _store_pairs(ctx, node, axes, parts, value.dtype, strides).name
    return Output(name, sizes, strides, is_full_buffer=True, is_view_as_real=True)


def _find_view_of_parts(
    ctx: LoweringContext, value: ComplexValue, strides: tuple[Index, ...]
) -> tuple[tuple[Tensor, Tensor], Index] | None:
    """The tensors of this region whose view, with these strides, both parts are, and its offset."""
    names = [getattr(part.expression, "name", "") for part in (value.real, value.imaginary)]
    if not all(name in ctx.producers for name in names):
        return None
    real, imaginary = (ctx.tensors[name] for name in names)
    views = [
        find_strides(part, tensor)
        for part, tensor in ((value.real, real), (value.imaginary, imaginary))
    ]
    are_alike = (real.sizes, real.strides) == (imaginary.sizes, imaginary.strides)
    if views[0] is None or views[0] != views[1] or not are_alike:
        return None
    found, offset = views[0]
    matches = zip(found, strides, strict=True)
    if not all(stride is None or stride == want for stride, want in matches):
        return None
    return (real, imaginary), offset


def _interleave(ctx: LoweringContext, node: Node, real: Tensor, imaginary: Tensor) -> Tensor:
    """Both parts in one memory: all results that are views of them share it, as in eager mode."""
    key = (real.name, imaginary.name)
    if key not in ctx.pairs:
        sizes = (*real.sizes, Index(2))
        strides = (*(stride * 2 for stride in real.strides), indices.ONE)
        axes = make_axes(sizes)
        parts = tuple(load_tensor(tensor).broadcast_to(axes[:-1]) for tensor in (real, imaginary))
        ctx.pairs[key] = _store_pairs(ctx, node, axes, parts, real.dtype.to_complex(), strides)
    return ctx.pairs[key]


def _store_pairs(
    ctx: LoweringContext,
    node: Node,
    axes: Axes,
    parts: tuple[Expression, ...],
    dtype: torch.dtype,
    strides: tuple[Index, ...],
) -> Tensor:
    expression = make_masked((BoundsCheck(indices.from_atom(axes[-1]), indices.ONE),), *parts)
    stored = ctx.add_statement(
        f"{node.name}_pairs",
        dtype.to_real(),
        axes,
        expression,
        strides=strides,
        is_view_as_real=True,
    )
    load = stored.expression
    assert isinstance(load, Load), "a stored value is a load"
    return ctx.tensors[load.name]


def lower_cast(ctx: LoweringContext, node: Node, bound: dict[str, Any]) -> Any:
    """Lowers _to_copy: to another precision, to complex, to the real part, or to bool."""
    target = fake_value(node).dtype
    part_dtype = opmath_dtype(target)

    def pair(axes: Axes) -> ComplexPair:
        return read_pair(ctx, bound.get("source", bound.get("a")), axes, part_dtype)

    if target.is_complex:
        return store_pair(ctx, node, pair)
    if target == torch.bool:
        return ctx.add_result(node, lambda axes: is_nonzero(ctx, bound, axes))
    return ctx.add_result(node, lambda axes: pair(axes).real)


def is_nonzero(ctx: LoweringContext, bound: dict[str, Any], axes: Axes) -> Expression:
    """Returns whether either part is nonzero."""
    source = ctx.values[bound.get("source", bound.get("a"))]
    part_dtype = opmath_dtype(source.dtype)
    both = read_pair(ctx, bound.get("source", bound.get("a")), axes, part_dtype)
    zero = Constant(0.0, part_dtype)
    return apply("or", apply("ne", both.real, zero), apply("ne", both.imaginary, zero))


def make_fill_lowering(fill: Any) -> Callable[..., ComplexValue]:
    def lower(ctx: LoweringContext, node: Node, bound: dict[str, Any]) -> ComplexValue:
        value = next((bound[k] for k in ("fill_value", "value", "s") if k in bound), fill)
        part_dtype = opmath_dtype(fake_value(node).dtype)
        return store_pair(ctx, node, lambda axes: read_pair(ctx, value, axes, part_dtype))

    return lower


COMPLEX_LOWERINGS: dict[str, Callable[..., Any]] = {
    "_conj": lower_conj_view,
    "view_as_real": lower_view_as_real,
    "view_as_complex": lower_view_as_complex,
    "_to_copy": lower_cast,
    "convert_element_type": lower_cast,
    **{
        name: make_fill_lowering(0)
        for name in ("zeros", "zeros_like", "new_zeros", "empty", "empty_like")
    },
    **{name: make_fill_lowering(1) for name in ("ones", "ones_like", "new_ones")},
    **{
        name: make_fill_lowering(0)
        for name in ("full", "full_like", "new_full", "fill", "scalar_tensor")
    },
}


def read_pair(
    ctx: LoweringContext, argument: Any, axes: Axes, part_dtype: torch.dtype
) -> ComplexPair:
    """Returns a tensor or number as a pair of expressions at the axes of a result."""
    found = ctx.values.get(argument) if isinstance(argument, Node) else None
    if isinstance(found, ComplexValue):
        cast = make_cast(part_dtype)
        return ComplexPair(
            cast(found.real.broadcast_to(axes), axes),
            cast(found.imaginary.broadcast_to(axes), axes),
        )
    if isinstance(argument, complex):
        return ComplexPair(Constant(argument.real, part_dtype), Constant(argument.imag, part_dtype))
    return ComplexPair(ctx.read_operand(argument, axes, part_dtype), Constant(0.0, part_dtype))


def store_pair(
    ctx: LoweringContext, node: Node, pair_at: Callable[[Axes], ComplexPair]
) -> ComplexValue:
    """Adds two statements, one per part."""
    real = ctx.add_result(NodePart(node, "real"), lambda axes: pair_at(axes).real)
    other = ctx.add_result(NodePart(node, "imaginary"), lambda axes: pair_at(axes).imaginary)
    return ComplexValue(real, other, fake_value(node).dtype)


def _lower_formula(ctx: LoweringContext, node: Node, name: str, bound: dict[str, Any]) -> Any:
    operands, formula = COMPLEX_FORMULAS[name]
    fakes = [fake_value(n) for n in node.all_input_nodes]
    parts = [fake.dtype for fake in fakes if isinstance(fake, torch.Tensor)]
    dtype = fake_value(node).dtype
    part_dtype = opmath_dtype(dtype)
    if (
        not dtype.is_complex
        and dtype != torch.bool
        and opmath_dtype(dtype) not in (torch.float32, torch.float64)
    ):
        raise Unsupported(f"{name} of complex numbers as {dtype}")
    if dtype == torch.bool:
        doubles = (torch.float64, torch.complex128)
        part_dtype = torch.float64 if any(part in doubles for part in parts) else torch.float32
    extra = {key: value for key, value in bound.items() if key not in operands}

    def result(axes: Axes) -> Any:
        pairs = [read_pair(ctx, bound[key], axes, part_dtype) for key in operands]
        rest = {  # a node here is the condition of a where
            key: ctx.read_operand(value, axes, torch.bool) if isinstance(value, Node) else value
            for key, value in extra.items()
        }
        return formula(*pairs, **rest)

    if dtype.is_complex:
        return store_pair(ctx, node, result)
    return ctx.add_result(node, result)
