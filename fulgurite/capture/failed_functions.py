"""Functions on which TorchDynamo itself fails: eager mode runs them.

In: TorchDynamo's handling of errors. Out: the same, with an internal error as a graph break: the function runs
in eager mode, with a warning, and the functions that it calls are captured. With `FULGURITE_STRICT=1` and
`fullgraph=True` it stays an error.

Compiled coroutines and asynchronous generators run in eager mode, too. TorchDynamo takes their frames for those
of functions: the process crashed at a later garbage collection.

TorchDynamo wraps most of its own errors as InternalTorchDynamoError. It passes failed assertions and some more
as they are, because the program may be at fault. Eager mode then raises the program's error.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from types import CodeType
from typing import Any

from torch._dynamo import convert_frame, exc
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from fulgurite.capture.program_errors import skips_failed_functions
from fulgurite.errors import FallbackWarning, FulguriteError
from fulgurite.logs import LOG

SUSPENDING = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
UNWRAPPED = (AssertionError, IndexError, GuardOnDataDependentSymNode)


def install() -> None:
    """Correct TorchDynamo's functions."""
    for name, make in (
        ("InternalTorchDynamoError", _skip_after_internal_error),
        ("exception_handler", _skip_after_unwrapped_error),
        ("is_generator", lambda _: _suspends),
    ):
        setattr(convert_frame, name, make(getattr(convert_frame, name)))


def _suspends(code: CodeType) -> bool:
    """Whether a frame of the code may be left and entered again."""
    return bool(code.co_flags & SUSPENDING)


def _skip_after_internal_error(original: type[Exception]) -> Callable[[str], Exception]:
    """TorchDynamo raises what this returns. After `Unsupported` it runs the function in eager mode."""
    return lambda text: _skip(text) if skips_failed_functions() else original(text)


def _skip_after_unwrapped_error(original: Callable[..., Any]) -> Callable[..., Any]:
    def handle(error: Exception, *args: Any, **kwargs: Any) -> Any:
        original(error, *args, **kwargs)
        is_ours = isinstance(error, FulguriteError)
        if isinstance(error, UNWRAPPED) and not is_ours and skips_failed_functions():
            raise _skip(f"{type(error).__name__}: {error}") from error

    return handle


def _skip(text: str) -> Exception:
    LOG.warning("capture failed, eager mode runs the function: %s", text)
    warnings.warn(
        f"a function could not be captured: {text}\n"
        "  runs instead   the function itself, in eager mode\n"
        "  next           this is a failure of TorchDynamo; FULGURITE_STRICT=1 raises the error",
        FallbackWarning,
        stacklevel=3,
    )
    return exc.Unsupported(text)
