"""Packages that only some functions need, asked for when they are needed.

In: a package's name and what for. Out: the module, or an error that says how to get it.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from fulgurite.errors import ArgumentError


def require(package: str, purpose: str, install: str) -> ModuleType:
    """The module `package`; `install` is the name to install it by."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ArgumentError(
            f"{purpose} needs the {install} package", next=f"pip install {install}"
        ) from error
