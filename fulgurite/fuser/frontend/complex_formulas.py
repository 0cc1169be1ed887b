"""Formulas of complex numbers as pairs of real expressions: one row an op, as `pointwise_rules` has them.

Divisions are Smith's; infinities and NaN go where C's complex functions put them, except that a factor of 1 in
front of a sum is not multiplied with (torch multiplies, and turns infinities into NaN).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from fulgurite.fuser.frontend.pointwise import Unsupported, add, apply, div, mul, number, sub, where
from fulgurite.fuser.ir.expression import Constant, Expression, Operation


class Pair(NamedTuple):
    """A complex number as two expressions."""

    real: Expression
    imaginary: Expression


def plus(a: Pair, b: Pair) -> Pair:
    return Pair(add(a.real, b.real), add(a.imaginary, b.imaginary))


def minus(a: Pair, b: Pair) -> Pair:
    return Pair(sub(a.real, b.real), sub(a.imaginary, b.imaginary))


def times(a: Pair, b: Pair) -> Pair:
    real = sub(mul(a.real, b.real), mul(a.imaginary, b.imaginary))
    return Pair(real, add(mul(a.real, b.imaginary), mul(a.imaginary, b.real)))


def over(a: Pair, b: Pair) -> Pair:
    """Smith's: by the larger part of the divisor first, so that no square leaves the range."""
    c, d = b
    first = apply("ge", apply("abs", c), apply("abs", d))
    ratio = where(first, div(d, c), div(c, d))
    scale = apply("reciprocal", where(first, add(c, mul(d, ratio)), add(d, mul(c, ratio))))
    real = where(first, add(a.real, mul(a.imaginary, ratio)), add(mul(a.real, ratio), a.imaginary))
    turned_back = sub(mul(a.imaginary, ratio), a.real)
    imaginary = where(first, sub(a.imaginary, mul(a.real, ratio)), turned_back)
    nothing = Operation(
        "and", (apply("eq", c, number(0, c)), apply("eq", d, number(0, d))), torch.bool
    )
    by_zero = Pair(div(a.real, apply("abs", c)), div(a.imaginary, apply("abs", d)))
    return choose(nothing, by_zero, Pair(mul(real, scale), mul(imaginary, scale)))


def negative(a: Pair) -> Pair:
    return Pair(apply("neg", a.real), apply("neg", a.imaginary))


def constant(value: complex, like: Pair) -> Pair:
    return Pair(number(value.real, like.real), number(value.imag, like.real))


def scaled(a: Pair, factor: Any) -> Pair:
    if not isinstance(factor, int | float | complex):
        raise Unsupported("a scale that is not a plain number")
    return a if factor == 1 else times(constant(complex(factor), a), a)


def choose(condition: Expression, a: Pair, b: Pair) -> Pair:
    return Pair(where(condition, a.real, b.real), where(condition, a.imaginary, b.imaginary))


def magnitude(a: Pair) -> Expression:
    return apply("hypot", a.real, a.imaginary)


def angle(a: Pair) -> Expression:
    return apply("atan2", a.imaginary, a.real)


def conjugate(a: Pair) -> Pair:
    return Pair(a.real, apply("neg", a.imaginary))


def exponential(a: Pair) -> Pair:
    size = apply("exp", a.real)
    flat = apply("eq", a.imaginary, number(0, a.real))
    turned = Pair(mul(size, apply("cos", a.imaginary)), mul(size, apply("sin", a.imaginary)))
    result = choose(flat, Pair(size, a.imaginary), turned)
    zero = number(0, size)
    nothing = Operation(
        "and", (apply("eq", size, zero), apply("eq", a.real, number(-math.inf, size))), torch.bool
    )
    return choose(
        nothing, Pair(zero, zero), Pair(_kept_infinite(size, a, result), result.imaginary)
    )


