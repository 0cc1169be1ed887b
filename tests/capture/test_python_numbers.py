"""Python numbers that became symbols, against Python's own arithmetic."""

from __future__ import annotations

import math

import pytest
import torch

import fulgurite

FLOATS = (0.5, 0.25, -1.0, -2.5, 0.0, 3.0, 1.0, -4.0)
INTEGERS = (3, 5, -2, 0, 7, 1, -7)


def check(f, numbers):
    compiled, x = fulgurite.compile(f), torch.arange(3.0) - 1
    for number in numbers:
        try:
            right = f(x, number)
        except (ArithmeticError, ValueError) as error:
            with pytest.raises(type(error)) as ours:
                compiled(x, number)
            assert str(ours.value) == str(error)
        else:
            torch.testing.assert_close(compiled(x, number), right)


@pytest.mark.parametrize("exponent", [2, 3, -1, -2, 0.5, 2.0, -0.5, 0, 1])
def test_powers_of_a_float(exponent):
    check(lambda x, p: x * p + p**exponent, FLOATS)


@pytest.mark.parametrize("base", [2.0, -2.0, 0.5, -2, 2])
def test_powers_of_a_number(base):
    check(lambda x, p: x * p + base**p, FLOATS)
    check(lambda x, p: x + base**p, INTEGERS)


@pytest.mark.parametrize(
    "f",
    [
        lambda x, p: x * p + 1 / p,
        lambda x, p: x * p + 3.5 // p,
        lambda x, p: x * p + 3.5 % p,
        lambda x, p: x * (p % 2) + p // 1,
        lambda x, p: x * p + math.sqrt(p),
        lambda x, p: x * p + math.log(p),
        lambda x, p: x * p + math.acos(p),
    ],
)
def test_errors_of_python(f):
    check(f, FLOATS)


def test_infinity():
    check(lambda x, p: x + math.sin(p), (0.5, 0.25, math.inf, 2.0))


@pytest.mark.parametrize(
    "f",
    [
        lambda x, n: x + 7 // n,
        lambda x, n: x + 7 / n,
        lambda x, n: x + n // 3 + n % -3,
        lambda x, n: x + math.sqrt(n),
        lambda x, n: x * n + n**-1,
    ],
)
def test_integers(f):
    check(f, INTEGERS)


def test_numbers_inside_the_domain_are_one_graph():
    compiled = fulgurite.compile(lambda x, p: x * p + 1 / p, fullgraph=True)
    for p in (0.5, 0.25, 2.0, -3.0):
        compiled(torch.ones(3), p)
    assert len(compiled.graphs) == 2


@pytest.mark.parametrize("dynamic", [None, True])
def test_integers_of_more_than_64_bits(dynamic):
    def f(x, n, m):
        return x * n, n * m, n + m, x + float(n**3 - m)

    compiled = fulgurite.compile(f, dynamic=dynamic)
    x = torch.ones(2)
    pairs = [(3, 4), (5, -6), (2**62 + 1, 7), (2**40, 2**50), (-(2**31), 2**33), (2**63, 9), (8, 9)]
    for n, m in pairs:
        for found, right in zip(compiled(x, n, m), f(x, n, m), strict=True):
            if isinstance(right, int):
                assert found == right
            else:
                torch.testing.assert_close(found, right)


def test_integers_that_fit_share_one_graph():
    compiled = fulgurite.compile(lambda x, n: (x * n, n * 5), fullgraph=True)
    for n in (3, 5, -7, 2**31 - 1, 0):
        assert compiled(torch.ones(2), n)[1] == n * 5
    assert len(compiled.graphs) <= 3  # the first number, a symbol, and 0
