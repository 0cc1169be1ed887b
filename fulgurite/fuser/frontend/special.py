"""Lowerings of special functions and rare elementwise ops. Same structure as `pointwise.py`.

Formulas use only primitives that both code generators have, so loops over them vectorize. Errors in
float32 ulp, as `tests/fuser/frontend/test_special.py` measures them: erfinv 4, digamma 6 (near its
roots the absolute error is 2e-7).

Not lowered on purpose: i0, i1, the Bessel and Airy functions, igamma, zeta, polygamma, ndtri, erfcx
and the orthogonal polynomials. Each needs many coefficients or a data-dependent loop. None is on
the hot path of a model, and torch's own kernel is as fast.
"""

from __future__ import annotations

import math

from fulgurite.fuser.frontend.pointwise import PointwiseLowering
from fulgurite.fuser.ir.build_expression import (
    add,
    apply,
    constant_like,
    div,
    mul,
    one_minus,
    sub,
    where,
)
from fulgurite.fuser.ir.expression import Expression

# erfinv(x) = x p(w) with w = -log(1 - x^2). p is a polynomial of w - 2.5 for w < 5, and of
# sqrt(w) - 3 above.
ERFINV_CENTER = (
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
ERFINV_TAIL = (
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
# coefficients of the asymptotic series of digamma: B_2k / 2k
DIGAMMA_SERIES = (1 / 12, -1 / 120, 1 / 252, -1 / 240, 1 / 132, -691 / 32760, 1 / 12)
DIGAMMA_SERIES_START = 10  # from here on the series is exact in float64


def evaluate_polynomial(x: Expression, coefficients: tuple[float, ...]) -> Expression:
    """Evaluates a polynomial by Horner's rule. Coefficients start with the highest power."""
    total: Expression = constant_like(coefficients[0], x)
    for coefficient in coefficients[1:]:
        total = add(mul(total, x), constant_like(coefficient, x))
    return total


def _erfinv(a: Expression) -> Expression:
    sign, a = a, apply("abs", a)
    w = apply("neg", apply("log1p", apply("neg", mul(a, a))))
    near = evaluate_polynomial(sub(w, constant_like(2.5, a)), ERFINV_CENTER)
    far = evaluate_polynomial(sub(apply("sqrt", w), constant_like(3, a)), ERFINV_TAIL)
    y = mul(a, where(apply("lt", w, constant_like(5, a)), near, far))
    for _ in range(2 if a.dtype.itemsize == 8 else 0):  # Newton steps on erf(y) = a or on erfc
        slope = mul(constant_like(2 / math.sqrt(math.pi), a), apply("exp", apply("neg", mul(y, y))))
        near_zero = apply("lt", a, constant_like(0.5, a))
        tail = sub(one_minus(a), apply("erfc", y))
        y = sub(y, div(where(near_zero, sub(apply("erf", y), a), tail), slope))
    y = where(apply("eq", a, constant_like(1, a)), constant_like(math.inf, a), y)
    return apply("copysign", y, sign)


def _digamma(a: Expression) -> Expression:
    """Computes digamma (psi).

    psi(x) = psi(x + 1) - 1/x up to DIGAMMA_SERIES_START, then the series. For x < 0 it is
    psi(1 - x) - pi / tan(pi x).
    """
    zero, one = constant_like(0, a), constant_like(1, a)
    negative = apply("lt", a, zero)
    x = where(negative, one_minus(a), a)
    steps: Expression = zero
    # An expression is a tree: each step starts from x, not from the previous step.
    for k in range(DIGAMMA_SERIES_START):
        small = apply("lt", x, constant_like(DIGAMMA_SERIES_START - k, a))
        steps = add(steps, where(small, div(one, add(x, constant_like(k, a))), zero))
    y = where(
        apply("lt", x, constant_like(DIGAMMA_SERIES_START, a)),
        add(x, apply("ceil", sub(constant_like(DIGAMMA_SERIES_START, a), x))),
        x,
    )
    square = div(one, mul(y, y))
    series = mul(square, evaluate_polynomial(square, DIGAMMA_SERIES[::-1]))
    value = sub(sub(sub(apply("log", y), div(constant_like(0.5, a), y)), series), steps)
    fraction = sub(a, apply("trunc", a))
    if a.dtype.itemsize == 4:
        # Measure from the nearest integer: pi times a fraction near -1 would lose its distance from
        # the pole. torch computes this in double, and loses it for doubles.
        past_half = apply("lt", fraction, constant_like(-0.5, a))
        fraction = where(past_half, add(fraction, one), fraction)
    cotangent = div(
        constant_like(math.pi, a), apply("tan", mul(constant_like(math.pi, a), fraction))
    )
    is_pole = apply("eq", fraction, zero)
    reflected = where(is_pole, constant_like(math.nan, a), sub(value, cotangent))
    at_zero = apply("copysign", constant_like(math.inf, a), apply("neg", a))
    return where(apply("eq", a, zero), at_zero, where(negative, reflected, value))


def _angle(a: Expression) -> Expression:
    """Computes the angle of a real number: pi if it is negative, otherwise 0."""
    value = where(
        apply("lt", a, constant_like(0, a)), constant_like(math.pi, a), constant_like(0, a)
    )
    return where(apply("ne", a, a), a, value)


SPECIAL_LOWERINGS: dict[str, PointwiseLowering] = {
    "erfinv": PointwiseLowering(("self",), "float", _erfinv),
    "digamma": PointwiseLowering(("self",), "float", _digamma),
    "angle": PointwiseLowering(("self",), "float", _angle),
    "gcd": PointwiseLowering(("self", "other"), "default", lambda a, b: apply("gcd", a, b)),
    "lcm": PointwiseLowering(("self", "other"), "default", lambda a, b: apply("lcm", a, b)),
}
