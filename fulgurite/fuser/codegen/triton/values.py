"""Numbers and types of the IR as Triton text, and what is known of a value without computing it."""

from __future__ import annotations

import functools
import math

import torch

from fulgurite.fuser.ir.expression import Constant, Expression, Operation, value_type
from fulgurite.fuser.ir.index import Index

TYPES: dict[torch.dtype, str] = {
    torch.bool: "int1",
    torch.uint8: "uint8",
    torch.uint16: "uint16",
    torch.uint32: "uint32",
    torch.uint64: "uint64",
    torch.int8: "int8",
    torch.int16: "int16",
    torch.int32: "int32",
    torch.int64: "int64",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float8_e4m3fn: "float8e4nv",
    torch.float8_e5m2: "float8e5",
    torch.float32: "float32",
    torch.float64: "float64",
}
TO_FLOAT8 = {torch.float8_e4m3fn: "to_e4m3", torch.float8_e5m2: "to_e5m2"}


def value_tl(dtype: torch.dtype) -> str:
    return f"tl.{TYPES[value_type(dtype)]}"


def constant(value: int | float | bool, dtype: torch.dtype) -> str:
    """A number as a literal; its type is that of the block it meets."""
    dtype = value_type(dtype)
    if dtype.is_floating_point:
        number = float(value)
        if math.isnan(number) or math.isinf(number):
            return f'float("{number}")'
        return repr(number) if number >= 0 and not repr(number).startswith("-") else f"({number!r})"
    if dtype == torch.bool:
        return str(bool(value))
    return str(int(value)) if value >= 0 else f"({int(value)})"


def typed(value: int | float | bool, dtype: torch.dtype) -> str:
    """A number as a scalar of a type, for places where nothing else decides it."""
    return f"tl.full([], {constant(value, dtype)}, {value_tl(dtype)})"


@functools.cache
def saturates(dtype: torch.dtype) -> bool:
    """Does this torch round what is past the largest number to the largest number?"""
    return bool(torch.tensor(1e9).to(dtype).float().isfinite())


def is_single(index: Index) -> bool:
    """Is the index one atom and nothing else?"""
    one = not index.constant and len(index.terms) == 1
    return one and index.terms[0][1] == 1 and len(index.terms[0][0]) == 1


def is_power_of_two(value: Expression) -> bool:
    """Is it a number whose quotients are exact?"""
    return isinstance(value, Constant) and abs(math.frexp(value.value)[0]) == 0.5


def one_plus_tanh(operation: Operation) -> Expression | None:
    """The argument of tanh in 1 + tanh(u), which is 2 / (1 + exp(-2u)) without cancellation."""
    if operation.name == "add" and operation.dtype != torch.float64:
        one, other = operation.arguments
        if isinstance(one, Constant) and one.value == 1 and isinstance(other, Operation):
            return other.arguments[0] if other.name == "tanh" else None
    return None


def within(value: Expression, limit: float) -> bool:
    """Is the value clamped between -limit and limit?"""
    if isinstance(value, Operation) and value.name == "minimum":
        a, b = value.arguments
        if isinstance(b, Constant) and abs(b.value) <= limit and isinstance(a, Operation):
            low = a.arguments[-1] if a.name == "maximum" else None
            return isinstance(low, Constant) and abs(low.value) <= limit
    return False


def bare(text: str) -> str:
    """Without parentheses around the whole of it."""
    if not (text.startswith("(") and text.endswith(")")):
        return text
    depth = 0
    for k, c in enumerate(text):
        depth += (c == "(") - (c == ")")
        if depth == 0 and k < len(text) - 1:
            return text
    return text[1:-1]
