"""A compiled nn.Module that is still an instance of its class.

In: a module, and the function to call instead of its forward. Out: an instance of a subclass of the
module's class that shares the module's `__dict__`: the same parameters, buffers, hooks, submodules,
`state_dict`, `train()`/`eval()`, `to()`, attributes and methods. Only `__call__` differs. New objects of that
subclass, as `type(self)(...)` in a method makes them, are objects of the original's class: they are not compiled.

`__class__` is that of the original, which may change: torch's parametrizations give a module a class of its
own, with properties in place of its parameters. Attributes that the subclass lacks are read from the
original, and all attributes are written there.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Protocol

from torch import nn

from fulgurite.capture.dynamo import is_capturing


class RunsCompiled(Protocol):
    """What a compiled module calls. `run` is read at every call: native code may take its place."""

    run: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


class MakesOriginals(type):
    """The metaclass of compiled classes: one compiled class belongs to one object."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        original = vars(cls).get("_fulgurite_original")
        return (
            super().__call__(*args, **kwargs)
            if original is None
            else type(original)(*args, **kwargs)
        )


class CompiledModule(nn.Module):
    """A mixin before the user's class. `wrap_module` sets the class attributes on a subclass per object."""

    _fulgurite_original: nn.Module
    _fulgurite_compiled: RunsCompiled  # a static method: it binds like a function

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Don't tell the user's class of a new subclass: it may keep a list of them, or need arguments."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Also without `__init__`: torch.nn.parallel copies a module's `__dict__` to a new object."""
        original = type(cls._fulgurite_original)
        make: Any = original.__new__
        return make(original) if make is object.__new__ else make(original, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_capturing():  # inside another capture: behave like the original module
            return self._fulgurite_original(*args, **kwargs)
        return type(self)._fulgurite_compiled.run(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """What only the original's present class has."""
        return getattr(self._fulgurite_original, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._fulgurite_original, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._fulgurite_original, name)

    def __eq__(self, other: object) -> bool:
        """Equal to the original: FSDP2 and others keep what they know of a module in a dict by module."""
        return unwrap_compiled(self) is unwrap_compiled(other)

    def __hash__(self) -> int:
        return hash(self._fulgurite_original)

    def __copy__(self) -> Any:
        return self._fulgurite_recompile(copy.copy(self._fulgurite_original))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._fulgurite_recompile(copy.deepcopy(self._fulgurite_original, memo))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return unpickle_original, (self._fulgurite_original,)  # a pickle holds the original module

    @staticmethod
    def _fulgurite_recompile(module: nn.Module) -> Any:
        """Compile another module with the same options."""
        raise AssertionError("set by wrap_module")


def _class_of_original(self: CompiledModule) -> type:
    return type(self._fulgurite_original)


def unpickle_original(original: Any) -> Any:
    """What the pickle of a compiled function or module calls: compiled code is not pickled."""
    return original


def wrap_module(
    module: nn.Module,
    compiled: RunsCompiled,
    recompile: Callable[[nn.Module], Any],
    members: dict[str, Any],
) -> Any:
    """`module` as an object that calls `compiled.run`. `members` are added unless the module has the name."""
    original = type(module)
    free = {name: value for name, value in members.items() if not hasattr(module, name)}
    namespace = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "_fulgurite_original": module,
        "_fulgurite_compiled": staticmethod(compiled),
        "_fulgurite_recompile": staticmethod(recompile),
        "__class__": property(_class_of_original),
        **free,
    }
    bases = (CompiledModule, original)
    metaclass: Any = type("MakesOriginals", (MakesOriginals, type(original)), {})
    derived = metaclass(original.__name__, bases, namespace)
    wrapped: Any = object.__new__(derived)
    object.__setattr__(wrapped, "__dict__", module.__dict__)  # the class may have a __setattr__
    return wrapped


def unwrap_compiled(module: Any) -> Any:
    """The module or function before compilation."""
    return module._fulgurite_original if isinstance(module, CompiledModule) else module
