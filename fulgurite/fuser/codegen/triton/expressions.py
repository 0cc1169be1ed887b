"""Expressions and indices of the IR as lines of Triton.

In: expressions over the loops of a nest. Out: text, and lines for what is read from memory (`triton_lines`
says where they go; `triton_operations` has what is computed of it). A `Body` is the text of one kernel below its `def`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fulgurite.fuser.codegen.triton.operations import Operations
from fulgurite.fuser.codegen.triton.source_lines import Loop
from fulgurite.fuser.codegen.triton.values import constant, is_single, typed, value_tl
from fulgurite.fuser.ir.expression import (
    NARROW_FLOATS,
    Bound,
    Constant,
    Expression,
    Guard,
    Load,
    Position,
    value_type,
)
from fulgurite.fuser.ir.index import Axis, Index, Loaded, Quotient, Remainder, Symbol
from fulgurite.fuser.ir.loop_nest import Nest

WIDE_INTEGERS = (torch.int64, torch.uint64, torch.uint32)


class Body(Operations):
    """Text below a kernel's `def`."""

    def __init__(self, nest: Nest, blocks: tuple[Axis, ...], wide: bool, taken: set[str]) -> None:
        super().__init__(nest, taken | {axis.name for axis in nest.axes})
        self.blocks = blocks  # the axes that are dimensions of a block, in order
        self.wide = wide
        self.loops: dict[Axis, Loop] = {}
        self.names: dict[str, str] = {}  # of locals
        self.level_of: dict[str, int] = {}
        self.axes_of: dict[str, set[Axis]] = {}
        self.guards: list[tuple[str, set[Axis], int]] = []
        self.asserts = False
        self.kept: dict[Load, str] = {}  # blocks that an earlier walk has read
        self.places: dict[Index | None, str] = {}  # indices that have a shorter text
        self.walk = 0  # which walk over the body this is
        self.remade = False  # what is read stays narrow, and is widened in every walk
        # inputs that may have no address
        self.empty = {t.name for t, _, stores in nest.accesses() if t.is_empty and not stores}

    def shaped(self, text: str, axis: Axis) -> str:
        """A vector along one axis, with the other dimensions of the block as ones."""
        if len(self.blocks) < 2:
            return text
        places = [":" if a == axis else "None" for a in self.blocks]
        return f"{text}[{', '.join(places)}]"

    # indices

    def index(self, index: Index) -> str:
        if index in self.places:
            return self.places[index]
        parts: list[str] = []
        for monomial, coefficient in index.terms:
            factors = [self.atom(atom) for atom in monomial]
            if coefficient == -1:
                parts.append("-" + " * ".join(factors))
                continue
            if coefficient != 1:
                factors.append(str(coefficient))
            parts.append(" * ".join(factors))
        if index.constant or not parts:
            parts.append(str(index.constant))
        return " + ".join(parts).replace("+ -", "- ")

    def atom(self, atom: Axis | Symbol | Quotient | Remainder | Loaded) -> str:
        if isinstance(atom, Axis | Symbol):
            return atom.name
        if isinstance(atom, Loaded):
            return self.gathered(atom)
        if atom.denominator == 0:
            return "0"  # a position in nothing: of a loop that has no points
        top, bottom = self.index(atom.numerator), self.index(atom.denominator)
        top = top if is_single(atom.numerator) else f"({top})"
        bottom = bottom if atom.denominator.is_constant or atom.denominator.plain else f"({bottom})"
        low, _ = atom.numerator.bounds()
        if low is not None and low >= 0:
            return f"({top} {'//' if isinstance(atom, Quotient) else '%'} {bottom})"
        name = "whole_floored_divide" if isinstance(atom, Quotient) else "whole_floored_remainder"
        self.functions.add(name)
        return f"{name}({top}, {bottom})"

    def gathered(self, atom: Loaded) -> str:
        """A position that a tensor holds, checked against its range."""
        if isinstance(atom.value, Constant) and atom.size.is_constant:
            if 0 <= atom.value.value < atom.size.constant:
                return str(int(atom.value.value))
        mask = self.mask_text(self.axes(atom.value))
        # under another guard other positions were read
        key = f"{atom.value} of {atom.size} {atom.wraps} {mask}"
        level = self.level(atom.value)
        found = self.levels[level].tests.get(key)
        if found is not None:
            return found
        value, size = self.typed_expression(atom.value), self.index(atom.size)
        name = self.fresh("place")
        if value_type(atom.value.dtype) != torch.int64 and self.wide:
            value = f"{value}.to(tl.int64)"
        self.line(f"{name} = {value}", level)
        if atom.wraps:
            self.line(f"{name} = tl.where({name} < 0, {name} + {size}, {name})", level)
        test = f"(0 <= {name}) & ({name} < {size})"
        if mask:
            test = f"({test}) | ~({mask})"
        self.line(f'tl.device_assert({test}, "index out of range")', level)
        self.asserts = True
        if not self.wide and value_type(atom.value.dtype) in WIDE_INTEGERS:
            self.line(f"{name} = {name}.to(tl.int32)", level)
        self.levels[level].tests[key] = name
        return name

    # where an expression is known

    def axes(self, expression: Expression) -> set[Axis]:
        """The loops an expression depends on, through locals too."""
        found = set(expression.axes())
        for local in self.nest.references(expression):
            found |= self.axes_of[local.name]
        return found

    def level(self, expression: Expression) -> int:
        found = max((self.loops[a].level for a in expression.axes()), default=0)
        for local in self.nest.references(expression):
            found = max(found, self.level_of[local.name])
        return max([found, *(level for _, _, level in self.guards)])

    # masks

    def mask_text(self, axes: set[Axis]) -> str:
        """The conditions under which memory at these axes may be touched."""
        tests: list[str] = []
        for axis in (*self.nest.axes,):
            loop = self.loops.get(axis)
            if axis in axes and loop is not None and loop.mask:
                tests.append(loop.mask)
        for test, of, _ in self.guards:
            if of & axes or not of:
                tests.append(test)
        return " & ".join(tests)

    def weaker_masks(self, axes: set[Axis]) -> list[str]:
        """The same without the innermost guards: what was read under one of these was read here, too."""
        guards, found = self.guards, []
        for count in reversed(range(len(guards))):
            self.guards = guards[:count]
            found.append(self.mask_text(axes))
        self.guards = guards
        return found

    # values

    def expression(self, expression: Expression) -> str:
        if isinstance(expression, Constant):
            return constant(expression.value, expression.dtype)
        if isinstance(expression, Position):
            text = self.index(expression.index)
            if text.removeprefix("-").isdigit():
                return typed(int(text), expression.dtype)
            plain = expression.index.plain is not None
            return f"{text if plain else f'({text})'}.to({value_tl(expression.dtype)})"
        if isinstance(expression, Load):
            return self.load(expression) if expression.index else self.names[expression.name]
        if isinstance(expression, Guard):
            return self.guarded(expression)
        return self.operation(expression)

    def load(self, load: Load) -> str:
        index = load.index[0]
        axes = self.axes(load)
        extra = ""
        for _, of, _ in self.guards:
            for axis in sorted(of - axes if of & axes else (), key=str):
                if self.loops[axis].block:
                    extra += f" + 0 * {axis.name}"  # the mask has more dimensions than the place
                axes = axes | {axis}
        mask = self.mask_text(axes)
        level = self.level(load)
        key = (load, mask + extra)
        for known in (key, *((load, less) for less in self.weaker_masks(axes))):
            for outer in self.levels[: level + 1]:
                if known in outer.loads:
                    return outer.loads[known]
        letters = "".join(a.name for a in self.nest.axes if a in load.axes())
        if self.remade and load not in self.kept and self.stays_narrow(load):
            self.kept[load] = self.fresh(f"{self.names[load.name]}_kept")
            self.levels[level].reads.append(f"{self.kept[load]} = {self.read_text(load, mask)}")
        name = self.fresh(f"{self.names[load.name]}_{letters or 'value'}")
        if load in self.kept:
            text, level = self.kept_text(load, level < self.depth), self.depth
        else:
            text = self.read_text(load, mask, extra)
        if load.dtype in NARROW_FLOATS:
            text += ".to(tl.float32)"
        plain = not self.guards and not index.loaded() and load not in self.kept
        place_in = self.levels[level].reads if plain else self.levels[level].lines
        place_in.append(f"{name} = {text}")
        self.levels[level].loads[key] = name
        return name

    def read_text(self, load: Load, mask: str, extra: str = "") -> str:
        """The reading of a block, of the type that memory has."""
        mask = "False" if load.name in self.empty else mask
        place = self.index(load.index[0]) + extra
        pointer = f"{self.names[load.name]} + {place}" if place != "0" else self.names[load.name]
        options = f", mask={mask}" if mask else ""
        if mask and not load.dtype.is_floating_point:
            options += ", other=0"  # it may be a position
        return f"tl.load({pointer}{options})"

    def kept_text(self, load: Load, outside: bool = False) -> str:
        """The same where registers have it; what an earlier walk, or row, made of it is made again."""
        times = self.walk + outside
        if times == 0 or load.dtype.itemsize > 2:
            return self.kept[load]
        self.functions.add("again")
        return f"again({self.kept[load]}, {times})"

    def stays_narrow(self, load: Load) -> bool:
        along = any(a in self.loops and self.loops[a].block for a in load.axes())
        return along and load.dtype.itemsize == 2 and not self.guards and not load.index[0].loaded()

    def guarded(self, guard: Guard) -> str:
        tests = [self.bound(bound) for bound in guard.bounds]
        text = " & ".join(f"({test})" for test in tests) if len(tests) > 1 else tests[0]
        axes: set[Axis] = set()
        level = 0
        for bound in guard.bounds:
            for index in (bound.index, bound.size):
                position = Position(index, torch.int64)
                axes |= self.axes(position)
                level = max(level, self.level(position))
        known = self.levels[level].tests
        if text not in known:
            known[text] = self.fresh("inside")
            self.line(f"{known[text]} = {text}", level)
        name = known[text]
        either = set(_always_read(guard.outside))
        for load in _always_read(guard.inside):
            if load in either:  # once for both
                self.load(load)
        self.guards.append((name, axes, level))
        inside = self.expression(guard.inside)
        self.guards[-1] = (f"~{name}", axes, level)
        outside = self.expression(guard.outside)
        self.guards.pop()
        if isinstance(guard.inside, Constant) and isinstance(guard.outside, Constant):
            inside = typed(guard.inside.value, guard.dtype)
        return f"tl.where({name}, {inside}, {outside})"

    def bound(self, bound: Bound) -> str:
        low, high = bound.index.bounds()
        text, size = self.index(bound.index), self.index(bound.size)
        tests = []
        if low is None or low < 0:
            tests.append(f"{text} >= 0")
        if high is None or not bound.size.is_constant or high >= bound.size.constant:
            tests.append(f"{text} < {size}")
        return " & ".join(f"({t})" for t in tests) if len(tests) > 1 else "".join(tests) or "True"


def _always_read(expression: Expression) -> Iterator[Load]:
    """What an expression reads from memory at every point: nothing that a guard of its own decides about."""
    if isinstance(expression, Load):
        if expression.index:
            yield expression
    elif not isinstance(expression, Guard):
        for part in expression.parts():
            yield from _always_read(part)
