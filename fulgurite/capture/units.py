"""Units: the modules that a distributed wrapper runs between its communication.

In: a model, in which DDP, FSDP or FSDP2 wrap some modules. Out: the innermost wrapped modules, and a
`Runner` that runs each compiled. The wrappers themselves run in eager mode: TorchDynamo can't capture the
hooks and collectives that gather parameters, reduce gradients and record what to do in backward.

    wrapper                  its unit
    DDP, FSDP                the module inside, with its hooks
    FSDP2 (`fully_shard`)    the `forward` of the sharded module; parameters are gathered when it runs

A module that holds other units is not a unit: its own code runs in eager mode. Its other children are
compiled one by one, except for modules of torch's own classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from fulgurite.capture.blocks import (
    called_children,
    common_path,
    is_torch_module,
    structural_key,
)
from fulgurite.capture.runner import Runner

# wrapper classes that hold the wrapped module, and the name of that child
WRAPPER_CHILDREN = {
    "torch.nn.parallel.distributed.DistributedDataParallel": "module",
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": (
        "_fsdp_wrapped_module"
    ),
}


@dataclass(frozen=True)
class Unit:
    """A module that a distributed wrapper runs."""

    path: str
    module: nn.Module
    wrapper: str  # class of the wrapper, or of the state whose hooks the module has
    runs_forward_only: bool  # the module has the wrapper's hooks, which run in eager mode

    def bind_call(self) -> Callable[..., Any]:
        """A function that runs the module: its arguments are the module's."""
        function = copy_function(run_forward if self.runs_forward_only else call_unit)
        return MethodType(function, self.module)

    def make_runner(self, run: Callable[..., Any]) -> Runner:
        """Run this unit by `run`, which takes the module's arguments."""
        calls = {self.module: lambda _, *args, **kwargs: run(*args, **kwargs)}
        return Runner({}, calls) if self.runs_forward_only else Runner(calls)


@dataclass(frozen=True)
class UnitGroup:
    """Units of the same class, structure and shapes: one compiled function runs them."""

    units: tuple[Unit, ...]

    def __str__(self) -> str:
        first = self.units[0]
        kind = original_class(first.module).__name__
        count = f"{len(self.units)} × " if len(self.units) > 1 else ""
        path = common_path([u.path for u in self.units]) if len(self.units) > 1 else first.path
        return f"{count}{kind} of {first.wrapper} in {path or 'the model'}"


def find_units(model: nn.Module) -> list[Unit]:
    """The innermost modules that distributed wrappers run, in the order of `named_modules`."""
    found = []
    for path, module in model.named_modules():
        child = _wrapped_child(module)
        if child is not None:
            name = f"{path}.{child}" if path else child
            found.append(Unit(name, getattr(module, child), type(module).__name__, False))
        elif "forward" not in vars(module) and (state := _communication_state(module)):
            found.append(Unit(path, module, state, True))
    modules = {unit.module for unit in found}
    return [u for u in found if not any(m in modules for m in u.module.modules() if m != u.module)]


def _wrapped_child(module: nn.Module) -> str | None:
    """The name of the child that a wrapper class holds; None if the module is no wrapper."""
    names = (f"{kind.__module__}.{kind.__qualname__}" for kind in type(module).__mro__)
    return next((WRAPPER_CHILDREN[name] for name in names if name in WRAPPER_CHILDREN), None)


def _communication_state(module: nn.Module) -> str | None:
    """The kind of object of torch.distributed that has hooks on the module's forward, such as FSDP2's.

    The class `fully_shard` gave to the module does not tell: it may have given it to a compiled module.
    """
    for kind in type(module).__mro__:
        if kind.__name__ == "FSDPModule" and kind.__module__.startswith("torch.distributed."):
            return "fully_shard"
    for hook in module._forward_pre_hooks.values():
        state = type(getattr(hook, "__self__", None))
        if state.__module__.startswith("torch.distributed."):
            return "fully_shard" if state.__name__ == "FSDPState" else state.__name__
    return None


def original_class(module: nn.Module) -> type:
    """The module's class before `fully_shard` derived another one from it."""
    kind = type(module)
    while any(base.__name__ == "FSDPModule" for base in kind.__bases__):
        kind = kind.__bases__[-1]
    return kind


def group_units(units: Iterable[Unit]) -> list[UnitGroup]:
    """Units by class, structure and shapes, in the order of the first of each."""
    groups: dict[Any, list[Unit]] = {}
    for unit in units:
        key = (unit.wrapper, unit.runs_forward_only, structural_key(unit.module))
        groups.setdefault(key, []).append(unit)
    return [UnitGroup(tuple(equal)) for equal in groups.values()]


def find_unit_siblings(model: nn.Module, units: Sequence[Unit]) -> list[nn.Module]:
    """Modules that are called beside units, without those of torch's own classes."""
    inside = {module for unit in units for module in unit.module.modules()}
    found: dict[nn.Module, None] = {}
    for parent in model.modules():
        if parent in inside or inside.isdisjoint(parent.modules()):
            continue
        for child in called_children(parent):
            if not is_torch_module(child) and inside.isdisjoint(child.modules()):
                found[child] = None
    return list(found)


def make_unit_runner(
    model: nn.Module,
    groups: Sequence[UnitGroup],
    optimize: Callable[[Callable[..., Any]], Any],
) -> Runner:
    """Run every unit compiled, each group by one compiled function."""
    calls: dict[nn.Module, Any] = {}
    forwards: dict[nn.Module, Any] = {}
    for group in groups:
        first = group.units[0]
        function = copy_function(run_forward if first.runs_forward_only else call_unit)
        target = forwards if first.runs_forward_only else calls
        target |= dict.fromkeys((unit.module for unit in group.units), optimize(function))
    siblings = find_unit_siblings(model, [unit for group in groups for unit in group.units])
    if siblings:
        calls |= dict.fromkeys(siblings, optimize(copy_function(call_unit)))
    return Runner(calls, forwards)


def copy_function(function: Callable[..., Any]) -> FunctionType:
    """The function with a code object of its own, and so with its own cache in TorchDynamo."""
    assert isinstance(function, FunctionType), function
    code = function.__code__
    return FunctionType(code.replace(co_name=code.co_name), function.__globals__)


def call_unit(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a unit with its own hooks."""
    return self._call_impl(*args, **kwargs)


def run_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run the forward of a unit whose hooks communicate."""
    return type(self).forward(self, *args, **kwargs)
