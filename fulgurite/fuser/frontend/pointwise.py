"""Lowerings of elementwise ops: each ATen op as an expression of the IR's primitives.

A `PointwiseLowering` has the operands, the type promotion and the formula of an op. The operands
are those arguments of the op's schema that are tensors or numbers. A formula gets operands of one
opmath dtype, and the op's other arguments by name. It raises `Unsupported` for arguments that it
can't lower.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

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
from fulgurite.fuser.ir.errors import Unsupported
from fulgurite.fuser.ir.expression import NARROW_FLOATS, Constant, Expression, Operation


@dataclass(frozen=True, slots=True)
class PointwiseLowering:
    """How one elementwise op is lowered.

    `promotion` is "default", "float" (integers become floats), "bool" (computes as default, returns
    bool), or the name of an op with rules of its own.
    """

    operands: tuple[str, ...]
    promotion: str
    formula: Callable[..., Expression]


def scale_by(a: Expression, factor: Any) -> Expression:
    """Multiplies by a Python number."""
    if not isinstance(factor, int | float):
        raise Unsupported("a scale factor that is not a Python number")
    return a if factor == 1 else mul(a, constant_like(factor, a))


def _is_integral(a: Expression) -> bool:
    return not a.dtype.is_floating_point


def _unary(name: str, promotion: str = "float") -> PointwiseLowering:
    return PointwiseLowering(("self",), promotion, lambda a, **_: apply(name, a))


def _rounding(name: str) -> PointwiseLowering:
    """Returns the lowering of a rounding op. Integers stay as they are."""
    return PointwiseLowering(
        ("self",), "default", lambda a, **_: a if _is_integral(a) else apply(name, a)
    )


def _binary(name: str, promotion: str = "default") -> PointwiseLowering:
    return PointwiseLowering(("self", "other"), promotion, lambda a, b, **_: apply(name, a, b))


def _nan_ignoring(name: str, integer_name: str) -> PointwiseLowering:
    """Returns the lowering of fmax or fmin. Integers have no NaN and use `integer_name`.

    Of equal numbers, the primitives return the second one. So does torch for narrow floats; for others it
    returns the first one.
    """

    def lower(a: Expression, b: Expression, storage: torch.dtype) -> Expression:
        primitive = integer_name if _is_integral(a) else name
        return apply(primitive, a, b) if storage in NARROW_FLOATS else apply(primitive, b, a)

    return PointwiseLowering(("self", "other"), "default", lower)


def _nextafter(a: Expression, b: Expression, storage: torch.dtype) -> Expression:
    if storage in NARROW_FLOATS:
        raise Unsupported(
            f"nextafter of {storage}: kernels compute in float32, where steps are smaller"
        )
    return apply("nextafter", a, b)


def _round(a: Expression, decimals: int = 0) -> Expression:
    if decimals:
        raise Unsupported("round with decimals")
    return a if _is_integral(a) else apply("round", a)


def _comparison(name: str) -> PointwiseLowering:
    return PointwiseLowering(("self", "other"), "bool", lambda a, b, **_: apply(name, a, b))


def _to_bool(a: Expression) -> Expression:
    return a if a.dtype == torch.bool else apply("ne", a, constant_like(0, a))


def _logical(name: str) -> PointwiseLowering:
    return PointwiseLowering(
        ("self", "other"), "bool", lambda a, b, **_: apply(name, _to_bool(a), _to_bool(b))
    )


def _add(a: Expression, b: Expression, alpha: Any = 1) -> Expression:
    return add(a, scale_by(b, alpha))


def _sub(a: Expression, b: Expression, alpha: Any = 1) -> Expression:
    """Adds -alpha times b, as torch does: with an integer alpha of 0 it is 0, not -0."""
    if not isinstance(alpha, int | float) or alpha == 1 or _is_integral(a):
        return sub(a, scale_by(b, alpha))
    return add(a, scale_by(b, -alpha))


def _reciprocal(b: Expression) -> Expression:
    if isinstance(b, Constant):  # rounded in the dtype of the division
        return Constant(torch.tensor(b.value, dtype=b.dtype).reciprocal().item(), b.dtype)
    return apply("reciprocal", b)


def _div(
    a: Expression, b: Expression, rounding_mode: str | None = None, by_reciprocal: bool = False
) -> Expression:
    """Divides. `by_reciprocal`: as torch does on a GPU by a number of the host, a * (1 / b).

    The last bit may differ from a / b. It decides where a floor or a cast to an integer follows: the
    buckets of T5's relative positions.
    """
    if by_reciprocal and not _is_integral(a) and rounding_mode != "floor":
        product = mul(a, _reciprocal(b))
        return product if rounding_mode is None else apply("trunc", product)
    if rounding_mode is None:
        return div(a, b)
    name = "floor_divide" if rounding_mode == "floor" else "trunc_divide"
    return apply(name, a, _check_divisor(b) if _is_integral(a) else b)


def _check_divisor(b: Expression) -> Expression:
    """Checks an integer divisor: a constant now, any other value in the kernel."""
    if not isinstance(b, Constant):
        return apply("nonzero_divisor", b)
    if not b.value:
        raise Unsupported("integer division by a constant zero")
    return b


def _remainder(name: str) -> PointwiseLowering:
    def formula(a: Expression, b: Expression, **_: Any) -> Expression:
        return apply(name, a, _check_divisor(b) if _is_integral(a) else b)

    return PointwiseLowering(("self", "other"), "default", formula)


def _pow(a: Expression, b: Expression) -> Expression:
    """Expands powers with a small constant exponent into products, as torch does."""
    exponent = b.value if isinstance(b, Constant) else None
    if exponent == 2:
        return mul(a, a)
    if exponent == 3:
        return mul(mul(a, a), a)
    if exponent == 1:
        return a
    if _is_integral(a):
        if exponent is not None and exponent < 0:
            raise Unsupported(
                "an integer to a negative constant power"
            )  # torch raises for a scalar
        if not (isinstance(exponent, int) and 0 <= exponent <= 64):
            return apply("pow", a, b)
        result: Expression = constant_like(1, a)
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
        a = _limit("maximum", a, low)
    return a if high is None else _limit("minimum", a, high)


def _limit(name: str, a: Expression, bound: Expression) -> Expression:
    """The maximum or minimum of a value and a bound.

    If they are equal, as -0 and 0 are, torch returns the value for a number, and the bound for a tensor.
    """
    return apply(name, bound, a) if isinstance(bound, Constant) else apply(name, a, bound)


def _isnan(a: Expression) -> Expression:
    return Constant(False, torch.bool) if _is_integral(a) else apply("ne", a, a)


def _isinf(a: Expression) -> Expression:
    if _is_integral(a):
        return Constant(False, torch.bool)
    return apply("eq", apply("abs", a), constant_like(math.inf, a))


def _nan_to_num(
    a: Expression,
    nan: float | None = None,
    posinf: float | None = None,
    neginf: float | None = None,
    storage: torch.dtype = torch.float32,
) -> Expression:
    if _is_integral(a):
        return a
    info = torch.finfo(storage)
    high = info.max if posinf is None else posinf
    low = info.min if neginf is None else neginf
    result = where(apply("eq", a, constant_like(math.inf, a)), constant_like(high, a), a)
    result = where(apply("eq", a, constant_like(-math.inf, a)), constant_like(low, a), result)
    return where(apply("ne", a, a), constant_like(nan or 0.0, a), result)


def _sign(a: Expression) -> Expression:
    if a.dtype == torch.bool:
        return a
    return apply("sign", a)


def _abs(a: Expression) -> Expression:
    unsigned = (torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64)
    return a if a.dtype in unsigned else apply("abs", a)


def _lerp(a: Expression, b: Expression, weight: Expression) -> Expression:
    """Interpolates from the nearer end, as torch does: weight 1 gives exactly b."""
    difference = sub(b, a)
    from_start = add(a, mul(weight, difference))
    from_end = sub(b, mul(difference, one_minus(weight)))
    return where(apply("lt", apply("abs", weight), constant_like(0.5, a)), from_start, from_end)


def _logaddexp(a: Expression, b: Expression) -> Expression:
    high, low = apply("maximum", a, b), apply("minimum", a, b)
    same_infinity = Operation(
        "and",
        (apply("eq", a, b), apply("eq", apply("abs", a), constant_like(math.inf, a))),
        torch.bool,
    )
    return where(same_infinity, a, add(high, apply("log1p", apply("exp", sub(low, high)))))


def _xlogy(a: Expression, b: Expression) -> Expression:
    product = where(
        apply("eq", a, constant_like(0, a)), constant_like(0, a), mul(a, apply("log", b))
    )
    return where(apply("ne", b, b), b, product)


def _addcmul(a: Expression, b: Expression, c: Expression, value: Any = 1) -> Expression:
    return add(a, mul(scale_by(b, value), c))


def _addcdiv(a: Expression, b: Expression, c: Expression, value: Any = 1) -> Expression:
    return add(a, div(scale_by(b, value), c))


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

POINTWISE_LOWERINGS: dict[str, PointwiseLowering] = {
    **{name: _unary(name) for name in FLOAT_FUNCTIONS},
    **{name: _comparison(name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    **{name: _rounding(name) for name in ("floor", "ceil", "trunc")},
    "round": PointwiseLowering(("self",), "default", lambda a, decimals=0: _round(a, decimals)),
    "neg": _unary("neg", "default"),
    "abs": PointwiseLowering(("self",), "default", _abs),
    "sign": PointwiseLowering(("self",), "default", _sign),
    "sgn": PointwiseLowering(("self",), "default", _sign),
    "square": PointwiseLowering(("self",), "default", lambda a: mul(a, a)),
    "positive": PointwiseLowering(("self",), "default", lambda a: a),
    "frac": PointwiseLowering(("self",), "default", lambda a: sub(a, apply("trunc", a))),
    "isnan": PointwiseLowering(("self",), "bool", _isnan),
    "isinf": PointwiseLowering(("self",), "bool", _isinf),
    "signbit": PointwiseLowering(
        ("self",),
        "bool",
        lambda a: apply("lt", a, constant_like(0, a)) if _is_integral(a) else apply("signbit", a),
    ),
    "add": PointwiseLowering(("self", "other"), "default", _add),
    "sub": PointwiseLowering(("self", "other"), "default", _sub),
    "rsub": PointwiseLowering(
        ("self", "other"), "default", lambda a, b, alpha=1: _sub(b, a, alpha)
    ),
    "mul": _binary("mul"),
    "div": PointwiseLowering(("self", "other"), "division", _div),
    "floor_divide": PointwiseLowering(
        ("self", "other"), "default", lambda a, b: _div(a, b, rounding_mode="floor")
    ),
    "fmod": _remainder("fmod"),
    "remainder": _remainder("remainder"),
    "pow": PointwiseLowering(("self", "exponent"), "default", _pow),
    "maximum": _binary("maximum"),
    "minimum": _binary("minimum"),
    "fmax": _nan_ignoring("fmax", "maximum"),
    "fmin": _nan_ignoring("fmin", "minimum"),
    "atan2": _binary("atan2", "float"),
    "hypot": _binary("hypot"),
    "copysign": _binary("copysign", "float"),
    "nextafter": PointwiseLowering(("self", "other"), "default", _nextafter),
    "logaddexp": PointwiseLowering(("self", "other"), "default", _logaddexp),
    "xlogy": PointwiseLowering(("self", "other"), "float", _xlogy),
    "lerp": PointwiseLowering(("self", "end", "weight"), "default", _lerp),
    "addcmul": PointwiseLowering(("self", "tensor1", "tensor2"), "default", _addcmul),
    "addcdiv": PointwiseLowering(("self", "tensor1", "tensor2"), "default", _addcdiv),
    "fma": PointwiseLowering(("a", "b", "c"), "default", lambda a, b, c: add(mul(a, b), c)),
    "bitwise_and": _binary("and"),
    "bitwise_or": _binary("or"),
    "bitwise_xor": _binary("xor"),
    "bitwise_not": _unary("not", "default"),
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
    "logical_not": PointwiseLowering(("self",), "bool", lambda a: apply("not", _to_bool(a))),
    "clamp": PointwiseLowering(("self", "min", "max"), "default", clamp),
    "clamp_min": PointwiseLowering(("self", "min"), "default", lambda a, b: clamp(a, b)),
    "clamp_max": PointwiseLowering(("self", "max"), "default", lambda a, b: clamp(a, None, b)),
    "nan_to_num": PointwiseLowering(("self",), "default", _nan_to_num),
    "masked_fill": PointwiseLowering(
        ("self", "value"), "masked_fill", lambda a, b, mask: where(mask, b, a)
    ),
    "where": PointwiseLowering(
        ("self", "other"), "where", lambda a, b, condition: where(condition, a, b)
    ),
}