def _kept_infinite(size: Expression, a: Pair, result: Pair) -> Expression:
    """e^(inf + iy) has an infinite real part, whatever y is."""
    endless = apply("eq", a.real, number(math.inf, size))
    lost = apply("ne", result.real, result.real)
    undone = Operation("and", (endless, lost), torch.bool)
    return where(undone, size, result.real)


def logarithm(a: Pair) -> Pair:
    return Pair(apply("log", magnitude(a)), angle(a))


def root(a: Pair) -> Pair:
    half = number(0.5, a.real)
    larger = apply("sqrt", mul(half, add(magnitude(a), apply("abs", a.real))))
    smaller = div(mul(half, apply("abs", a.imaginary)), larger)
    right = apply("ge", a.real, number(0, a.real))
    zero = apply("eq", larger, number(0, a.real))
    real = where(right, larger, smaller)
    imaginary = where(right, smaller, larger)
    signed = apply("copysign", imaginary, a.imaginary)
    result = choose(zero, Pair(number(0, a.real), a.imaginary), Pair(real, signed))
    tall = _infinite(a.imaginary)
    return choose(tall, Pair(number(math.inf, a.real), a.imaginary), result)


def hyperbolic(sine: bool) -> Callable[[Pair], Pair]:
    first, second = ("sinh", "cosh") if sine else ("cosh", "sinh")

    def formula(a: Pair) -> Pair:
        real = mul(apply(first, a.real), apply("cos", a.imaginary))
        return Pair(real, mul(apply(second, a.real), apply("sin", a.imaginary)))

    return formula


def tangent(a: Pair) -> Pair:
    """tanh = (t (1 + u^2) + i u (1 - t^2)) / (1 + t^2 u^2) with t = tanh real, u = tan imaginary."""
    one = number(1, a.real)
    t, u = apply("tanh", a.real), apply("tan", a.imaginary)
    below = add(one, mul(mul(t, t), mul(u, u)))
    real = div(mul(t, add(one, mul(u, u))), below)
    return Pair(real, div(mul(u, sub(one, mul(t, t))), below))


def turned(function: Callable[[Pair], Pair], back: bool) -> Callable[[Pair], Pair]:
    """f(z) = g(iz), or -i g(iz): sin, cos and tan of their hyperbolic kin."""

    def formula(a: Pair) -> Pair:
        b = function(Pair(apply("neg", a.imaginary), a.real))
        return Pair(b.imaginary, apply("neg", b.real)) if back else b

    return formula


def power(a: Pair, b: Pair) -> Pair:
    exponent = (
        b.real.value if isinstance(b.real, Constant) and b.imaginary == number(0, b.real) else None
    )
    if exponent == 1:
        return a
    if exponent == 2:
        return times(a, a)
    if exponent == 3:
        return times(times(a, a), a)
    if exponent == 0.5:
        return root(a)
    general = exponential(times(b, logarithm(a)))
    nothing = apply("eq", magnitude(a), number(0, a.real))
    none = apply("eq", magnitude(b), number(0, b.real))
    at_zero = Pair(where(none, number(1, a.real), number(0, a.real)), number(0, a.real))
    return choose(nothing, at_zero, general)


def sign(a: Pair) -> Pair:
    size = magnitude(a)
    nothing = apply("eq", size, number(0, size))
    return choose(nothing, constant(0, a), Pair(div(a.real, size), div(a.imaginary, size)))


def _either(test: Callable[[Expression], Expression]) -> Callable[[Pair], Expression]:
    return lambda a: Operation("or", (test(a.real), test(a.imaginary)), torch.bool)


def _infinite(a: Expression) -> Expression:
    return apply("eq", apply("abs", a), number(math.inf, a))


def _equal(a: Pair, b: Pair) -> Expression:
    same = (apply("eq", a.real, b.real), apply("eq", a.imaginary, b.imaginary))
    return Operation("and", same, torch.bool)


