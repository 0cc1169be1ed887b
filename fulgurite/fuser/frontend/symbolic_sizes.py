"""Converts torch's symbolic numbers to the IR.

In: ints, SymInts and SymFloats of fx metadata. Out: an `Index` over symbols with the bounds that
the shape environment knows, or the expression of a floating-point scalar. What is no polynomial
becomes a symbol that the launcher computes (`ir/host_symbols.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._sympy.numbers import IntInfinity, NegativeIntInfinity
from torch.utils._sympy.printers import PythonPrinter
from torch.utils._sympy.value_ranges import bound_sympy

from fulgurite.fuser.ir import index as indices
from fulgurite.fuser.ir.errors import Unsupported
from fulgurite.fuser.ir.expression import Expression, IndexValue, Operation
from fulgurite.fuser.ir.host_symbols import define_symbol
from fulgurite.fuser.ir.index import FloorDiv, Index, Mod, Symbol

MAX_BOUND = 1 << 62  # a bound from here on says nothing: torch gives sys.maxsize for an unknown one


def size_to_index(size: Any) -> Index:
    """Converts a size or SymInt of torch to an `Index` over symbols.

    A size that a guard pins to 1, such as n // 2 with n in (2, 3), becomes 1: it broadcasts.
    """
    if isinstance(size, int):
        return Index(size)
    if not size.node.expr.is_Symbol and statically_known_true(size == 1):
        return Index(1)
    return _Converter(size.node.shape_env).convert(size.node.expr)


def sizes_to_indices(fake: torch.Tensor) -> tuple[Index, ...]:
    """Converts the sizes of a tensor."""
    return tuple(size_to_index(size) for size in fake.shape)


def strides_to_indices(fake: torch.Tensor) -> tuple[Index, ...]:
    """Converts the strides of a tensor.

    Max(1, n) becomes n where n is one of its sizes: strides of an empty tensor mean nothing.
    """
    sizes = sizes_to_indices(fake)
    return tuple(_convert_stride(stride, sizes) for stride in fake.stride())


def _convert_stride(stride: Any, sizes: tuple[Index, ...]) -> Index:
    if isinstance(stride, int):
        return Index(stride)
    return _Converter(stride.node.shape_env, sizes).convert(stride.node.expr)


def float_to_index(number: torch.SymFloat) -> Index:
    """Returns the symbol of a floating-point scalar, as an argument of a region."""
    return indices.from_atom(_Converter(number.node.shape_env).define_float(number.node.expr))


def float_to_expression(number: torch.SymFloat) -> Expression:
    """Returns a floating-point scalar as an expression. Kernels get its bits as an integer."""
    symbol = _Converter(number.node.shape_env).define_float(number.node.expr)
    bits = define_symbol("bits", f"float_bits({symbol.name})", [symbol], is_64_bit=True)
    value = IndexValue(indices.from_atom(bits), torch.int64)
    return Operation("bitcast", (value,), torch.float64)


class _Converter:
    """Converts sympy expressions without sympy arithmetic, which is slow."""

    def __init__(self, shape_env: Any, sizes: tuple[Index, ...] = ()) -> None:
        self.ranges = shape_env.var_to_range
        self.sizes = sizes  # of the tensor whose strides are converted

    def convert(self, expression: Any) -> Index:
        if expression.is_Integer:
            return Index(int(expression))
        if expression.is_Symbol:
            return indices.from_atom(self.make_symbol(expression))
        if expression.is_Add:
            total = indices.ZERO
            for part in expression.args:
                total = total + self.convert(part)
            return total
        if expression.is_Mul:
            return indices.product([self.convert(part) for part in expression.args])
        if expression.is_Pow and expression.args[1].is_Integer and int(expression.args[1]) > 0:
            return indices.product([self.convert(expression.args[0])] * int(expression.args[1]))
        found = self.convert_size_or_one(expression) or self.convert_quotient(expression)
        return found or self.define(expression)

    def convert_size_or_one(self, expression: Any) -> Index | None:
        """Returns n for Max(1, n) if n is a size of the tensor."""
        if not self.sizes or expression.func.__name__ != "Max" or len(expression.args) != 2:
            return None
        one, rest = sorted(expression.args, key=lambda part: not part.is_Integer)
        size = self.convert(rest) if one.is_Integer and int(one) == 1 else None
        return size if size in self.sizes else None

    def convert_quotient(self, expression: Any) -> Index | None:
        """Returns a quotient or remainder if it is a polynomial."""
        name = expression.func.__name__
        is_quotient = name in ("FloorDiv", "CleanDiv")
        if not is_quotient and name not in ("Mod", "PythonMod"):
            return None
        top, bottom = map(self.convert, expression.args)
        low, _ = bottom.bounds()
        if low is None or low < 1:
            return None
        found = indices.floordiv(top, bottom) if is_quotient else indices.modulo(top, bottom)
        return None if any(isinstance(atom, FloorDiv | Mod) for atom in found.atoms()) else found

    def make_symbol(self, symbol: Any) -> Symbol:
        return Symbol(symbol.name, *self.find_bounds(symbol))

    def define(self, expression: Any) -> Index:
        """Returns the symbol that the launcher computes for any other expression."""
        symbol = self._define("size", expression, *self.find_bounds(expression))
        return indices.from_atom(symbol)

    def define_float(self, expression: Any) -> Symbol:
        if expression.is_Symbol:
            return Symbol(expression.name, None)
        return self._define("float", expression, None, None)

    def _define(self, kind: str, expression: Any, low: int | None, high: int | None) -> Symbol:
        try:
            text = PythonPrinter().doprint(expression)
        except NotImplementedError as reason:
            raise Unsupported(f"the symbolic number {expression}") from reason
        inner = [
            Symbol(symbol.name, *self.find_bounds(symbol)) for symbol in expression.free_symbols
        ]
        return define_symbol(kind, text, inner, low, high)

    def find_bounds(self, expression: Any) -> tuple[int | None, int | None]:
        """Returns the bounds that the shape environment knows of an integer."""
        found = self.ranges.get(expression) if expression.is_Symbol else None
        if found is None:
            found = bound_sympy(expression, self.ranges)
        if not found.is_int:
            return None, None
        return _to_bound(found.lower), _to_bound(found.upper)


def _to_bound(bound: Any) -> int | None:
    if isinstance(bound, IntInfinity | NegativeIntInfinity):
        return None
    number = int(bound)
    return number if abs(number) < MAX_BOUND else None
