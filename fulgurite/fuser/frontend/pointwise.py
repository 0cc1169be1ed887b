"""ATen's elementwise ops as expressions of the IR's primitives: one row an op.

A `Rule` names the operands (arguments of the op's schema that are tensors or numbers), how torch
promotes their types (`default`, `float`: integers become floating, `bool`: computes as default and
gives bool) and the formula. Formulas get operands of one value type and the rest of the op's
arguments by name; they raise `Unsupported` for an argument that has no formula here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fulgurite.fuser.ir.expression import Constant, Expression, Operation

BOOLEAN = {"eq", "ne", "lt", "le", "gt", "ge", "signbit"}


class Unsupported(Exception):
    """This op, with these arguments, is not one that the fuser generates code for."""


@dataclass(frozen=True, slots=True)
class Rule:
    operands: tuple[str, ...]
    promotion: str
    formula: Callable[..., Expression]


def apply(name: str, *arguments: Expression) -> Operation:
    """A primitive of arguments that have one value type."""
    dtype = torch.bool if name in BOOLEAN else arguments[-1].dtype
    return Operation(name, arguments, dtype)


def number(value: float | int | bool, like: Expression) -> Constant:
    if like.dtype.is_floating_point:
        return Constant(float(value), like.dtype)
    if like.dtype == torch.bool:
        return Constant(bool(value), like.dtype)
    return Constant(int(value), like.dtype)


def add(a: Expression, b: Expression) -> Expression:
    return apply("add", a, b)


def sub(a: Expression, b: Expression) -> Expression:
    return apply("sub", a, b)


def mul(a: Expression, b: Expression) -> Expression:
    return apply("mul", a, b)


def div(a: Expression, b: Expression) -> Expression:
    return apply("div", a, b)


def where(condition: Expression, a: Expression, b: Expression) -> Expression:
    return Operation("where", (condition, a, b), a.dtype)


def scaled(a: Expression, factor: Any) -> Expression:
    if not isinstance(factor, int | float):
        raise Unsupported("a scale that is not a plain number")
    return a if factor == 1 else mul(a, number(factor, a))


def one_minus(a: Expression) -> Expression:
    return sub(number(1, a), a)


def _integral(a: Expression) -> bool:
    return not a.dtype.is_floating_point


def _simple(name: str, promotion: str = "float") -> Rule:
    return Rule(("self",), promotion, lambda a, **_: apply(name, a))


def _rounding(name: str) -> Rule:
    """Integers round to themselves."""
    return Rule(("self",), "default", lambda a, **_: a if _integral(a) else apply(name, a))


def _binary(name: str, promotion: str = "default") -> Rule:
    return Rule(("self", "other"), promotion, lambda a, b, **_: apply(name, a, b))


def _number_extreme(name: str, whole: str) -> Rule:
    """The extreme of what is a number; integers always are."""
    return Rule(
        ("self", "other"),
        "default",
        lambda a, b, **_: apply(whole if _integral(a) else name, a, b),
    )


def _round(a: Expression, decimals: int = 0) -> Expression:
    if decimals:
        raise Unsupported("round with decimals")
    return a if _integral(a) else apply("round", a)


def _compare(name: str) -> Rule:
    return Rule(("self", "other"), "bool", lambda a, b, **_: apply(name, a, b))


def _truth(a: Expression) -> Expression:
    return a if a.dtype == torch.bool else apply("ne", a, number(0, a))


def _logical(name: str) -> Rule:
    return Rule(("self", "other"), "bool", lambda a, b, **_: apply(name, _truth(a), _truth(b)))


def _add(a: Expression, b: Expression, alpha: Any = 1) -> Expression:
    return add(a, scaled(b, alpha))


def _sub(a: Expression, b: Expression, alpha: Any = 1) -> Expression:
    return sub(a, scaled(b, alpha))


def _divide(a: Expression, b: Expression, rounding_mode: str | None = None) -> Expression:
    if rounding_mode is None:
        return div(a, b)
    name = "floor_divide" if rounding_mode == "floor" else "truncated_divide"
    return apply(name, a, _divisor(b) if _integral(a) else b)


def _divisor(b: Expression) -> Expression:
    """An integer that is divided by, checked where it is not a number of the program."""
    if not isinstance(b, Constant):
        return apply("divisor", b)
    if not b.value:
        raise Unsupported("a division by zero")
    return b


def _remainder(name: str) -> Rule:
    def formula(a: Expression, b: Expression, **_: Any) -> Expression:
        return apply(name, a, _divisor(b) if _integral(a) else b)

    return Rule(("self", "other"), "default", formula)


def _power(a: Expression, b: Expression) -> Expression:
    """Powers with a known small exponent are products, as in torch."""
    exponent = b.value if isinstance(b, Constant) else None
    if exponent == 2:
        return mul(a, a)
    if exponent == 3:
        return mul(mul(a, a), a)
    if exponent == 1:
        return a
    if _integral(a):
        if not (isinstance(exponent, int) and 0 <= exponent <= 64):
            return apply("pow", a, b)
        result: Expression = number(1, a)
        for _ in range(exponent):
            result = mul(result, a)
        return result
    if exponent == 0.5:
        return apply("sqrt", a)
    if exponent == -0.5:
        return apply("rsqrt", a)
    if exponent == -1:
        return apply("reciprocal", a)
    if exponent == -2:
        return apply("reciprocal", mul(a, a))
    return apply("pow", a, b)


def clamp(
    a: Expression, low: Expression | None = None, high: Expression | None = None
) -> Expression:
    if low is not None:
        a = apply("maximum", a, low)
    return a if high is None else apply("minimum", a, high)


def _isnan(a: Expression) -> Expression:
    return Constant(False, torch.bool) if _integral(a) else apply("ne", a, a)


def _isinf(a: Expression) -> Expression:
    if _integral(a):
        return Constant(False, torch.bool)
    return apply("eq", apply("abs", a), number(math.inf, a))


def _nan_to_num(
    a: Expression,
    nan: float | None = None,
    posinf: float | None = None,
    neginf: float | None = None,
    storage: torch.dtype = torch.float32,
) -> Expression:
    if _integral(a):
        return a
    info = torch.finfo(storage)
    high = info.max if posinf is None else posinf
    low = info.min if neginf is None else neginf
    result = where(apply("eq", a, number(math.inf, a)), number(high, a), a)
    result = where(apply("eq", a, number(-math.inf, a)), number(low, a), result)
    return where(apply("ne", a, a), number(nan or 0.0, a), result)


def _sign(a: Expression) -> Expression:
    if a.dtype == torch.bool:
        return a
    return apply("sign", a)


def _abs(a: Expression) -> Expression:
    unsigned = (torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64)
    return a if a.dtype in unsigned else apply("abs", a)


def _lerp(a: Expression, b: Expression, weight: Expression) -> Expression:
    """As torch: from the nearer end, so that weight 1 gives exactly b."""
    step = sub(b, a)
    near = add(a, mul(weight, step))
    far = sub(b, mul(step, one_minus(weight)))
    return where(apply("lt", apply("abs", weight), number(0.5, a)), near, far)


def _logaddexp(a: Expression, b: Expression) -> Expression:
    high, low = apply("maximum", a, b), apply("minimum", a, b)
    same_infinity = Operation(
        "and",
        (apply("eq", a, b), apply("eq", apply("abs", a), number(math.inf, a))),
        torch.bool,
    )
    return where(same_infinity, a, add(high, apply("log1p", apply("exp", sub(low, high)))))


def _xlogy(a: Expression, b: Expression) -> Expression:
    product = where(apply("eq", a, number(0, a)), number(0, a), mul(a, apply("log", b)))
    return where(apply("ne", b, b), b, product)


def _addcmul(a: Expression, b: Expression, c: Expression, value: Any = 1) -> Expression:
    return add(a, mul(scaled(b, value), c))


def _addcdiv(a: Expression, b: Expression, c: Expression, value: Any = 1) -> Expression:
    return add(a, div(scaled(b, value), c))


FLOAT_FUNCTIONS = [
    "sqrt",
    "rsqrt",
    "exp",
    "exp2",
    "expm1",
    "log",
    "log2",
    "log10",
    "log1p",
    "tanh",
    "sigmoid",
    "erf",
    "erfc",
    "sin",
    "cos",
    "tan",
    "asin",
    "acos",
    "atan",
    "sinh",
    "cosh",
    "asinh",
    "acosh",
    "atanh",
    "lgamma",
    "reciprocal",
]

RULES: dict[str, Rule] = {
    **{name: _simple(name) for name in FLOAT_FUNCTIONS},
    **{name: _compare(name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    **{name: _rounding(name) for name in ("floor", "ceil", "trunc")},
    "round": Rule(("self",), "default", lambda a, decimals=0: _round(a, decimals)),
    "neg": _simple("neg", "default"),
    "abs": Rule(("self",), "default", lambda a: _abs(a)),
    "sign": Rule(("self",), "default", lambda a: _sign(a)),
    "sgn": Rule(("self",), "default", lambda a: _sign(a)),
    "square": Rule(("self",), "default", lambda a: mul(a, a)),
    "positive": Rule(("self",), "default", lambda a: a),
    "frac": Rule(("self",), "default", lambda a: sub(a, apply("trunc", a))),
    "isnan": Rule(("self",), "bool", lambda a: _isnan(a)),
    "isinf": Rule(("self",), "bool", lambda a: _isinf(a)),
    "signbit": Rule(
        ("self",),
        "bool",
        lambda a: apply("lt", a, number(0, a)) if _integral(a) else apply("signbit", a),
    ),
    "add": Rule(("self", "other"), "default", _add),
    "sub": Rule(("self", "other"), "default", _sub),
    "rsub": Rule(("self", "other"), "default", lambda a, b, alpha=1: sub(b, scaled(a, alpha))),
    "mul": _binary("mul"),
    "div": Rule(("self", "other"), "division", _divide),
    "floor_divide": Rule(
        ("self", "other"), "default", lambda a, b: _divide(a, b, rounding_mode="floor")
    ),
    "fmod": _remainder("fmod"),
    "remainder": _remainder("remainder"),
    "pow": Rule(("self", "exponent"), "default", _power),
    "maximum": _binary("maximum"),
    "minimum": _binary("minimum"),
    "fmax": _number_extreme("fmax", "maximum"),
    "fmin": _number_extreme("fmin", "minimum"),
    "atan2": _binary("atan2", "float"),
    "hypot": _binary("hypot"),
    "copysign": _binary("copysign", "float"),
    "nextafter": _binary("nextafter"),
    "logaddexp": Rule(("self", "other"), "default", lambda a, b: _logaddexp(a, b)),
    "xlogy": Rule(("self", "other"), "float", lambda a, b: _xlogy(a, b)),
    "lerp": Rule(("self", "end", "weight"), "default", _lerp),
    "addcmul": Rule(("self", "tensor1", "tensor2"), "default", _addcmul),
    "addcdiv": Rule(("self", "tensor1", "tensor2"), "default", _addcdiv),
    "bitwise_and": _binary("and"),
    "bitwise_or": _binary("or"),
    "bitwise_xor": _binary("xor"),
    "bitwise_not": _simple("not", "default"),
    "bitwise_left_shift": _binary("shift_left"),
    "bitwise_right_shift": _binary("shift_right"),
    "__and__": _binary("and"),
    "__or__": _binary("or"),
    "__xor__": _binary("xor"),
    "__lshift__": _binary("shift_left"),
    "__rshift__": _binary("shift_right"),
    "logical_and": _logical("and"),
    "logical_or": _logical("or"),
    "logical_xor": _logical("xor"),
    "logical_not": Rule(("self",), "bool", lambda a: apply("not", _truth(a))),
    "clamp": Rule(("self", "min", "max"), "default", clamp),
    "clamp_min": Rule(("self", "min"), "default", lambda a, b: clamp(a, b)),
    "clamp_max": Rule(("self", "max"), "default", lambda a, b: clamp(a, None, b)),
    "nan_to_num": Rule(("self",), "default", _nan_to_num),
    "masked_fill": Rule(("self", "value"), "masked_fill", lambda a, b, mask: where(mask, b, a)),
    "where": Rule(("self", "other"), "where", lambda a, b, condition: where(condition, a, b)),
}
