"""Lowerings of random ops: each number is a function of a seed and the element's position.

Every op that draws has a stream number. Its element k is Philox 4x32-10 at position k with the key
`seed + 2 * stream`. No state is stored. The seed is the symbol `SEED` of the region, which
launchers bind once per call (`ir/random_seed.py`). So `torch.manual_seed` makes a program
repeatable, and two calls differ. The distributions are torch's; the streams are not. Same calling
convention as `views.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from fulgurite.fuser.frontend.lowering_context import LoweringContext
from fulgurite.fuser.frontend.tensor_value import Axes, TensorValue, axis_indices
from fulgurite.fuser.ir import index as indices
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
from fulgurite.fuser.ir.expression import Constant, Expression, IndexValue, Operation, opmath_dtype
from fulgurite.fuser.ir.random_seed import SEED
from fulgurite.trace.node_meta import fake_value

MIN_EXPONENTIAL = (
    2.0**-25
)  # half a step of the uniform numbers, so that exponential draws are above 0
FRACTION_BITS = {torch.float16: 11, torch.bfloat16: 8}  # of uniform numbers that stay below 1


class RandomNumbers:
    """Random numbers of one op, at the axes of its result."""

    def __init__(self, ctx: LoweringContext, axes: Axes, dtype: torch.dtype) -> None:
        self.key = IndexValue(indices.from_atom(SEED) + 2 * ctx.next_random_stream(), torch.int64)
        self.position = indices.ZERO
        for axis, index in zip(axes, axis_indices(axes), strict=True):
            self.position = self.position * axis.size + index
        self.dtype = dtype
        self.wide = opmath_dtype(dtype)

    def uniform(self, which: int = 0, per_element: int = 1) -> Expression:
        """Draws from [0, 1): number `which` of `per_element`."""
        position = IndexValue(self.position * per_element + which, torch.int64)
        if self.wide == torch.float64:
            return Operation("uniform53", (self.key, position), torch.float64)
        return Operation("uniform", (self.key, position), torch.float32)

    def uniform_rounded(self) -> Expression:
        """Draws from [0, 1), and stays below 1 after rounding to the dtype."""
        draw = self.uniform()
        bits = FRACTION_BITS.get(self.dtype)
        if bits is None:
            return draw
        floored = apply("floor", mul(draw, constant_like(2.0**bits, draw)))
        return mul(floored, constant_like(2.0**-bits, floored))

    def normal(self) -> Expression:
        """Draws from N(0, 1) by Box-Muller: sqrt(-2 log u) cos(2 pi v)."""
        radius = apply(
            "sqrt", mul(constant_like(-2, self.one), apply("log", one_minus(self.uniform(0, 2))))
        )
        return mul(
            radius, apply("cos", mul(constant_like(2 * math.pi, self.one), self.uniform(1, 2)))
        )

    def uniform_float32(self) -> Expression:
        """Draws from [0, 1) in float32, whatever the dtype of the result."""
        return Operation(
            "uniform", (self.key, IndexValue(self.position, torch.int64)), torch.float32
        )

    def integer(self) -> Expression:
        """Draws from [0, 2**63)."""
        return Operation(
            "random_integer", (self.key, IndexValue(self.position, torch.int64)), torch.int64
        )

    @property
    def one(self) -> Constant:
        return Constant(1.0, self.wide)


def make_random_lowering(formula: Callable[..., Expression]) -> Callable[..., TensorValue]:
    """Returns a lowering from a formula of random numbers and the op's arguments."""

    def lower(
        ctx: LoweringContext,
        node: Node,
        generator: Any = None,
        size: Any = None,
        **arguments: Any,
    ) -> TensorValue:
        if generator is not None:
            raise Unsupported("an explicit generator argument")
        dtype = fake_value(node).dtype

        def expression_at(axes: Axes) -> Expression:
            numbers = RandomNumbers(ctx, axes, dtype)

            def operand(name: str, dtype: torch.dtype | None = None) -> Expression:
                return ctx.read_operand(arguments[name], axes, dtype or numbers.wide)

            return formula(numbers, arguments, operand)

        return ctx.add_result(node, expression_at)

    return lower


ReadOperand = Callable[..., Expression]
Arguments = dict[str, Any]


def _rand(numbers: RandomNumbers, arguments: Arguments, operand: ReadOperand) -> Expression:
    return numbers.uniform_rounded()


def _uniform(numbers: RandomNumbers, arguments: Arguments, operand: ReadOperand) -> Expression:
    low, high = arguments["from"], arguments["to"]
    span = constant_like(high - low, numbers.one)
    return add(mul(numbers.uniform_rounded(), span), constant_like(low, numbers.one))


def _randn(numbers: RandomNumbers, arguments: Arguments, operand: ReadOperand) -> Expression:
    return numbers.normal()


def _normal(numbers: RandomNumbers, arguments: Arguments, operand: ReadOperand) -> Expression:
    return add(mul(numbers.normal(), operand("std")), operand("mean"))


