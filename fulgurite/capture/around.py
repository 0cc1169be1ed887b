"""What is around a model's repeated layers: compiled, too, while the modules that call the layers are left alone.

In: a model and the groups of its equal layers. Out: the model, captured by TorchDynamo with a graph break at each body,
the module whose forward calls layers: a head and a loss behind it become graphs of their own. A body itself runs in eager,
with its layers compiled: TorchDynamo skips functions in which a loop breaks the graph.

This is for calls whose arguments are data alone. A cache among them, or any other object, is likely to differ from call
to call (its length, what it holds), and TorchDynamo would capture what is around the body again for each: `is_data`
tells. Calls that record gradients, in which caches are rare, are taken whatever their arguments are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import torch
from torch import fx, nn

from fulgurite.capture.blocks import (
    REASON,
    Blocks,
    called_with,
    captures_around,
    capturing_around,
    is_torchs,
)
from fulgurite.capture.dynamo import GraphBreak, is_capturing

# torch.compile's own; past them what is around runs in eager, with layers compiled
MOST_CAPTURES = 8
DATA = (
    torch.Tensor,
    *(bool, int, float, complex, str, bytes, type(None)),
    *(torch.dtype, torch.device, torch.memory_format, torch.layout),
)


def bodies_of(model: nn.Module, blocks: Sequence[Blocks]) -> tuple[nn.Module, ...]:
    """The outermost modules that call layers; none where the model does, or torch's own module is the model."""
    parents = dict.fromkeys(group.parent for group in blocks)
    if model in parents or is_torchs(model):
        return ()
    inside = {m for parent in parents for m in parent.modules() if m is not parent}
    return tuple(parent for parent in parents if parent not in inside)


def is_data(value: Any) -> bool:
    """Tensors, numbers, words, and tuples, lists and dicts of them: nothing that has a state of its own."""
    if isinstance(value, DATA):
        return True
    if isinstance(value, dict):
        return all(map(is_data, value.values()))
    return isinstance(value, tuple | list) and all(map(is_data, value))


class Around:
    """A session as the backend of what is around bodies: breaks that are meant are none."""

    def __init__(self, session: Any) -> None:
        self.session = session
        self.bodies: list[str] = []  # their paths
        self.heard: list[GraphBreak] = []
        self.__name__ = "fulgurite"  # TorchDynamo prints its backend's name

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return self.session(module, inputs)  # type: ignore[no-any-return]

    @property
    def graphs(self) -> Sequence[Any]:
        return self.session.graphs  # type: ignore[no-any-return]

    @property
    def breaks(self) -> list[GraphBreak]:
        """Where TorchDynamo's listener puts them, the meant ones among them."""
        return self.heard

    @property
    def unmeant(self) -> list[GraphBreak]:
        return [one for one in self.heard if REASON not in one.reason]


def set_apart(
    bodies: Sequence[nn.Module], blocks: Sequence[Blocks], capture: Callable[..., Any]
) -> Callable[..., Any]:
    """`capture`, which breaks the graph at these modules, and at layers that are called past them."""
    for body in bodies:
        if not isinstance(body._compiled_call_impl, Apart):
            body._compiled_call_impl = Apart(body)  # type: ignore[assignment]
    for module in (*bodies, *(layer for group in blocks for layer in group.modules)):
        # TorchDynamo goes straight to forward where this is nn.Module's own
        module.__dict__["_call_impl"] = MethodType(_call_impl, module)
    return called_with(capturing_around, True, capture)


class Apart:
    """Stands for a body's `__call__`: a graph break while what is around it is captured, nothing everywhere else."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.apart = torch._dynamo.disable(self.call, reason=REASON)  # type: ignore[no-untyped-call]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_capturing() and captures_around():
            return self.apart(*args, **kwargs)
        return self.call(*args, **kwargs)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        return self.module._call_impl(*args, **kwargs)


def _call_impl(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return nn.Module._call_impl(self, *args, **kwargs)
