"""Rewrites of an index that keep its value: addresses made plain, gathered positions in other words."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from fulgurite.fuser.ir.index import (
    Atom,
    Index,
    Loaded,
    Quotient,
    Remainder,
    floordiv,
    modulo,
    of_atom,
)

if TYPE_CHECKING:
    from fulgurite.fuser.ir.expression import Expression


def recombine(index: Index) -> Index:
    """`(n//d)*d*c + (n%d)*c` is `n*c`, and `((n//d)%e)*d*c + (n%d)*c` is `(n%(d*e))*c`: addresses through a reshape
    become plain again.
    """
    for monomial, coefficient in index.terms:
        for atom in monomial:
            if not isinstance(atom, Remainder):
                continue
            rest = tuple(other for other in monomial if other is not atom)
            factor = Index(0, ((rest, coefficient),)) if rest else Index(coefficient)
            for other, both in _beside(atom, index):
                pair = other * atom.denominator * factor
                if pair.terms and pair.terms[0] in index.terms:
                    left = index - pair - Index(0, ((monomial, coefficient),))
                    return recombine(left + both * factor)
    return index


def _beside(remainder: Remainder, index: Index) -> Iterator[tuple[Index, Index]]:
    """What may stand beside `n%d` as a multiple of `d`, and what the two are together."""
    for quotient in _quotients(remainder):
        yield of_atom(quotient), remainder.numerator
    for atom in index.atoms():
        if isinstance(atom, Remainder):
            for quotient in _quotients(remainder):
                if atom.numerator == of_atom(quotient):
                    whole = remainder.denominator * atom.denominator
                    yield of_atom(atom), modulo(remainder.numerator, whole)


def _quotients(remainder: Remainder) -> list[Quotient]:
    """The quotient beside a remainder, in both of its spellings: `(n//64)//32` and `n//2048`."""
    found = [Quotient(remainder.numerator, remainder.denominator)]
    terms, constant = remainder.numerator.terms, remainder.numerator.constant
    if len(terms) == 1 and not constant and terms[0][1] == 1 and len(terms[0][0]) == 1:
        (inner,) = terms[0][0]
        if isinstance(inner, Quotient):
            whole = inner.denominator * remainder.denominator
            found.append(Quotient(inner.numerator, whole))
    return found


def map_loaded(index: Index, change: Callable[[Expression], Expression]) -> Index:
    """The index with the expressions inside gathered positions changed."""
    if not index.terms or not any(_holds_loaded(atom) for atom in index.atoms()):
        return index
    total = Index(index.constant)
    for monomial, coefficient in index.terms:
        term = Index(coefficient)
        for atom in monomial:
            if isinstance(atom, Loaded):
                term = term * of_atom(replace(atom, value=change(atom.value)))
            elif isinstance(atom, Quotient):
                inner = map_loaded(atom.numerator, change)
                term = term * floordiv(inner, atom.denominator)
            elif isinstance(atom, Remainder):
                inner = map_loaded(atom.numerator, change)
                term = term * modulo(inner, atom.denominator)
            else:
                term = term * of_atom(atom)
        total = total + term
    return total


def _holds_loaded(atom: Atom) -> bool:
    if isinstance(atom, Loaded):
        return True
    if isinstance(atom, Quotient | Remainder):
        return any(_holds_loaded(a) for a in atom.numerator.atoms())
    return False
