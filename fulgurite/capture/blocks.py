"""Repeated blocks: the equal layers of a model are compiled once and reused.

In: a module. Out: groups of equal layers, and a `Runner` that runs each layer compiled while the compiled
model runs. One compiled function serves all layers of a group. A layer's parameters are inputs of the
graph, so TorchDynamo's guards pass for every layer and only the first is captured. Sibling modules of the
layers, such as the final norm, are compiled one by one. The other code of their parent runs in eager mode;
the code outside the parent is compiled by `outer_graph`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.jit import ScriptModule
from torch.nn.parameter import is_lazy

from fulgurite.capture.runner import Runner

MIN_REPEATS = 4  # fewer equal layers are compiled in one graph with the rest
MIN_PARAMETER_FRACTION = 0.5  # of the model's parameters that must be in repeated layers


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
        if parent in nested or _is_container(parent) or isinstance(parent, ScriptModule):
            continue
        by_structure: dict[Any, list[nn.Module]] = {}
        for child in dict.fromkeys(called_children(parent)):
            if isinstance(child, ScriptModule):  # TorchScript runs it as a whole
                continue
            if any(True for _ in child.parameters()) and any(True for _ in child.children()):
                by_structure.setdefault(structural_key(child), []).append(child)
        for layers in by_structure.values():
            if len(layers) >= MIN_REPEATS:
                kind = type(layers[0]).__name__
                path = common_path([names[layer] for layer in layers])
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
        for child in called_children(group.parent):
            if not is_torch_module(child) and layers.isdisjoint(child.modules()):
                found[child] = None
    return list(found)


def is_torch_module(module: nn.Module) -> bool:
    """Whether the module's class is torch's own."""
    return type(module).__module__.split(".")[0] == "torch"


def _is_container(module: nn.Module) -> bool:
    """Whether the module has no forward of its own, such as ModuleList: it is never called."""
    return getattr(type(module), "forward", None) is nn.Module.forward  # a ScriptModule's has none


def called_children(parent: nn.Module) -> Iterator[nn.Module]:
    """The children that forward can call; containers are replaced by what they hold."""
    for child in parent.children():
        if _is_container(child):
            yield from called_children(child)
        else:
            yield child


def common_path(paths: list[str]) -> str:
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


def structural_key(module: nn.Module) -> Any:
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


class BlockRunner(Runner):
    """Runs the repeated layers of one model compiled, and their sibling modules."""

    def __init__(
        self, blocks: list[BlockGroup], optimize: Callable[[Callable[..., Any]], Any]
    ) -> None:
        self.layers = {module for group in blocks for module in group.modules}
        calls = dict.fromkeys(self.layers, optimize(call_block))
        calls |= dict.fromkeys(find_sibling_modules(blocks), optimize(call_sibling))
        super().__init__(calls)

    @property
    def called(self) -> bool:
        """Whether the model has called one of its layers."""
        return not self.layers.isdisjoint(self.seen)


def call_block(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call one layer with its hooks. Its parameters become inputs of the captured graph."""
    return self._call_impl(*args, **kwargs)


def call_sibling(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a sibling module. A second function keeps TorchDynamo's cache entries apart."""
    return self._call_impl(*args, **kwargs)
