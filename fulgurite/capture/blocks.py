"""Repeated blocks: the equal layers of a model are compiled once and reused.

In: a module. Out: groups of equal layers, and a compiled call for each layer while the compiled model
runs. One compiled function serves all layers of a group. A layer's parameters are inputs of the graph, so
TorchDynamo's guards pass for every layer and only the first is captured. Sibling modules of the layers,
such as the final norm, are compiled one by one. The other code of their parent runs in eager mode; the
code outside the parent is compiled by `outer_graph`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fulgurite.capture.dynamo import is_capturing

MIN_REPEATS = 4  # fewer equal layers are compiled in one graph with the rest
MIN_PARAMETER_FRACTION = 0.5  # of the model's parameters that must be in repeated layers
# reason of the intended graph breaks in the outer graph
BREAK_REASON = "the repeated layers of a model are compiled as graphs of their own"


@dataclass(frozen=True)
class BlockGroup:
    """Layers of a model with the same class, structure and shapes."""

    path: str
    kind: str  # name of their class
    modules: tuple[nn.Module, ...]
    parent: nn.Module  # the module whose forward calls them

    def __str__(self) -> str:
        return f"{len(self.modules)} × {self.kind} in {self.path}"


def find_blocks(model: nn.Module) -> list[BlockGroup]:
    """Find groups of equal layers, outermost first. Layers inside another group's layers don't count."""
    if any(is_lazy(value) for value in (*model.parameters(), *model.buffers())):
        return []  # sizes are unknown before the first call
    groups: list[BlockGroup] = []
    nested: set[nn.Module] = set()
    names = {module: path for path, module in model.named_modules()}
    for parent in names:
        if parent in nested or _is_container(parent):
            continue
        by_structure: dict[Any, list[nn.Module]] = {}
        for child in dict.fromkeys(_called_children(parent)):
            if any(True for _ in child.parameters()) and any(True for _ in child.children()):
                by_structure.setdefault(_structural_key(child), []).append(child)
        for layers in by_structure.values():
            if len(layers) >= MIN_REPEATS:
                kind = type(layers[0]).__name__
                path = _common_path([names[layer] for layer in layers])
                groups.append(BlockGroup(path or "the model", kind, tuple(layers), parent))
                nested.update(m for layer in layers for m in layer.modules())
    return groups


def find_sibling_modules(blocks: Sequence[BlockGroup]) -> list[nn.Module]:
    """Modules that the block parents call besides the layers.

    Without modules of torch's own classes: most of them are one kernel already.
    """
    layers = {layer for group in blocks for layer in group.modules}
    found: dict[nn.Module, None] = {}
    for group in blocks:
        for child in _called_children(group.parent):
            if not is_torch_module(child) and layers.isdisjoint(child.modules()):
                found[child] = None
    return list(found)


def is_torch_module(module: nn.Module) -> bool:
    """Whether the module's class is torch's own."""
    return type(module).__module__.split(".")[0] == "torch"


def _is_container(module: nn.Module) -> bool:
    """Whether the module has no forward of its own, such as ModuleList: it is never called."""
    return type(module).forward is nn.Module.forward


def _called_children(parent: nn.Module) -> Iterator[nn.Module]:
    """The children that forward can call; containers are replaced by what they hold."""
    for child in parent.children():
        if _is_container(child):
            yield from _called_children(child)
        else:
            yield child


def _common_path(paths: list[str]) -> str:
    """`layers` of `layers.0`, `layers.1`, …"""
    parents = [path.split(".")[:-1] for path in paths]
    shared = itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*parents, strict=False))
    return ".".join(parts[0] for parts in shared)


def should_compile_blocks(model: nn.Module, blocks: list[BlockGroup]) -> bool:
    """Whether most of the model's parameters are in repeated layers."""
    if not blocks:
        return False
    total = sum(p.numel() for p in model.parameters())
    repeated = sum(p.numel() for b in blocks for m in b.modules for p in m.parameters())
    return repeated >= MIN_PARAMETER_FRACTION * total


def _structural_key(module: nn.Module) -> Any:
    """What equal layers have in common: classes, names, shapes, dtypes and plain attributes."""
    parts: list[Any] = []
    for path, child in module.named_modules():
        parts.append((path, type(child), tuple(_plain_attributes(child))))
    for name, value in (*module.named_parameters(), *module.named_buffers()):
        parts.append((name, tuple(value.shape), value.dtype, value.device, value.requires_grad))
    return tuple(parts)


def _plain_attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, value in vars(module).items():
        public = not name.startswith("_") and name not in ("training", "layer_idx", "layer_index")
        if public and isinstance(value, (bool, int, float, str, type(None))):
            yield name, value


class BlockRunner:
    """Compiles the layers of one model, and dispatches to them while the compiled model runs.

    The layers are not replaced: called through the original model, they run in eager mode. A layer that
    backward calls again (activation checkpointing) runs compiled if its forward did.
    """

    def __init__(
        self, blocks: list[BlockGroup], optimize: Callable[[Callable[..., Any]], Any]
    ) -> None:
        self.blocks = blocks
        self.called = False  # whether the model has called one of its layers
        block, sibling = optimize(call_block), optimize(call_sibling)
        self.layers = {module for group in blocks for module in group.modules}
        self.compiled = dict.fromkeys(self.layers, block)
        self.compiled |= dict.fromkeys(find_sibling_modules(blocks), sibling)
        for module in self.compiled:
            if not isinstance(module._compiled_call_impl, _BlockCall):
                module._compiled_call_impl = _BlockCall(module)  # type: ignore[assignment]

    def wrap(self, model: Callable[..., Any]) -> Callable[..., Any]:
        """`model`, with compiled layers during its calls."""
        return with_context_value(_active_runner, self, model)


def with_context_value(
    variable: ContextVar[Any], value: Any, function: Callable[..., Any]
) -> Callable[..., Any]:
    """`function`, with the context variable set to `value` during its calls."""

    def run(*args: Any, **kwargs: Any) -> Any:
        token = variable.set(value)
        try:
            return function(*args, **kwargs)
        finally:
            variable.reset(token)

    return run


_active_runner: ContextVar[BlockRunner | None] = ContextVar("fulgurite_active_runner", default=None)
capturing_outer_graph: ContextVar[bool] = ContextVar(
    "fulgurite_capturing_outer_graph", default=False
)


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def is_capturing_outer_graph() -> bool:
    """Whether TorchDynamo captures an outer graph, in which layers are graph breaks."""
    return capturing_outer_graph.get()


class _BlockCall:
    """Replaces a module's `__call__`: runs it compiled inside a compiled model, as it is elsewhere."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.runner: BlockRunner | None = None
        self.break_graph = torch._dynamo.disable(self.call, reason=BREAK_REASON)  # type: ignore[no-untyped-call]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_capturing():
            if is_capturing_outer_graph():
                return self.break_graph(*args, **kwargs)
            return self.module._call_impl(*args, **kwargs)
        return self.call(*args, **kwargs)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        if torch._C._current_graph_task_id() == -1:  # not inside backward
            runner = _active_runner.get()
            is_compiled = runner is not None and self.module in runner.compiled
            self.runner = runner if is_compiled else None
        if self.runner is not None:
            self.runner.called |= self.module in self.runner.layers
            return self.runner.compiled[self.module](self.module, *args, **kwargs)
        return self.module._call_impl(*args, **kwargs)


def call_block(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call one layer with its hooks. Its parameters become inputs of the captured graph."""
    return self._call_impl(*args, **kwargs)


def call_sibling(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a sibling module. A second function keeps TorchDynamo's cache entries apart."""
    return self._call_impl(*args, **kwargs)
