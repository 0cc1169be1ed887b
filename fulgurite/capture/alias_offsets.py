"""Storage offsets of outputs that are views of mutated inputs.

In: a functional graph and its callable. Out: the callable; such outputs have the offset of the view in the
input's memory.

AOTAutograd rebuilds an output that is a view of an input. With symbolic sizes it applies size, stride and
offset of the graph's output to the input's memory. After a write the output is a view of a new tensor,
whose offset lacks that of the input.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._functorch._aot_autograd.schemas import OutputType
from torch._guards import TracingContext
from torch.utils._sympy.printers import PythonPrinter

from fulgurite.capture.training import BoxedFunction, RunnableGraph
from fulgurite.trace.node_meta import fake_value

Evaluate = Callable[[Sequence[Any]], int]  # from a graph's inputs


def restore_alias_offsets(graph: fx.GraphModule, run: RunnableGraph) -> BoxedFunction:
    """`run`, with the offsets that views of mutated inputs have in the memory of those inputs."""
    offsets = _offsets_in_mutated_inputs(graph)
    if not offsets:
        return run

    def call(inputs: list[Any]) -> Any:
        found = [(k, inputs[base], offset(inputs)) for k, (base, offset) in offsets.items()]
        results = list(run.run(inputs))
        for position, base, offset in found:
            start = _in_elements_of(results[position], base) + offset
            if results[position].storage_offset() != start:
                results[position] = _at_offset(results[position], start)
        return results

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def _offsets_in_mutated_inputs(graph: fx.GraphModule) -> dict[int, tuple[int, Evaluate]]:
    """For each output that is a view of a new value of an input: the input, and its offset there."""
    metadata = TracingContext.get().fw_metadata
    if metadata is None:
        return {}
    found: dict[int, tuple[int, Evaluate]] = {}
    outputs = graph.graph.output_node().args[0]
    first = len(metadata.tokens) + metadata.num_mutated_inp_runtime_indices
    for position, info in enumerate(metadata.output_info, first):
        if info.output_type is not OutputType.alias_of_input or not isinstance(info.base_idx, int):
            continue
        node: Any = outputs[position]  # type: ignore[index]
        if metadata.input_info[info.base_idx].mutates_data and isinstance(node, fx.Node):
            offset = _offset_in_root(node)
            if offset is not None:
                found[position] = (info.base_idx, _evaluate_from_inputs(graph, offset))
    return found


def _offset_in_root(node: fx.Node) -> int | torch.SymInt | None:
    """The elements between the start of the tensor that a node is a view of and the view's start.

    A new value of an input may have an offset of its own: scatters such as `slice_scatter` keep the input's.
    """
    root = node
    while True:
        source = root.args[0] if root.target is operator.getitem else root  # of `split`, `unbind`
        if not isinstance(source, fx.Node) or not _is_view(source):
            break
        if not isinstance(source.args[0], fx.Node):
            break
        root = source.args[0]
    value, base = fake_value(node), fake_value(root)
    if not isinstance(value, torch.Tensor) or not isinstance(base, torch.Tensor):
        return None
    return value.storage_offset() - _in_elements_of(value, base)


def _is_view(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    aliases = [returned.alias_info for returned in schema.returns] if schema is not None else []
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)


def _in_elements_of(value: torch.Tensor, base: torch.Tensor) -> int:
    """The storage offset of `base`, counted in elements of `value`: a complex one may be viewed as two reals."""
    return base.storage_offset() * base.itemsize // value.itemsize


def _evaluate_from_inputs(graph: fx.GraphModule, number: int | torch.SymInt) -> Evaluate:
    """The function that computes a number of the graph from its inputs."""
    if isinstance(number, int):
        return lambda inputs: number
    expression = number.node.expr
    positions = {}
    for position, node in enumerate(graph.graph.find_nodes(op="placeholder")):
        value = fake_value(node)
        if isinstance(value, torch.SymInt) and value.node.expr in expression.free_symbols:
            positions[str(value.node.expr)] = position
    missing = {str(symbol) for symbol in expression.free_symbols} - positions.keys()
    assert not missing, f"no input of the graph is {', '.join(sorted(missing))}"
    text = PythonPrinter().doprint(expression)  # type: ignore[no-untyped-call]
    compute = eval(f"lambda {', '.join(positions)}: {text}", {"math": math})
    return lambda inputs: int(compute(*(inputs[p] for p in positions.values())))


def _at_offset(tensor: torch.Tensor, start: int) -> torch.Tensor:
    """A tensor with the size and strides of another one, at an offset; its values have no meaning."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    extent = 1 + sum((size - 1) * stride for size, stride in pairs) if tensor.numel() else 0
    memory = tensor.new_empty(start + extent).untyped_storage()
    # not a view: AOTAutograd would rebuild the view that it is of `memory`
    return tensor.new_empty(0).set_(memory, start, tensor.shape, tensor.stride())
