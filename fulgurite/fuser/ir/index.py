"""Index expressions: integers that depend on axes, sizes and, for gathers, on loaded values.

An `Index` is a polynomial with integer coefficients over atoms. Most are affine, `64*h + d`; symbols
of dynamic sizes may multiply (`s0*h + d`), and what a reshape leaves over becomes `//` and `%` atoms.
Everything is built through `+`, `*`, `floordiv` and `modulo`, which simplify as they build, so two
equal indices are, as far as the simplification sees, the same value.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import replace

from fulgurite.fuser.ir.index_atoms import (
    Atom,
    Axis,
    Loaded,
    Monomial,
    Quotient,
    Remainder,
    Symbol,
    order,
)


class Index:
    """A polynomial: `constant + sum of coefficient * product of atoms`. Immutable."""

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
        return _index(self.constant + other.constant, terms)

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
                    monomial = tuple(sorted(left + right, key=order))
                    terms[monomial] = terms.get(monomial, 0) + a * b
        return _index(terms.pop((), 0), terms)

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
    def plain(self) -> Axis | None:
        """The axis, when this index is exactly one axis and nothing else."""
        if self.constant or len(self.terms) != 1:
            return None
        monomial, coefficient = self.terms[0]
        if coefficient != 1 or len(monomial) != 1 or not isinstance(monomial[0], Axis):
            return None
        return monomial[0]

    def atoms(self) -> list[Atom]:
        """The atoms of this index, each once, not looking inside `//` and `%`."""
        return list(dict.fromkeys(atom for monomial, _ in self.terms for atom in monomial))

    def axes(self) -> set[Axis]:
        """Every axis it depends on, inside `//`, `%` and gathered indices too."""
        found: set[Axis] = set()
        for atom in self.atoms():
            if isinstance(atom, Axis):
                found.add(atom)
            elif isinstance(atom, Quotient | Remainder):
                found |= atom.numerator.axes() | atom.denominator.axes()
            elif isinstance(atom, Loaded):
                found |= atom.value.axes()
        return found

    def loaded(self) -> list[Loaded]:
        """The gathered positions in it, inside `//` and `%` too."""
        found: list[Loaded] = []
        for atom in self.atoms():
            if isinstance(atom, Loaded):
                found.append(atom)
            elif isinstance(atom, Quotient | Remainder):
                found += atom.numerator.loaded()
        return found

    def symbols(self) -> set[Symbol]:
        found: set[Symbol] = set()
        for atom in self.atoms():
            if isinstance(atom, Symbol):
                found.add(atom)
            elif isinstance(atom, Axis):
                found |= atom.size.symbols()
            elif isinstance(atom, Quotient | Remainder):
                found |= atom.numerator.symbols() | atom.denominator.symbols()
            elif isinstance(atom, Loaded):
                found |= atom.value.symbols() | atom.size.symbols()
        return found

    def coefficient(self, axis: Axis) -> Index | None:
        """What the axis is multiplied with, or None where the index is not linear in it."""
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
                if not isinstance(atom, Axis | Symbol) and axis in of_atom(atom).axes():
                    return None
        return _index(result.pop((), 0), result)

    def substitute(self, axes: Mapping[Axis, Index]) -> Index:
        """This index with axes replaced, simplified again."""
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
        """The integer this is, where `value_of` knows axes, symbols and loaded values."""
        total = self.constant
        for monomial, coefficient in self.terms:
            for atom in monomial:
                if isinstance(atom, Quotient):
                    down = atom.denominator.evaluate(value_of)
                    coefficient *= atom.numerator.evaluate(value_of) // down
                elif isinstance(atom, Remainder):
                    down = atom.denominator.evaluate(value_of)
                    coefficient *= atom.numerator.evaluate(value_of) % down
                else:
                    coefficient *= value_of(atom)
            total += coefficient
        return total

    def bounds(self) -> tuple[int | None, int | None]:
        """The smallest and largest value it can take; None where that is not known."""
        low: int | None = self.constant
        high: int | None = self.constant
        for monomial, coefficient in self.terms:
            least: int | None = 1
            most: int | None = 1
            for atom in monomial:
                atom_low, atom_high = atom.bounds()
                if atom_low is None or atom_low < 0:
                    least = most = None
                    break
                least = least * atom_low if least is not None else None
                most = most * atom_high if most is not None and atom_high is not None else None
            if coefficient < 0:
                least, most = most, least
            low = low + coefficient * least if low is not None and least is not None else None
            high = high + coefficient * most if high is not None and most is not None else None
        return low, high


ZERO = Index(0)
ONE = Index(1)


def of(value: Index | int) -> Index:
    return value if isinstance(value, Index) else Index(value)


def of_atom(atom: Atom) -> Index:
    return Index(0, (((atom,), 1),))


def product(sizes: tuple[Index, ...] | list[Index]) -> Index:
    total = ONE
    for size in sizes:
        total = total * size
    return total


def divide_exactly(index: Index, by: Index) -> Index | None:
    """index / by where that leaves nothing over for every value of the symbols, else None."""
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
    return _index(terms.pop((), 0), terms)


def floordiv(index: Index, by: Index) -> Index:
    """index // by for a positive `by`."""
    whole, rest = _split(index, by)
    if _within(rest, by):
        return whole
    if not rest.terms and not by.terms and by.constant:
        return whole + rest.constant // by.constant
    of_two = _of_two_steps(rest, by, operator.floordiv)
    return whole + (of_two or of_atom(Quotient(rest, by)))


