"""The outer graph: a model's code around its repeated layers, for example the LM head and the loss.

In: a model and its groups of repeated layers. Out: the model, captured by TorchDynamo with a graph break
at each block parent (the module whose forward calls the layers). The code before and after a parent
becomes graphs of its own. The parent itself runs in eager mode with compiled layers, because TorchDynamo
skips functions that break the graph inside a loop.

The outer graph is used for calls whose arguments are plain data. An argument such as a KV cache differs
from call to call (its length, its contents), and TorchDynamo would recompile the outer graph each time;
see `is_plain_data`. Calls that record gradients rarely pass a cache, so they always use it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import torch
from torch import fx, nn

from fulgurite.capture.blocks import BlockGroup, is_torch_module
from fulgurite.capture.dynamo import GraphBreak, is_capturing
from fulgurite.capture.runner import (
    BREAK_REASON,
    capturing_outer_graph,
    is_capturing_outer_graph,
    with_context_value,
)

# torch.compile's own limit; beyond it, the code around the layers runs in eager mode
OUTER_RECOMPILE_LIMIT = 8
PLAIN_TYPES = (
    torch.Tensor,
    *(bool, int, float, complex, str, bytes, type(None)),
    *(torch.dtype, torch.device, torch.memory_format, torch.layout),
)


def find_block_parents(model: nn.Module, blocks: Sequence[BlockGroup]) -> tuple[nn.Module, ...]:
    """The outermost modules that call layers.

    Empty if the model itself calls them, or if the model's class is torch's own.
    """
    parents = dict.fromkeys(group.parent for group in blocks)
    if model in parents or is_torch_module(model):
        return ()
    nested = {m for parent in parents for m in parent.modules() if m is not parent}
    return tuple(parent for parent in parents if parent not in nested)


def is_plain_data(value: Any) -> bool:
    """Whether a value is a tensor, number, string, or a tuple, list or dict of them: no stateful object."""
    if isinstance(value, PLAIN_TYPES):
        return True
    if isinstance(value, dict):
        return all(map(is_plain_data, value.values()))
    return isinstance(value, tuple | list) and all(map(is_plain_data, value))


class OuterGraphBackend:
    """A session as the TorchDynamo backend of outer graphs. Separates our graph breaks from the user's."""

    def __init__(self, session: Any) -> None:
        self.session = session
        self.parent_paths: list[str] = []  # module paths of the block parents
        self.all_breaks: list[GraphBreak] = []
        self.__name__ = "fulgurite"  # TorchDynamo prints its backend's name

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return self.session(module, inputs)  # type: ignore[no-any-return]

    @property
    def graphs(self) -> Sequence[Any]:
        return self.session.graphs  # type: ignore[no-any-return]

    @property
    def breaks(self) -> list[GraphBreak]:
        """The list that the graph-break listener appends to, the intended breaks included."""
        return self.all_breaks

    @property
    def unintended_breaks(self) -> list[GraphBreak]:
        """Graph breaks of the user's code: those that are not at a block parent."""
        return [found for found in self.all_breaks if BREAK_REASON not in found.reason]


def break_graph_at(
    parents: Sequence[nn.Module], blocks: Sequence[BlockGroup], capture: Callable[..., Any]
) -> Callable[..., Any]:
    """`capture`, which breaks the graph at these modules, and at layers that are called without them."""
    for parent in parents:
        if not isinstance(parent._compiled_call_impl, _GraphBreakCall):
            parent._compiled_call_impl = _GraphBreakCall(parent)  # type: ignore[assignment]
    for module in (*parents, *(layer for group in blocks for layer in group.modules)):
        # TorchDynamo calls forward directly if _call_impl is nn.Module's own
        module.__dict__["_call_impl"] = MethodType(_call_impl, module)
    return with_context_value(capturing_outer_graph, True, capture)


class _GraphBreakCall:
    """Replaces a block parent's `__call__`: breaks the graph during capture of the outer graph."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.break_graph = torch._dynamo.disable(self.call, reason=BREAK_REASON)  # type: ignore[no-untyped-call]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_capturing() and is_capturing_outer_graph():
            return self.break_graph(*args, **kwargs)
        return self.call(*args, **kwargs)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        return self.module._call_impl(*args, **kwargs)


def _call_impl(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """A bound method pickles as its object and this name, so it must be nn.Module's own name."""
    return nn.Module._call_impl(self, *args, **kwargs)
