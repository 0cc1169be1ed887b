"""The torch executor: each op is one call of torch. It runs everything.

In: single nodes. Out: the same nodes, with the most direct function as target: `torch.add(x, 1)` instead
of `torch.ops.aten.add.Tensor(x, 1)`. It reads better and skips the slow, schema-driven entry of the
dispatcher. A direct function is used only if it was recorded to dispatch to exactly that op with exactly
those arguments. Large matmuls on the CPU become those of `pooled_matmul`, whose outputs reuse memory. Backward
of attention with dropout becomes a function that places the seed (`cudagraph/attention_seeds.py`).
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from fulgurite.cudagraph.attention_seeds import find_seeded_function
from fulgurite.executors import pooled_matmul
from fulgurite.executors.base import Executor
from fulgurite.kernels.conv import dense, direct, gradients
from fulgurite.kernels.conv import ops as conv_ops
from fulgurite.kernels.conv.matmul import matmul
from fulgurite.trace.metadata import find_fake_mode, use_fake_mode
from fulgurite.trace.node_meta import fake_value, set_aten_op
from fulgurite.trace.printer import render
from fulgurite.trace.source import compile_source


class TorchExecutor(Executor):
    name = "torch"

    def claims(self, node: fx.Node) -> bool:
        return True

    def lower(self, region: fx.GraphModule) -> Callable[..., Sequence[Any]]:
        """Run a region op by op; autotuning times torch this way."""
        run = compile_source(render(region, "region", (), "boxed"), "<fulgurite region>")
        return lambda *inputs: run(list(inputs))

    def use_direct_function(self, module: fx.GraphModule, node: fx.Node) -> None:
        """Replace the node's target by the most direct function that dispatches to it."""
        if not isinstance(node.target, torch._ops.OpOverload):
            return
        if node.target in OWN_FUNCTIONS:
            set_aten_op(node, node.target)
            node.target = OWN_FUNCTIONS[node.target]
        if getattr(node.target, "namespace", "") != "aten":
            return
        function = pooled_matmul.find_pooled_function(node)
        function = function or find_seeded_function(node.target, node.args)
        if function is None:
            key = (node.target, _argument_kinds(node.args), _argument_kinds(node.kwargs))
            if key not in _DIRECT_FUNCTIONS:
                _DIRECT_FUNCTIONS[key] = _find_direct_function(node, find_fake_mode(module))
            function = _DIRECT_FUNCTIONS[key]
        if function is not None:
            set_aten_op(node, node.target)
            node.target = function


# operators of ours that a trace calls without torch's dispatcher
OWN_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    conv_ops.packed_conv.overload: direct.packed_conv,
    conv_ops.packed_linear.overload: direct.packed_linear,
    gradients.packed_conv_transpose.overload: direct.packed_conv_transpose,
    gradients.conv_weight_gradient.overload: direct.conv_weight_gradient,
    dense.conv2d.overload: direct.conv2d,
    dense.conv_transpose2d.overload: direct.conv_transpose2d,
    matmul.overload: direct.matmul,
}
_DIRECT_FUNCTIONS: dict[Any, Callable[..., Any] | None] = {}
_EQUIVALENT_OPS = {torch.ops.aten._unsafe_view.default: torch.ops.aten.view.default}
_NAMESPACES = (torch, torch._C._nn, torch._C._special, torch._C._linalg, torch._C._fft)


def _find_direct_function(node: fx.Node, mode: FakeTensorMode) -> Callable[..., Any] | None:
    args = fx.node.map_arg(node.args, lambda source: fake_value(source))
    kwargs = fx.node.map_arg(node.kwargs, lambda source: fake_value(source))
    for candidate in _candidate_functions(node):
        recorder = _DispatchRecorder()
        try:
            with use_fake_mode(mode), recorder:
                result = candidate(*args, **kwargs)
        except (TypeError, RuntimeError, ValueError, NotImplementedError):
            continue  # the function doesn't take these arguments
        op = _EQUIVALENT_OPS.get(node.target, node.target)
        if recorder.recorded_only(op, args, kwargs) and _same_kinds(result, fake_value(node)):
            return candidate
    return None


def _same_kinds(one: Any, two: Any) -> bool:
    """Whether tensors are where tensors are. Python bindings return some integers as tensors."""
    if isinstance(one, list | tuple) and isinstance(two, list | tuple):
        return len(one) == len(two) and all(map(_same_kinds, one, two))
    return isinstance(one, torch.Tensor) == isinstance(two, torch.Tensor)


def _candidate_functions(node: fx.Node) -> Iterator[Callable[..., Any]]:
    assert isinstance(node.target, torch._ops.OpOverload), "only ATen ops have direct functions"
    name = node.target._schema.name.split("::")[1]
    for namespace in _NAMESPACES:
        function = getattr(namespace, name, None)
        if isinstance(function, types.BuiltinFunctionType):
            yield function
    name = {"_unsafe_view": "view"}.get(name, name)
    method = getattr(torch.Tensor, name, None)
    if isinstance(method, types.MethodDescriptorType) and node.args:
        yield method


class _DispatchRecorder(TorchDispatchMode):
    """Records which ops a call dispatches to."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace != "prim":  # queries of a tensor, such as its device
            self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))

    def recorded_only(self, target: Any, args: Any, kwargs: Any) -> bool:
        if len(self.calls) != 1 or self.calls[0][0] is not target:
            return False
        _, recorded_args, recorded_kwargs = self.calls[0]
        return _arguments_by_name(target, recorded_args, recorded_kwargs) == _arguments_by_name(
            target, args, kwargs
        )


def _arguments_by_name(target: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """All arguments of a call by name, with defaults, in a form that == compares exactly."""
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


def _argument_kinds(value: Any) -> Any:
    """What torch's argument parser looks at: the kinds of arguments, not their values."""
    if isinstance(value, dict):
        return tuple((key, _argument_kinds(item)) for key, item in sorted(value.items()))
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, *(_argument_kinds(item) for item in value))
    if isinstance(value, fx.Node):
        inner = fake_value(value)
        is_scalar = isinstance(inner, torch.Tensor) and inner.dim() == 0
        return (type(inner).__name__, is_scalar)
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format, str, bool)):
        return value
    return type(value).__name__


TORCH = TorchExecutor()
