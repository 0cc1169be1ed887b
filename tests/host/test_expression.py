"""Integer expressions of host programs: their postfix code computes what Python computes."""

from __future__ import annotations

import ctypes
import itertools

import pytest

from fulgurite import native
from fulgurite.host.expression import Code, Unsupported, Words, compile_expression

TEXTS = [
    "3",
    "-a + 2*b*a - 7",
    "a // b",
    "a % b",
    "(a - 5) // (b - 2)",
    "max(a, b, 3) - min(a, -b)",
    "(a if a < 0 else b)",
    "Where(a >= b, a, 2)",
    "a > 2 and not b == 1 or a != b",
    "((a) % (b) if b else 0)",
]


def evaluate(words: Words, a: int, b: int) -> int | None:
    """What the evaluator of host_program.h does, in Python."""
    stack: list[int] = []
    for code, value in zip(words[::2], words[1::2], strict=True):
        if code == Code.CONSTANT:
            stack.append(value)
        elif code == Code.REGISTER:
            stack.append((a, b)[value])
        elif code == Code.NOT:
            stack.append(int(not stack.pop()))
        elif code == Code.SELECT:
            other, yes, test = stack.pop(), stack.pop(), stack.pop()
            stack.append(yes if test else other)
        else:
            y, x = stack.pop(), stack.pop()
            if code in (Code.FLOORDIV, Code.MOD) and y == 0:
                return None  # the step runs as Python
            stack.append(
                {
                    Code.ADD: lambda: x + y,
                    Code.SUB: lambda: x - y,
                    Code.MUL: lambda: x * y,
                    Code.FLOORDIV: lambda: x // y,
                    Code.MOD: lambda: x % y,
                    Code.MIN: lambda: min(x, y),
                    Code.MAX: lambda: max(x, y),
                    Code.LT: lambda: int(x < y),
                    Code.LE: lambda: int(x <= y),
                    Code.EQ: lambda: int(x == y),
                    Code.NE: lambda: int(x != y),
                    Code.AND: lambda: int(bool(x) and bool(y)),
                    Code.OR: lambda: int(bool(x) or bool(y)),
                }[Code(code)]()
            )
    return stack[0]


def lookup(name: str) -> Words | None:
    return {"a": [int(Code.REGISTER), 0], "b": [int(Code.REGISTER), 1]}.get(name)


@pytest.mark.parametrize("text", TEXTS)
def test_code_computes_the_expression(text: str) -> None:
    words = compile_expression(text, lookup)
    for a, b in itertools.product((-7, -1, 0, 1, 2, 5, 12), repeat=2):
        found = evaluate(words, a, b)
        if found is None:
            continue
        scope = {"a": a, "b": b, "Where": lambda c, x, y: x if c else y}
        assert found == int(eval(text, scope)), (text, a, b)


@pytest.mark.skipif(native.find_compiler() is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("text", TEXTS)
def test_the_native_evaluator_agrees(text: str) -> None:
    """The evaluator of the header itself, compiled with a function that calls it."""
    source = (
        (native.INCLUDE / "host_program.h").read_text()
        + """
EXPORT int64_t evaluate_with(int64_t* registers, const int64_t* code, int64_t count, int64_t* result) {
  Frame f;
  f.registers = registers;
  return evaluate(f, code, count, result);
}
"""
    )
    library = native.load(source)
    words = compile_expression(text, lookup)
    code = (ctypes.c_int64 * len(words))(*words)
    for a, b in itertools.product((-7, -1, 0, 1, 2, 5, 12), repeat=2):
        result = ctypes.c_int64()
        registers = (ctypes.c_int64 * 2)(a, b)
        count = ctypes.c_int64(len(words) // 2)
        worked = library.evaluate_with(registers, code, count, ctypes.byref(result))
        expected = evaluate(words, a, b)
        assert bool(worked) == (expected is not None)
        if expected is not None:
            assert result.value == expected, (text, a, b)


@pytest.mark.parametrize("text", ["a / b", "f(a)", "c + 1", "a +", "a ** b", str(1 << 70)])
def test_what_the_evaluator_does_not_know_is_refused(text: str) -> None:
    with pytest.raises(Unsupported):
        compile_expression(text, lookup)
