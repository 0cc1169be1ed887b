"""The atoms that an `Index` is a polynomial of: loop variables, sizes, `//`, `%` and gathered values.

Each knows its `bounds`: the smallest and largest value it can take, None where that is not known.
"""

from __future__ import annotations

from dataclasses import dataclass
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
        return below(self.size)


@dataclass(frozen=True, slots=True)
class Symbol:
    """A size that is known only when the kernel is called; at least `low`."""

    name: str
    low: int = 0

    def __str__(self) -> str:
        return self.name

    def bounds(self) -> Bounds:
        return self.low, None


@dataclass(frozen=True, slots=True)
class Quotient:
    """numerator // denominator, rounded down."""

    numerator: Index
    denominator: Index

    def __str__(self) -> str:
        return f"({self.numerator})//{factor(self.denominator)}"

    def bounds(self) -> Bounds:
        low, high = self.numerator.bounds()
        if not self.denominator.is_constant or not self.denominator.constant:
            return (0, high) if low is not None and low >= 0 else (None, None)
        by = self.denominator.constant
        return None if low is None else low // by, None if high is None else high // by


@dataclass(frozen=True, slots=True)
class Remainder:
    """numerator % denominator, with the sign of the denominator."""

    numerator: Index
    denominator: Index

    def __str__(self) -> str:
        return f"({self.numerator})%{factor(self.denominator)}"

    def bounds(self) -> Bounds:
        return below(self.denominator)


@dataclass(frozen=True, slots=True)
class Loaded:
    """An integer that a tensor holds, below `size`: the index of a gather.

    Where it `wraps`, negative values count from the end; elsewhere they are out of range.
    """

    value: Expression
    size: Index
    wraps: bool = True

    def __str__(self) -> str:
        return str(self.value)

    def bounds(self) -> Bounds:
        return below(self.size)


Atom = Axis | Symbol | Quotient | Remainder | Loaded
Monomial = tuple[Atom, ...]


def below(size: Index) -> Bounds:
    """The bounds of 0 <= value < size."""
    _, high = size.bounds()
    return 0, None if high is None else max(high - 1, 0)


def order(atom: Atom) -> tuple[int, str]:
    """Where an atom stands in a product: axes first, then symbols, then the rest."""
    kind = 0 if isinstance(atom, Axis) else 1 if isinstance(atom, Symbol) else 2
    return kind, str(atom)


def factor(index: Index) -> str:
    return str(index) if index.is_constant or index.plain else f"({index})"
