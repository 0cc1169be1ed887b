"""The elementwise primitives of the IR, one row each.

`torch` is the definition on tensors of the opmath dtype; the interpreter runs it. `flops` is a
rough cost per element, which decides what is recomputed. `infix` is how the primitive prints. All
arguments of one operation have the same opmath dtype, except for `where` and casts. Comparisons
return bool.

Semantics that a name does not define:

    maximum, minimum  NaN if either argument is NaN; in C++ the second one of equal numbers (0 and -0)
    fmax, fmin        the other argument if one is NaN; of equal numbers as above
    fmod, remainder   the sign of the dividend; the sign of the divisor
    round             half to even
    where             (bool, a, b)
    cast              to the operation's own dtype. A narrow float rounds, an integer wraps. A float
                      that does not fit an integer gives torch's result.
    bitcast           reinterprets the bits as another dtype of the same width. A narrow float
                      argument is always a `cast` to that format, so that its width is visible.
    nonzero_divisor   the argument, an integer. On a CPU a zero is reported and the call raises
                      RuntimeError, as in torch. On a GPU nothing is raised, as in torch.
    softmax_div       a / b for softmax: b is the sum of a row's exponentials below its maximum, a
                      is one of them. So 0 <= a <= 1 <= b, or both are NaN. Only GPU schedules emit
                      it (`schedule/online_reduction.py`).
    uniform           (seed, position), both int64: float32 in [0, 1), the upper 24 bits of
                      `word(position)`
    uniform53         the same in float64: the upper 27 bits of word(2p), then the upper 26 bits of
                      word(2p + 1)
    random_integer    int64 in [0, 2**63): the upper 31 bits of word(2p), then the 32 bits of
                      word(2p + 1)

`word(p)` is word p % 4 of Philox 4x32-10 with the counter p // 4 (its upper 64 bits are zero) and
the key `seed` (low word first). This is the standard generator, so neighbors can share one
evaluation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

MASK_32 = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Primitive:
    """A row of the table."""

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
    raise AssertionError("the interpreter implements casts itself")


def _multiply_high_low(a: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the upper and lower 32 bits of a 32-bit number times a constant, both as int64."""
    first, second = (a & 0xFFFF) * factor, (a >> 16) * factor
    lower = (first + ((second & 0xFFFF) << 16)) & MASK_32
    return (second + (first >> 16)) >> 16, lower


def philox(seed: torch.Tensor, counter: torch.Tensor) -> list[torch.Tensor]:
    """Computes Philox 4x32-10 of a 64-bit counter with the key `seed`: four words, as int64."""
    zero = torch.zeros_like(counter)
    a, b, c, d = counter & MASK_32, (counter >> 32) & MASK_32, zero, zero
    left, right = seed & MASK_32, (seed >> 32) & MASK_32
    for _ in range(10):
        upper_a, lower_a = _multiply_high_low(a, 0xD2511F53)
        upper_c, lower_c = _multiply_high_low(c, 0xCD9E8D57)
        a, b, c, d = upper_c ^ b ^ left, lower_c, upper_a ^ d ^ right, lower_a
        left, right = (left + 0x9E3779B9) & MASK_32, (right + 0xBB67AE85) & MASK_32
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


def _nonzero_divisor(a: torch.Tensor) -> torch.Tensor:
    if not bool(a.all()):
        raise RuntimeError("ZeroDivisionError")
    return a


PRIMITIVES: dict[str, Primitive] = {
    # arithmetic
    "add": Primitive(2, torch.add, 1, "+"),
    "sub": Primitive(2, torch.sub, 1, "-"),
    "mul": Primitive(2, torch.mul, 1, "*"),
    "div": Primitive(2, torch.true_divide, 4, "/"),
    "softmax_div": Primitive(2, torch.true_divide, 4, "/"),
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
    "trunc_divide": Primitive(
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
    "nonzero_divisor": Primitive(1, _nonzero_divisor, 1),
}
