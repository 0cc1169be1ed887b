"""Formulas of complex ops as pairs of real expressions. Same structure as `pointwise.py`.

Division is Smith's method. Infinities and NaN follow C's complex functions. A factor in front of a
sum is multiplied as a complex number even if it is 1, as in torch: it turns infinities into NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from fulgurite.fuser.ir.build_expression import add, apply, constant_like, div, mul, sub, where
from fulgurite.fuser.ir.errors import Unsupported
from fulgurite.fuser.ir.expression import Constant, Expression, Operation


class ComplexPair(NamedTuple):
    """A complex number as two real expressions."""

    real: Expression
    imaginary: Expression


def complex_add(a: ComplexPair, b: ComplexPair) -> ComplexPair:
    return ComplexPair(add(a.real, b.real), add(a.imaginary, b.imaginary))


def complex_sub(a: ComplexPair, b: ComplexPair) -> ComplexPair:
    return ComplexPair(sub(a.real, b.real), sub(a.imaginary, b.imaginary))


def complex_mul(a: ComplexPair, b: ComplexPair) -> ComplexPair:
    real = sub(mul(a.real, b.real), mul(a.imaginary, b.imaginary))
    return ComplexPair(real, add(mul(a.real, b.imaginary), mul(a.imaginary, b.real)))


def complex_div(a: ComplexPair, b: ComplexPair) -> ComplexPair:
    """Divides by Smith's method: by the larger part of the divisor first, against overflow."""
    c, d = b
    real_is_larger = apply("ge", apply("abs", c), apply("abs", d))
    ratio = where(real_is_larger, div(d, c), div(c, d))
    divisor = where(real_is_larger, add(c, mul(d, ratio)), add(d, mul(c, ratio)))
    scale = apply("reciprocal", divisor)
    real = where(
        real_is_larger, add(a.real, mul(a.imaginary, ratio)), add(mul(a.real, ratio), a.imaginary)
    )
    imaginary = where(
        real_is_larger, sub(a.imaginary, mul(a.real, ratio)), sub(mul(a.imaginary, ratio), a.real)
    )
    is_zero = Operation(
        "and",
        (apply("eq", c, constant_like(0, c)), apply("eq", d, constant_like(0, d))),
        torch.bool,
    )
    by_zero = ComplexPair(div(a.real, apply("abs", c)), div(a.imaginary, apply("abs", d)))
    return complex_where(is_zero, by_zero, ComplexPair(mul(real, scale), mul(imaginary, scale)))


def complex_neg(a: ComplexPair) -> ComplexPair:
    return ComplexPair(apply("neg", a.real), apply("neg", a.imaginary))


def complex_constant(value: complex, like: ComplexPair) -> ComplexPair:
    return ComplexPair(constant_like(value.real, like.real), constant_like(value.imag, like.real))


def complex_scale(a: ComplexPair, factor: Any) -> ComplexPair:
    if not isinstance(factor, int | float | complex):
        raise Unsupported("a scale factor that is not a Python number")
    return complex_mul(complex_constant(complex(factor), a), a)


def complex_where(condition: Expression, a: ComplexPair, b: ComplexPair) -> ComplexPair:
    return ComplexPair(where(condition, a.real, b.real), where(condition, a.imaginary, b.imaginary))


def complex_abs(a: ComplexPair) -> Expression:
    return apply("hypot", a.real, a.imaginary)


def complex_angle(a: ComplexPair) -> Expression:
    return apply("atan2", a.imaginary, a.real)


def complex_conj(a: ComplexPair) -> ComplexPair:
    return ComplexPair(a.real, apply("neg", a.imaginary))


