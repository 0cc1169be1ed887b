"""Rewrites of an index: simpler addresses, and new expressions inside gathered indices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from fulgurite.fuser.ir.index import (
    Atom,
    FloorDiv,
    Index,
    IndirectIndex,
    Mod,
    floordiv,
    from_atom,
    modulo,
)

if TYPE_CHECKING:
    from fulgurite.fuser.ir.expression import Expression


def recombine_div_mod(index: Index) -> Index:
    """Removes the `//` and `%` pairs that a reshape leaves in an address.

    `(n//d)*d*c + (n%d)*c` becomes `n*c`, and `((n//d)%e)*d*c + (n%d)*c` becomes `(n%(d*e))*c`.
    """
    for monomial, coefficient in index.terms:
        for atom in monomial:
            if not isinstance(atom, Mod):
                continue
            rest = tuple(other for other in monomial if other is not atom)
            factor = Index(0, ((rest, coefficient),)) if rest else Index(coefficient)
            for other, both in _find_matching_multiples(atom, index):
                pair = other * atom.denominator * factor
                if pair.terms and pair.terms[0] in index.terms:
                    left = index - pair - Index(0, ((monomial, coefficient),))
                    return recombine_div_mod(left + both * factor)
    return index


def _find_matching_multiples(remainder: Mod, index: Index) -> Iterator[tuple[Index, Index]]:
    """Yields (q, sum): terms q such that `q*d + n%d` simplifies, and what that sum is."""
    for quotient in _find_quotients(remainder):
        yield from_atom(quotient), remainder.numerator
    for atom in index.atoms():
        if isinstance(atom, Mod):
            for quotient in _find_quotients(remainder):
                if atom.numerator == from_atom(quotient):
                    whole = remainder.denominator * atom.denominator
                    yield from_atom(atom), modulo(remainder.numerator, whole)


def _find_quotients(remainder: Mod) -> list[FloorDiv]:
    """Returns the quotient that matches a remainder, in both forms: `(n//64)//32` and `n//2048`."""
    found = [FloorDiv(remainder.numerator, remainder.denominator)]
    terms, constant = remainder.numerator.terms, remainder.numerator.constant
    if len(terms) == 1 and not constant and terms[0][1] == 1 and len(terms[0][0]) == 1:
        (inner,) = terms[0][0]
        if isinstance(inner, FloorDiv):
            whole = inner.denominator * remainder.denominator
            found.append(FloorDiv(inner.numerator, whole))
    return found


def map_indirect(index: Index, change: Callable[[Expression], Expression]) -> Index:
    """Applies `change` to the expressions inside indirect indices."""
    if not index.terms or not any(_has_indirect(atom) for atom in index.atoms()):
        return index
    total = Index(index.constant)
    for monomial, coefficient in index.terms:
        term = Index(coefficient)
        for atom in monomial:
            if isinstance(atom, IndirectIndex):
                term = term * from_atom(replace(atom, value=change(atom.value)))
            elif isinstance(atom, FloorDiv):
                inner = map_indirect(atom.numerator, change)
                term = term * floordiv(inner, atom.denominator)
            elif isinstance(atom, Mod):
                inner = map_indirect(atom.numerator, change)
                term = term * modulo(inner, atom.denominator)
            else:
                term = term * from_atom(atom)
        total = total + term
    return total


def _has_indirect(atom: Atom) -> bool:
    if isinstance(atom, IndirectIndex):
        return True
    if isinstance(atom, FloorDiv | Mod):
        return any(_has_indirect(a) for a in atom.numerator.atoms())
    return False
