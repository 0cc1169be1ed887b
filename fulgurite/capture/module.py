"""A compiled nn.Module that still is that module.

In: a module, and what runs instead of its forward. Out: an object of a subclass of the module's class that shares
the module's `__dict__`: the same parameters, buffers, hooks, submodules, `state_dict`, `train()`/`eval()`,
`to()`, attributes and methods, and `isinstance` says so too. Only calling it is different.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import nn

from fulgurite.capture.dynamo import is_capturing


class CompiledModule(nn.Module):
    """Mixed in before the user's class. The two class attributes are set on each object's own subclass."""

    _fulgurite_original: nn.Module
    _fulgurite_call: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_capturing():  # inside someone else's capture: be the plain module
            return self._fulgurite_original(*args, **kwargs)
        return type(self)._fulgurite_call(*args, **kwargs)

    def __copy__(self) -> Any:
        return self._fulgurite_again(copy.copy(self._fulgurite_original))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._fulgurite_again(copy.deepcopy(self._fulgurite_original, memo))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return plain_again, (self._fulgurite_original,)  # a pickle holds the plain module

    @staticmethod
    def _fulgurite_again(module: nn.Module) -> Any:
        """Compile another module the same way."""
        raise AssertionError("set by wrap_module")


def plain_again(original: Any) -> Any:
    return original


def wrap_module(
    module: nn.Module,
    call: Callable[..., Any],
    again: Callable[[nn.Module], Any],
    members: dict[str, Any],
) -> Any:
    """`module` as an object that calls `call`; `members` are added where the class has no such name."""
    original = type(module)
    free = {name: value for name, value in members.items() if not hasattr(module, name)}
    namespace = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "_fulgurite_original": module,
        "_fulgurite_call": staticmethod(call),
        "_fulgurite_again": staticmethod(again),
        **free,
    }
    derived = type(original.__name__, (CompiledModule, original), namespace)
    compiled: Any = object.__new__(derived)
    compiled.__dict__ = module.__dict__
    return compiled


def original_of(module: Any) -> Any:
    """The module or function as it was before compiling."""
    return module._fulgurite_original if isinstance(module, CompiledModule) else module
