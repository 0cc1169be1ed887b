"""Expressions of the IR: what a statement computes at one point of its axes.

An expression is a tree of loads, constants, index values, primitives and masked selections. It
computes in its opmath dtype, as torch does: float32 for narrow floats, otherwise the dtype itself.
A `cast` to a narrow float rounds.
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

# Storage-only formats with two numbers in a byte. They are computed on as `view(torch.uint8)`.
PACKED_DTYPES = {torch.float4_e2m1fn_x2: torch.uint8}


def opmath_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of arithmetic on a tensor of this dtype (`at::opmath_type`).

    For a complex dtype it is the opmath dtype of its parts, because the IR computes on the parts.
    """
    if dtype.is_complex:
        return opmath_dtype(dtype.to_real())
    return torch.float32 if dtype in NARROW_FLOATS else PACKED_DTYPES.get(dtype, dtype)


@dataclass(frozen=True, slots=True)
class Load:
    """One element of a region input or of an earlier statement."""

    name: str
    index: tuple[Index, ...]
    dtype: torch.dtype

    def substitute(self, axes: Mapping[Axis, Index]) -> Load:
        return replace(self, index=tuple(i.substitute(axes) for i in self.index))

    def children(self) -> tuple[Expression, ...]:
        return tuple(a.value for i in self.index for a in i.indirect_indices())

    def __str__(self) -> str:
        return f"{self.name}[{','.join(str(i).replace(' ', '') for i in self.index)}]"

    def axes(self) -> set[Axis]:
        return set().union(*(i.axes() for i in self.index)) if self.index else set()

    def symbols(self) -> set[Symbol]:
        return set().union(*(i.symbols() for i in self.index)) if self.index else set()


@dataclass(frozen=True, slots=True)
class Constant:
    """A literal number."""

    value: int | float | bool
    dtype: torch.dtype

    def substitute(self, axes: Mapping[Axis, Index]) -> Constant:
        return self

    def children(self) -> tuple[Expression, ...]:
        return ()

    def __str__(self) -> str:
        return repr(self.value)

    def axes(self) -> set[Axis]:
        return set()

    def symbols(self) -> set[Symbol]:
        return set()


@dataclass(frozen=True, slots=True)
class IndexValue:
    """The value of an index as a number, for arange, position masks and dynamic sizes."""

    index: Index
    dtype: torch.dtype

    def substitute(self, axes: Mapping[Axis, Index]) -> IndexValue:
        return replace(self, index=self.index.substitute(axes))

    def children(self) -> tuple[Expression, ...]:
        return tuple(a.value for a in self.index.indirect_indices())

    def __str__(self) -> str:
        return f"({self.index})"

    def axes(self) -> set[Axis]:
        return self.index.axes()

    def symbols(self) -> set[Symbol]:
        return self.index.symbols()


@dataclass(frozen=True, slots=True)
class Operation:
    """An elementwise primitive of `primitives.py`."""

    name: str
    arguments: tuple[Expression, ...]
    dtype: torch.dtype

    def substitute(self, axes: Mapping[Axis, Index]) -> Operation:
        return replace(self, arguments=tuple(a.substitute(axes) for a in self.arguments))

    def children(self) -> tuple[Expression, ...]:
        return self.arguments

    def __str__(self) -> str:
        texts = [str(argument) for argument in self.arguments]
        if self.name == "cast":
            return f"{str(self.dtype).removeprefix('torch.')}({texts[0]})"
        infix = PRIMITIVES[self.name].infix if self.name in PRIMITIVES else None
        if infix is None:
            return f"{self.name}({', '.join(texts)})"
        return f"({texts[0]} {infix} {texts[1]})" if len(texts) == 2 else f"{infix}{texts[0]}"

    def axes(self) -> set[Axis]:
        return set().union(*(a.axes() for a in self.arguments)) if self.arguments else set()

    def symbols(self) -> set[Symbol]:
        return set().union(*(a.symbols() for a in self.arguments)) if self.arguments else set()


@dataclass(frozen=True, slots=True)
class BoundsCheck:
    """The condition 0 <= index < size."""

    index: Index
    size: Index

    def substitute(self, axes: Mapping[Axis, Index]) -> BoundsCheck:
        return BoundsCheck(self.index.substitute(axes), self.size.substitute(axes))

    @property
    def static_value(self) -> bool | None:
        """True or False if the condition is always so, None if it depends on the axes."""
        if self.size == 0:
            return False
        low, high = self.index.bounds()
        if low is not None and low >= 0:
            if self.size.is_constant and high is not None and high < self.size.constant:
                return True
            axis = self.index.single_axis
            if axis is not None and axis.size == self.size:
                return True
            if self.size.is_constant and low >= self.size.constant:
                return False
        if high is not None and high < 0:
            return False
        return self._static_value_with_symbols(low is not None and low >= 0)

    def _static_value_with_symbols(self, is_positive: bool) -> bool | None:
        """The same where dynamic sizes cancel: `i < s0` for an axis of size s0."""
        if not self.index.symbols() and self.size.is_constant:
            return None
        low, _ = (self.index - self.size).bounds()
        if low is not None and low >= 0:
            return False
        largest = self.index.largest()
        _, last = (None, None) if largest is None else largest.bounds()
        _, past = (None, None) if largest is None else (largest - self.size).bounds()
        if last is not None and last < 0:
            return False
        return True if is_positive and past is not None and past < 0 else None

    def __str__(self) -> str:
        return f"0 <= {self.index} < {self.size}"


@dataclass(frozen=True, slots=True)
class Masked:
    """`inside` where every bounds check holds, otherwise `outside`.

    Memory of a side is read only where that side is selected.
    """

    bounds: tuple[BoundsCheck, ...]
    inside: Expression
    outside: Expression
    dtype: torch.dtype

    def substitute(self, axes: Mapping[Axis, Index]) -> Expression:
        return make_masked(
            tuple(b.substitute(axes) for b in self.bounds),
            self.inside.substitute(axes),
            self.outside.substitute(axes),
        )

    def children(self) -> tuple[Expression, ...]:
        gathered = tuple(a.value for b in self.bounds for a in b.index.indirect_indices())
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


Expression = Load | Constant | IndexValue | Operation | Masked


def make_masked(
    bounds: tuple[BoundsCheck, ...], inside: Expression, outside: Expression
) -> Expression:
    """Creates a `Masked`, or returns the side that is always selected."""
    dynamic = tuple(b for b in bounds if b.static_value is not True)
    if not dynamic:
        return inside
    if any(b.static_value is False for b in dynamic):
        return outside
    return Masked(dynamic, inside, outside, inside.dtype)


def walk(expression: Expression) -> Iterator[Expression]:
    """Yields the expression and all its descendants, parents first."""
    stack: list[Expression] = [expression]
    while stack:
        top = stack.pop()
        yield top
        stack.extend(top.children())


def iter_indices(expression: Expression) -> Iterator[Index]:
    """Yields every index of an expression: of loads, index values and bounds checks."""
    for part in walk(expression):
        if isinstance(part, Load):
            yield from part.index
        elif isinstance(part, IndexValue):
            yield part.index
        elif isinstance(part, Masked):
            for bound in part.bounds:
                yield bound.index


def collect_loads(expression: Expression) -> list[Load]:
    """Returns all loads of an expression, including those of gathered indices."""
    return [part for part in walk(expression) if isinstance(part, Load)]