def complex_exp(a: ComplexPair) -> ComplexPair:
    modulus = apply("exp", a.real)
    is_real = apply("eq", a.imaginary, constant_like(0, a.real))
    rotated = ComplexPair(
        mul(modulus, apply("cos", a.imaginary)), mul(modulus, apply("sin", a.imaginary))
    )
    result = complex_where(is_real, ComplexPair(modulus, a.imaginary), rotated)
    zero = constant_like(0, modulus)
    is_zero = Operation(
        "and",
        (apply("eq", modulus, zero), apply("eq", a.real, constant_like(-math.inf, modulus))),
        torch.bool,
    )
    is_infinite = apply("eq", a.real, constant_like(math.inf, modulus))
    real = _fix_nan(result.real, is_infinite, modulus)  # for every imaginary part
    return complex_where(is_zero, ComplexPair(zero, zero), ComplexPair(real, result.imaginary))


def complex_log(a: ComplexPair) -> ComplexPair:
    """Computes log |z| + i angle(z). Near |z| = 1, log |z| is log1p(|z|^2 - 1) / 2.

    With m and n, the larger and the smaller part, |z|^2 - 1 is (m - 1) (m + 1) + n^2.
    """
    one, half = constant_like(1, a.real), constant_like(0.5, a.real)
    parts = apply("abs", a.real), apply("abs", a.imaginary)
    m, n = apply("maximum", *parts), apply("minimum", *parts)
    excess = add(mul(sub(m, one), add(m, one)), mul(n, n))
    modulus = complex_abs(a)
    is_near = apply("lt", apply("abs", sub(modulus, one)), half)
    real = where(is_near, mul(half, apply("log1p", excess)), apply("log", modulus))
    return ComplexPair(real, complex_angle(a))


def make_logarithm(base: float) -> Callable[[ComplexPair], ComplexPair]:
    """Both parts are scaled by themselves: an infinite real part leaves the angle finite."""

    def formula(a: ComplexPair) -> ComplexPair:
        scale, b = constant_like(1 / math.log(base), a.real), complex_log(a)
        return ComplexPair(mul(scale, b.real), mul(scale, b.imaginary))

    return formula


def complex_sqrt(a: ComplexPair) -> ComplexPair:
    half = constant_like(0.5, a.real)
    larger = apply("sqrt", mul(half, add(complex_abs(a), apply("abs", a.real))))
    smaller = div(mul(half, apply("abs", a.imaginary)), larger)
    is_positive = apply("ge", a.real, constant_like(0, a.real))
    zero = apply("eq", larger, constant_like(0, a.real))
    real = where(is_positive, larger, smaller)
    imaginary = where(is_positive, smaller, larger)
    signed = apply("copysign", imaginary, a.imaginary)
    result = complex_where(
        zero, ComplexPair(constant_like(0, a.real), a.imaginary), ComplexPair(real, signed)
    )
    return complex_where(
        _is_inf(a.imaginary), ComplexPair(constant_like(math.inf, a.real), a.imaginary), result
    )


def make_sinh_cosh(sine: bool) -> Callable[[ComplexPair], ComplexPair]:
    first, second = ("sinh", "cosh") if sine else ("cosh", "sinh")

    def formula(a: ComplexPair) -> ComplexPair:
        x, y = a
        real = mul(apply(first, x), apply("cos", y))
        imaginary = mul(apply(second, x), apply("sin", y))
        real = _fix_nan(real, _is_inf(x), apply("abs", x))
        zero = y if sine else mul(y, apply("copysign", constant_like(1, x), x))
        imaginary = _fix_nan(imaginary, _is_zero(y), zero)
        if sine:
            return ComplexPair(_fix_nan(real, _is_zero(x), x), imaginary)
        return ComplexPair(real, _fix_nan(imaginary, _is_zero(x), x))

    return formula


