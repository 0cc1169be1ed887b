"""A compiled function as a Python function.

In: a compiled function, which is an object. Out: what code expects of functions and methods.

Frameworks look at functions: Lightning compares the code of a method with that of its base class, and counts
arguments with `inspect.getfullargspec`. `torch.compile` returns a function of `*args, **kwargs` there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import CodeType
from typing import Any


def as_function(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls `compiled`. Methods are made of it: TorchDynamo knows no others."""

    @functools.wraps(compiled, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        return compiled(*args, **kwargs)

    vars(call)["compiled"] = compiled
    return call


class FunctionLike:
    """What `inspect` and frameworks read of functions: that of a function of `*args, **kwargs`."""

    __code__: CodeType = (lambda *args, **kwargs: None).__code__
    __defaults__ = None
    __kwdefaults__ = None
