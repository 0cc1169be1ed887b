"""Where TorchDynamo fails or is wrong on programs that eager mode runs.

In: TorchDynamo's functions. Out: the same functions, corrected when this module is first used.

- An op that its FakeTensor rule refuses and the op itself takes (`F.grouped_mm` of float32 numbers on a CPU) is
  a graph break: torch runs that op, and capture goes on after it. If the op fails as well, its own
  error is raised. With `FULGURITE_STRICT=1` and `fullgraph=True` the failed capture is an error.
- `5 in (n, m)` and `n in range(5)` with integers that became symbols compare their values.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from torch._dynamo import exc, utils
from torch._dynamo.variables import lists
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.tensor import SymNodeVariable

from fulgurite.errors import FallbackWarning
from fulgurite.logs import LOG


class _Capture(threading.local):
    """What this thread's capture does at an op that fails on FakeTensors."""

    breaks_at_failed_ops = False


capture = _Capture()
_installed = False


def install() -> None:
    """Correct TorchDynamo's functions, once."""
    global _installed
    if _installed:
        return
    _installed = True
    _replace(utils, "_wrap_graph_break_with_torch_runtime_err", _break_at_failed_op)
    _replace(lists, "iter_contains", _contains)
    _replace(lists.RangeVariable, "sq_contains", _range_contains)


def _replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace a function where this version of torch has it."""
    original = getattr(owner, name, None)
    if original is not None:
        setattr(owner, name, make(original))


def _break_at_failed_op(original: Callable[..., NoReturn]) -> Callable[..., NoReturn]:
    def raise_for_failed_op(raise_graph_break: Callable[[], NoReturn]) -> NoReturn:
        if not capture.breaks_at_failed_ops:
            original(raise_graph_break)
        try:
            raise_graph_break()
        except exc.Unsupported as error:
            message = str(error).partition("Hint:")[0].strip()
            LOG.warning("capture failed, eager mode runs the op: %s", message)
            warnings.warn(
                f"an op could not be captured: {message}\n"
                "  runs instead   the op itself, between two graphs\n"
                "  next           torch refuses these inputs while capturing; FULGURITE_STRICT=1 raises "
                "the error",
                FallbackWarning,
                stacklevel=2,
            )
            raise

    return raise_for_failed_op


def _contains(original: Callable[..., Any]) -> Callable[..., Any]:
    def contains(items: Iterable[Any], search: Any, *args: Any, **kwargs: Any) -> Any:
        items = list(items)
        if isinstance(search, SymNodeVariable) or search.is_python_constant():
            search, items = _specialize(search), [_specialize(item) for item in items]
        return original(items, search, *args, **kwargs)

    return contains


def _range_contains(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, tx, item: original(self, tx, _specialize(item))


def _specialize(variable: Any) -> Any:
    """A symbol as its value, with a guard on it."""
    if isinstance(variable, SymNodeVariable):
        return ConstantVariable.create(variable.evaluate_expr())
    return variable