def complex_tanh(a: ComplexPair) -> ComplexPair:
    """Computes tanh(x + iy) with t = tanh x, c = 1 / cosh x and u = tan y.

    (t (1 + u^2) + i u c^2) / (1 + t^2 u^2). 1 - t^2 instead of c^2 would lose all digits of large x.
    """
    x, y = a
    one = constant_like(1, x)
    t, u = apply("tanh", x), apply("tan", y)
    c = apply("reciprocal", apply("cosh", x))
    below = add(one, mul(mul(t, t), mul(u, u)))
    real = div(mul(t, add(one, mul(u, u))), below)
    imaginary = div(mul(u, mul(c, c)), below)
    real = _fix_nan(_fix_nan(real, _is_zero(x), x), _is_inf(x), t)
    imaginary = _fix_nan(imaginary, _is_zero(y), y)
    return ComplexPair(real, _fix_nan(imaginary, _is_inf(x), constant_like(0, x)))


def _fix_nan(value: Expression, condition: Expression, instead: Expression) -> Expression:
    """Another value for a NaN, on a condition: C defines more values than formulas have."""
    needs_fix = Operation("and", (condition, apply("ne", value, value)), torch.bool)
    return where(needs_fix, instead, value)


def _is_zero(a: Expression) -> Expression:
    return apply("eq", a, constant_like(0, a))


def make_trigonometric(
    function: Callable[[ComplexPair], ComplexPair], back: bool
) -> Callable[[ComplexPair], ComplexPair]:
    """Returns sin, cos or tan from its hyperbolic counterpart g: f(z) = g(iz), or -i g(iz)."""

    def formula(a: ComplexPair) -> ComplexPair:
        b = function(ComplexPair(apply("neg", a.imaginary), a.real))
        return ComplexPair(b.imaginary, apply("neg", b.real)) if back else b

    return formula


def complex_pow(a: ComplexPair, b: ComplexPair) -> ComplexPair:
    """a ** b as exp(b log a). That is also the rule for zeros and infinities: 0 ** -3 is inf + nan i.

    Constant exponents for which torch has formulas of its own have those.
    """
    if isinstance(b.real, Constant) and b.imaginary == constant_like(0, b.real):
        formula = _POWERS.get(b.real.value)
        if formula is not None:
            return formula(a)
    return complex_exp(complex_mul(b, complex_log(a)))


def _reciprocal(a: ComplexPair) -> ComplexPair:
    return complex_div(complex_constant(1, a), a)


def _square(a: ComplexPair) -> ComplexPair:
    return complex_mul(a, a)


_POWERS: dict[float, Callable[[ComplexPair], ComplexPair]] = {
    0: lambda a: complex_constant(1, a),
    1: lambda a: a,
    2: _square,
    3: lambda a: complex_mul(_square(a), a),
    0.5: complex_sqrt,
    -0.5: lambda a: _reciprocal(complex_sqrt(a)),
    -1: _reciprocal,
    -2: lambda a: _reciprocal(_square(a)),
}


def complex_sgn(a: ComplexPair) -> ComplexPair:
    modulus = complex_abs(a)
    is_zero = apply("eq", modulus, constant_like(0, modulus))
    return complex_where(
        is_zero,
        complex_constant(0, a),
        ComplexPair(div(a.real, modulus), div(a.imaginary, modulus)),
    )


def _any_part(test: Callable[[Expression], Expression]) -> Callable[[ComplexPair], Expression]:
    return lambda a: Operation("or", (test(a.real), test(a.imaginary)), torch.bool)


def _is_inf(a: Expression) -> Expression:
    return apply("eq", apply("abs", a), constant_like(math.inf, a))


def _eq(a: ComplexPair, b: ComplexPair) -> Expression:
    same = (apply("eq", a.real, b.real), apply("eq", a.imaginary, b.imaginary))
    return Operation("and", same, torch.bool)


def _div(a: ComplexPair, b: ComplexPair, rounding_mode: str | None = None) -> ComplexPair:
    if rounding_mode is not None:
        raise Unsupported("complex division with rounding_mode")
    return complex_div(a, b)


def _lerp(a: ComplexPair, b: ComplexPair, weight: ComplexPair) -> ComplexPair:
    near = complex_add(a, complex_mul(weight, complex_sub(b, a)))
    far = complex_sub(
        b, complex_mul(complex_sub(b, a), complex_sub(complex_constant(1, a), weight))
    )
    return complex_where(apply("lt", complex_abs(weight), constant_like(0.5, a.real)), near, far)


