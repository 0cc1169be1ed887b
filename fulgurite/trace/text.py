"""Python text → something that runs.

In: a rendered `Program`, or text a person edited. Out: a function. Source goes into `linecache`, so that a
traceback shows the line of the trace it happened in.
"""

from __future__ import annotations

import itertools
import linecache
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fulgurite.errors import TraceTextError
from fulgurite.trace.printer import Program

_serial = itertools.count()


def bind(program: Program, filename: str) -> Callable[[list[Any]], Any]:
    """The function of a program whose names we bound ourselves."""
    return _execute(program.text, f"{filename} #{next(_serial)}", dict(program.bindings))["forward"]


def load(text: str, filename: str = "<trace>") -> Callable[..., Any]:
    """`forward` of a text that stands alone. Errors name the line."""
    try:
        namespace = _execute(text, filename, {"__name__": "fulgurite_trace"})
    except TraceTextError:
        raise
    except Exception as error:
        raise TraceTextError(
            f"the text fails before forward is defined: {type(error).__name__}: {error}",
            where=filename,
            next="mend its imports and constants and hand the text in again",
        ) from error
    forward = namespace.get("forward")
    if not callable(forward):
        raise TraceTextError(
            "the text defines no function called forward",
            where=filename,
            next="start from str(trace) and keep its `def forward(...)`",
        )
    return forward


def _execute(text: str, filename: str, namespace: dict[str, Any]) -> dict[str, Any]:
    try:
        code = compile(text, filename, "exec")
    except SyntaxError as error:
        line = (error.text or "").strip()
        raise TraceTextError(
            f"the text of the trace is not Python: {error.msg}",
            where=f"line {error.lineno}: {line}",
            next="mend that line and hand the text in again",
        ) from error
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    exec(code, namespace)
    return namespace


def write_text(path: Path, text: str) -> Path:
    """Write a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    return path