def _log_normal(numbers: RandomNumbers, arguments: Arguments, operand: ReadOperand) -> Expression:
    return apply("exp", _normal(numbers, arguments, operand))


def _exponential(numbers: RandomNumbers, arguments: Arguments, operand: ReadOperand) -> Expression:
    draw = apply("neg", apply("log", one_minus(numbers.uniform())))
    return div(apply("maximum", draw, constant_like(MIN_EXPONENTIAL, draw)), operand("lambd"))


def _cauchy(numbers: RandomNumbers, arguments: Arguments, operand: ReadOperand) -> Expression:
    angle = mul(
        sub(numbers.uniform(), constant_like(0.5, numbers.one)),
        constant_like(math.pi, numbers.one),
    )
    return add(operand("median"), mul(operand("sigma"), apply("tan", angle)))


def _geometric(numbers: RandomNumbers, arguments: Arguments, operand: ReadOperand) -> Expression:
    probability = arguments["p"]
    if probability == 1:
        return numbers.one
    draw = apply("log", one_minus(numbers.uniform()))
    count = apply("ceil", div(draw, constant_like(math.log1p(-probability), draw)))
    return apply("maximum", count, constant_like(1, count))


def _bernoulli(numbers: RandomNumbers, arguments: Arguments, operand: ReadOperand) -> Expression:
    """Draws 1 with probability p, which is an argument or the tensor itself."""
    probability = operand("p" if arguments.get("p") is not None else "source", torch.float32)
    if isinstance(probability, Constant) and not 0 <= probability.value <= 1:
        raise Unsupported("a probability outside [0, 1]")
    return apply("lt", numbers.uniform_float32(), probability)


def _integers_between(numbers: RandomNumbers, low: Any, high: Any) -> Expression:
    if not isinstance(low, int) or not isinstance(high, int):
        raise Unsupported("randint with dynamic bounds")
    span = constant_like(high - low, numbers.integer())
    return add(apply("remainder", numbers.integer(), span), constant_like(low, numbers.integer()))


def _randint(numbers: RandomNumbers, arguments: Arguments, operand: ReadOperand) -> Expression:
    return _integers_between(numbers, arguments.get("low") or 0, arguments["high"])


def _random(numbers: RandomNumbers, arguments: Arguments, operand: ReadOperand) -> Expression:
    """Draws from the range of the dtype, limited by `from` and `to`."""
    low, high = arguments.get("from") or 0, arguments.get("to")
    if high is None:
        high = _random_limit(numbers.dtype)
    return _integers_between(numbers, low, high)


def _random_limit(dtype: torch.dtype) -> int:
    """Returns the exclusive upper limit of random_. Floats draw the integers they hold exactly."""
    if dtype == torch.bool:
        return 2
    if dtype.is_floating_point:
        return int(2 / torch.finfo(dtype).eps) + 1
    return min(torch.iinfo(dtype).max + 1, 2**63 - 1)


def lower_native_dropout(
    ctx: LoweringContext, node: Node, input: Any, p: float, train: bool | None
) -> tuple[TensorValue, TensorValue]:
    """Lowers dropout to its result and its mask. A dropped NaN or infinity is NaN, as in torch."""
    value = ctx.get_value(input)
    result, mask = fake_value(node)
    keep_probability = 1.0 - p if train or train is None else 1.0

    def mask_at(axes: Axes) -> Expression:
        if keep_probability in (0.0, 1.0):
            return Constant(bool(keep_probability), torch.bool)
        numbers = RandomNumbers(ctx, axes, torch.float32)
        return apply("lt", numbers.uniform_float32(), constant_like(keep_probability, numbers.one))

    draw = ctx.add_result(node, mask_at, mask, "mask")

    def result_at(axes: Axes) -> Expression:
        element = value.broadcast_to(axes)
        if keep_probability == 1.0:
            return element
        factor = where(
            draw.broadcast_to(axes), constant_like(1, element), constant_like(0, element)
        )
        masked = mul(element, factor)
        return mul(
            masked, constant_like(1 / keep_probability if keep_probability else 0.0, element)
        )

    return ctx.add_result(node, result_at, result), draw


RANDOM_LOWERINGS: dict[str, Callable[..., Any]] = {
    "rand": make_random_lowering(_rand),
    "rand_like": make_random_lowering(_rand),
    "uniform": make_random_lowering(_uniform),
    "randn": make_random_lowering(_randn),
    "randn_like": make_random_lowering(_randn),
    "normal": make_random_lowering(_normal),
    "normal_functional": make_random_lowering(_normal),
    "log_normal": make_random_lowering(_log_normal),
    "exponential": make_random_lowering(_exponential),
    "cauchy": make_random_lowering(_cauchy),
    "geometric": make_random_lowering(_geometric),
    "bernoulli": make_random_lowering(_bernoulli),
    "randint": make_random_lowering(_randint),
    "randint_like": make_random_lowering(_randint),
    "random": make_random_lowering(_random),
    "native_dropout": lower_native_dropout,
}
