"""Lowerings of activations and their gradients. Same structure as `pointwise.py`."""

from __future__ import annotations

import math

import torch

from fulgurite.fuser.frontend.pointwise import PointwiseLowering, clamp, scale_by
from fulgurite.fuser.ir.build_expression import (
    add,
    apply,
    constant_like,
    div,
    mul,
    one_minus,
    where,
)
from fulgurite.fuser.ir.expression import Expression, Operation

BACKWARD = ("grad_output", "self")


def relu(a: Expression) -> Expression:
    # maximum keeps NaN; of equal numbers it returns the second one: -0 for -0, as torch does
    return apply("maximum", constant_like(0, a), a)


def silu(a: Expression) -> Expression:
    return div(a, add(constant_like(1, a), apply("exp", apply("neg", a))))


def _silu_backward(grad: Expression, a: Expression) -> Expression:
    s = apply("sigmoid", a)
    return mul(mul(grad, s), add(constant_like(1, a), mul(a, one_minus(s))))


def _gelu(a: Expression, approximate: str = "none") -> Expression:
    half = mul(constant_like(0.5, a), a)
    if approximate == "tanh":
        return mul(half, add(constant_like(1, a), apply("tanh", _gelu_inner(a))))
    inner = apply("erf", mul(a, constant_like(math.sqrt(0.5), a)))
    return mul(half, add(constant_like(1, a), inner))


def _gelu_inner(a: Expression) -> Expression:
    cube = mul(mul(a, a), a)
    return mul(
        constant_like(math.sqrt(2 / math.pi), a), add(a, mul(constant_like(0.044715, a), cube))
    )


def _gelu_backward(grad: Expression, a: Expression, approximate: str = "none") -> Expression:
    half = constant_like(0.5, a)
    if approximate == "tanh":
        t = apply("tanh", _gelu_inner(a))
        left = mul(half, add(constant_like(1, a), t))
        slope: Expression = add(constant_like(1, a), mul(constant_like(3 * 0.044715, a), mul(a, a)))
        slope = mul(slope, constant_like(math.sqrt(2 / math.pi), a))
        right = mul(mul(mul(half, a), one_minus(mul(t, t))), slope)
        return mul(grad, add(left, right))
    cdf = mul(
        half, add(constant_like(1, a), apply("erf", mul(a, constant_like(math.sqrt(0.5), a))))
    )
    density: Expression = apply("exp", mul(constant_like(-0.5, a), mul(a, a)))
    density = mul(density, constant_like(1 / math.sqrt(2 * math.pi), a))
    return mul(grad, add(cdf, mul(a, density)))


def _leaky_relu(a: Expression, negative_slope: float = 0.01) -> Expression:
    return where(apply("gt", a, constant_like(0, a)), a, scale_by(a, negative_slope))


def _leaky_relu_backward(
    grad: Expression, a: Expression, negative_slope: float, self_is_result: bool
) -> Expression:
    return where(apply("gt", a, constant_like(0, a)), grad, scale_by(grad, negative_slope))


def _elu(a: Expression, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Expression:
    low = scale_by(apply("expm1", scale_by(a, input_scale)), alpha * scale)
    return where(apply("gt", a, constant_like(0, a)), scale_by(a, scale), low)


def _softplus(a: Expression, beta: float = 1, threshold: float = 20) -> Expression:
    scaled_a = scale_by(a, beta)
    smooth: Expression = apply("log1p", apply("exp", scaled_a))
    smooth = smooth if beta == 1 else div(smooth, constant_like(beta, a))
    return where(apply("gt", scaled_a, constant_like(threshold, a)), a, smooth)


def _softplus_backward(
    grad: Expression, a: Expression, beta: float, threshold: float
) -> Expression:
    scaled_a = scale_by(a, beta)
    z = apply("exp", scaled_a)
    smooth = mul(grad, div(z, add(z, constant_like(1, a))))
    return where(apply("gt", scaled_a, constant_like(threshold, a)), grad, smooth)


def _hardtanh(a: Expression, min_val: float = -1, max_val: float = 1) -> Expression:
    return clamp(a, constant_like(min_val, a), constant_like(max_val, a))


def _hardtanh_backward(
    grad: Expression, a: Expression, min_val: float, max_val: float
) -> Expression:
    outside = Operation(
        "or",
        (apply("le", a, constant_like(min_val, a)), apply("ge", a, constant_like(max_val, a))),
        torch.bool,
    )
    return where(outside, constant_like(0, grad), grad)


def _hardsigmoid(a: Expression) -> Expression:
    shifted = clamp(add(a, constant_like(3, a)), constant_like(0, a), constant_like(6, a))
    return div(shifted, constant_like(6, a))


def _hardswish(a: Expression) -> Expression:
    shifted = clamp(add(a, constant_like(3, a)), constant_like(0, a), constant_like(6, a))
    return div(mul(a, shifted), constant_like(6, a))


def _mish(a: Expression) -> Expression:
    return mul(a, apply("tanh", apply("log1p", apply("exp", a))))


def _threshold(a: Expression, threshold: float, value: float) -> Expression:
    return where(apply("le", a, constant_like(threshold, a)), constant_like(value, a), a)


def _threshold_backward(grad: Expression, a: Expression, threshold: float) -> Expression:
    return where(apply("le", a, constant_like(threshold, a)), constant_like(0, grad), grad)


ACTIVATION_LOWERINGS: dict[str, PointwiseLowering] = {
    "relu": PointwiseLowering(("self",), "default", relu),
    "silu": PointwiseLowering(("self",), "default", silu),
    "silu_backward": PointwiseLowering(BACKWARD, "default", _silu_backward),
    "gelu": PointwiseLowering(("self",), "default", _gelu),
    "gelu_backward": PointwiseLowering(BACKWARD, "default", _gelu_backward),
    "sigmoid_backward": PointwiseLowering(
        ("grad_output", "output"), "default", lambda g, y: mul(g, mul(one_minus(y), y))
    ),
    "tanh_backward": PointwiseLowering(
        ("grad_output", "output"), "default", lambda g, y: mul(g, one_minus(mul(y, y)))
    ),
    "leaky_relu": PointwiseLowering(("self",), "default", _leaky_relu),
    "leaky_relu_backward": PointwiseLowering(BACKWARD, "default", _leaky_relu_backward),
    "elu": PointwiseLowering(("self",), "default", _elu),
    "softplus": PointwiseLowering(("self",), "default", _softplus),
    "softplus_backward": PointwiseLowering(BACKWARD, "default", _softplus_backward),
    "hardtanh": PointwiseLowering(("self",), "default", _hardtanh),
    "hardtanh_backward": PointwiseLowering(BACKWARD, "default", _hardtanh_backward),
    "hardsigmoid": PointwiseLowering(("self",), "default", _hardsigmoid),
    "hardswish": PointwiseLowering(("self",), "default", _hardswish),
    "mish": PointwiseLowering(("self",), "default", _mish),
    "threshold": PointwiseLowering(("self",), "default", _threshold),
    "threshold_backward": PointwiseLowering(BACKWARD, "default", _threshold_backward),
}
