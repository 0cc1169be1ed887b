"""Names that know more than the plain ones: loads from a buffer, divisors whose inverse is known."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from fulgurite.fuser.codegen.cpp.expressions import Names
from fulgurite.fuser.ir.expression import Expression, Load, Operation, value_type, walk


@dataclass
class BufferNames(Names):
    """Text of expressions where some loads come from a buffer and some divisors have an inverse."""

    buffers: dict[Load, str] = field(default_factory=dict)
    inverses: dict[str, str] = field(default_factory=dict)

    def load(self, load: Load) -> str:
        found = self.buffers.get(load)
        return super().load(load) if found is None else self.widened(load, found)

    def operation(self, operation: Operation) -> str:
        local = divisor(operation)
        if local is not None and local in self.inverses:
            return f"({self.expression(operation.arguments[0])} / {self.inverses[local]})"
        return super().operation(operation)


def divisor(part: Expression) -> str | None:
    """The local a float is divided by, if that is what the expression is."""
    if isinstance(part, Operation) and part.name == "div":
        by = part.arguments[1]
        if isinstance(by, Load) and not by.index and value_type(part.dtype) == torch.float32:
            return by.name
    return None


def divisors(expressions: list[Expression]) -> Iterator[str]:
    """Every local that something in the expressions is divided by."""
    for expression in expressions:
        for part in walk(expression):
            found = divisor(part)
            if found is not None:
                yield found
