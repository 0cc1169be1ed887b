"""Literals and types of the IR as Triton text, and properties of expressions.

In: numbers, dtypes, expressions. Out: text, or whether an expression has a property.
"""

from __future__ import annotations

import functools
import math

import torch

from fulgurite.fuser.ir.expression import Constant, Expression, Operation, opmath_dtype
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
UNSIGNED_DTYPES = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)
INT32_MIN, INT32_MAX = -(1 << 31), (1 << 31) - 1
TO_FLOAT8 = {torch.float8_e4m3fn: "to_e4m3", torch.float8_e5m2: "to_e5m2"}


def triton_type(dtype: torch.dtype) -> str:
    """The type that values of a dtype are computed in."""
    return f"tl.{TYPES[opmath_dtype(dtype)]}"


def literal(value: int | float | bool, dtype: torch.dtype) -> str:
    """A number as an untyped literal: it takes the type of the block it meets.

    Triton refuses negative literals beside unsigned blocks, so they are written modulo 2^bits.
    """
    dtype = opmath_dtype(dtype)
    if dtype in UNSIGNED_DTYPES:
        value = int(value) % (1 << 8 * dtype.itemsize)
    if dtype.is_floating_point:
        number = float(value)
        if math.isnan(number) or math.isinf(number):
            return f'float("{number}")'
        return repr(number) if number >= 0 and not repr(number).startswith("-") else f"({number!r})"
    if dtype == torch.bool:
        return str(bool(value))
    return str(int(value)) if value >= 0 else f"({int(value)})"


def typed_literal(value: int | float | bool, dtype: torch.dtype) -> str:
    """A number as a scalar of a type, for where nothing else decides the type."""
    return f"tl.full([], {literal(value, dtype)}, {triton_type(dtype)})"


@functools.cache
def cast_saturates(dtype: torch.dtype) -> bool:
    """Does the installed torch saturate when it casts to this dtype?"""
    return bool(torch.tensor(1e9).to(dtype).float().isfinite())


def is_single_atom(index: Index) -> bool:
    """Is the index one atom and nothing else?"""
    has_one_term = not index.constant and len(index.terms) == 1
    return has_one_term and index.terms[0][1] == 1 and len(index.terms[0][0]) == 1


def is_power_of_two(value: Expression) -> bool:
    """Is it a constant that divides exactly?"""
    return isinstance(value, Constant) and abs(math.frexp(value.value)[0]) == 0.5


def match_one_plus_tanh(operation: Operation) -> Expression | None:
    """The argument u of 1 + tanh(u), which is 2 / (1 + exp(-2u)) without cancellation."""
    if operation.name == "add" and operation.dtype != torch.float64:
        one, other = operation.arguments
        if isinstance(one, Constant) and one.value == 1 and isinstance(other, Operation):
            return other.arguments[0] if other.name == "tanh" else None
    return None


def is_clamped(value: Expression, limit: float) -> bool:
    """Is the value clamped between -limit and limit?"""
    for name in ("minimum", "maximum"):
        if not isinstance(value, Operation) or value.name != name:
            return False
        bound, value = value.arguments
        if not isinstance(bound, Constant) or abs(bound.value) > limit:
            return False
    return True


def strip_parentheses(text: str) -> str:
    """The text without one pair of parentheses around all of it."""
    if not (text.startswith("(") and text.endswith(")")):
        return text
    depth = 0
    for k, c in enumerate(text):
        depth += (c == "(") - (c == ")")
        if depth == 0 and k < len(text) - 1:
            return text
    return text[1:-1]


def as_factor(text: str) -> str:
    """The text as an operand of a multiplication."""
    return text if text.isalnum() else f"({text})"


def fits_int32(index: Index) -> bool:
    """Whether an index has 32 bits if its axes and symbols have."""
    low = high = index.constant
    for monomial, coefficient in index.terms:
        term = (coefficient, coefficient)
        for atom in monomial:
            least, most = atom.bounds()
            wide_least = INT32_MIN if least is None else max(least, INT32_MIN)
            wide_most = INT32_MAX if most is None else min(most, INT32_MAX)
            products = [x * y for x in term for y in (wide_least, wide_most)]
            term = (min(products), max(products))
        low, high = low + term[0], high + term[1]
    return low >= INT32_MIN and high <= INT32_MAX
