"""The target of `fulgurite explain`.

In: `package.module:name`, `file.py:name`, or `script.py`. Out: a callable with example inputs, or the
functions that a script compiled while it ran.

`name` may be a function without parameters that returns a module, or `(function, inputs)`. Example inputs
come from the first of these that exists: that pair; a function `name_inputs()` or `example_inputs()` in the
same module; hints on the parameters such as `x: "f32[4, 8]"`. Inputs are a tuple or list of arguments, a
dict of keyword arguments, or one argument.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import re
import runpy
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import nn

from fulgurite.compile import Compiled, record_compilations
from fulgurite.errors import ArgumentError
from fulgurite.trace.describe import DTYPE_NAMES

_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


@dataclass(frozen=True)
class Example:
    """A callable with the arguments of one call."""

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


def load_example(target: str) -> Example:
    """Load the function or module that `module:name` names, and its example inputs."""
    location, _, name = target.rpartition(":")
    if not location or not name:
        raise ArgumentError(
            f"{target!r} names no function", next="module:name, file.py:name or script.py"
        )
    module = _import_module(location)
    found = getattr(module, name, None)
    if isinstance(found, type):
        raise ArgumentError(
            f"{target} is a class",
            next=f"name an instance, or a function that returns (object, inputs): {location}:example",
        )
    if not callable(found):
        callables = {n: v for n, v in vars(module).items() if callable(v) and not n.startswith("_")}
        known = [n for n, v in callables.items() if not isinstance(v, type)]
        raise ArgumentError(
            f"{location} has no callable {name!r}",
            next=f"one of {', '.join(sorted(known)[:20])}",
        )
    make_inputs = getattr(module, f"{name}_inputs", getattr(module, "example_inputs", None))
    if _is_factory(found, has_inputs=make_inputs is not None):
        result = found()
        if isinstance(result, tuple) and len(result) == 2 and callable(result[0]):
            return _example(*result)
        if not isinstance(result, nn.Module):
            return Example(found)
        found = result
    if make_inputs is not None:
        return _example(found, make_inputs())
    parameters = _required_parameters(found)
    if parameters == []:
        return Example(found)
    hints = [_tensor_from_hint(parameter.annotation) for parameter in parameters or ()]
    if hints and all(hint is not None for hint in hints):
        return Example(found, tuple(hints))
    raise ArgumentError(
        f"no example inputs for {target}",
        next=f"add `def {name}_inputs(): return (torch.randn(4, 8),)` to its module, or hints such as "
        'x: "f32[4, 8]" on its parameters',
    )


def _is_factory(found: Callable[..., Any], has_inputs: bool) -> bool:
    """Whether a call without arguments tells what to explain. With inputs, only if it takes none."""
    if isinstance(found, nn.Module):
        return False
    return _required_parameters(found) == [] and not (
        has_inputs and inspect.signature(found).parameters
    )


def _example(function: Callable[..., Any], inputs: Any) -> Example:
    if isinstance(inputs, Mapping):
        return Example(function, kwargs=dict(inputs))
    return Example(function, tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,))


def _required_parameters(found: Callable[..., Any]) -> list[inspect.Parameter] | None:
    """Parameters that a call must pass: those without default, or with a hint. None: unknown."""
    try:
        signature = inspect.signature(found.forward if isinstance(found, nn.Module) else found)
    except ValueError:  # a builtin
        return None
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = []
    for parameter in signature.parameters.values():
        optional = parameter.default is not inspect.Parameter.empty or parameter.kind in variadic
        if optional and _tensor_from_hint(parameter.annotation) is None:
            break
        required.append(parameter)
    return required


def run_script(path: str) -> list[Compiled]:
    """Run a script as `python script.py` does. Returns what it compiled and called."""
    if not os.path.isfile(path):
        raise ArgumentError(
            f"there is no file {path}", next="module:name, file.py:name or a script"
        )
    with record_compilations() as compilations:
        sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
        argv, sys.argv = sys.argv, [path]
        try:
            runpy.run_path(path, run_name="__main__")
        finally:
            sys.argv = argv
            sys.path.pop(0)
    called = [compiled for compiled in compilations if compiled.graphs]
    if not called:
        raise ArgumentError(
            f"{path} compiled nothing",
            next="call fulgurite.compile(...) in it, and call the result",
        )
    return called


def _import_module(location: str) -> ModuleType:
    is_file = location.endswith(".py")
    if is_file and not os.path.isfile(location):
        raise ArgumentError(
            f"there is no file {location}", next="file.py:name or package.module:name"
        )
    folder = os.path.dirname(os.path.abspath(location)) if is_file else os.getcwd()
    sys.path.insert(0, folder)
    try:
        return _load_file(location) if is_file else importlib.import_module(location)
    except ModuleNotFoundError as error:
        raise ArgumentError(
            f"{location} can't be imported: {error}", next="file.py:name, or package.module:name"
        ) from error
    finally:
        sys.path.pop(0)


def _load_file(file: str) -> ModuleType:
    """Import a file under a free module name: types.py must not replace the module `types`."""
    name = os.path.basename(file)[:-3]
    name = f"{name}_to_explain" if name in sys.modules else name
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, f"{file} is no Python file"
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _tensor_from_hint(hint: Any) -> torch.Tensor | None:
    """A random tensor for a hint such as "f32[4, 8]"; None if it is no such hint."""
    match = (
        re.fullmatch(r"(\w+)\[([\d, ]*)\]", hint.strip("'\"")) if isinstance(hint, str) else None
    )
    if match is None or match[1] not in _DTYPES:
        return None
    dtype = _DTYPES[match[1]]
    shape = [int(size) for size in match[2].split(",") if size.strip()]
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape).to(dtype)
    return torch.randint(0, 2, shape).to(dtype)