def modulo(index: Index, by: Index) -> Index:
    """index % by for a positive `by`."""
    _, rest = _split(index, by)
    if _within(rest, by):
        return rest
    if not rest.terms and not by.terms and by.constant:
        return Index(rest.constant % by.constant)
    return _of_two_steps(rest, by, operator.mod) or of_atom(Remainder(rest, by))


def _of_two_steps(index: Index, by: Index, function: Callable[[int, int], int]) -> Index | None:
    """What depends on one axis of two steps alone, a straight line between the two: `(i - 1) % 2` is `1 - i`."""
    axes = list(index.axes())
    if len(axes) != 1 or index.atoms() != axes or axes[0].size != 2 or not by.constant or by.terms:
        return None
    ends = [index.substitute({axes[0]: Index(step)}).constant for step in (0, 1)]
    first, second = (function(end, by.constant) for end in ends)
    return of_atom(axes[0]) * (second - first) + first


def _split(index: Index, by: Index) -> tuple[Index, Index]:
    """index = whole * by + rest, moving every term that divides exactly into whole."""
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


def _within(index: Index, size: Index) -> bool:
    """Is 0 <= index < size certain?"""
    low, high = index.bounds()
    if low is None or low < 0:
        return False
    if size.is_constant:
        return high is not None and high < size.constant
    axis = index.plain
    if axis is not None:
        return axis.size == size
    # sum of stride * axis with each stride the product of the sizes inside it
    remaining = index
    reach = ONE
    for _ in range(len(index.terms)):
        for monomial, _ in remaining.terms:
            inner = [atom for atom in monomial if isinstance(atom, Axis)]
            if len(inner) == 1 and remaining.coefficient(inner[0]) == reach:
                remaining = remaining - of_atom(inner[0]) * reach
                reach = reach * inner[0].size
                break
    return remaining == 0 and reach == size


def _substitute_atom(atom: Atom, axes: Mapping[Axis, Index]) -> Index:
    if isinstance(atom, Axis):
        return axes.get(atom, of_atom(atom))
    if isinstance(atom, Quotient):
        return floordiv(atom.numerator.substitute(axes), atom.denominator.substitute(axes))
    if isinstance(atom, Remainder):
        return modulo(atom.numerator.substitute(axes), atom.denominator.substitute(axes))
    if isinstance(atom, Loaded):
        return of_atom(replace(atom, value=atom.value.substitute(axes)))
    return of_atom(atom)


def _index(constant: int, terms: dict[Monomial, int]) -> Index:
    kept = [(m, c) for m, c in terms.items() if c]
    kept.sort(key=lambda term: (tuple(order(a) for a in term[0]), term[1]))
    return Index(constant, tuple(kept))
