"""Python source → a callable.

In: a printed `PythonSource`, or a text that a person edited. Out: its function `forward`. The text is put
into `linecache`, so that tracebacks show lines of the trace.
"""

from __future__ import annotations

import itertools
import linecache
from collections.abc import Callable
from typing import Any

from fulgurite.errors import TraceTextError
from fulgurite.trace.printer import PythonSource

_serial = itertools.count()


def compile_source(source: PythonSource, filename: str) -> Callable[[list[Any]], Any]:
    """`forward` of a printed source, with its bindings as globals."""
    unique = f"{filename} #{next(_serial)}"
    return _exec_source(source.text, unique, dict(source.bindings))["forward"]


def load_source(text: str, filename: str = "<trace>") -> Callable[..., Any]:
    """`forward` of a standalone text. Errors name the line."""
    try:
        namespace = _exec_source(text, filename, {"__name__": "fulgurite_trace"})
    except TraceTextError:
        raise
    except Exception as error:
        raise TraceTextError(
            f"the text fails before forward is defined: {type(error).__name__}: {error}",
            where=filename,
            next="fix its imports and constants",
        ) from error
    forward = namespace.get("forward")
    if not callable(forward):
        raise TraceTextError(
            "the text defines no function called forward",
            where=filename,
            next="start from str(trace) and keep its `def forward(...)`",
        )
    return forward


def _exec_source(text: str, filename: str, namespace: dict[str, Any]) -> dict[str, Any]:
    try:
        code = compile(text, filename, "exec")
    except SyntaxError as error:
        line = (error.text or "").strip()
        raise TraceTextError(
            f"the text of the trace is not Python: {error.msg}",
            where=f"line {error.lineno}: {line}",
            next="fix that line",
        ) from error
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    exec(code, namespace)
    return namespace
