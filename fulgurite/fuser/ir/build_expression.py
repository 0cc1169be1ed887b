"""Constructors of expressions: primitives of operands that have one opmath dtype."""

from __future__ import annotations

import torch

from fulgurite.fuser.ir.expression import Constant, Expression, Operation

BOOLEAN_PRIMITIVES = {"eq", "ne", "lt", "le", "gt", "ge", "signbit"}


def apply(name: str, *arguments: Expression) -> Operation:
    """Applies a primitive to arguments of one opmath dtype."""
    dtype = torch.bool if name in BOOLEAN_PRIMITIVES else arguments[-1].dtype
    return Operation(name, arguments, dtype)


def constant_like(value: float | int | bool, like: Expression) -> Constant:
    """Creates a constant with the dtype of another expression."""
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


def one_minus(a: Expression) -> Expression:
    return sub(constant_like(1, a), a)
