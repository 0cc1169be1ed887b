"""Fast math: activations with fewer instructions, for GEMM epilogues.

In: an expression of the IR. Out: one that is equal but for the last place: gates by the sigmoid, constants
multiplied in advance. A pointwise kernel waits for memory anyway, but a GEMM tile waits for its epilogue.
"""

from __future__ import annotations

from fulgurite.fuser.ir.expression import Constant, Expression, Operation
from fulgurite.fuser.ir.expression_rewrites import rewrite_expression


def use_fast_math(expression: Expression) -> Expression:
    """Rewrite the activations of an expression."""
    return rewrite_expression(expression, _rewrite_activation, lambda index: index)


def _rewrite_activation(part: Expression) -> Expression | None:
    if not isinstance(part, Operation):
        return None
    found = _tanh_to_sigmoid(part) or _exp_to_sigmoid(part)
    return None if found is None else use_fast_math(found)


def _tanh_to_sigmoid(part: Operation) -> Expression | None:
    """c*x * (1 + tanh(u)) = 2c*x * sigmoid(2u), which does not cancel either."""
    if part.name != "mul":
        return None
    scaled, gate = part.arguments
    if not isinstance(scaled, Operation) or not isinstance(gate, Operation) or gate.name != "add":
        return None
    factor, x = _split_constant_factor(scaled)
    one, tanh = gate.arguments
    if not (isinstance(one, Constant) and one.value == 1 and isinstance(tanh, Operation)):
        return None
    if tanh.name != "tanh":
        return None
    inner, u = _split_constant_factor(tanh.arguments[0])
    sigmoid = Operation("sigmoid", (_multiply(2 * inner, u),), part.dtype)
    return Operation("mul", (_multiply(2 * factor, x), sigmoid), part.dtype)


def _exp_to_sigmoid(part: Operation) -> Expression | None:
    """x / (1 + exp(-u)) = x * sigmoid(u)."""
    if part.name != "div" or not isinstance(part.arguments[1], Operation):
        return None
    x, below = part.arguments
    if not isinstance(below, Operation) or below.name != "add":
        return None
    one, power = below.arguments
    if not (isinstance(one, Constant) and one.value == 1 and isinstance(power, Operation)):
        return None
    if power.name != "exp":
        return None
    (negative,) = power.arguments
    if not (isinstance(negative, Operation) and negative.name == "neg"):
        return None
    sigmoid = Operation("sigmoid", negative.arguments, part.dtype)
    return Operation("mul", (x, sigmoid), part.dtype)


def _split_constant_factor(expression: Expression) -> tuple[float, Expression]:
    """The constant that an expression is multiplied with, and the rest."""
    if isinstance(expression, Operation) and expression.name == "mul":
        first, rest = expression.arguments
        if isinstance(first, Constant):
            factor, inner = _split_constant_factor(rest)
            return float(first.value) * factor, inner
    return 1.0, expression


def _multiply(factor: float, expression: Expression) -> Expression:
    if factor == 1:
        return expression
    return Operation("mul", (Constant(factor, expression.dtype), expression), expression.dtype)
