"""In-place elementwise ops that eager mode refuses: a result that does not fit into the tensor.

In: an op of the program that TorchDynamo runs on FakeTensors. Out: eager mode's error, if the result has
another shape (`x.mul_(y)` with a `y` of more dimensions) or can't be cast (`counts.mul_(0.5)`). FakeTensor
rules of many such ops check neither: the tensor would get the other shape, and integers be truncated.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fulgurite.capture.view_writes import IN_PLACE_OPERATORS
from fulgurite.trace.cost import size_hint


def is_in_place(node: fx.Node) -> bool:
    """Whether a call of the captured program writes its first argument, by its name."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return node.target in IN_PLACE_OPERATORS or (name.endswith("_") and not name.endswith("__"))


class CheckInPlaceOps(TorchDispatchMode):
    """Raise eager mode's error for elementwise ops whose result does not fit."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        functional = _find_functional(func)
        if functional is not None:
            _check_shape(args, kwargs)
            _check_dtype(functional, args, kwargs)
        return func(*args, **kwargs)


def _find_functional(func: Any) -> Any:
    """The op that returns what an elementwise op writes; None for other ops."""
    name = func._schema.name.split("::")[1]
    packet = getattr(torch.ops.aten, name.removesuffix("_"), None)
    if func.namespace != "aten" or not name.endswith("_") or packet is None:
        return None
    if name == "floor_divide_":  # elementwise, without the tag
        return packet
    overloads = [func, *(getattr(packet, overload) for overload in packet.overloads())]
    return packet if any(torch.Tag.pointwise in op.tags for op in overloads) else None


def _check_shape(args: Any, kwargs: dict[str, Any]) -> None:
    written = [size_hint(size) for size in args[0].shape]
    for value in pytree.tree_leaves((args[1:], kwargs)):
        sizes = [size_hint(size) for size in value.shape] if isinstance(value, Tensor) else []
        own = written[len(written) - len(sizes) :]
        if len(sizes) > len(written) or any(
            a not in (1, b) for a, b in zip(sizes, own, strict=True)
        ):
            raise RuntimeError(
                f"output with shape {written} doesn't match the broadcast shape of {sizes}"
            )


def _check_dtype(functional: Any, args: Any, kwargs: dict[str, Any]) -> None:
    try:
        result = functional(*args, **kwargs).dtype
    except (RuntimeError, TypeError, ValueError):
        return  # other arguments than the in-place op: its own rule decides
    if not torch.can_cast(result, args[0].dtype):
        raise RuntimeError(
            f"result type {result} can't be cast to the desired output type {args[0].dtype}"
        )
