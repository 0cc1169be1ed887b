"""Catch custom operators that mutate an argument, though their schema says that they don't.

In: a claimed Trace. Out: the same with a copy of the arguments before each call of a custom operator, and a
comparison after it. Capture relies on schemas: such an operator may be moved, merged or dropped, and a
buffer that it writes to may be in use by others. Version counters don't see it in inference mode, so
values are compared. `FULGURITE_VERIFY=1` adds this transform.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, fx

from fulgurite.errors import ArgumentError
from fulgurite.trace import Trace
from fulgurite.trace.node_meta import aten_op, fake_value
from fulgurite.transforms.base import transform
from fulgurite.transforms.instrument import add_effect, op_label, source_label

# operators that are torch's or ours: their schemas are tested
TRUSTED_NAMESPACES = ("aten", "prims", "prim", "fulgurite", "_c10d_functional", "c10d_functional")


@transform(phase="after_claim")
def find_false_schemas(trace: Trace) -> Trace:
    """Compare the arguments of custom operators before and after each call."""

    def change(graph: fx.Graph) -> None:
        for node in filter(_claims_to_be_functional, list(graph.nodes)):
            tensors = [n for n in node.all_input_nodes if isinstance(fake_value(n), Tensor)]
            if not tensors:
                continue
            with graph.inserting_before(node):
                copies = add_effect(graph, copy_arguments, tensors)
            with graph.inserting_after(node):
                names = [n.name for n in tensors]
                add_effect(
                    graph,
                    check_arguments,
                    tensors,
                    copies,
                    names,
                    op_label(node),
                    source_label(node),
                )

    return trace.edit(change)


def has_custom_ops(trace: Trace) -> bool:
    return any(map(_claims_to_be_functional, trace.graph.nodes))


def _claims_to_be_functional(node: fx.Node) -> bool:
    op = aten_op(node) if node.op == "call_function" else None
    if not isinstance(op, torch._ops.OpOverload) or op.namespace in TRUSTED_NAMESPACES:
        return False
    return not op._schema.is_mutable


def copy_arguments(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


def check_arguments(
    tensors: Sequence[Tensor], copies: Sequence[Tensor], names: Sequence[str], op: str, where: str
) -> None:
    """Raise if a tensor differs from its copy in any bit."""
    for tensor, copy, name in zip(tensors, copies, names, strict=True):
        if not torch.equal(_as_bytes(tensor), _as_bytes(copy)):
            raise ArgumentError(
                f"{op} mutated its argument {name}, and its schema says that it does not",
                where=where,
                next="declare it (mutates_args, or `Tensor(a!)` in the schema), or work on a copy",
            )


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
