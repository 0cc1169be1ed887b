"""Python numbers that became symbols: where their arithmetic differs from Python's.

In: TorchDynamo's ops on symbols. Out: the same ops, corrected.

- `p ** 2` of a negative float is a float, and `p ** 0.5` of one a complex constant. `(-2) ** n` is a constant.
- The remainder of a float (`p % 2`) is computed on tensors, as its other ops are.
- A number for which Python raises an error (`1 / 0.0`, `math.sqrt(-1)`) is a graph break, so Python raises it.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._dynamo import exc
from torch.utils._sympy.reference import TensorReferenceAnalysis

PowerOperator = Callable[[Any, Any], Any]


def install() -> None:
    """Correct the ops, once."""
    if not hasattr(TensorReferenceAnalysis, "python_mod"):
        TensorReferenceAnalysis.python_mod = staticmethod(_python_mod)  # type: ignore[attr-defined]
    torch.SymFloat.__pow__ = _raise_symbol(torch.SymFloat.__pow__)  # type: ignore[method-assign]
    for kind in (torch.SymFloat, torch.SymInt):
        kind.__rpow__ = _raise_number(kind.__rpow__)  # type: ignore[method-assign]


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


def check_cause(function: Any, args: Sequence[Any], error: RuntimeError) -> None:
    """Break the graph if a function of numbers has failed, as it does in Python."""
    if isinstance(error.__cause__, ArithmeticError | ValueError) and _are_numbers(args):
        _break_graph(function)


def _break_graph(function: Any) -> None:
    exc.unimplemented(
        gb_type="Python number outside of a function's domain",
        context=str(function),
        explanation=f"Python raises an error for these arguments of `{function.__name__}`.",
        hints=["Check the arguments of the compiled function."],
    )


def _are_numbers(args: Sequence[Any]) -> bool:
    """Whether one of some numbers is a symbol of an argument."""
    symbols = [x for x in args if isinstance(x, torch.SymInt | torch.SymFloat)]
    are_known = all(symbol.node.has_hint() for symbol in symbols)
    numbers = (int, float, torch.SymInt, torch.SymFloat)
    return bool(symbols) and are_known and all(isinstance(x, numbers) for x in args)
