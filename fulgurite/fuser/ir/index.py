"""Index expressions: integers that depend on axes, sizes and, for gathers, on loaded values.

An `Index` is a polynomial with integer coefficients over atoms (`index_atoms.py`). Most indices are
affine, such as `64*h + d`. Symbols of dynamic sizes may multiply (`s0*h + d`), and a reshape can
leave `//` and `%` atoms. `+`, `*`, `floordiv` and `modulo` simplify as they build. Equal indices
are therefore equal values, as far as the simplification can see.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from fulgurite.fuser.ir.index_atoms import (
    Atom,
    Axis,
    Bounds,
    FloorDiv,
    IndirectIndex,
    Mod,
    Monomial,
    Symbol,
    sort_key,
)


class Index:
    """An immutable polynomial: `constant + sum of coefficient * product of atoms`."""

    __slots__ = ("_hash", "constant", "terms")

    def __init__(self, constant: int, terms: tuple[tuple[Monomial, int], ...] = ()) -> None:
        self.constant = constant
        self.terms = terms
        self._hash = hash((constant, terms))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if isinstance(other, int):
            return not self.terms and self.constant == other
        if not isinstance(other, Index):
            return NotImplemented
        return (
            self._hash == other._hash
            and self.constant == other.constant
            and self.terms == other.terms
        )

    def __add__(self, other: Index | int) -> Index:
        if isinstance(other, int):
            return Index(self.constant + other, self.terms) if other else self
        if not other.terms:
            return self + other.constant
        if not self.terms:
            return other + self.constant
        terms = dict(self.terms)
        for monomial, coefficient in other.terms:
            terms[monomial] = terms.get(monomial, 0) + coefficient
        return _build_index(self.constant + other.constant, terms)

    def __neg__(self) -> Index:
        return self * -1

    def __sub__(self, other: Index | int) -> Index:
        return self + -other

    def __mul__(self, other: Index | int) -> Index:
        if isinstance(other, int):
            if other == 1:
                return self
            if other == 0:
                return ZERO
            return Index(self.constant * other, tuple((m, c * other) for m, c in self.terms))
        if not other.terms:
            return self * other.constant
        if not self.terms:
            return other * self.constant
        terms: dict[Monomial, int] = {}
        for left, a in (((), self.constant), *self.terms):
            for right, b in (((), other.constant), *other.terms):
                if a and b:
                    monomial = tuple(sorted(left + right, key=sort_key))
                    terms[monomial] = terms.get(monomial, 0) + a * b
        return _build_index(terms.pop((), 0), terms)

    __radd__ = __add__
    __rmul__ = __mul__

    def __str__(self) -> str:
        parts: list[str] = []
        for monomial, coefficient in self.terms:
            body = "*".join(str(atom) for atom in monomial)
            if coefficient == -1:
                body = f"-{body}"
            elif coefficient != 1:
                body = f"{coefficient}*{body}"
            parts.append(body)
        if self.constant or not parts:
            parts.append(str(self.constant))
        return " + ".join(parts).replace("+ -", "- ")

    __repr__ = __str__

    @property
    def is_constant(self) -> bool:
        return not self.terms

    @property
    def single_axis(self) -> Axis | None:
        """The axis if this index is exactly one axis, otherwise None."""
        if self.constant or len(self.terms) != 1:
            return None
        monomial, coefficient = self.terms[0]
        if coefficient != 1 or len(monomial) != 1 or not isinstance(monomial[0], Axis):
            return None
        return monomial[0]

    def atoms(self) -> list[Atom]:
        """Returns the distinct atoms of this index, without those inside `//` and `%`."""
        return list(dict.fromkeys(atom for monomial, _ in self.terms for atom in monomial))

    def axes(self) -> set[Axis]:
        """Returns every axis that it depends on, including those inside `//`, `%` and gathers."""
        found: set[Axis] = set()
        for atom in self.atoms():
            if isinstance(atom, Axis):
                found.add(atom)
            elif isinstance(atom, FloorDiv | Mod):
                found |= atom.numerator.axes() | atom.denominator.axes()
            elif isinstance(atom, IndirectIndex):
                found |= atom.value.axes()
        return found

    def indirect_indices(self) -> list[IndirectIndex]:
        """Returns its indirect (gathered) indices, including those inside `//` and `%`."""
        found: list[IndirectIndex] = []
        for atom in self.atoms():
            if isinstance(atom, IndirectIndex):
                found.append(atom)
            elif isinstance(atom, FloorDiv | Mod):
                found += atom.numerator.indirect_indices()
        return found

    def symbols(self) -> set[Symbol]:
        """Returns every symbol that it depends on, including those in the sizes of its axes."""
        found: set[Symbol] = set()
        for atom in self.atoms():
            if isinstance(atom, Symbol):
                found.add(atom)
            elif isinstance(atom, Axis):
                found |= atom.size.symbols()
            elif isinstance(atom, FloorDiv | Mod):
                found |= atom.numerator.symbols() | atom.denominator.symbols()
            elif isinstance(atom, IndirectIndex):
                found |= atom.value.symbols() | atom.size.symbols()
        return found

    def coefficient(self, axis: Axis) -> Index | None:
        """Returns the factor of `axis`, or None if the index is not linear in it."""
        result: dict[Monomial, int] = {}
        for monomial, coefficient in self.terms:
            count = sum(atom is axis or atom == axis for atom in monomial)
            if count == 1:
                rest = tuple(atom for atom in monomial if atom != axis)
                if any(not isinstance(atom, Symbol) for atom in rest):
                    return None
                result[rest] = result.get(rest, 0) + coefficient
            elif count > 1:
                return None
            for atom in monomial:
                if not isinstance(atom, Axis | Symbol) and axis in from_atom(atom).axes():
                    return None
        return _build_index(result.pop((), 0), result)

    def substitute(self, axes: Mapping[Axis, Index]) -> Index:
        """Replaces axes by indices and simplifies the result."""
        if not self.terms:
            return self
        total = Index(self.constant)
        for monomial, coefficient in self.terms:
            product = Index(coefficient)
            for atom in monomial:
                product = product * _substitute_atom(atom, axes)
            total = total + product
        return total

    def evaluate(self, value_of: Callable[[Atom], int]) -> int:
        """Computes the integer value. `value_of` returns the value of an axis, symbol or gather."""
        total = self.constant
        for monomial, coefficient in self.terms:
            for atom in monomial:
                if isinstance(atom, FloorDiv):
                    down = atom.denominator.evaluate(value_of)
                    coefficient *= atom.numerator.evaluate(value_of) // down
                elif isinstance(atom, Mod):
                    down = atom.denominator.evaluate(value_of)
                    coefficient *= atom.numerator.evaluate(value_of) % down
                else:
                    coefficient *= value_of(atom)
            total += coefficient
        return total

    def largest(self) -> Index | None:
        """Returns the value at the last points of its axes; None if it is not linear in them."""
        ends: dict[Axis, Index] = {}
        for axis in self.axes():
            step = self.coefficient(axis)
            low, high = (None, None) if step is None else step.bounds()
            if low is not None and low >= 0:
                ends[axis] = axis.size - 1
            elif high is not None and high <= 0:
                ends[axis] = ZERO
            else:
                return None
        return self.substitute(ends)

    def bounds(self) -> Bounds:
        """Returns the smallest and the largest possible value; None for an unknown bound."""
        low: int | None = self.constant
        high: int | None = self.constant
        for monomial, coefficient in self.terms:
            term: Bounds = (coefficient, coefficient)
            for atom in monomial:
                term = _multiply_bounds(term, atom.bounds())
            low = low + term[0] if low is not None and term[0] is not None else None
            high = high + term[1] if high is not None and term[1] is not None else None
        return low, high


ZERO = Index(0)
ONE = Index(1)


def as_index(value: Index | int) -> Index:
    """Converts an int to an `Index`."""
    return value if isinstance(value, Index) else Index(value)


def from_atom(atom: Atom) -> Index:
    """Returns the index that consists of this one atom."""
    return Index(0, (((atom,), 1),))


def product(sizes: tuple[Index, ...] | list[Index]) -> Index:
    """Multiplies all sizes."""
    total = ONE
    for size in sizes:
        total = total * size
    return total


def sum_of(parts: list[Index]) -> Index:
    """Adds all parts."""
    total = ZERO
    for part in parts:
        total = total + part
    return total


def _multiply_bounds(a: Bounds, b: Bounds) -> Bounds:
    """Returns the bounds of a product. None is an unknown bound."""
    if a[0] is not None and a[0] >= 0 and b[0] is not None and b[0] >= 0:
        is_bounded = a[1] is not None and b[1] is not None
        return a[0] * b[0], a[1] * b[1] if is_bounded else None  # type: ignore[operator]
    lows: list[int | None] = []
    highs: list[int | None] = []
    for x, x_is_high in ((a[0], False), (a[1], True)):
        for y, y_is_high in ((b[0], False), (b[1], True)):
            if x is not None and y is not None:
                lows.append(x * y)
                highs.append(x * y)
            elif x == 0 or y == 0:
                lows.append(0)
                highs.append(0)
            else:  # an infinite end: its sign is that of the two factors
                is_negative = _is_negative(x, x_is_high) != _is_negative(y, y_is_high)
                (lows if is_negative else highs).append(None)
    low = None if None in lows else min(n for n in lows if n is not None)
    high = None if None in highs else max(n for n in highs if n is not None)
    return low, high


def _is_negative(end: int | None, is_high: bool) -> bool:
    return not is_high if end is None else end < 0


def divide_exactly(index: Index, by: Index) -> Index | None:
    """Returns `index / by` if it has no remainder for any value of the symbols, otherwise None."""
    if by == 1:
        return index
    if by.is_constant:
        if by.constant == 0:
            return None
        if index.constant % by.constant or any(c % by.constant for _, c in index.terms):
            return None
        down = by.constant
        return Index(index.constant // down, tuple((m, c // down) for m, c in index.terms))
    if by.constant or len(by.terms) != 1 or index.constant:
        return ZERO if index == 0 else ONE if index == by else None
    divisor, scale = by.terms[0]
    terms: dict[Monomial, int] = {}
    for monomial, coefficient in index.terms:
        rest = list(monomial)
        for atom in divisor:
            if atom not in rest:
                return None
            rest.remove(atom)
        if coefficient % scale:
            return None
        terms[tuple(rest)] = coefficient // scale
    return _build_index(terms.pop((), 0), terms)


def floordiv(index: Index, by: Index) -> Index:
    """Returns `index // by` for a positive `by`."""
    whole, rest = _split_divisible(index, by)
    if is_within(rest, by):
        return whole
    if not rest.terms and not by.terms and by.constant:
        return whole + rest.constant // by.constant
    linear = _interpolate_two_points(rest, by, operator.floordiv)
    return whole + (linear or from_atom(FloorDiv(rest, by)))


def modulo(index: Index, by: Index) -> Index:
    """Returns `index % by` for a positive `by`."""
    _, rest = _split_divisible(index, by)
    if is_within(rest, by):
        return rest
    if not rest.terms and not by.terms and by.constant:
        return Index(rest.constant % by.constant)
    return _interpolate_two_points(rest, by, operator.mod) or from_atom(Mod(rest, by))


def _interpolate_two_points(
    index: Index, by: Index, function: Callable[[int, int], int]
) -> Index | None:
    """Returns `function(index, by)` as a line if the index depends only on one axis of size 2.

    Two points define a line: `(i - 1) % 2` is `1 - i`.
    """
    axes = list(index.axes())
    if len(axes) != 1 or index.atoms() != axes or axes[0].size != 2 or not by.constant or by.terms:
        return None
    ends = [index.substitute({axes[0]: Index(step)}).constant for step in (0, 1)]
    first, second = (function(end, by.constant) for end in ends)
    return from_atom(axes[0]) * (second - first) + first


def _split_divisible(index: Index, by: Index) -> tuple[Index, Index]:
    """Splits `index = whole * by + rest`. Every term that `by` divides goes into `whole`."""
    whole, rest = ZERO, ZERO
    for monomial, coefficient in index.terms:
        term = Index(0, ((monomial, coefficient),))
        divided = divide_exactly(term, by)
        if divided is None:
            rest = rest + term
        else:
            whole = whole + divided
    constant = Index(index.constant)
    if by.is_constant and by.constant and not rest.terms:
        return whole + index.constant // by.constant, Index(index.constant % by.constant)
    divided = divide_exactly(constant, by) if index.constant else None
    if divided is not None:
        return whole + divided, rest
    return whole, rest + constant


def is_within(index: Index, size: Index) -> bool:
    """Whether 0 <= index < size certainly holds."""
    low, high = index.bounds()
    if low is None or low < 0:
        return False
    if size.is_constant:
        return high is not None and high < size.constant
    axis = index.single_axis
    if axis is not None:
        return axis.size == size
    # A row-major sum of stride * axis: each stride is the product of the inner sizes.
    remaining = index
    reach = ONE
    for _ in range(len(index.terms)):
        for monomial, _ in remaining.terms:
            inner = [atom for atom in monomial if isinstance(atom, Axis)]
            if len(inner) == 1 and remaining.coefficient(inner[0]) == reach:
                remaining = remaining - from_atom(inner[0]) * reach
                reach = reach * inner[0].size
                break
    return remaining == 0 and reach == size


def _substitute_atom(atom: Atom, axes: Mapping[Axis, Index]) -> Index:
    if isinstance(atom, Axis):
        return axes.get(atom, from_atom(atom))
    if isinstance(atom, FloorDiv):
        return floordiv(atom.numerator.substitute(axes), atom.denominator.substitute(axes))
    if isinstance(atom, Mod):
        return modulo(atom.numerator.substitute(axes), atom.denominator.substitute(axes))
    if isinstance(atom, IndirectIndex):
        return from_atom(replace(atom, value=atom.value.substitute(axes)))
    return from_atom(atom)


def _build_index(constant: int, terms: dict[Monomial, int]) -> Index:
    """Drops zero terms and sorts the others into canonical order."""
    nonzero = [(m, c) for m, c in terms.items() if c]
    nonzero.sort(key=lambda term: (tuple(sort_key(a) for a in term[0]), term[1]))
    return Index(constant, tuple(nonzero))


def make_axes(sizes: Sequence[Index], prefix: str = "i") -> tuple[Axis, ...]:
    return tuple(Axis(f"{prefix}{k}", size) for k, size in enumerate(sizes))
