"""The IR: indices simplify, regions print one line a statement, the checker sees what is wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fulgurite.fuser.frontend import lower_graph
from fulgurite.fuser.ir import split_axes
from fulgurite.fuser.ir.expression import Constant, Load, Operation
from fulgurite.fuser.ir.index import Axis, Index, Symbol, divide_exactly, floordiv, modulo, of_atom
from fulgurite.fuser.ir.index_rewrites import recombine
from fulgurite.fuser.ir.statement import check
from tests.fuser.support import oracle, trace

F = torch.nn.functional
ROW, COLUMN = Axis("i", Index(6)), Axis("j", Index(4))
i, j = of_atom(ROW), of_atom(COLUMN)


def test_indices_simplify() -> None:
    assert floordiv(i * 4 + j, Index(4)) == i
    assert modulo(i * 4 + j, Index(4)) == j
    assert floordiv(j, Index(4)) == 0
    assert modulo(i * 8 + 3, Index(4)) == 3
    assert recombine(floordiv(i, Index(3)) * 3 + modulo(i, Index(3))) == i
    p = of_atom(Axis("p", Index(768)))
    pairs = modulo(floordiv(p, Index(2)), Index(96)) * 2 + modulo(p, Index(2))
    assert recombine(pairs) == modulo(p, Index(192))
    assert recombine(pairs * 5 + j) == modulo(p, Index(192)) * 5 + j
    assert recombine(pairs + floordiv(p, Index(192)) * 192) == p
    assert str(i * 4 - j + 2) == "4*i - j + 2"
    assert (i - i) == 0


def test_indices_with_symbols() -> None:
    n = of_atom(Symbol("n"))
    row, column = of_atom(Axis("r", n * 3)), of_atom(Axis("c", n))
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
        if draw(st.booleans()):  # as a reshape leaves it, or nearly
            inner = modulo(floordiv(part, by), Index(draw(st.integers(1, 5))))
            total = total + inner * draw(st.sampled_from([by.constant, 1])) + modulo(part, by)
    return total


@settings(max_examples=150, deadline=None)
@given(polynomials(), st.integers(1, 12), st.integers(0, 5), st.integers(0, 3))
def test_simplified_means_the_same(index: Index, by: int, a: int, b: int) -> None:
    at = {ROW: a, COLUMN: b}

    def value(of: Index) -> int:
        return of.evaluate(at.__getitem__)

    plain = value(index)
    assert value(floordiv(index, Index(by))) == plain // by
    assert value(modulo(index, Index(by))) == plain % by
    assert value(recombine(index)) == plain
    low, high = index.bounds()
    assert (low is None or low <= plain) and (high is None or plain <= high)
    assert value(index.substitute({ROW: Index(a), COLUMN: Index(b)})) == plain


def test_a_region_prints_as_on_a_board() -> None:
    x, w = torch.randn(8, 16), torch.randn(16)
    region = oracle(lambda x, w: F.rms_norm(x, (16,), w, 0.25), x, w)
    assert [str(s) for s in region.statements] == [
        "pow_1[i0,i1] = (arg0_1[i0,i1] * arg0_1[i0,i1])",
        "mean_sum[i0] = sum_r1 pow_1[i0,r1]",
        "mean[i0] = (mean_sum[i0] / 16.0)",
        "add[i0] = (mean[i0] + 0.25)",
        "rsqrt[i0] = rsqrt(add[i0])",
        "mul[i0,i1] = (arg0_1[i0,i1] * rsqrt[i0])",
        "mul_1[i0,i1] = (mul[i0,i1] * arg1_1[i1])",
    ]


def test_refinement_makes_reshapes_renames() -> None:
    def heads(x):
        return (x * 2).view(3, 4, 5).transpose(0, 1).reshape(4, 15).exp()

    region = oracle(heads, torch.randn(12, 5))
    text = str(region)
    assert "//" not in text and "%" not in text, text


def test_what_can_not_be_refined_keeps_its_quotients() -> None:
    region = oracle(
        lambda x: (x * 2).view(2, 3).exp() + (x * 2).view(3, 2).exp().view(2, 3), torch.randn(6)
    )
    assert region.statements


@pytest.mark.parametrize(
    ("breakage", "message"),
    [
        (lambda s: replace(s, expression=Load("nothing", (), torch.float32)), "read before"),
        (lambda s: replace(s, axes=s.axes[:1]), "axes"),
        (lambda s: replace(s, expression=Operation("nonsense", (), torch.float32)), "primitive"),
        (lambda s: replace(s, expression=Load("arg0_1", (i,), torch.float32)), "not bound|rank"),
        (
            lambda s: replace(
                s, expression=Operation("exp", (Constant(1.0, torch.float32),) * 2, torch.float32)
            ),
            "takes 1",
        ),
    ],
)
def test_the_checker_names_the_statement(breakage, message: str) -> None:
    region = lower_graph.read(trace(lambda x: x.exp() * 2, (torch.randn(3, 4),)))
    check(region)
    first, *rest = region.statements
    with pytest.raises(AssertionError, match=message) as caught:
        check(replace(region, statements=(breakage(first), *rest)))
    assert "exp" in str(caught.value)


def test_classes_keep_both_axes_of_a_square_apart() -> None:
    region = split_axes.refine(
        lower_graph.read(trace(lambda x: x * 2 + (x * 2).t(), (torch.randn(5, 5),)))
    )
    classes = split_axes.axis_classes(region)
    for s in region.statements:
        assert len({classes[(s.name, axis)] for axis in s.axes}) == 2
