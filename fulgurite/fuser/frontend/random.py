"""Random numbers as expressions: a function of a seed and the element's place, nothing is kept.

Each op that draws has a number (its stream); element k of it is Philox 4x32-10 at position k under the key
`seed + 2 * stream`. The seed is a symbol of the region, `SEED`, like a dynamic size: launchers draw it from
torch's generator once a call (`draw_seed`), so `torch.manual_seed` makes a program repeat and two calls
differ. The numbers are not torch's own stream, but have its distributions. Same calling convention as
`view_rules`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from fulgurite.fuser.frontend.lowering_context import Reader
from fulgurite.fuser.frontend.pointwise import (
    Unsupported,
    add,
    apply,
    div,
    mul,
    number,
    one_minus,
    sub,
    where,
)
from fulgurite.fuser.frontend.tensor_value import Axes, Value, positions
from fulgurite.fuser.ir import index as indices
from fulgurite.fuser.ir.expression import Constant, Expression, Operation, Position, value_type
from fulgurite.fuser.ir.index import Symbol

SEED = Symbol("random_seed", low=1 << 62)
TINIEST = 2.0**-25  # half a step of the uniform numbers: exponential draws are above zero
FRACTION_BITS = {torch.float16: 11, torch.bfloat16: 8}  # of uniform numbers that round to below 1


def draw_seed() -> int:
    """A seed from torch's default generator: odd and of 63 bits, so that all look alike to a launcher."""
    return int(torch.empty((), dtype=torch.int64).random_()) | (1 << 62) | 1


class Draws:
    """The random numbers of one op at the axes of its result."""

    def __init__(self, reader: Reader, axes: Axes, dtype: torch.dtype) -> None:
        self.key = Position(indices.of_atom(SEED) + 2 * reader.next_stream(), torch.int64)
        self.place = indices.ZERO
        for axis, position in zip(axes, positions(axes), strict=True):
            self.place = self.place * axis.size + position
        self.dtype = dtype
        self.wide = value_type(dtype)

    def uniform(self, number_of: int = 0, out_of: int = 1) -> Expression:
        """In [0, 1), draw `number_of` of `out_of` for each element."""
        place = Position(self.place * out_of + number_of, torch.int64)
        if self.wide == torch.float64:
            return Operation("uniform53", (self.key, place), torch.float64)
        return Operation("uniform", (self.key, place), torch.float32)

    def fraction(self) -> Expression:
        """In [0, 1) after rounding to the dtype, too."""
        drawn = self.uniform()
        bits = FRACTION_BITS.get(self.dtype)
        if bits is None:
            return drawn
        whole = apply("floor", mul(drawn, number(2.0**bits, drawn)))
        return mul(whole, number(2.0**-bits, whole))

    def normal(self) -> Expression:
        """Box and Muller's: sqrt(-2 log u) cos(2 pi v)."""
        radius = apply(
            "sqrt", mul(number(-2, self.one), apply("log", one_minus(self.uniform(0, 2))))
        )
        return mul(radius, apply("cos", mul(number(2 * math.pi, self.one), self.uniform(1, 2))))

    def chance(self) -> Expression:
        """In [0, 1), float32 whatever the result is."""
        return Operation("uniform", (self.key, Position(self.place, torch.int64)), torch.float32)

    def integer(self) -> Expression:
        """In [0, 2**63)."""
        return Operation(
            "random_integer", (self.key, Position(self.place, torch.int64)), torch.int64
        )

    @property
    def one(self) -> Constant:
        return Constant(1.0, self.wide)


def drawing(formula: Callable[..., Expression]) -> Callable[..., Value]:
    """A rule from a formula of draws and the op's arguments as the reader gives them."""

    def rule(reader: Reader, node: Node, generator: Any = None, **arguments: Any) -> Value:
        if generator is not None:
            raise Unsupported("a generator of the program's own")
        dtype = node.meta["val"].dtype

        def expression_at(axes: Axes) -> Expression:
            draws = Draws(reader, axes, dtype)

            def given(name: str, dtype: torch.dtype | None = None) -> Expression:
                return reader.operand(arguments[name], axes, dtype or draws.wide)

            return formula(draws, arguments, given)

        return reader.result(node, expression_at)

    return rule


Given = Callable[..., Expression]
Arguments = dict[str, Any]


def _rand(draws: Draws, arguments: Arguments, given: Given) -> Expression:
    return draws.fraction()


def _uniform(draws: Draws, arguments: Arguments, given: Given) -> Expression:
    low, high = arguments["from"], arguments["to"]
    span = number(high - low, draws.one)
    return add(mul(draws.fraction(), span), number(low, draws.one))


