"""Integer expressions of host programs: Python text → postfix code.

In: the text of an integer expression over names, as launchers contain it (`max(s0 - 4, 0) // 2`), and what each name
is. Out: words for `evaluate` of host_program.h, or an `Unsupported` error: the step then runs as Python.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from enum import IntEnum

MAX_DEPTH = 48  # values on the evaluator's stack, which has 64
INT64_MAX = (1 << 63) - 1


class Unsupported(Exception):
    """A step that host programs don't cover. It runs as Python."""


class Code(IntEnum):
    """`Code` of host_program.h."""

    CONSTANT = 0
    REGISTER = 1
    SLOT = 2
    SIZE = 3
    STRIDE = 4
    ADD = 5
    SUB = 6
    MUL = 7
    FLOORDIV = 8
    MOD = 9
    MIN = 10
    MAX = 11
    LT = 12
    LE = 13
    EQ = 14
    NE = 15
    SELECT = 16
    AND = 17
    OR = 18
    NOT = 19


Words = list[int]
# How a name is read: its code words, or None if it is unknown.
Lookup = Callable[[str], Words | None]

BINARY: Mapping[type[ast.operator], Code] = {
    ast.Add: Code.ADD,
    ast.Sub: Code.SUB,
    ast.Mult: Code.MUL,
    ast.FloorDiv: Code.FLOORDIV,
    ast.Mod: Code.MOD,
}
# an operator, and whether its sides are exchanged
COMPARISONS: Mapping[type[ast.cmpop], tuple[Code, bool]] = {
    ast.Lt: (Code.LT, False),
    ast.LtE: (Code.LE, False),
    ast.Gt: (Code.LT, True),
    ast.GtE: (Code.LE, True),
    ast.Eq: (Code.EQ, False),
    ast.NotEq: (Code.NE, False),
}


def compile_expression(text: str, lookup: Lookup) -> Words:
    """The postfix code of an expression: pairs of an operation and its value."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except SyntaxError as error:
        raise Unsupported(f"{text} is no expression") from error
    return _compile(tree, lookup, 0)


def constant_value(words: Words) -> int | None:
    """The value of code that is one constant; None otherwise."""
    return words[1] if len(words) == 2 and words[0] == Code.CONSTANT else None


def constant(value: int) -> Words:
    if not -INT64_MAX <= value <= INT64_MAX:
        raise Unsupported(f"{value} has more than 64 bits")
    return [Code.CONSTANT, value]


def _compile(node: ast.expr, lookup: Lookup, depth: int) -> Words:
    if depth > MAX_DEPTH:
        raise Unsupported("an expression is nested too deeply")
    match node:
        case ast.Constant(value=bool() | int() as value):
            return constant(int(value))
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return _binary(Code.SUB, constant(0), _compile(inner, lookup, depth + 1))
        case ast.UnaryOp(op=ast.Not(), operand=inner):
            return [*_compile(inner, lookup, depth), Code.NOT, 0]
        case ast.BinOp(left=left, op=op, right=right) if type(op) in BINARY:
            sides = _compile(left, lookup, depth), _compile(right, lookup, depth + 1)
            return _binary(BINARY[type(op)], *sides)
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in COMPARISONS:
            code, exchanged = COMPARISONS[type(op)]
            first, second = (right, left) if exchanged else (left, right)
            return _binary(
                code, _compile(first, lookup, depth), _compile(second, lookup, depth + 1)
            )
        case ast.IfExp(test=test, body=body, orelse=other):
            return _select(test, body, other, lookup, depth)
        case ast.Call(func=ast.Name(id="Where"), args=[test, body, other], keywords=[]):
            return _select(test, body, other, lookup, depth)
        case ast.Call(func=ast.Name(id="max" | "min" as name), args=args, keywords=[]) if args:
            words = _compile(args[0], lookup, depth)
            for argument in args[1:]:
                code = Code.MAX if name == "max" else Code.MIN
                words = _binary(code, words, _compile(argument, lookup, depth + 1))
            return words
        case ast.BoolOp(op=op, values=values):
            words = _compile(values[0], lookup, depth)
            for part in values[1:]:
                code = Code.AND if isinstance(op, ast.And) else Code.OR
                words = [*words, *_compile(part, lookup, depth + 1), code, 0]
            return words
    found = lookup(ast.unparse(node))
    if found is None:
        raise Unsupported(f"{ast.unparse(node)} in an integer expression")
    return found


def _binary(code: Code, left: Words, right: Words) -> Words:
    a, b = constant_value(left), constant_value(right)
    if a is not None and b is not None and code in (Code.ADD, Code.SUB, Code.MUL):
        return constant(a + b if code is Code.ADD else a - b if code is Code.SUB else a * b)
    if code is Code.ADD and b == 0:
        return left
    if code is Code.MUL and a == 1:
        return right
    return [*left, *right, code, 0]


def _select(test: ast.expr, body: ast.expr, other: ast.expr, lookup: Lookup, depth: int) -> Words:
    """Both sides are evaluated. A division by zero makes the step run as Python."""
    parts = [_compile(part, lookup, depth + k) for k, part in enumerate((test, body, other))]
    return [*parts[0], *parts[1], *parts[2], Code.SELECT, 0]
