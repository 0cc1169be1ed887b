"""Custom operators whose gradient formula can't be traced: their backward becomes one opaque call.

In: a captured graph. Out: the same graph; calls of such operators go through `call_with_opaque_gradient`.

AOTAutograd traces the gradient formula of an operator with FakeTensors. A formula that reads values fails there:
`transformers::grouped_mm_fallback` loops over `offs.tolist()`. Without this step each such call would be a graph break.
The operator `fulgurite::custom_op_gradient` calls the custom operator again and lets autograd run its formula on real
tensors. So the backward costs one more forward of that operator.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from fulgurite.logs import LOG
from fulgurite.trace.node_meta import captured_value

TRACEABLE_NAMESPACES = ("aten", "prims", "fulgurite", "higher_order", "_c10d_functional")
TENSOR = "<tensor {}>"  # stands for a tensor in the text of an operator's arguments


def make_gradients_opaque(module: fx.GraphModule) -> None:
    """Route calls of custom operators whose gradients can't be traced, in place."""
    changed = False
    for node in module.graph.nodes:
        op = _custom_op(node)
        if op is None or not _needs_opaque_gradient(node, op):
            continue
        LOG.info("the gradient of %s can't be traced: its backward is an opaque call", op)
        node.args = (str(op), *node.args)
        node.target = call_with_opaque_gradient
        changed = True
    if changed:
        module.recompile()


def call_with_opaque_gradient(op_name: str, *args: Any, **kwargs: Any) -> Any:
    """Call an operator; its gradient is one call of `fulgurite::custom_op_gradient`."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    outputs = _OpaqueGradient.apply(op_name, spec, *leaves)  # type: ignore[no-untyped-call]
    return outputs[0] if len(outputs) == 1 else outputs


class _OpaqueGradient(torch.autograd.Function):
    """Forward: the operator. Backward: `fulgurite::custom_op_gradient`."""

    @staticmethod
    def forward(ctx: Any, op_name: str, spec: pytree.TreeSpec, *leaves: Any) -> tuple[Tensor, ...]:
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        result = _resolve(op_name)(*args, **kwargs)
        outputs = (result,) if isinstance(result, Tensor) else tuple(result)
        ctx.mark_non_differentiable(*(x for x in outputs if not x.is_floating_point()))
        ctx.save_for_backward(*(leaf for leaf in leaves if isinstance(leaf, Tensor)))
        ctx.op_name = op_name
        ctx.arguments = _encode_arguments(leaves, spec)
        ctx.is_tensor = [isinstance(leaf, Tensor) for leaf in leaves]
        ctx.is_differentiable = [x.is_floating_point() for x in outputs]
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        needed = ctx.needs_input_grad[2:]
        needs = [need for need, is_tensor in zip(needed, ctx.is_tensor, strict=True) if is_tensor]
        given = [grad for grad, used in zip(grads, ctx.is_differentiable, strict=True) if used]
        found = iter(
            torch.ops.fulgurite.custom_op_gradient(
                ctx.op_name, ctx.arguments, list(ctx.saved_tensors), needs, given
            )
        )
        return None, None, *(next(found) if need else None for need in needed)


@torch.library.custom_op("fulgurite::custom_op_gradient", mutates_args=())
def custom_op_gradient(
    op_name: str, arguments: str, tensors: list[Tensor], needs: list[bool], grads: list[Tensor]
) -> list[Tensor]:
    """Gradients of the tensors that need one, by autograd on a second call of the operator.

    arguments   text of the operator's positional and keyword arguments, without the tensors
    grads       gradients of its floating-point outputs
    """
    with _record_gradients():
        inputs = [x.detach().requires_grad_(need) for x, need in zip(tensors, needs, strict=True)]
        args, kwargs = _decode_arguments(arguments, inputs)
        result = _resolve(op_name)(*args, **kwargs)
    outputs = [result] if isinstance(result, Tensor) else list(result)
    outputs = [output for output in outputs if output.is_floating_point()]
    pairs = [(x, grad) for x, grad in zip(outputs, grads, strict=True) if x.requires_grad]
    wanted = [x for x, need in zip(inputs, needs, strict=True) if need]
    found = torch.autograd.grad(
        [x for x, _ in pairs], wanted, [grad for _, grad in pairs], allow_unused=True
    )
    return [_like(x, grad) for x, grad in zip(wanted, found, strict=True)]


@custom_op_gradient.register_fake
def _(
    op_name: str, arguments: str, tensors: list[Tensor], needs: list[bool], grads: list[Tensor]
) -> list[Tensor]:
    return [torch.empty_like(x) for x, need in zip(tensors, needs, strict=True) if need]


@contextmanager
def _record_gradients() -> Iterator[None]:
    """Let autograd record, inside of an operator: there the dispatcher excludes its keys."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in (torch._C.DispatchKey.AutogradFunctionality, torch._C.DispatchKey.ADInplaceOrView):
        excluded = excluded.remove(key)
    included = torch._C._dispatch_tls_local_include_set()
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.enable_grad():
        yield


