"""Qualified names of functions.

In: a function. Out: a dotted name that resolves to it, or None.

    torch.ops.aten.mm.default → "torch.ops.aten.mm.default"        a lambda → None
"""

from __future__ import annotations

import builtins
import importlib
from typing import Any

from torch.fx.node import _get_qualified_name

from fulgurite.trace.literal import format_literal


def qualified_name(target: Any) -> str | None:
    """The dotted name of a function, if it resolves to that very function."""
    text = format_literal(target, lambda node: node.name)
    if text is not None:
        return text
    if not hasattr(target, "__name__") or target.__name__ == "<lambda>":
        return None
    try:
        name = _get_qualified_name(target)
    except RuntimeError:  # fx: "cannot find module for …"
        return None
    if name.startswith("_operator."):
        name = name[1:]  # the public module name
    return name if _resolve(name) is target else None


def _resolve(name: str) -> Any:
    """What a dotted name refers to; None if nothing."""
    first, *rest = name.split(".")
    if not rest:
        return getattr(builtins, first, None)
    try:
        found: Any = importlib.import_module(first)
    except ImportError:
        return None
    for depth, part in enumerate(rest):
        if not hasattr(found, part):
            try:
                found = importlib.import_module(".".join([first, *rest[: depth + 1]]))
            except ImportError:
                return None
        else:
            found = getattr(found, part)
    return found
