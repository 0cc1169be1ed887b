"""Imports of optional packages, when they are first needed.

In: a package name and its purpose. Out: the module, or an error that says how to install it.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from fulgurite.errors import ArgumentError


def import_optional(package: str, purpose: str, install: str) -> ModuleType:
    """Import `package`; `install` is its name on PyPI."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ArgumentError(
            f"{purpose} needs the {install} package", next=f"pip install {install}"
        ) from error
