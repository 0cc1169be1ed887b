"""An expression printer that knows buffered loads and precomputed reciprocals.

In: expressions of the IR. Out: C++ text.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from fulgurite.fuser.codegen.cpp.expressions import ExpressionPrinter
from fulgurite.fuser.ir.expression import Expression, Load, Operation, opmath_dtype, walk


@dataclass
class BufferedPrinter(ExpressionPrinter):
    """Prints some loads as reads of a buffer, and some divisions by a precomputed reciprocal."""

    buffers: dict[Load, str] = field(default_factory=dict)
    reciprocals: dict[str, str] = field(default_factory=dict)

    def print_load(self, load: Load) -> str:
        buffer = self.buffers.get(load)
        return super().print_load(load) if buffer is None else self.print_widened(load, buffer)

    def print_operation(self, operation: Operation) -> str:
        divisor = find_divisor(operation)
        if divisor is not None and divisor in self.reciprocals:
            numerator = self.print_expression(operation.arguments[0])
            return f"({numerator} / {self.reciprocals[divisor]})"
        return super().print_operation(operation)


def find_divisor(part: Expression) -> str | None:
    """The local that a float is divided by, if the expression is such a division."""
    if isinstance(part, Operation) and part.name == "div":
        by = part.arguments[1]
        if isinstance(by, Load) and not by.index and opmath_dtype(part.dtype) == torch.float32:
            return by.name
    return None


def find_divisors(expressions: list[Expression]) -> Iterator[str]:
    """Every local that something in the expressions is divided by."""
    for expression in expressions:
        for part in walk(expression):
            found = find_divisor(part)
            if found is not None:
                yield found