def _polar(modulus: ComplexPair, turn: ComplexPair) -> ComplexPair:
    return ComplexPair(
        mul(modulus.real, apply("cos", turn.real)), mul(modulus.real, apply("sin", turn.real))
    )


BINARY = ("self", "other")
UNARY = ("self",)
COMPLEX_FORMULAS: dict[str, tuple[tuple[str, ...], Callable[..., Any]]] = {
    "add": (BINARY, lambda a, b, alpha=1: complex_add(a, complex_scale(b, alpha))),
    "sub": (BINARY, lambda a, b, alpha=1: complex_sub(a, complex_scale(b, alpha))),
    "rsub": (BINARY, lambda a, b, alpha=1: complex_sub(b, complex_scale(a, alpha))),
    "mul": (BINARY, complex_mul),
    "div": (BINARY, _div),
    "neg": (UNARY, complex_neg),
    "positive": (UNARY, lambda a: a),
    "reciprocal": (UNARY, _reciprocal),
    "square": (UNARY, lambda a: complex_mul(a, a)),
    "abs": (UNARY, complex_abs),
    "angle": (UNARY, complex_angle),
    "sgn": (UNARY, complex_sgn),
    "_conj_physical": (UNARY, complex_conj),
    "conj_physical": (UNARY, complex_conj),
    "resolve_conj": (UNARY, lambda a: a),
    "resolve_neg": (UNARY, lambda a: a),
    "_neg_view": (UNARY, complex_neg),
    "exp": (UNARY, complex_exp),
    "log": (UNARY, complex_log),
    "log2": (UNARY, make_logarithm(2)),
    "log10": (UNARY, make_logarithm(10)),
    "sqrt": (UNARY, complex_sqrt),
    "rsqrt": (UNARY, lambda a: _reciprocal(complex_sqrt(a))),
    "sinh": (UNARY, make_sinh_cosh(sine=True)),
    "cosh": (UNARY, make_sinh_cosh(sine=False)),
    "tanh": (UNARY, complex_tanh),
    "sin": (UNARY, make_trigonometric(make_sinh_cosh(sine=True), back=True)),
    "cos": (UNARY, make_trigonometric(make_sinh_cosh(sine=False), back=False)),
    "tan": (UNARY, make_trigonometric(complex_tanh, back=True)),
    "sigmoid": (
        UNARY,
        lambda a: _reciprocal(complex_add(complex_constant(1, a), complex_exp(complex_neg(a)))),
    ),
    "silu": (
        UNARY,
        lambda a: complex_mul(
            a, _reciprocal(complex_add(complex_constant(1, a), complex_exp(complex_neg(a))))
        ),
    ),
    "pow": (("self", "exponent"), complex_pow),
    "eq": (BINARY, _eq),
    "ne": (BINARY, lambda a, b: apply("not", _eq(a, b))),
    "isnan": (UNARY, _any_part(lambda a: apply("ne", a, a))),
    "isinf": (UNARY, _any_part(_is_inf)),
    "logical_not": (UNARY, lambda a: _eq(a, complex_constant(0, a))),
    "where": (BINARY, lambda a, b, condition: complex_where(condition, a, b)),
    "masked_fill": (("self", "value"), lambda a, b, mask: complex_where(mask, b, a)),
    "addcmul": (
        ("self", "tensor1", "tensor2"),
        lambda a, b, c, value=1: complex_add(a, complex_mul(complex_scale(b, value), c)),
    ),
    "addcdiv": (
        ("self", "tensor1", "tensor2"),
        lambda a, b, c, value=1: complex_add(a, complex_div(complex_scale(b, value), c)),
    ),
    "lerp": (("self", "end", "weight"), _lerp),
    "complex": (("real", "imag"), lambda a, b: ComplexPair(a.real, b.real)),
    "polar": (("abs", "angle"), _polar),
}
