"""The executor that runs everything: each op is one call of torch.

In: single nodes. Out: the same nodes, spelled as the plainest function that does the same: `torch.add(x, 1)`
rather than `torch.ops.aten.add.Tensor(x, 1)`. It reads better and skips the slow, schema-driven way into the
dispatcher. A spelling is used only if it was seen to dispatch to exactly that op with exactly those arguments.
Large matmuls of the CPU are those of `kept`: the same, into memory that is reused.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from fulgurite.executors import kept
from fulgurite.executors.base import Executor
from fulgurite.trace.metadata import fake_mode_of, faking
from fulgurite.trace.printer import render
from fulgurite.trace.text import bind


class TorchExecutor(Executor):
    name = "torch"

    def claims(self, node: fx.Node) -> bool:
        return True

    def lower(self, region: fx.GraphModule) -> Callable[..., Sequence[Any]]:
        """A region run op by op; how tuning times torch against the others."""
        run = bind(render(region, "region", (), "boxed"), "<fulgurite region>")
        return lambda *inputs: run(list(inputs))

    def spell(self, module: fx.GraphModule, node: fx.Node) -> None:
        """Point the node at the plainest function that does the same."""
        if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace != "aten":
            return
        spelling = kept.spelling(node)
        if spelling is None:
            key = (node.target, _kinds(node.args), _kinds(node.kwargs))
            if key not in _SPELLINGS:
                _SPELLINGS[key] = _find_spelling(node, fake_mode_of(module))
            spelling = _SPELLINGS[key]
        if spelling is not None:
            node.meta["aten"] = node.target
            node.target = spelling


_SPELLINGS: dict[Any, Callable[..., Any] | None] = {}
_SAME_AS = {torch.ops.aten._unsafe_view.default: torch.ops.aten.view.default}
_NAMESPACES = (torch, torch._C._nn, torch._C._special, torch._C._linalg, torch._C._fft)


def _find_spelling(node: fx.Node, mode: FakeTensorMode) -> Callable[..., Any] | None:
    args = fx.node.map_arg(node.args, lambda source: source.meta.get("val"))
    kwargs = fx.node.map_arg(node.kwargs, lambda source: source.meta.get("val"))
    for candidate in _candidates(node):
        recorder = _Recorder()
        try:
            with faking(mode), recorder:
                candidate(*args, **kwargs)
        except (TypeError, RuntimeError, ValueError, NotImplementedError):
            continue  # this function doesn't take these arguments: not a spelling of the op
        wanted = _SAME_AS.get(node.target, node.target)
        if recorder.saw_only(wanted, args, kwargs):
            return candidate
    return None


def _candidates(node: fx.Node) -> Iterator[Callable[..., Any]]:
    assert isinstance(node.target, torch._ops.OpOverload), "only ATen ops are spelled"
    name = node.target._schema.name.split("::")[1]
    for namespace in _NAMESPACES:
        function = getattr(namespace, name, None)
        if isinstance(function, types.BuiltinFunctionType):
            yield function
    name = {"_unsafe_view": "view"}.get(name, name)
    method = getattr(torch.Tensor, name, None)
    if isinstance(method, types.MethodDescriptorType) and node.args:
        yield method


class _Recorder(TorchDispatchMode):
    """Remembers which ops a call comes down to."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace != "prim":  # questions about a tensor, such as its device, are no work
            self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))

    def saw_only(self, target: Any, args: Any, kwargs: Any) -> bool:
        if len(self.calls) != 1 or self.calls[0][0] is not target:
            return False
        _, seen_args, seen_kwargs = self.calls[0]
        return _by_name(target, seen_args, seen_kwargs) == _by_name(target, args, kwargs)


def _by_name(target: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """All arguments of a call by name, defaults filled in, in a form that == compares exactly."""
    result = {}
    for position, parameter in enumerate(target._schema.arguments):
        if position < len(args):
            value = args[position]
        else:
            value = kwargs.get(parameter.name, parameter.default_value)
        result[parameter.name] = _comparable(value)
    return result


def _comparable(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return id(value)
    if isinstance(value, (list, tuple)):
        return tuple(_comparable(item) for item in value)
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return str(value)
    return (type(value), repr(value))


def _kinds(value: Any) -> Any:
    """What the argument parser looks at: kinds of arguments, not their values."""
    if isinstance(value, dict):
        return tuple((key, _kinds(item)) for key, item in sorted(value.items()))
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, *(_kinds(item) for item in value))
    if isinstance(value, fx.Node):
        held = value.meta.get("val")
        scalar = isinstance(held, torch.Tensor) and held.dim() == 0
        return (type(held).__name__, scalar)
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format, str, bool)):
        return value
    return type(value).__name__


TORCH = TorchExecutor()
