"""Indices simplify to canonical form without changing their value."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from fulgurite.fuser.ir.index import (
    Axis,
    Index,
    Symbol,
    divide_exactly,
    floordiv,
    from_atom,
    modulo,
)
from fulgurite.fuser.ir.index_rewrites import recombine_div_mod

ROW, COLUMN = Axis("i", Index(6)), Axis("j", Index(4))
i, j = from_atom(ROW), from_atom(COLUMN)


def test_indices_simplify() -> None:
    assert floordiv(i * 4 + j, Index(4)) == i
    assert modulo(i * 4 + j, Index(4)) == j
    assert floordiv(j, Index(4)) == 0
    assert modulo(i * 8 + 3, Index(4)) == 3
    assert recombine_div_mod(floordiv(i, Index(3)) * 3 + modulo(i, Index(3))) == i
    p = from_atom(Axis("p", Index(768)))
    pairs = modulo(floordiv(p, Index(2)), Index(96)) * 2 + modulo(p, Index(2))
    assert recombine_div_mod(pairs) == modulo(p, Index(192))
    assert recombine_div_mod(pairs * 5 + j) == modulo(p, Index(192)) * 5 + j
    assert recombine_div_mod(pairs + floordiv(p, Index(192)) * 192) == p
    assert str(i * 4 - j + 2) == "4*i - j + 2"
    assert (i - i) == 0


def test_indices_with_symbols_simplify() -> None:
    n = from_atom(Symbol("n"))
    row, column = from_atom(Axis("r", n * 3)), from_atom(Axis("c", n))
    assert floordiv(row * n + column, n) == row
    assert modulo(row * n + column, n) == column
    assert divide_exactly(n * 12, n * 4) == 3
    assert divide_exactly(n * 12 + 1, n) is None


@st.composite
def polynomials(draw):
    total = Index(draw(st.integers(-20, 20)))
    for atom in (i, j):
        total = total + atom * draw(st.integers(-30, 30))
    for _ in range(draw(st.integers(0, 2))):
        by = Index(draw(st.integers(1, 9)))
        part = draw(st.sampled_from([i * 3 + j, i, j * 5 + 2, i * 4 + j]))
        total = total + draw(st.sampled_from([floordiv, modulo]))(part, by)
        if draw(st.booleans()):  # the form that a reshape leaves, or nearly
            inner = modulo(floordiv(part, by), Index(draw(st.integers(1, 5))))
            total = total + inner * draw(st.sampled_from([by.constant, 1])) + modulo(part, by)
    return total


@settings(max_examples=150, deadline=None)
@given(polynomials(), st.integers(1, 12), st.integers(0, 5), st.integers(0, 3))
def test_simplification_keeps_the_value(index: Index, by: int, a: int, b: int) -> None:
    at = {ROW: a, COLUMN: b}

    def value(of: Index) -> int:
        return of.evaluate(at.__getitem__)

    plain = value(index)
    assert value(floordiv(index, Index(by))) == plain // by
    assert value(modulo(index, Index(by))) == plain % by
    assert value(recombine_div_mod(index)) == plain
    low, high = index.bounds()
    assert (low is None or low <= plain) and (high is None or plain <= high)
    assert value(index.substitute({ROW: Index(a), COLUMN: Index(b)})) == plain
