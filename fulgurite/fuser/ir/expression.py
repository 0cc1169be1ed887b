"""Expressions of the IR: what a statement computes at one point of its axes.

Loads, constants, positions, primitives and guarded choices. An expression computes in its *value type*:
float32 for the narrow floats, as torch does, and the dtype itself otherwise; a `cast` to a narrow float rounds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from fulgurite.fuser.ir.index import Axis, Index, Symbol
from fulgurite.fuser.ir.primitives import PRIMITIVES

NARROW_FLOATS = {
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "f8e4m3",
    torch.float8_e5m2: "f8e5m2",
    torch.float8_e4m3fnuz: "f8e4m3z",
    torch.float8_e5m2fnuz: "f8e5m2z",
    torch.float8_e8m0fnu: "f8e8m0",
}

# formats that torch only stores: two numbers a byte, looked at through `view(torch.uint8)`
PACKED = {torch.float4_e2m1fn_x2: torch.uint8}


def value_type(dtype: torch.dtype) -> torch.dtype:
    """The type that arithmetic on a tensor of this dtype is done in (torch's opmath type).

    Of complex numbers the type of a part: the IR computes with their parts.
    """
    if dtype.is_complex:
        return value_type(dtype.to_real())
    return torch.float32 if dtype in NARROW_FLOATS else PACKED.get(dtype, dtype)


@dataclass(frozen=True, slots=True)
class Load:
    """An element of a region input or of an earlier statement."""

    name: str
    index: tuple[Index, ...]
    dtype: torch.dtype

    def substitute(self, axes: Mapping[Axis, Index]) -> Load:
        return replace(self, index=tuple(i.substitute(axes) for i in self.index))

    def parts(self) -> tuple[Expression, ...]:
        return tuple(a.value for i in self.index for a in i.loaded())

    def __str__(self) -> str:
        return f"{self.name}[{','.join(str(i).replace(' ', '') for i in self.index)}]"

    def axes(self) -> set[Axis]:
        return set().union(*(i.axes() for i in self.index)) if self.index else set()

    def symbols(self) -> set[Symbol]:
        return set().union(*(i.symbols() for i in self.index)) if self.index else set()


@dataclass(frozen=True, slots=True)
class Constant:
    """A number of the program."""

    value: int | float | bool
    dtype: torch.dtype

    def substitute(self, axes: Mapping[Axis, Index]) -> Constant:
        return self

    def parts(self) -> tuple[Expression, ...]:
        return ()

    def __str__(self) -> str:
        return repr(self.value)

    def axes(self) -> set[Axis]:
        return set()

    def symbols(self) -> set[Symbol]:
        return set()


@dataclass(frozen=True, slots=True)
class Position:
    """The value of an index, as a number (arange, masks of positions, a dynamic size)."""

    index: Index
    dtype: torch.dtype

    def substitute(self, axes: Mapping[Axis, Index]) -> Position:
        return replace(self, index=self.index.substitute(axes))

    def parts(self) -> tuple[Expression, ...]:
        return tuple(a.value for a in self.index.loaded())

    def __str__(self) -> str:
        return f"({self.index})"

    def axes(self) -> set[Axis]:
        return self.index.axes()

    def symbols(self) -> set[Symbol]:
        return self.index.symbols()


@dataclass(frozen=True, slots=True)
class Operation:
    """A primitive of `primitives.py`, elementwise."""

    name: str
    arguments: tuple[Expression, ...]
    dtype: torch.dtype

    def substitute(self, axes: Mapping[Axis, Index]) -> Operation:
        return replace(self, arguments=tuple(a.substitute(axes) for a in self.arguments))

    def parts(self) -> tuple[Expression, ...]:
        return self.arguments

    def __str__(self) -> str:
        texts = [str(argument) for argument in self.arguments]
        if self.name == "cast":
            return f"{str(self.dtype).removeprefix('torch.')}({texts[0]})"
        sign = PRIMITIVES[self.name].infix if self.name in PRIMITIVES else None
        if sign is None:
            return f"{self.name}({', '.join(texts)})"
        return f"({texts[0]} {sign} {texts[1]})" if len(texts) == 2 else f"{sign}{texts[0]}"

    def axes(self) -> set[Axis]:
        return set().union(*(a.axes() for a in self.arguments)) if self.arguments else set()

    def symbols(self) -> set[Symbol]:
        return set().union(*(a.symbols() for a in self.arguments)) if self.arguments else set()


@dataclass(frozen=True, slots=True)
class Bound:
    """0 <= index < size."""

    index: Index
    size: Index

    def substitute(self, axes: Mapping[Axis, Index]) -> Bound:
        return Bound(self.index.substitute(axes), self.size.substitute(axes))

    @property
    def known(self) -> bool | None:
        """True or False where it always is, None where it depends on the axes."""
        if self.size == 0:
            return False
        low, high = self.index.bounds()
        if low is not None and low >= 0:
            if self.size.is_constant and high is not None and high < self.size.constant:
                return True
            axis = self.index.plain
            if axis is not None and axis.size == self.size:
                return True
            if self.size.is_constant and low >= self.size.constant:
                return False
        if high is not None and high < 0:
            return False
        return None

    def __str__(self) -> str:
        return f"0 <= {self.index} < {self.size}"


@dataclass(frozen=True, slots=True)
class Guard:
    """`inside` where every bound holds, else `outside`; each is read only where it is the answer."""

    bounds: tuple[Bound, ...]
    inside: Expression
    outside: Expression
    dtype: torch.dtype

    def substitute(self, axes: Mapping[Axis, Index]) -> Expression:
        return guard(
            tuple(b.substitute(axes) for b in self.bounds),
            self.inside.substitute(axes),
            self.outside.substitute(axes),
        )

    def parts(self) -> tuple[Expression, ...]:
        gathered = tuple(a.value for b in self.bounds for a in b.index.loaded())
        return (self.inside, self.outside, *gathered)

    def __str__(self) -> str:
        test = " and ".join(str(b) for b in self.bounds)
        return f"where({test}, {self.inside}, {self.outside})"

    def axes(self) -> set[Axis]:
        found = self.inside.axes() | self.outside.axes()
        for bound in self.bounds:
            found |= bound.index.axes() | bound.size.axes()
        return found

    def symbols(self) -> set[Symbol]:
        found = self.inside.symbols() | self.outside.symbols()
        for bound in self.bounds:
            found |= bound.index.symbols() | bound.size.symbols()
        return found


Expression = Load | Constant | Position | Operation | Guard


def guard(bounds: tuple[Bound, ...], inside: Expression, outside: Expression) -> Expression:
    """A Guard, or the side that is always taken."""
    left = tuple(b for b in bounds if b.known is not True)
    if not left:
        return inside
    if any(b.known is False for b in left):
        return outside
    return Guard(left, inside, outside, inside.dtype)


def walk(expression: Expression) -> Iterator[Expression]:
    """The expression and all its parts, parents first."""
    stack: list[Expression] = [expression]
    while stack:
        top = stack.pop()
        yield top
        stack.extend(top.parts())


def loads(expression: Expression) -> list[Load]:
    return [part for part in walk(expression) if isinstance(part, Load)]
