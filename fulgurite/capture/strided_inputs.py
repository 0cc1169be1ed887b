"""Guard on storage offsets of inputs, for graphs that call `as_strided`.

In: a functional graph, its compiled form and the captured graph. Out: a callable that runs the compiled form
if its inputs lie in their storages as they did at capture, and the captured graph op by op otherwise. Calls
that run as captured are reported.

`as_strided` counts from the start of the storage, not of the tensor, and TorchDynamo has no guards on storage
offsets. Two things depend on them:

- A view at a given offset of an input: compiled code knows its distance to the start of the input.
- A mutated input. Functionalization replaces it by a new tensor with a dense storage of its own. Addresses
  in both are the same only if the input starts at offset 0, is dense and fills its storage.
  `a.add_(1); a.as_strided((2,), (1,), 0)` reads something else if `a` is a slice.

A write to a part of a view whose elements share memory runs as captured for all inputs: functionalization
would write the whole view back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._functorch._aot_autograd.descriptors import PlainAOTInput, ViewBaseAOTInput
from torch._guards import TracingContext

from fulgurite.capture.input_aliasing import Report, has_address
from fulgurite.trace.cost import is_view, size_hint
from fulgurite.trace.node_meta import fake_value

SCATTER = torch.ops.aten.as_strided_scatter.default
AS_STRIDED = (
    torch.ops.aten.as_strided.default,
    torch.ops.aten.as_strided_copy.default,
    SCATTER,
)
MUTATED_SLICE = "as_strided reads or writes the storage of a mutated input that is a view"
OTHER_OFFSETS = "as_strided, and inputs that lie elsewhere in their storages than at capture"
OVERLAPPING_WRITE = "a write to a part of an as_strided view whose elements share memory"


def guard_strided_inputs(
    run: Callable[..., Any],
    captured: Callable[..., Any],
    inputs: Sequence[Any],
    graph: fx.GraphModule,
    report: Report,
) -> Callable[..., Any]:
    """`run` for inputs that lie in their storages as these do, `captured` for other inputs."""
    if any(map(_overlaps, graph.graph.find_nodes(op="call_function", target=SCATTER))):
        report(OVERLAPPING_WRITE)
        return captured
    calls = _find_as_strided(graph)
    if not calls:
        return run
    mutated = [k for k in _mutated_positions(len(inputs)) if has_address(inputs[k])]
    if not all(fills_storage(inputs[k]) for k in mutated):
        report(MUTATED_SLICE)
        return captured
    viewed = {k for k in _viewed_positions(calls) if has_address(inputs[k])}
    offsets = {k: size_hint(inputs[k].storage_offset()) for k in sorted(viewed)}

    def call(*args: Any) -> Any:
        is_same = all(args[k].storage_offset() == offset for k, offset in offsets.items())
        is_same = is_same and all(fills_storage(args[k]) for k in mutated)
        if is_same:
            return run(*args)
        report(OTHER_OFFSETS)
        return captured(*args)

    return call if mutated or offsets else run


def _find_as_strided(graph: fx.GraphModule) -> list[fx.Node]:
    """The calls of `as_strided` by the program. AOTAutograd calls it too, for views of a common base."""
    placeholders = graph.graph.find_nodes(op="placeholder")
    if any(isinstance(node.meta.get("desc"), ViewBaseAOTInput) for node in placeholders):
        return []
    found = [graph.graph.find_nodes(op="call_function", target=op) for op in AS_STRIDED]
    return [node for nodes in found for node in nodes]


def _overlaps(scatter: fx.Node) -> bool:
    """Whether elements of the view may share memory. A write to one of them leaves old values in others,
    and which of them the base gets would depend on the order."""
    sizes, strides = fx.node.map_arg(scatter.args[2:4], fake_value)
    end = 0  # distance between the first and the last element of the dimensions so far
    for stride, size in sorted(zip(strides, sizes, strict=True)):
        if size > 1 and stride <= end:  # with symbols: a guard
            return True
        end += (size - 1) * stride if size > 1 else 0
    return False


def _viewed_positions(calls: Sequence[fx.Node]) -> Iterator[int]:
    """The inputs in whose storages the calls start at an offset that they are given."""
    for node in calls:
        source = node.args[0]
        first = 4 if node.target is SCATTER else 3
        has_offset = len(node.args) > first and node.args[first] is not None
        while isinstance(source, fx.Node) and is_view(source) and source.op != "placeholder":
            has_offset = has_offset and source.target not in AS_STRIDED
            source = source.args[0]
        description = source.meta.get("desc") if isinstance(source, fx.Node) else None
        if has_offset and isinstance(description, PlainAOTInput):
            yield description.idx


def _mutated_positions(count: int) -> list[int]:
    """The inputs that the graph mutates; all of them if AOTAutograd counts other inputs."""
    metadata = TracingContext.get().fw_metadata
    if metadata is None or len(metadata.input_info) != count:
        return list(range(count))
    return [k for k, info in enumerate(metadata.input_info) if info.mutates_data]


def fills_storage(tensor: Tensor) -> bool:
    """Whether a tensor is dense, and nothing else is in its storage."""
    if size_hint(tensor.storage_offset()):
        return False
    extent = 1
    pairs = zip(map(size_hint, tensor.stride()), map(size_hint, tensor.shape), strict=True)
    for stride, size in sorted(pair for pair in pairs if pair[1] != 1):
        if stride != extent:
            return False
        extent *= size
    return size_hint(tensor.untyped_storage().nbytes()) == extent * tensor.itemsize
