"""Packages that import their names on first use: imports for type checkers in, `__getattr__` out.

    if TYPE_CHECKING:
        from fulgurite.compile import Compiled, compile

    __all__ = ["Compiled", "compile"]
    __getattr__, __dir__ = make_lazy(__name__)

The imports are written once, where mypy, editors and the API docs look for them. They are read from
the source when a name is first used. `import fulgurite` then takes milliseconds, and a process that
needs no torch never imports it: the HTTP server, or `fulgurite --help`.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any


class LazyPackage(ModuleType):
    """A package in which an exported name wins over a module of the same name.

    Importing `fulgurite.compile` sets the attribute `compile` of the package to that module.
    `fulgurite.compile` must stay the function, whatever was imported first.
    """

    __all__: list[str]

    def __setattr__(self, name: str, value: Any) -> None:
        is_module = isinstance(value, ModuleType) and value.__name__ == f"{self.__name__}.{name}"
        if not (is_module and name in self.__all__):
            super().__setattr__(name, value)


def make_lazy(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package that has `__all__` and imports for type checkers.

    Modules of the package are attributes as well: `import fulgurite; fulgurite.models.load_model`.
    """
    this = sys.modules[package]
    this.__class__ = LazyPackage

    @cache
    def find_modules() -> dict[str, str]:
        assert this.__file__ is not None, f"{package} is a folder of files"
        return read_typing_imports(Path(this.__file__).read_text(encoding="utf-8"))

    def get_attribute(name: str) -> Any:
        if name in this.__all__ and name in find_modules():
            value = getattr(import_module(find_modules()[name]), name)
            vars(this)[name] = value  # from now on it is found without this function
            return value
        if not name.startswith("_") and find_spec(f"{package}.{name}") is not None:
            return import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def list_names() -> list[str]:
        return sorted({*vars(this), *this.__all__})

    return get_attribute, list_names


def read_typing_imports(source: str) -> dict[str, str]:
    """Name → module of `from module import name` in blocks of `if TYPE_CHECKING`."""
    return {
        alias.name: statement.module
        for block in ast.parse(source).body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for statement in block.body
        if isinstance(statement, ast.ImportFrom) and statement.module is not None
        for alias in statement.names
    }
