"""The parts of an indexed store's loop nest: its initial values, and which loops never collide.

In: a statement with `scatter`, and its tensors. Out: the nest that stores the initial values, and
the axes whose iterations write different elements. Threads may split those.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fulgurite.fuser.ir import index as indices
from fulgurite.fuser.ir.expression import Constant, Expression, Load, collect_loads
from fulgurite.fuser.ir.expression_rewrites import rewrite_expression
from fulgurite.fuser.ir.index import Axis, Index
from fulgurite.fuser.ir.index_rewrites import map_indirect, recombine_div_mod
from fulgurite.fuser.ir.loop_nest import LoopNest, Store
from fulgurite.fuser.ir.statement import Statement, Tensor, make_statement
from fulgurite.fuser.segment.loop_structure import NO_LOOPS, LoopStructure, StatementInfo
from fulgurite.fuser.segment.state import Segment


def flatten_index(tensor: Tensor, at: tuple[Index, ...]) -> Index:
    """Returns the address of an element, relative to the tensor's start."""
    total = indices.ZERO
    for position, stride in zip(at, tensor.strides, strict=True):
        total = total + position * stride
    return recombine_div_mod(total)


def build_initial_nest(s: Statement, tensors: Mapping[str, Tensor]) -> LoopNest:
    """Builds the nest that stores the initial values of an indexed store."""

    def flatten(part: Expression) -> Expression | None:
        if not isinstance(part, Load):
            return None
        at = tuple(map_indirect(i, flatten_loads) for i in part.index)
        return replace(part, index=(flatten_index(tensors[part.name], at),))

    def flatten_loads(part: Expression) -> Expression:
        return rewrite_expression(part, flatten, lambda index: index)

    at = tuple(indices.from_atom(axis) for axis in s.axes)
    names = [s.name, *(load.name for load in collect_loads(s.expression))]
    memory = {name: tensors[name] for name in names}
    store = Store(s.tensor, flatten_index(s.tensor, at), flatten_loads(s.expression))
    formula = f"{s.name}[{','.join(axis.name for axis in s.axes)}] = {s.expression}"
    return LoopNest(s.axes, (), {}, (store,), memory, (formula,))


def find_disjoint_axes(positions: tuple[Index, ...]) -> frozenset[Axis]:
    """Returns the axes of which different values always mean different elements.

    They are the axes of dimensions whose index is `axis`, or `outer * size + inner`.
    """
    return frozenset(axis for position in positions for axis in _find_injective_axes(position))


def _find_injective_axes(position: Index) -> list[Axis]:
    """Returns the axes of an index that has another value at each of their points, if it does."""
    rest, reach = position - position.constant, indices.ONE
    found: list[Axis] = []
    while rest != 0:
        axis = next((a for a in rest.atoms() if _is_axis_at(rest, a, reach)), None)
        if not isinstance(axis, Axis):
            return []
        found.append(axis)
        rest = rest - indices.from_atom(axis) * reach
        reach = reach * axis.size
    return found


def _is_axis_at(index: Index, atom: object, stride: Index) -> bool:
    return isinstance(atom, Axis) and index.coefficient(atom) == stride


def with_initial_nests(
    segments: list[Segment], nests: list[LoopNest]
) -> tuple[list[Segment], list[LoopNest]]:
    """Inserts the nests of initial values, each before the nest of its indexed store."""
    all_segments: list[Segment] = []
    all_nests: list[LoopNest] = []
    for segment, nest in zip(segments, nests, strict=True):
        if nest.initial is not None:
            all_segments.append(_make_initial_segment(segment))
            all_nests.append(nest.initial)
        all_segments.append(segment)
        all_nests.append(nest)
    return all_segments, all_nests


def _make_initial_segment(segment: Segment) -> Segment:
    """Describes the kernel of the initial values of an indexed store, for names and reports."""
    (name,) = segment.stored
    info = segment.structure.statements[name]
    s = info.statement
    origin = "fill" if isinstance(s.expression, Constant) else "clone"
    initial = make_statement(s.tensor, s.axes, s.expression, origin=origin)
    structure = LoopStructure(segment.structure.loop_sizes)
    structure.statements[name] = StatementInfo(
        initial, NO_LOOPS, NO_LOOPS, NO_LOOPS, (), 0, info.bytes, 0, is_constant=False
    )
    return Segment(structure, f"{name} stores on top of it", (name,), segment.position)
