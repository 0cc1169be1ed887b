"""Modules without initial values: for those on the meta device, and those that a checkpoint fills."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.nn.init
from torch.overrides import TorchFunctionMode


class SkipInitialization(TorchFunctionMode):
    """In this context functions of `torch.nn.init` do nothing.

    On the meta device they have nothing to fill, but `normal_` would import TorchDynamo for it: more
    than a second of the start of an engine.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = {} if kwargs is None else kwargs
        if getattr(func, "__module__", None) == torch.nn.init.__name__:
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)
