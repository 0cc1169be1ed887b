"""Sizes that were computed elsewhere, as sizes of the graph that is being traced.

In: the values of the graph that is being traced, and a size or stride of a FakeTensor outside of it. Out: an
equal number that is computed from the graph's own sizes, so that the tracer knows where it comes from. torch
does this for sums and products, and since 2.13 for minima and maxima.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from functools import reduce
from typing import Any

import sympy
import torch
from torch import SymInt
from torch.utils._sympy.functions import FloorDiv, Max, Min, Mod, PowByNatural, PythonMod

from fulgurite.trace.cost import iter_tensors

OPERATIONS: dict[Any, Callable[[Any, Any], Any]] = {
    sympy.Add: operator.add,
    sympy.Mul: operator.mul,
    sympy.Pow: operator.pow,
    PowByNatural: operator.pow,
    FloorDiv: operator.floordiv,
    Mod: operator.mod,
    PythonMod: operator.mod,
    Max: torch.sym_max,
    Min: torch.sym_min,
}


class TracedSizes:
    """The sizes, strides and integers of values of a graph, by their expressions."""

    def __init__(self, values: Iterable[Any]) -> None:
        self._known: dict[sympy.Expr, int | SymInt] = {}
        for value in values:
            sizes = [n for tensor in iter_tensors(value) for n in (*tensor.shape, *tensor.stride())]
            for size in (value, *sizes):
                if isinstance(size, SymInt):
                    self._known.setdefault(size.node.expr, size)

    def find(self, size: int | SymInt) -> int | SymInt:
        """The size, computed in the graph. Raises NotImplementedError if the graph lacks a part of it."""
        return self._find(size.node.expr) if isinstance(size, SymInt) else size

    def _find(self, expression: sympy.Expr) -> int | SymInt:
        if expression not in self._known:
            if expression.is_Integer:
                return int(expression)
            operation = OPERATIONS.get(expression.func)
            if operation is None:
                raise NotImplementedError(f"the size {expression} of another graph")
            self._known[expression] = reduce(operation, map(self._find, expression.args))
        return self._known[expression]
