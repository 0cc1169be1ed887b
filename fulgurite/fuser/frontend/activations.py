"""ATen's activations and their gradients as expressions: one row an op, as in `pointwise_rules`."""

from __future__ import annotations

import math

import torch

from fulgurite.fuser.frontend.pointwise import (
    Rule,
    add,
    apply,
    clamp,
    div,
    mul,
    number,
    one_minus,
    scaled,
    where,
)
from fulgurite.fuser.ir.expression import Expression, Operation

BACKWARD = ("grad_output", "self")


def relu(a: Expression) -> Expression:
    # max(a, 0) that keeps NaN and, as torch does, gives +0 for -0
    return apply("maximum", a, number(0, a))


def silu(a: Expression) -> Expression:
    return div(a, add(number(1, a), apply("exp", apply("neg", a))))


def _silu_backward(grad: Expression, a: Expression) -> Expression:
    s = apply("sigmoid", a)
    return mul(mul(grad, s), add(number(1, a), mul(a, one_minus(s))))


def _gelu(a: Expression, approximate: str = "none") -> Expression:
    half = mul(number(0.5, a), a)
    if approximate == "tanh":
        return mul(half, add(number(1, a), apply("tanh", _gelu_inner(a))))
    inner = apply("erf", mul(a, number(math.sqrt(0.5), a)))
    return mul(half, add(number(1, a), inner))


def _gelu_inner(a: Expression) -> Expression:
    cube = mul(mul(a, a), a)
    return mul(number(math.sqrt(2 / math.pi), a), add(a, mul(number(0.044715, a), cube)))


def _gelu_backward(grad: Expression, a: Expression, approximate: str = "none") -> Expression:
    half = number(0.5, a)
    if approximate == "tanh":
        t = apply("tanh", _gelu_inner(a))
        left = mul(half, add(number(1, a), t))
        slope: Expression = add(number(1, a), mul(number(3 * 0.044715, a), mul(a, a)))
        slope = mul(slope, number(math.sqrt(2 / math.pi), a))
        right = mul(mul(mul(half, a), one_minus(mul(t, t))), slope)
        return mul(grad, add(left, right))
    cdf = mul(half, add(number(1, a), apply("erf", mul(a, number(math.sqrt(0.5), a)))))
    density: Expression = apply("exp", mul(number(-0.5, a), mul(a, a)))
    density = mul(density, number(1 / math.sqrt(2 * math.pi), a))
    return mul(grad, add(cdf, mul(a, density)))


def _leaky_relu(a: Expression, negative_slope: float = 0.01) -> Expression:
    return where(apply("gt", a, number(0, a)), a, scaled(a, negative_slope))


def _leaky_relu_backward(
    grad: Expression, a: Expression, negative_slope: float, self_is_result: bool
) -> Expression:
    return where(apply("gt", a, number(0, a)), grad, scaled(grad, negative_slope))


def _elu(a: Expression, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Expression:
    low = scaled(apply("expm1", scaled(a, input_scale)), alpha * scale)
    return where(apply("gt", a, number(0, a)), scaled(a, scale), low)


def _softplus(a: Expression, beta: float = 1, threshold: float = 20) -> Expression:
    scaled_a = scaled(a, beta)
    smooth: Expression = apply("log1p", apply("exp", scaled_a))
    smooth = smooth if beta == 1 else div(smooth, number(beta, a))
    return where(apply("gt", scaled_a, number(threshold, a)), a, smooth)


def _softplus_backward(
    grad: Expression, a: Expression, beta: float, threshold: float
) -> Expression:
    scaled_a = scaled(a, beta)
    z = apply("exp", scaled_a)
    smooth = mul(grad, div(z, add(z, number(1, a))))
    return where(apply("gt", scaled_a, number(threshold, a)), grad, smooth)


def _hardtanh(a: Expression, min_val: float = -1, max_val: float = 1) -> Expression:
    return clamp(a, number(min_val, a), number(max_val, a))


def _hardtanh_backward(
    grad: Expression, a: Expression, min_val: float, max_val: float
) -> Expression:
    outside = Operation(
        "or",
        (apply("le", a, number(min_val, a)), apply("ge", a, number(max_val, a))),
        torch.bool,
    )
    return where(outside, number(0, grad), grad)


def _hardsigmoid(a: Expression) -> Expression:
    shifted = clamp(add(a, number(3, a)), number(0, a), number(6, a))
    return div(shifted, number(6, a))


def _hardswish(a: Expression) -> Expression:
    shifted = clamp(add(a, number(3, a)), number(0, a), number(6, a))
    return div(mul(a, shifted), number(6, a))


def _mish(a: Expression) -> Expression:
    return mul(a, apply("tanh", apply("log1p", apply("exp", a))))


def _threshold(a: Expression, threshold: float, value: float) -> Expression:
    return where(apply("le", a, number(threshold, a)), number(value, a), a)


def _threshold_backward(grad: Expression, a: Expression, threshold: float) -> Expression:
    return where(apply("le", a, number(threshold, a)), number(0, grad), grad)


RULES: dict[str, Rule] = {
    "relu": Rule(("self",), "default", lambda a: relu(a)),
    "silu": Rule(("self",), "default", lambda a: silu(a)),
    "silu_backward": Rule(BACKWARD, "default", _silu_backward),
    "gelu": Rule(("self",), "default", _gelu),
    "gelu_backward": Rule(BACKWARD, "default", _gelu_backward),
    "sigmoid_backward": Rule(
        ("grad_output", "output"), "default", lambda g, y: mul(g, mul(one_minus(y), y))
    ),
    "tanh_backward": Rule(
        ("grad_output", "output"), "default", lambda g, y: mul(g, one_minus(mul(y, y)))
    ),
    "leaky_relu": Rule(("self",), "default", _leaky_relu),
    "leaky_relu_backward": Rule(BACKWARD, "default", _leaky_relu_backward),
    "elu": Rule(("self",), "default", _elu),
    "softplus": Rule(("self",), "default", _softplus),
    "softplus_backward": Rule(BACKWARD, "default", _softplus_backward),
    "hardtanh": Rule(("self",), "default", _hardtanh),
    "hardtanh_backward": Rule(BACKWARD, "default", _hardtanh_backward),
    "hardsigmoid": Rule(("self",), "default", lambda a: _hardsigmoid(a)),
    "hardswish": Rule(("self",), "default", lambda a: _hardswish(a)),
    "mish": Rule(("self",), "default", lambda a: _mish(a)),
    "threshold": Rule(("self",), "default", _threshold),
    "threshold_backward": Rule(BACKWARD, "default", _threshold_backward),
}
