"""llguidance, if it is installed: the one place that imports it."""

from __future__ import annotations

import importlib
from typing import Any

from fulgurite.errors import ArgumentError

llguidance: Any
try:
    llguidance = importlib.import_module("llguidance")
except ImportError:  # the rest of the package runs without it
    llguidance = None

INSTALL = "pip install 'fulgurite[serve]'"


def require_llguidance() -> Any:
    """The module; ArgumentError if it is not installed."""
    if llguidance is None:
        raise ArgumentError("structured output needs llguidance", next=INSTALL)
    return llguidance