def _divide(a: Pair, b: Pair, rounding_mode: str | None = None) -> Pair:
    if rounding_mode is not None:
        raise Unsupported("a rounded division of complex numbers")
    return over(a, b)


def _one_over(a: Pair) -> Pair:
    return over(constant(1, a), a)


def _lerp(a: Pair, b: Pair, weight: Pair) -> Pair:
    near = plus(a, times(weight, minus(b, a)))
    far = minus(b, times(minus(b, a), minus(constant(1, a), weight)))
    return choose(apply("lt", magnitude(weight), number(0.5, a.real)), near, far)


def _polar(size: Pair, turn: Pair) -> Pair:
    return Pair(mul(size.real, apply("cos", turn.real)), mul(size.real, apply("sin", turn.real)))


BOTH = ("self", "other")
SELF = ("self",)
FORMULAS: dict[str, tuple[tuple[str, ...], Callable[..., Any]]] = {
    "add": (BOTH, lambda a, b, alpha=1: plus(a, scaled(b, alpha))),
    "sub": (BOTH, lambda a, b, alpha=1: minus(a, scaled(b, alpha))),
    "rsub": (BOTH, lambda a, b, alpha=1: minus(b, scaled(a, alpha))),
    "mul": (BOTH, times),
    "div": (BOTH, _divide),
    "neg": (SELF, negative),
    "positive": (SELF, lambda a: a),
    "reciprocal": (SELF, _one_over),
    "square": (SELF, lambda a: times(a, a)),
    "abs": (SELF, magnitude),
    "angle": (SELF, angle),
    "sgn": (SELF, sign),
    "_conj": (SELF, conjugate),
    "_conj_physical": (SELF, conjugate),
    "conj_physical": (SELF, conjugate),
    "resolve_conj": (SELF, lambda a: a),
    "resolve_neg": (SELF, lambda a: a),
    "_neg_view": (SELF, negative),
    "exp": (SELF, exponential),
    "log": (SELF, logarithm),
    "log2": (SELF, lambda a: scaled(logarithm(a), 1 / math.log(2))),
    "log10": (SELF, lambda a: scaled(logarithm(a), 1 / math.log(10))),
    "sqrt": (SELF, root),
    "rsqrt": (SELF, lambda a: _one_over(root(a))),
    "sinh": (SELF, hyperbolic(sine=True)),
    "cosh": (SELF, hyperbolic(sine=False)),
    "tanh": (SELF, tangent),
    "sin": (SELF, turned(hyperbolic(sine=True), back=True)),
    "cos": (SELF, turned(hyperbolic(sine=False), back=False)),
    "tan": (SELF, turned(tangent, back=True)),
    "sigmoid": (SELF, lambda a: _one_over(plus(constant(1, a), exponential(negative(a))))),
    "silu": (
        SELF,
        lambda a: times(a, _one_over(plus(constant(1, a), exponential(negative(a))))),
    ),
    "pow": (("self", "exponent"), power),
    "eq": (BOTH, _equal),
    "ne": (BOTH, lambda a, b: apply("not", _equal(a, b))),
    "isnan": (SELF, _either(lambda a: apply("ne", a, a))),
    "isinf": (SELF, _either(_infinite)),
    "logical_not": (SELF, lambda a: _equal(a, constant(0, a))),
    "where": (BOTH, lambda a, b, condition: choose(condition, a, b)),
    "masked_fill": (("self", "value"), lambda a, b, mask: choose(mask, b, a)),
    "addcmul": (
        ("self", "tensor1", "tensor2"),
        lambda a, b, c, value=1: plus(a, times(scaled(b, value), c)),
    ),
    "addcdiv": (
        ("self", "tensor1", "tensor2"),
        lambda a, b, c, value=1: plus(a, over(scaled(b, value), c)),
    ),
    "lerp": (("self", "end", "weight"), _lerp),
    "complex": (("real", "imag"), lambda a, b: Pair(a.real, b.real)),
    "polar": (("abs", "angle"), _polar),
}