def _like(x: Tensor, grad: Tensor | None) -> Tensor:
    """A gradient in memory of its own, with the strides of `empty_like(x)`."""
    return torch.zeros_like(x) if grad is None else torch.empty_like(x).copy_(grad)


def _encode_arguments(leaves: Any, spec: pytree.TreeSpec) -> str:
    """Text of the arguments with numbered places for the tensors."""
    count = itertools.count()
    texts = [TENSOR.format(next(count)) if isinstance(x, Tensor) else x for x in leaves]
    return repr(pytree.tree_unflatten(texts, spec))


def _decode_arguments(text: str, tensors: list[Tensor]) -> Any:
    places = {TENSOR.format(position): tensor for position, tensor in enumerate(tensors)}

    def fill(leaf: Any) -> Any:
        return places.get(leaf, leaf) if isinstance(leaf, str) else leaf

    return pytree.tree_map(fill, ast.literal_eval(text))


def _resolve(op_name: str) -> OpOverload[..., Any]:
    """The operator of a name such as `mine.scale.default`."""
    namespace, name, overload = op_name.split(".")
    op: OpOverload[..., Any] = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    return op


def _custom_op(node: fx.Node) -> OpOverload[..., Any] | None:
    """The overload that a node calls, if it is an operator of another library."""
    target = node.target
    if isinstance(target, OpOverloadPacket) and target.overloads() == ["default"]:
        target = target.default
    if isinstance(target, OpOverload) and target.namespace not in TRACEABLE_NAMESPACES:
        return target
    return None


def _needs_opaque_gradient(node: fx.Node, op: OpOverload[..., Any]) -> bool:
    """Whether a call needs a gradient that can't be traced, and has arguments that can be written as text."""
    leaves = pytree.tree_leaves((node.args, node.kwargs))
    values = [captured_value(leaf) if isinstance(leaf, fx.Node) else leaf for leaf in leaves]
    tensors = [value for value in values if isinstance(value, Tensor)]
    others = [value for value in values if not isinstance(value, Tensor)]
    return (
        torch.is_grad_enabled()
        and not op._schema.is_mutable
        and all(type(tensor) is FakeTensor for tensor in tensors)
        and any(tensor.requires_grad for tensor in tensors)
        and all(type(other) in (int, float, bool, str, type(None)) for other in others)
        and not _can_trace_gradient(node, op)
    )


@contextmanager
def discard_fresh_symbols(shape_env: ShapeEnv | None) -> Iterator[None]:
    """Forget the unbacked symbols that are made inside, on whatever thread.

    Autograd runs the formulas of CUDA tensors on a thread of its own. There,
    `ShapeEnv.ignore_fresh_unbacked_symbols` has no effect.
    """
    pending = list(shape_env.pending_fresh_unbacked_symbols) if shape_env else []
    try:
        yield
    finally:
        if shape_env is not None:
            shape_env.pending_fresh_unbacked_symbols[:] = pending


def _can_trace_gradient(node: fx.Node, op: OpOverload[..., Any]) -> bool:
    """Whether the gradient formula runs on FakeTensors."""

    def example(leaf: Any) -> Any:
        value = captured_value(leaf) if isinstance(leaf, fx.Node) else leaf
        return (
            value.detach().requires_grad_(value.requires_grad)
            if isinstance(value, Tensor)
            else value
        )

    args, kwargs = pytree.tree_map(example, (node.args, node.kwargs))
    wanted = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    mode = wanted[0].fake_mode
    with mode, discard_fresh_symbols(mode.shape_env):
        outputs = [x for x in pytree.tree_leaves(op(*args, **kwargs)) if x.requires_grad]
        if not outputs:
            return True
        try:
            torch.autograd.grad(
                outputs,
                [x for x in wanted if x.requires_grad],
                [torch.empty_like(x) for x in outputs],
                allow_unused=True,
            )
        except Exception as error:  # whatever the formula raises on FakeTensors
            LOG.info("the gradient of %s: %s: %s", op, type(error).__name__, error)
            return False
    return True
