"""Python numbers that became symbols: where their arithmetic differs from Python's.

In: TorchDynamo's ops on symbols. Out: the same ops, corrected.

- `p ** 2` of a negative float is a float, and `p ** 0.5` of one a complex constant. `(-2) ** n` is a constant.
- The remainder of a float (`p % 2`) is computed on tensors, as its other ops are.
- A number for which Python raises an error (`1 / 0.0`, `math.sqrt(-1)`) is a graph break, so Python raises it.
- Integers have any size in Python, and 64 bits in a graph. An argument that does not fit is a constant, and
  arithmetic whose result does not fit is a graph break.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._dynamo import exc
from torch._dynamo.guards import GuardBuilder
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.tensor import SymNodeVariable
from torch.utils._sympy.reference import TensorReferenceAnalysis
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

# Of integers: products of two small ones fit into 64 bits, and so do small multiples of large ones.
SMALL, LARGE, LARGEST = 1 << 31, 1 << 62, (1 << 63) - 1
LARGEST_SIZE = 1 << 48
INTEGER_ARITHMETIC = frozenset(
    {operator.add, operator.sub, operator.mul, operator.pow, operator.lshift}
)
PowerOperator = Callable[[Any, Any], Any]


def install() -> None:
    """Correct the ops, once."""
    if not hasattr(TensorReferenceAnalysis, "python_mod"):
        TensorReferenceAnalysis.python_mod = staticmethod(_python_mod)  # type: ignore[attr-defined]
    torch.SymFloat.__pow__ = _raise_symbol(torch.SymFloat.__pow__)  # type: ignore[method-assign]
    for kind in (torch.SymFloat, torch.SymInt):
        kind.__rpow__ = _raise_number(kind.__rpow__)  # type: ignore[method-assign]
    VariableBuilder.wrap_symint = _bound_symbol(VariableBuilder.wrap_symint)  # type: ignore[method-assign]


def _bound_symbol(original: Callable[..., Any]) -> Callable[..., Any]:
    """An integer argument: a symbol with bounds, so that most arithmetic fits; a constant if it is too large."""

    def wrap_symint(self: VariableBuilder, value: int, *args: Any, **options: Any) -> Any:
        if not -LARGE <= value <= LARGE:
            self.install_guards(GuardBuilder.CONSTANT_MATCH)  # type: ignore[arg-type]
            return ConstantVariable.create(value=value, source=self.source)
        variable = original(self, value, *args, **options)
        symbol = variable.sym_num if isinstance(variable, SymNodeVariable) else None
        if isinstance(symbol, torch.SymInt) and symbol.node.has_hint():
            bound = SMALL if -SMALL <= value <= SMALL else LARGE
            _guard(-bound <= symbol, symbol <= bound)
        return variable

    return wrap_symint


def _guard(*conditions: Any) -> None:
    """Capture again if one of these conditions, which hold now, does not."""
    assert all(map(bool, conditions)), "a guard that does not hold for the captured numbers"


def _raise_symbol(original: PowerOperator) -> PowerOperator:
    """`p ** n` of a float symbol. torch refuses negative ones: powers that are no integers are complex."""

    def power(base: Any, exponent: Any) -> Any:
        if not isinstance(exponent, int | float) or base > 0:
            return original(base, exponent)
        if base == 0 or not float(exponent).is_integer():
            return float(base) ** exponent
        return base.__float_pow__(exponent)

    return power


def _raise_number(original: PowerOperator) -> PowerOperator:
    """`b ** p` of a symbol. The power of a negative number is a constant: its type depends on the symbol."""

    def power(exponent: Any, base: Any) -> Any:
        if not isinstance(base, int | float) or base >= 0:
            return original(exponent, base)
        is_integer = isinstance(exponent, torch.SymInt)
        return base ** (int(exponent) if is_integer else float(exponent))

    return power


def _python_mod(x: Any, y: Any) -> Any:
    """`x % y` of Python floats, on tensors: both take the sign of `y`."""
    return torch.ops.aten.remainder.Tensor(x, y)


def _is_divisor(_: Any, divisor: Any) -> bool:
    return bool(divisor != 0)


def _is_finite(x: Any) -> bool:
    return -sys.float_info.max <= x <= sys.float_info.max


def _is_cosine(x: Any) -> bool:
    return -1 <= x <= 1


# arguments for which Python's function raises no error
DOMAINS: Mapping[Any, Callable[..., bool]] = {
    operator.truediv: _is_divisor,
    operator.floordiv: _is_divisor,
    operator.mod: _is_divisor,
    torch._sym_sqrt: lambda x: bool(x >= 0),
    torch._sym_sin: _is_finite,
    torch._sym_cos: _is_finite,
    torch._sym_tan: _is_finite,
    torch._sym_asin: _is_cosine,
    torch._sym_acos: _is_cosine,
}


def check_domain(function: Any, args: Sequence[Any]) -> None:
    """Break the graph if Python raises an error for these numbers; else guard on that it does not."""
    if function in DOMAINS and _are_numbers(args) and not DOMAINS[function](*args):
        _break_graph(function)
    are_integers = _are_numbers(args) and all(isinstance(x, int | torch.SymInt) for x in args)
    is_fraction = function is operator.pow and are_integers and args[1] < 0
    if function in INTEGER_ARITHMETIC and are_integers and not is_fraction:
        _check_overflow(function, function(*args))


def _check_overflow(function: Any, result: Any) -> None:
    """Break the graph if an integer has more than 64 bits; guard on that it has not, if it may."""
    if not isinstance(result, torch.SymInt) or _always_fits(result):
        return
    if not -LARGEST <= result.node.hint <= LARGEST:
        _break_graph(function)
    _guard(result >= -LARGEST, result <= LARGEST)


def _always_fits(number: torch.SymInt) -> bool:
    """Whether a number has 64 bits, by the bounds of its symbols. Sizes of tensors and their products do."""
    ranges = number.node.shape_env.var_to_range
    bounds = {symbol: ranges[symbol] for symbol in number.node.expr.free_symbols}
    if all(bound.lower >= 0 for bound in bounds.values()):
        return True
    for symbol, bound in bounds.items():
        if bound.lower >= 0:
            bounds[symbol] = bound & ValueRanges(0, LARGEST_SIZE)
    found = bound_sympy(number.node.expr, bounds)
    return bool(found.lower >= -LARGEST and found.upper <= LARGEST)


def check_cause(function: Any, args: Sequence[Any], error: RuntimeError) -> None:
    """Break the graph if a function of numbers has failed, as it does in Python."""
    if isinstance(error.__cause__, ArithmeticError | ValueError) and _are_numbers(args):
        _break_graph(function)


def _break_graph(function: Any) -> None:
    exc.unimplemented(
        gb_type="Python number outside of a function's domain",
        context=str(function),
        explanation=f"`{function.__name__}` of these arguments raises an error in Python, or has more than 64 bits.",
        hints=["Check the arguments of the compiled function."],
    )


def _are_numbers(args: Sequence[Any]) -> bool:
    """Whether one of some numbers is a symbol of an argument."""
    symbols = [x for x in args if isinstance(x, torch.SymInt | torch.SymFloat)]
    are_known = all(symbol.node.has_hint() for symbol in symbols)
    numbers = (int, float, torch.SymInt, torch.SymFloat)
    return bool(symbols) and are_known and all(isinstance(x, numbers) for x in args)
