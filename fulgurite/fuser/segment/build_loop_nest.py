"""A segment as one loop nest.

In: a segment of a refined region. Out: a `Nest`. Statements of the segment that are read at several places
become several locals; axes that are always walked together are one axis.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fulgurite.fuser.ir import index as indices
from fulgurite.fuser.ir.expression import (
    Bound,
    Constant,
    Expression,
    Guard,
    Load,
    Operation,
    Position,
    value_type,
    walk,
)
from fulgurite.fuser.ir.index import Axis, Index
from fulgurite.fuser.ir.index_rewrites import map_loaded, recombine
from fulgurite.fuser.ir.loop_nest import Local, Nest, Store, rewrite
from fulgurite.fuser.ir.split_axes import axis_classes
from fulgurite.fuser.ir.statement import Region, Statement, Tensor
from fulgurite.fuser.segment import Segment


def build(region: Region, segment: Segment) -> Nest:
    """The nest of a segment, with its axes in no particular order yet."""
    return _Builder(region, segment).build()


class _Builder:
    def __init__(self, region: Region, segment: Segment) -> None:
        self.segment = segment
        self.tensors = region.tensors
        self.members = {f.name: f.statement for f in segment.shape.facts.values()}
        self.classes = axis_classes(region)
        self.loops: dict[int, Axis] = {}
        for s in self.members.values():
            for axis in s.all_axes:
                key = self.classes[(s.name, axis)]
                self.loops.setdefault(key, Axis(f"a{key}", axis.size))
        self.locals: dict[str, Local] = {}
        self.known: dict[tuple[str, tuple[Index, ...]], Expression] = {}
        self.memory: dict[str, Tensor] = {}

    def build(self) -> Nest:
        shape = self.segment.shape
        stores = []
        parts = self.parts()
        for name in self.segment.stored:
            s = self.members[name]
            at = tuple(self.loop(s, axis) for axis in s.axes)
            tensor = self.tensors[name]
            self.memory[name] = tensor
            places = [at] if parts is None else [(*at[:-1], Index(k)) for k in range(2)]
            stores += [Store(tensor, flat(tensor, at), self.value(name, at)) for at in places]
        grid = tuple(self.loops[c] for c in sorted(shape.grid - {parts}) if c in self.loops)
        body = tuple(self.loops[c] for c in sorted(shape.body) if c in self.loops)
        formulas = tuple(str(self.members[name]) for name in self.members)
        return Nest(grid, body, self.locals, tuple(stores), self.memory, formulas)

    def parts(self) -> int | None:
        """The loop over the parts of complex results, where it can be written out: nothing else has it.

        And nothing chooses between values: GCC 12 mixes up neighbours that are read under a mask and
        stored in pairs (-O2 -ftree-vectorize -fno-trapping-math).
        """
        woven = [s for s in self.members.values() if s.tensor.pairs]
        if not woven or {s.name for s in woven} != set(self.segment.stored):
            return None
        (loop,) = {self.classes[(s.name, s.axes[-1])] for s in woven}
        others = [s for s in self.members.values() if not s.tensor.pairs]
        if any(_chooses(part) for s in others for part in walk(s.expression)):
            return None
        used = {self.classes[(s.name, axis)] for s in others for axis in s.all_axes}
        used |= {self.classes[(s.name, axis)] for s in woven for axis in s.axes[:-1]}
        return None if loop in used else loop

    def loop(self, s: Statement, axis: Axis) -> Index:
        return indices.of_atom(self.loops[self.classes[(s.name, axis)]])

    def value(self, name: str, at: tuple[Index, ...]) -> Expression:
        """The statement's value at an index, as a constant or a reference to a local."""
        key = (name, at)
        if key in self.known:
            return self.known[key]
        s = self.members[name]
        axes = dict(zip(s.axes, at, strict=True))
        if s.reduction is not None:
            axes.update({axis: self.loop(s, axis) for axis in s.reduction.axes})
        expression = self.rewrite(s.expression.substitute(axes))
        role = self.segment.shape.roles[name]
        reduction = s.reduction.kind if s.reduction else s.scan.kind if s.scan else None
        reference = isinstance(expression, Load) and not expression.index
        if reduction is None and (reference or isinstance(expression, Constant)):
            self.known[key] = expression
            return expression
        unique = _unused(name, self.locals)
        dtype = value_type(s.expression.dtype)
        facts = self.segment.shape.facts[name]
        inner = bool(facts.reduced & self.segment.shape.body)
        about = s.reduction.about if s.reduction else None
        summed = self.known.get((about, at)) if about is not None else None
        self.locals[unique] = Local(
            unique,
            expression,
            dtype,
            reduction,
            role,
            facts.flops,
            over_body=inner,
            about=summed.name if isinstance(summed, Load) else None,
        )
        self.known[key] = Load(unique, (), dtype)
        return self.known[key]

    def rewrite(self, expression: Expression) -> Expression:
        """Loads of this segment's statements become locals, other loads flat addresses."""
        if isinstance(expression, Load):
            if expression.name in self.members:
                return self.value(expression.name, expression.index)
            at = tuple(self.in_index(i) for i in expression.index)
            tensor = self.tensors[expression.name]
            self.memory[expression.name] = tensor
            return Load(expression.name, (flat(tensor, at),), expression.dtype)
        if isinstance(expression, Operation):
            return replace(
                expression, arguments=tuple(self.rewrite(a) for a in expression.arguments)
            )
        if isinstance(expression, Guard):
            bounds = tuple(
                Bound(self.in_index(b.index), self.in_index(b.size)) for b in expression.bounds
            )
            return replace(
                expression,
                bounds=bounds,
                inside=self.guarded(expression.inside),
                outside=self.guarded(expression.outside),
            )
        if isinstance(expression, Position):
            return replace(expression, index=self.in_index(expression.index))
        return expression

    def guarded(self, expression: Expression) -> Expression:
        """A side of a guard, all in one expression: a local would be read outside the guard too."""
        rewritten = self.rewrite(expression)
        return self.expand(rewritten)

    def expand(self, expression: Expression) -> Expression:
        def expanded(part: Expression) -> Expression | None:
            if isinstance(part, Load) and not part.index:
                local = self.locals[part.name]
                if local.reduction is None and _reads_memory(local.expression, self.locals):
                    return self.expand(local.expression)
            return None

        return rewrite(expression, expanded, lambda index: index)

    def in_index(self, index: Index) -> Index:
        return map_loaded(index, self.rewrite)


def _chooses(part: Expression) -> bool:
    return isinstance(part, Guard) or (isinstance(part, Operation) and part.name == "where")


def _reads_memory(expression: Expression, known: Mapping[str, Local]) -> bool:
    """Does it read memory, itself or through locals that are not reductions?"""
    for part in walk(expression):
        if isinstance(part, Load):
            if part.index:
                return True
            local = known[part.name]
            if local.reduction is None and _reads_memory(local.expression, known):
                return True
    return False


def flat(tensor: Tensor, at: tuple[Index, ...]) -> Index:
    total = indices.ZERO
    for position, stride in zip(at, tensor.strides, strict=True):
        total = total + position * stride
    return recombine(total)


def _unused(name: str, taken: Mapping[str, object]) -> str:
    unique, count = name, 1
    while unique in taken:
        count += 1
        unique = f"{name}_at{count}"
    return unique
