"""Foreach ops as one op a tensor.

In: ATen's `_foreach_*` ops, which optimizers and gradient clipping call. Out: decompositions for
AOTAutograd's tracing, `lerp_in_place` for TorchDynamo's, and `separate_writes` for captured graphs.
One op a tensor can be fused with its neighbours, and takes a symbolic number: an opaque foreach op
makes TorchDynamo specialize on a learning rate, so that every new one recompiles. `add` and `sub`
with a symbolic `alpha` are decomposed for the same reason.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload, OpOverloadPacket

from fulgurite.capture.input_aliasing import has_storage
from fulgurite.trace.node_meta import example_value

aten = torch.ops.aten
PREFIX = "aten::_foreach_"
# foreach ops whose op for one tensor has another name; the scalar forms of maximum are clamps
OTHER_NAMES: dict[str, OpOverloadPacket] = {
    "norm": aten.linalg_vector_norm,
    "zero": aten.zeros_like,
}
SCALAR_NAMES = {"maximum": aten.clamp_min, "minimum": aten.clamp_max}
KEYWORD_NAMES = {"value", "alpha", "dtype", "memory_format"}  # keyword-only in ops of one tensor


@functools.cache
def foreach_decompositions() -> dict[OpOverload, Callable[..., Any]]:
    """Decompositions of all functional foreach ops with an op for one tensor, and of `add`, `sub`."""
    table: dict[OpOverload, Callable[..., Any]] = {
        aten.add.Tensor: functools.partial(_decompose_alpha, aten.add.Tensor),
        aten.sub.Tensor: functools.partial(_decompose_alpha, aten.sub.Tensor),
    }
    for schema in torch._C._jit_get_all_schemas():
        name = schema.name.removeprefix(PREFIX)
        if name == schema.name or name.endswith("_") or "out" in schema.overload_name:
            continue
        single = _find_single_op(name, schema)
        if single is not None:
            overload = getattr(getattr(aten, f"_foreach_{name}"), schema.overload_name or "default")
            table[overload] = functools.partial(_map_tensors, overload, single)
    return table


def _find_single_op(name: str, schema: Any) -> Callable[..., Any] | None:
    """The op for one tensor; None where there is none with the same meaning."""
    arguments = {argument.name: str(argument.type) for argument in schema.arguments}
    if arguments.get("scalars") == "Tensor":  # a tensor of one number for each
        return None
    if name in SCALAR_NAMES and "other" not in arguments:
        return SCALAR_NAMES[name]
    found: Callable[..., Any] | None = OTHER_NAMES.get(name, getattr(aten, name, None))
    return found


def _map_tensors(
    overload: OpOverload, single: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """`single` on each tensor of the lists: lists go element by element, other arguments to all."""
    bound: dict[str, Any] = {}
    for position, argument in enumerate(overload._schema.arguments):
        if position < len(args):
            bound[argument.name] = args[position]
        elif argument.name in kwargs:
            bound[argument.name] = kwargs[argument.name]
    length = next(len(value) for value in bound.values() if isinstance(value, list | tuple))
    results = []
    for k in range(length):
        each = {n: v[k] if isinstance(v, list | tuple) else v for n, v in bound.items()}
        if "scalars" in each and "tensor1" in each:
            each["value"] = each.pop("scalars")  # addcmul, addcdiv
        if single is aten.copy:
            each.pop("non_blocking", None)
        keywords = {n: each.pop(n) for n in [*each] if n in KEYWORD_NAMES}
        results.append(single(*each.values(), **keywords))
    return results


def _decompose_alpha(op: OpOverload, self: Any, other: Any, *, alpha: Any = 1) -> Any:
    """`self ± alpha * other` with a symbolic alpha, which may become a tensor."""
    if not isinstance(alpha, torch.SymFloat) or not isinstance(other, torch.Tensor):
        return NotImplemented
    return op(self, other * alpha)


def lerp_in_place(self: list[Tensor], end: list[Tensor], weight: Any) -> list[Tensor]:
    """What TorchDynamo traces for `torch._foreach_lerp_`: one tensor after another, as in eager mode.

    torch's own version reads all tensors of both lists before it writes any. A number becomes a tensor,
    by a product: TorchDynamo would specialize on the number of `lerp_` or `full`.
    """
    for tensor, other in zip(self, end, strict=True):
        number = weight.dtype if isinstance(weight, Tensor) else torch.float32
        dtype = torch.promote_types(tensor.dtype, number)
        if isinstance(weight, Tensor):
            each = weight.to(tensor.device, dtype)
        else:
            each = torch.ones((), dtype=dtype, device=tensor.device) * weight
        tensor.copy_(torch.lerp(tensor.to(dtype), other.to(dtype), each))
    return self


def separate_writes(module: fx.GraphModule) -> None:
    """Write tensors of one list that share memory one after another, as eager mode does.

    torch's functionalization lets an in-place foreach op read all tensors before it writes any.
    """
    nodes = [node for node in module.graph.nodes if _is_foreach_write(node) and _is_aliased(node)]
    for node in nodes:
        _write_one_by_one(node)
    if nodes:
        module.recompile()


def _is_foreach_write(node: fx.Node) -> bool:
    name = getattr(node.target, "__name__", "").partition(".")[0]
    return node.op == "call_function" and name.startswith("_foreach_") and name.endswith("_")


def _arguments(node: fx.Node) -> Iterator[Any]:
    return iter((*node.args, *node.kwargs.values()))


def _is_aliased(node: fx.Node) -> bool:
    """Whether a tensor shares memory with one at another position of its list, or of another list."""
    positions: dict[int, set[int]] = {}  # by storage
    for values in _arguments(node):
        for position, item in enumerate(values if isinstance(values, list | tuple) else ()):
            value: Any = example_value(item) if isinstance(item, fx.Node) else None
            if has_storage(value):
                positions.setdefault(value.untyped_storage()._cdata, set()).add(position)
    return any(len(found) > 1 for found in positions.values())


def _write_one_by_one(node: fx.Node) -> None:
    graph, written = node.graph, list(next(_arguments(node)))
    with graph.inserting_before(node):
        for k in range(len(written)):
            args = tuple(_take(graph, value, k) for value in node.args)
            kwargs = {name: _take(graph, value, k) for name, value in node.kwargs.items()}
            one = graph.call_function(node.target, args, kwargs)
            one.meta.update(node.meta, example_value=[example_value(written[k])])
    for user in [*node.users]:
        if user.target is operator.getitem:
            user.replace_all_uses_with(written[user.args[1]])
            graph.erase_node(user)
        else:  # it takes the whole list
            args = fx.map_arg((user.args, user.kwargs), lambda n: written if n is node else n)
            user.args, user.kwargs = args
    graph.erase_node(node)


def _take(graph: fx.Graph, value: Any, k: int) -> Any:
    """An argument for the tensor at position k alone."""
    if isinstance(value, list | tuple):
        return [value[k]]
    example = example_value(value) if isinstance(value, fx.Node) else None
    if isinstance(example, Tensor) and example.dim() == 1:  # a number for each tensor
        return graph.call_function(operator.getitem, (value, slice(k, k + 1)))
    return value
