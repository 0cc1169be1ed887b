"""Foreach ops as one op a tensor.

In: ATen's `_foreach_*` ops, which optimizers and gradient clipping call. Out: decompositions for
AOTAutograd's tracing. One op a tensor can be fused with its neighbours, and takes a symbolic number: an
opaque foreach op makes TorchDynamo specialize on a learning rate, so that every new one recompiles.
`add` and `sub` with a symbolic `alpha` are decomposed for the same reason.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

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
