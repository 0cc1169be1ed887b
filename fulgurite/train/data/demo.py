"""The demo text: what a plain install already has, as documents.

In: nothing. Out: `(name, text)` pairs, the same ones in the same order for one install.

    Python's language reference (`pydoc_data.topics`)      PSF licence
    docstrings of Python's standard library                PSF licence
    docstrings of torch and numpy, which we depend on      BSD-3-Clause

A module's docstrings are one document: the module's name, then each object with its docstring. They are
collected once and cached on disk by the versions of Python, torch and numpy.
"""

from __future__ import annotations

import ast
import gc
import inspect
import json
import platform
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import numpy
import torch

from fulgurite.cache import digest, get_or_build

try:
    from pydoc_data import topics
except ImportError:  # some distributions ship it apart
    PYTHON_TOPICS: dict[str, str] = {}
else:
    PYTHON_TOPICS = dict(topics.topics)

FORMAT = "1"  # of the cached file: a change of this file that changes the text changes it
# fmt: off
SKIPPED_FOLDERS = frozenset([
    "test", "tests", "testing", "idlelib", "lib2to3", "turtledemo", "ensurepip", "encodings",
    "distutils", "site-packages", "dist-packages", "__pycache__", "f2py", "_inductor", "_dynamo",
    "_decomp", "_refs", "_prims", "_internal", "_functorch", "_export", "export", "_C", "_vendor",
    "_subclasses", "_higher_order_ops", "fb", "jit", "onnx", "ao", "quantization", "sparse",
    "tensor", "backends", "bin", "include", "share", "lib",
])
# fmt: on
# Files that attach docstrings to functions written in C: their long strings count.
STRING_FILES = frozenset(
    ["_torch_docs.py", "_tensor_docs.py", "_storage_docs.py", "_add_newdocs.py"]
)
MIN_STRING = 200  # characters
MIN_DOCUMENT = 400


@cache
def demo_documents() -> tuple[tuple[str, str], ...]:
    """Names and texts of all documents."""
    key = digest(FORMAT, sys.version, platform.machine(), torch.__version__, numpy.__version__)
    path = get_or_build("demo_text", key, _write_documents, suffix=".json")
    return tuple((name, text) for name, text in json.loads(path.read_text(encoding="utf-8")))


def _write_documents(path: Path) -> None:
    with _no_garbage_collection():
        path.write_text(json.dumps(list(collect_documents()), ensure_ascii=False), encoding="utf-8")


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Syntax trees are many objects without cycles: collecting them doubles the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def collect_documents() -> Iterator[tuple[str, str]]:
    """The same, read from the install."""
    for topic, text in sorted(PYTHON_TOPICS.items()):
        yield f"python:{topic}", _clean(text)
    yield from collect_package("python", Path(sysconfig.get_path("stdlib")))
    yield from collect_package("torch", Path(torch.__file__).parent)
    yield from collect_package("numpy", Path(numpy.__file__).parent)


def collect_package(package: str, root: Path) -> Iterator[tuple[str, str]]:
    """A document for each module with enough docstrings, in the order of file names."""
    for file in sorted(root.rglob("*.py")):
        relative = file.relative_to(root)
        if _is_wanted(relative, package):
            name = ".".join(relative.with_suffix("").parts).removesuffix(".__init__")
            text = _read_docstrings(file, name if package == "python" else f"{package}.{name}")
            if len(text) >= MIN_DOCUMENT:
                yield f"{package}:{relative.as_posix()}", text


def _is_wanted(relative: Path, package: str) -> bool:
    if SKIPPED_FOLDERS.intersection(relative.parts[:-1]) or relative.name.startswith("test_"):
        return False
    top = relative.parts[0].removesuffix(".py")
    return package != "python" or top in sys.stdlib_module_names


def _read_docstrings(file: Path, name: str) -> str:
    """The docstrings of a file as one text; empty if it can't be parsed."""
    try:
        source = file.read_bytes()
        if b'"""' not in source and b"'''" not in source:
            return ""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in old docstrings
            tree = ast.parse(source)
    except (OSError, ValueError, SyntaxError, RecursionError):
        return ""
    if file.name in STRING_FILES:
        parts = [f"{name}\n", *_long_strings(tree)]
    else:
        parts = [f"{name}\n", *_docstrings(tree, "")]
    return _clean("\n".join(parts)) if len(parts) > 1 else ""


def _docstrings(node: ast.Module | ast.ClassDef, prefix: str) -> Iterator[str]:
    """The docstring of a module or class and of the public objects in it, in source order."""
    own = ast.get_docstring(node)
    if own:
        yield f"{own}\n"
    for child in node.body:
        if isinstance(child, ast.ClassDef) and not child.name.startswith("_"):
            parts = list(_docstrings(child, f"{prefix}{child.name}."))
            if parts:
                yield f"class {prefix}{child.name}\n"
                yield from parts
        elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(child)
            if text and not child.name.startswith("_"):
                yield f"{prefix}{child.name}({ast.unparse(child.args)})\n\n{text}\n"


def _long_strings(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if len(node.value) >= MIN_STRING:
                yield f"{inspect.cleandoc(node.value)}\n"


def _clean(text: str) -> str:
    """Without spaces at line ends and half surrogate pairs."""
    lines = (line.rstrip() for line in text.splitlines())
    return "\n".join(lines).strip().encode("utf-8", "replace").decode() + "\n"
