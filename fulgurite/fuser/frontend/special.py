"""Special functions and rarer elementwise ops as formulas of primitives: one row an op, as `pointwise_rules`.

Written so that both generators can spell them and loops over them become SIMD. Errors, in units of the last place
of float32, as `tests/fuser/test_special.py` measures them: erfinv 4, digamma 6 (away from its roots, where
the absolute error is 2e-7).

Left to torch on purpose: i0, i1 and the Bessel and Airy functions, igamma, zeta, polygamma, ndtri, erfcx and the
orthogonal polynomials. Each is a page of coefficients or a loop whose length depends on the data; none is near
the hot path of a model, and torch's own kernel costs the same without the page.
"""

from __future__ import annotations

import math

from fulgurite.fuser.frontend.pointwise import (
    Rule,
    add,
    apply,
    div,
    mul,
    number,
    one_minus,
    sub,
    where,
)
from fulgurite.fuser.ir.expression import Expression

# erfinv(x) = x p(w), w = -log(1 - x^2): one polynomial of w - 2.5 below w = 5, one of sqrt(w) - 3 above
CENTRE = (
    2.81022636e-08,
    3.43273939e-07,
    -3.5233877e-06,
    -4.39150654e-06,
    0.00021858087,
    -0.00125372503,
    -0.00417768164,
    0.246640727,
    1.50140941,
)
TAIL = (
    -0.000200214257,
    0.000100950558,
    0.00134934322,
    -0.00367342844,
    0.00573950773,
    -0.0076224613,
    0.00943887047,
    1.00167406,
    2.83297682,
)
# of the asymptotic series of digamma: B_2k / 2k
BERNOULLI = (1 / 12, -1 / 120, 1 / 252, -1 / 240, 1 / 132, -691 / 32760, 1 / 12)
LARGE = 10  # from here on that series is exact to a double


def polynomial(x: Expression, coefficients: tuple[float, ...]) -> Expression:
    """Horner's rule, the highest power first."""
    total: Expression = number(coefficients[0], x)
    for coefficient in coefficients[1:]:
        total = add(mul(total, x), number(coefficient, x))
    return total


def _erfinv(a: Expression) -> Expression:
    sign, a = a, apply("abs", a)
    w = apply("neg", apply("log1p", apply("neg", mul(a, a))))
    near = polynomial(sub(w, number(2.5, a)), CENTRE)
    far = polynomial(sub(apply("sqrt", w), number(3, a)), TAIL)
    y = mul(a, where(apply("lt", w, number(5, a)), near, far))
    for _ in range(2 if a.dtype.itemsize == 8 else 0):  # Newton's steps on erf(y) = a, or on erfc
        slope = mul(number(2 / math.sqrt(math.pi), a), apply("exp", apply("neg", mul(y, y))))
        near_zero = apply("lt", a, number(0.5, a))
        tail = sub(one_minus(a), apply("erfc", y))
        y = sub(y, div(where(near_zero, sub(apply("erf", y), a), tail), slope))
    y = where(apply("eq", a, number(1, a)), number(math.inf, a), y)
    return apply("copysign", y, sign)


def _digamma(a: Expression) -> Expression:
    """Up to LARGE by psi(x) = psi(x + 1) - 1/x, then the series; psi(1 - x) - pi / tan(pi x) below 0."""
    zero, one = number(0, a), number(1, a)
    negative = apply("lt", a, zero)
    x = where(negative, one_minus(a), a)
    steps: Expression = zero
    for k in range(
        LARGE
    ):  # an expression is a tree: each step starts from x, not from the one before
        small = apply("lt", x, number(LARGE - k, a))
        steps = add(steps, where(small, div(one, add(x, number(k, a))), zero))
    y = where(apply("lt", x, number(LARGE, a)), add(x, apply("ceil", sub(number(LARGE, a), x))), x)
    square = div(one, mul(y, y))
    series = mul(square, polynomial(square, BERNOULLI[::-1]))
    value = sub(sub(sub(apply("log", y), div(number(0.5, a), y)), series), steps)
    fraction = sub(a, apply("trunc", a))
    if a.dtype.itemsize == 4:
        # from the nearest whole number: pi times a fraction near -1 would lose what tells it from a pole (torch
        # has that in double, and of a double loses it, too)
        past_half = apply("lt", fraction, number(-0.5, a))
        fraction = where(past_half, add(fraction, one), fraction)
    turned = div(number(math.pi, a), apply("tan", mul(number(math.pi, a), fraction)))
    whole = apply("eq", fraction, zero)
    reflected = where(whole, number(math.nan, a), sub(value, turned))
    at_zero = apply("copysign", number(math.inf, a), apply("neg", a))
    return where(apply("eq", a, zero), at_zero, where(negative, reflected, value))


def _angle(a: Expression) -> Expression:
    """Of a real number: pi where it is negative."""
    turned = where(apply("lt", a, number(0, a)), number(math.pi, a), number(0, a))
    return where(apply("ne", a, a), a, turned)


RULES: dict[str, Rule] = {
    "erfinv": Rule(("self",), "float", lambda a: _erfinv(a)),
    "digamma": Rule(("self",), "float", lambda a: _digamma(a)),
    "angle": Rule(("self",), "float", lambda a: _angle(a)),
    "gcd": Rule(("self", "other"), "default", lambda a, b: apply("gcd", a, b)),
    "lcm": Rule(("self", "other"), "default", lambda a, b: apply("lcm", a, b)),
}
