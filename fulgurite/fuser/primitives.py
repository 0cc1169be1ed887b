"""The elementwise primitives of the IR, one row each.

`torch` is its meaning on tensors of the value type and is what the interpreter runs; `flops` is a
rough cost per element, for the choice of what to recompute; `infix` is how it prints.
Arguments of one operation have one value type (`where` and casts aside); comparisons give bool.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Primitive:
    arity: int
    torch: Callable[..., torch.Tensor]
    flops: int = 1
    infix: str | None = None


def _shift_left(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.bitwise_left_shift(a, b)


def _shift_right(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.bitwise_right_shift(a, b)


def _where(condition: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.where(condition, a, b)


def _cast(a: torch.Tensor) -> torch.Tensor:
    raise AssertionError("cast is the interpreter's own")


def _uniform(seed: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """Philox 2x32-10 of (position, seed), its first word as a float in [0, 1) with 24 bits."""
    mask = 0xFFFFFFFF
    low, high = position & mask, (position >> 32) & mask
    key = (seed & mask) ^ ((seed >> 32) & mask)
    for _ in range(10):
        # low is below 2**32, so its product with a 32-bit constant is formed from two halves
        first, second = (low & 0xFFFF) * 0xD256D193, (low >> 16) * 0xD256D193
        lower = (first + ((second & 0xFFFF) << 16)) & mask
        upper = (second + (first >> 16)) >> 16
        low, high = upper ^ high ^ key, lower
        key = (key + 0x9E3779B9) & mask
    return (low >> 8).to(torch.float32) * (1.0 / 16777216.0)


PRIMITIVES: dict[str, Primitive] = {
    # arithmetic
    "add": Primitive(2, torch.add, 1, "+"),
    "sub": Primitive(2, torch.sub, 1, "-"),
    "mul": Primitive(2, torch.mul, 1, "*"),
    "div": Primitive(2, torch.true_divide, 4, "/"),
    "neg": Primitive(1, torch.neg, 1, "-"),
    "abs": Primitive(1, torch.abs, 1),
    "reciprocal": Primitive(1, torch.reciprocal, 4),
    "maximum": Primitive(2, torch.maximum, 2),
    "minimum": Primitive(2, torch.minimum, 2),
    "fmax": Primitive(2, torch.fmax, 2),
    "fmin": Primitive(2, torch.fmin, 2),
    "fmod": Primitive(2, torch.fmod, 20),
    "remainder": Primitive(2, torch.remainder, 20),
    "floor_divide": Primitive(2, torch.floor_divide, 20),
    "truncated_divide": Primitive(
        2,
        lambda a, b: torch.div(a, b, rounding_mode="trunc"),
        6,
    ),
    "fma": Primitive(3, torch.addcmul, 2),
    # rounding and signs
    "floor": Primitive(1, torch.floor, 1),
    "ceil": Primitive(1, torch.ceil, 1),
    "trunc": Primitive(1, torch.trunc, 1),
    "round": Primitive(1, torch.round, 1),
    "sign": Primitive(1, torch.sign, 2),
    "signbit": Primitive(1, torch.signbit, 1),
    "copysign": Primitive(2, torch.copysign, 2),
    "nextafter": Primitive(2, torch.nextafter, 8),
    # comparisons and logic
    "eq": Primitive(2, torch.eq, 1, "=="),
    "ne": Primitive(2, torch.ne, 1, "!="),
    "lt": Primitive(2, torch.lt, 1, "<"),
    "le": Primitive(2, torch.le, 1, "<="),
    "gt": Primitive(2, torch.gt, 1, ">"),
    "ge": Primitive(2, torch.ge, 1, ">="),
    "and": Primitive(2, torch.bitwise_and, 1, "&"),
    "or": Primitive(2, torch.bitwise_or, 1, "|"),
    "xor": Primitive(2, torch.bitwise_xor, 1, "^"),
    "not": Primitive(1, torch.bitwise_not, 1, "~"),
    "shift_left": Primitive(2, _shift_left, 2),
    "shift_right": Primitive(2, _shift_right, 2),
    "where": Primitive(3, _where, 1),
    "cast": Primitive(1, _cast, 1),
    # functions
    "sqrt": Primitive(1, torch.sqrt, 6),
    "rsqrt": Primitive(1, torch.rsqrt, 8),
    "exp": Primitive(1, torch.exp, 12),
    "exp2": Primitive(1, torch.exp2, 12),
    "expm1": Primitive(1, torch.expm1, 20),
    "log": Primitive(1, torch.log, 16),
    "log2": Primitive(1, torch.log2, 18),
    "log10": Primitive(1, torch.log10, 18),
    "log1p": Primitive(1, torch.log1p, 20),
    "tanh": Primitive(1, torch.tanh, 20),
    "sigmoid": Primitive(1, torch.sigmoid, 16),
    "erf": Primitive(1, torch.erf, 24),
    "erfc": Primitive(1, torch.erfc, 40),
    "sin": Primitive(1, torch.sin, 30),
    "cos": Primitive(1, torch.cos, 30),
    "tan": Primitive(1, torch.tan, 40),
    "asin": Primitive(1, torch.asin, 40),
    "acos": Primitive(1, torch.acos, 40),
    "atan": Primitive(1, torch.atan, 40),
    "sinh": Primitive(1, torch.sinh, 40),
    "cosh": Primitive(1, torch.cosh, 40),
    "asinh": Primitive(1, torch.asinh, 40),
    "acosh": Primitive(1, torch.acosh, 40),
    "atanh": Primitive(1, torch.atanh, 40),
    "lgamma": Primitive(1, torch.lgamma, 60),
    "atan2": Primitive(2, torch.atan2, 40),
    "hypot": Primitive(2, torch.hypot, 30),
    "pow": Primitive(2, torch.pow, 40),
    # random numbers: a function of a seed and a position
    "uniform": Primitive(2, _uniform, 30),
}