def _randn(draws: Draws, arguments: Arguments, given: Given) -> Expression:
    return draws.normal()


def _normal(draws: Draws, arguments: Arguments, given: Given) -> Expression:
    return add(mul(draws.normal(), given("std")), given("mean"))


def _log_normal(draws: Draws, arguments: Arguments, given: Given) -> Expression:
    return apply("exp", _normal(draws, arguments, given))


def _exponential(draws: Draws, arguments: Arguments, given: Given) -> Expression:
    drawn = apply("neg", apply("log", one_minus(draws.uniform())))
    return div(apply("maximum", drawn, number(TINIEST, drawn)), given("lambd"))


def _cauchy(draws: Draws, arguments: Arguments, given: Given) -> Expression:
    angle = mul(sub(draws.uniform(), number(0.5, draws.one)), number(math.pi, draws.one))
    return add(given("median"), mul(given("sigma"), apply("tan", angle)))


def _geometric(draws: Draws, arguments: Arguments, given: Given) -> Expression:
    chance = arguments["p"]
    if chance == 1:
        return draws.one
    drawn = apply("log", one_minus(draws.uniform()))
    tries = apply("ceil", div(drawn, number(math.log1p(-chance), drawn)))
    return apply("maximum", tries, number(1, tries))


def _bernoulli(draws: Draws, arguments: Arguments, given: Given) -> Expression:
    """1 with probability p, which is an argument or the tensor itself."""
    chance = given("p" if arguments.get("p") is not None else "source", torch.float32)
    if isinstance(chance, Constant) and not 0 <= chance.value <= 1:
        raise Unsupported("a probability outside [0, 1]")
    return apply("lt", draws.chance(), chance)


def _whole(draws: Draws, low: Any, high: Any) -> Expression:
    if not isinstance(low, int) or not isinstance(high, int):
        raise Unsupported("random integers below a dynamic bound")
    span = number(high - low, draws.integer())
    return add(apply("remainder", draws.integer(), span), number(low, draws.integer()))


def _randint(draws: Draws, arguments: Arguments, given: Given) -> Expression:
    return _whole(draws, arguments.get("low") or 0, arguments["high"])


def _random(draws: Draws, arguments: Arguments, given: Given) -> Expression:
    """Over what the dtype can hold, or up to `to`, or from `from` up."""
    low, high = arguments.get("from") or 0, arguments.get("to")
    if high is None:
        high = _past_largest(draws.dtype)
    return _whole(draws, low, high)


def _past_largest(dtype: torch.dtype) -> int:
    """One more than the largest whole number that random_ gives; floats give what they hold exactly."""
    if dtype == torch.bool:
        return 2
    if dtype.is_floating_point:
        return int(2 / torch.finfo(dtype).eps) + 1
    return min(torch.iinfo(dtype).max + 1, 2**63 - 1)


def _native_dropout(
    reader: Reader, node: Node, input: Any, p: float, train: bool | None
) -> tuple[Value, Value]:
    """The result and its mask; a dropped NaN or infinity is NaN, as in torch."""
    value = reader.value(input)
    result, mask = node.meta["val"]
    keep = 1.0 - p if train or train is None else 1.0

    def kept(axes: Axes) -> Expression:
        if keep in (0.0, 1.0):
            return Constant(bool(keep), torch.bool)
        draws = Draws(reader, axes, torch.float32)
        return apply("lt", draws.chance(), number(keep, draws.one))

    drawn = reader.result(node, kept, mask, "mask")

    def scaled(axes: Axes) -> Expression:
        element = value.broadcast(axes)
        if keep == 1.0:
            return element
        chosen = where(drawn.broadcast(axes), number(1, element), number(0, element))
        dropped = mul(element, chosen)
        return mul(dropped, number(1 / keep if keep else 0.0, element))

    return reader.result(node, scaled, result), drawn


RULES: dict[str, Callable[..., Any]] = {
    "rand": drawing(_rand),
    "rand_like": drawing(_rand),
    "uniform": drawing(_uniform),
    "randn": drawing(_randn),
    "randn_like": drawing(_randn),
    "normal": drawing(_normal),
    "normal_functional": drawing(_normal),
    "log_normal": drawing(_log_normal),
    "exponential": drawing(_exponential),
    "cauchy": drawing(_cauchy),
    "geometric": drawing(_geometric),
    "bernoulli": drawing(_bernoulli),
    "randint": drawing(_randint),
    "randint_like": drawing(_randint),
    "random": drawing(_random),
    "native_dropout": _native_dropout,
}
