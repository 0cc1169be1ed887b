"""Repeated blocks: a model's equal layers are compiled once and reused.

In: a module. Out: groups of layers that are alike, and, while the compiled model runs, a compiled call in place
of each layer's own. One compiled function serves all layers: their parameters are its inputs, so TorchDynamo's
guards find the layers alike and capture the first only. Modules beside the layers, such as a last norm, are compiled
one by one. What else the module does that calls them runs in eager torch; what lies around it is compiled by `around`.
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

LEAST_REPEATS = 4  # fewer equal layers than this are compiled as one graph with the rest
LEAST_SHARE = 0.5  # of the model's parameters, in the repeated layers
# why what is around them is captured without them
REASON = "a model's layers are compiled one by one"


@dataclass(frozen=True)
class Blocks:
    """Layers of a model that are alike in class, structure and shapes."""

    path: str
    kind: str
    modules: tuple[nn.Module, ...]
    parent: nn.Module  # whose forward calls them

    def __str__(self) -> str:
        return f"{len(self.modules)} × {self.kind} in {self.path}"


def find_blocks(model: nn.Module) -> list[Blocks]:
    """The groups of equal layers, outermost first; layers inside a group's layers don't count."""
    if any(is_lazy(value) for value in (*model.parameters(), *model.buffers())):
        return []  # a lazy module learns its sizes in its first call: nothing can be compared yet
    found: list[Blocks] = []
    inside: set[nn.Module] = set()
    names = {module: path for path, module in model.named_modules()}
    for parent in names:
        if parent in inside or _only_holds(parent):
            continue
        alike: dict[Any, list[nn.Module]] = {}
        for child in dict.fromkeys(_called_by(parent)):
            if any(True for _ in child.parameters()) and any(True for _ in child.children()):
                alike.setdefault(_structure(child), []).append(child)
        for layers in alike.values():
            if len(layers) >= LEAST_REPEATS:
                kind = type(layers[0]).__name__
                path = _common_path([names[layer] for layer in layers])
                found.append(Blocks(path or "the model", kind, tuple(layers), parent))
                inside.update(m for layer in layers for m in layer.modules())
    return found


def beside(blocks: Sequence[Blocks]) -> list[nn.Module]:
    """What the modules that call layers call besides: no modules of torch's own, most of which are one kernel."""
    layers = {layer for group in blocks for layer in group.modules}
    found: dict[nn.Module, None] = {}
    for group in blocks:
        for child in _called_by(group.parent):
            if not is_torchs(child) and layers.isdisjoint(child.modules()):
                found[child] = None
    return list(found)


def is_torchs(module: nn.Module) -> bool:
    """Whether its class is torch's own."""
    return type(module).__module__.split(".")[0] == "torch"


def _only_holds(module: nn.Module) -> bool:
    """A container without a forward of its own, such as ModuleList: it is never called."""
    return type(module).forward is nn.Module.forward


def _called_by(parent: nn.Module) -> Iterator[nn.Module]:
    """The children, and in the place of containers what they hold."""
    for child in parent.children():
        if _only_holds(child):
            yield from _called_by(child)
        else:
            yield child


def _common_path(paths: list[str]) -> str:
    """`layers` of `layers.0`, `layers.1`, …"""
    parents = [path.split(".")[:-1] for path in paths]
    shared = itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*parents, strict=False))
    return ".".join(parts[0] for parts in shared)


def worth_it(model: nn.Module, blocks: list[Blocks]) -> bool:
    """Whether most of the model is in the repeated layers."""
    if not blocks:
        return False
    total = sum(p.numel() for p in model.parameters())
    repeated = sum(p.numel() for b in blocks for m in b.modules for p in m.parameters())
    return repeated >= LEAST_SHARE * total


def _structure(module: nn.Module) -> Any:
    """What two layers must share to run the same code: classes, names, shapes, dtypes, plain settings."""
    parts: list[Any] = []
    for path, child in module.named_modules():
        parts.append((path, type(child), tuple(_settings(child))))
    for name, value in (*module.named_parameters(), *module.named_buffers()):
        parts.append((name, tuple(value.shape), value.dtype, value.device, value.requires_grad))
    return tuple(parts)


def _settings(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, value in vars(module).items():
        public = not name.startswith("_") and name not in ("training", "layer_idx", "layer_index")
        if public and isinstance(value, (bool, int, float, str, type(None))):
            yield name, value


class BlockRunner:
    """Compiles the layers of one model, and calls the compiled ones while that model runs compiled.

    The layers themselves stay what they are: called through the original model they run in eager. A layer
    called again inside backward (activation checkpointing) runs the way its forward did.
    """

    def __init__(self, blocks: list[Blocks], optimize: Callable[[Callable[..., Any]], Any]) -> None:
        self.blocks = blocks
        self.called = False  # whether the model has called one of its layers
        layer, other = optimize(call_block), optimize(call_beside)
        self.layers = {module for group in blocks for module in group.modules}
        self.compiled = dict.fromkeys(self.layers, layer) | dict.fromkeys(beside(blocks), other)
        for module in self.compiled:
            if not isinstance(module._compiled_call_impl, _Dispatch):
                module._compiled_call_impl = _Dispatch(module)  # type: ignore[assignment]

    def around(self, model: Callable[..., Any]) -> Callable[..., Any]:
        """`model`, called with its layers compiled."""
        return called_with(_running, self, model)


def called_with(
    variable: ContextVar[Any], value: Any, function: Callable[..., Any]
) -> Callable[..., Any]:
    """`function`, during whose calls the variable has the value."""

    def run(*args: Any, **kwargs: Any) -> Any:
        token = variable.set(value)
        try:
            return function(*args, **kwargs)
        finally:
            variable.reset(token)

    return run


_running: ContextVar[BlockRunner | None] = ContextVar("fulgurite_running", default=None)
capturing_around: ContextVar[bool] = ContextVar("fulgurite_around", default=False)


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def captures_around() -> bool:
    """Whether what is around a model's layers is being captured, and they are not."""
    return capturing_around.get()


class _Dispatch:
    """Stands for a module's `__call__`: the compiled one inside a compiled model, its own everywhere else."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.runner: BlockRunner | None = None
        self.apart = torch._dynamo.disable(self.call, reason=REASON)  # type: ignore[no-untyped-call]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_capturing():
            if captures_around():
                return self.apart(*args, **kwargs)
            return self.module._call_impl(*args, **kwargs)
        return self.call(*args, **kwargs)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        if torch._C._current_graph_task_id() == -1:  # not inside backward
            runner = _running.get()
            known = runner is not None and self.module in runner.compiled
            self.runner = runner if known else None
        if self.runner is not None:
            self.runner.called |= self.module in self.runner.layers
            return self.runner.compiled[self.module](self.module, *args, **kwargs)
        return self.module._call_impl(*args, **kwargs)


def call_block(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """One layer, hooks and all. Its parameters become inputs of the captured graph."""
    return self._call_impl(*args, **kwargs)


def call_beside(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The same for a module beside the layers: another function, so that neither looks through what the other captured."""
    return self._call_impl(*args, **kwargs)
