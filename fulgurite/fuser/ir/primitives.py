"""The elementwise primitives of the IR, one row each.

`torch` is its meaning on tensors of the value type and is what the interpreter runs; `flops` is a
rough cost per element, for the choice of what to recompute; `infix` is how it prints.
Arguments of one operation have one value type (`where` and casts aside); comparisons give bool.

Where a name does not say it all:

    maximum, minimum   NaN where either is; fmax, fmin: the other where one is NaN
    fmod, remainder    the sign of the dividend; the sign of the divisor
    round              halves to even
    where              (bool, a, b)
    cast               to the operation's own dtype; a narrow float rounds, an integer wraps, a float
                       that does not fit an integer gives what torch gives
    bitcast            the bits of the argument read as another dtype of that width; a narrow float is
                       always the argument of a `cast` to that format, so that its width is there to see
    divisor            the argument, an integer; on a CPU a zero is reported and the call raises
                       RuntimeError, as torch's does (a GPU does not raise, there or here)
    uniform            (seed, position), both int64: float32 in [0, 1), the upper 24 bits of `word(position)`
    uniform53          the same in float64: upper 27 bits of word(2p), then upper 26 bits of word(2p + 1)
    share              a / b where b is the sum of a row's exponentials below its maximum and a is one of them:
                       0 <= a <= 1 <= b, or both are NaN. Only GPU schedules say so (`schedule/online.py`)
    random_integer     int64 in [0, 2**63): upper 31 bits of word(2p), then the 32 of word(2p + 1)

`word(p)` is word p % 4 of Philox 4x32-10 with the counter p // 4 (its upper 64 bits zero) and the key `seed`
(low word first): the standard generator, so neighbours can share one evaluation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

WORD = 0xFFFFFFFF


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
    raise AssertionError("casts are the interpreter's own")


def _shifted_product(a: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The upper and lower 32 bits of a 32-bit number times a 32-bit constant, both in int64."""
    first, second = (a & 0xFFFF) * factor, (a >> 16) * factor
    lower = (first + ((second & 0xFFFF) << 16)) & WORD
    return (second + (first >> 16)) >> 16, lower


def philox(seed: torch.Tensor, counter: torch.Tensor) -> list[torch.Tensor]:
    """Philox 4x32-10 of the counter (64 bits of 128) under the key `seed`: four words, as int64."""
    zero = torch.zeros_like(counter)
    a, b, c, d = counter & WORD, (counter >> 32) & WORD, zero, zero
    left, right = seed & WORD, (seed >> 32) & WORD
    for _ in range(10):
        upper_a, lower_a = _shifted_product(a, 0xD2511F53)
        upper_c, lower_c = _shifted_product(c, 0xCD9E8D57)
        a, b, c, d = upper_c ^ b ^ left, lower_c, upper_a ^ d ^ right, lower_a
        left, right = (left + 0x9E3779B9) & WORD, (right + 0xBB67AE85) & WORD
    return [a, b, c, d]


def _random_word(seed: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    seed, position = torch.broadcast_tensors(seed, position)
    words = torch.stack(philox(seed, position >> 2))
    return words.gather(0, (position & 3)[None])[0]


def _uniform(seed: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    return (_random_word(seed, position) >> 8).to(torch.float32) * 2.0**-24


def _uniform53(seed: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    upper, lower = _random_word(seed, 2 * position), _random_word(seed, 2 * position + 1)
    return ((upper >> 5 << 26) | (lower >> 6)).to(torch.float64) * 2.0**-53


def _random_integer(seed: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    upper, lower = _random_word(seed, 2 * position), _random_word(seed, 2 * position + 1)
    return (upper >> 1 << 32) | lower


def _divisor(a: torch.Tensor) -> torch.Tensor:
    if not bool(a.all()):
        raise RuntimeError("ZeroDivisionError")
    return a


PRIMITIVES: dict[str, Primitive] = {
    # arithmetic
    "add": Primitive(2, torch.add, 1, "+"),
    "sub": Primitive(2, torch.sub, 1, "-"),
    "mul": Primitive(2, torch.mul, 1, "*"),
    "div": Primitive(2, torch.true_divide, 4, "/"),
    "share": Primitive(2, torch.true_divide, 4, "/"),
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
    "bitcast": Primitive(1, _cast, 1),
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
    "uniform": Primitive(2, _uniform, 60),
    "uniform53": Primitive(2, _uniform53, 120),
    "random_integer": Primitive(2, _random_integer, 120),
    # integers only
    "gcd": Primitive(2, torch.gcd, 200),
    "lcm": Primitive(2, torch.lcm, 200),
    "divisor": Primitive(1, _divisor, 1),
}
