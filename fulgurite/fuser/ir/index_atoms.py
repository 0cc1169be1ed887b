"""The atoms of an `Index`: loop variables, symbols, `//`, `%` and gathered values.

Each atom has `bounds()`: the smallest and the largest value it can take, None for an unknown bound.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fulgurite.fuser.ir.expression import Expression
    from fulgurite.fuser.ir.index import Index

Bounds = tuple[int | None, int | None]


@dataclass(frozen=True, slots=True)
class Axis:
    """A loop variable: 0 <= name < size."""

    name: str
    size: Index

    def __str__(self) -> str:
        return self.name

    def bounds(self) -> Bounds:
        return bounds_below(self.size)


@dataclass(frozen=True, slots=True)
class Definition:
    """How the launcher computes a symbol: a Python expression over the names of other symbols."""

    text: str
    symbols: tuple[Symbol, ...]


@dataclass(frozen=True, slots=True)
class Symbol:
    """An integer that is known only when the kernel is called: low <= value <= high.

    A size is at least 0. An int argument of the program can have either sign. Symbols of one region
    are equal if their names are.
    """

    name: str
    low: int | None = field(default=0, compare=False)
    high: int | None = field(default=None, compare=False)
    definition: Definition | None = field(default=None, compare=False)
    is_64_bit: bool = field(default=False, compare=False)  # always, as seeds and floats are

    def __str__(self) -> str:
        return self.name

    def bounds(self) -> Bounds:
        return self.low, self.high


@dataclass(frozen=True, slots=True)
class FloorDiv:
    """numerator // denominator, rounded down. The denominator is positive."""

    numerator: Index
    denominator: Index

    def __str__(self) -> str:
        return f"({self.numerator})//{format_factor(self.denominator)}"

    def bounds(self) -> Bounds:
        low, high = self.numerator.bounds()
        if not self.denominator.is_constant or not self.denominator.constant:
            return (0, high) if low is not None and low >= 0 else (None, None)
        by = self.denominator.constant
        return None if low is None else low // by, None if high is None else high // by


@dataclass(frozen=True, slots=True)
class Mod:
    """numerator % denominator, in [0, denominator). The denominator is positive."""

    numerator: Index
    denominator: Index

    def __str__(self) -> str:
        return f"({self.numerator})%{format_factor(self.denominator)}"

    def bounds(self) -> Bounds:
        return bounds_below(self.denominator)


@dataclass(frozen=True, slots=True)
class IndirectIndex:
    """An integer below `size` that is loaded from a tensor: the index of a gather.

    If `wraps_negative`, negative values count from the end. Otherwise they are out of range. A
    value that is not `is_checked` is known to be in 0 <= value < size: kernels do not test it.
    """

    value: Expression
    size: Index
    wraps_negative: bool = True
    is_checked: bool = True

    def __str__(self) -> str:
        return str(self.value)

    def bounds(self) -> Bounds:
        return bounds_below(self.size)


Atom = Axis | Symbol | FloorDiv | Mod | IndirectIndex
Monomial = tuple[Atom, ...]


def bounds_below(size: Index) -> Bounds:
    """Returns the bounds of 0 <= value < size."""
    _, high = size.bounds()
    return 0, None if high is None else max(high - 1, 0)


def sort_key(atom: Atom) -> tuple[int, str]:
    """Orders the atoms of a product: axes first, then symbols, then the rest."""
    kind = 0 if isinstance(atom, Axis) else 1 if isinstance(atom, Symbol) else 2
    return kind, str(atom)


def format_factor(index: Index) -> str:
    """Prints an index as a format_factor, with parentheses around sums."""
    return str(index) if index.is_constant or index.single_axis else f"({index})"
