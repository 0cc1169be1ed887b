"""Integers of example inputs: values that the ops of a region accept as indices and offsets.

In: a region that is going to be timed. Out: `ExampleIntegers` for each integer input that an op reads as
positions; None if such values can't be made up, because an index is computed or has a meaning of its own.
All other integers are zeros.
"""

from __future__ import annotations

import torch
from torch import fx

from fulgurite.trace.cost import is_view, iter_tensors, size_hint, view_base
from fulgurite.trace.decisions import ExampleIntegers
from fulgurite.trace.node_meta import fake_value

# Their integers are offsets in windows: 0 is in the padding of the first window, before the tensor.
WINDOW_OFFSET_OPS = {"max_pool2d_offsets_backward"}
INDEX_OPS = {
    *("embedding", "embedding_dense_backward", "gather", "index", "index_add", "index_copy"),
    *("index_fill", "index_put", "index_select", "put", "scatter", "scatter_add", "scatter_reduce"),
    *("take", "_embedding_bag", "_unsafe_index", "_unsafe_index_put", "index_reduce"),
    *("_embedding_bag_backward", "_embedding_bag_dense_backward"),
}
# Arguments that never decrease. Offsets of bags end at the number of lookups, bags of lookups at the last bag.
# Argument → the argument whose rows are counted, and how far below this number the last value is.
SORTED_ARGUMENTS: dict[str, dict[int, tuple[int, int]]] = {
    "_embedding_bag": {2: (1, 0)},
    "_embedding_bag_backward": {2: (1, 0), 3: (0, 1)},
    "_embedding_bag_dense_backward": {2: (0, 1)},
}


def find_example_integers(module: fx.GraphModule) -> dict[fx.Node, ExampleIntegers] | None:
    """What integer inputs must hold; None if they can't be made up.

    Indices are spread over the rows: with zeros, every element of an indexed store would collide.
    """
    found: dict[fx.Node, ExampleIntegers] = {}
    for node in module.graph.nodes:
        if node.op != "call_function" or is_view(node):
            continue
        name = str(getattr(node.target, "_opname", ""))
        if name in WINDOW_OFFSET_OPS:
            return None
        is_index = name in INDEX_OPS
        limit = _smallest_size(node) if is_index else 1
        ascending = _sorted_inputs(node, name)
        for source in filter(_is_integer, node.all_input_nodes):
            base = view_base(source)
            if is_index and base.op not in ("placeholder", "get_attr"):
                return None  # computed: out of range for made-up inputs
            integers = ascending.get(source) or ExampleIntegers(limit)
            before = found.get(base, integers)
            if before.is_sorted != integers.is_sorted:
                return None
            found[base] = min(before, integers, key=lambda values: values.limit)
    return found


def _smallest_size(node: fx.Node) -> int:
    """A limit of indices, whatever the dimension: of the result and of the first argument."""
    tensors = [fake_value(n) for n in (node, *node.args[:1]) if isinstance(n, fx.Node)]
    sizes = [size_hint(n) for tensor in tensors for t in iter_tensors(tensor) for n in t.shape]
    return min(sizes, default=1)


def _sorted_inputs(node: fx.Node, name: str) -> dict[fx.Node, ExampleIntegers]:
    sources = {}
    for position, (counted, below) in SORTED_ARGUMENTS.get(name, {}).items():
        source, rows = node.args[position], node.args[counted]
        if isinstance(source, fx.Node) and isinstance(rows, fx.Node):
            last = size_hint(fake_value(rows).shape[0]) - below
            sources[source] = ExampleIntegers(last + 1, is_sorted=True)
    return sources


def _is_integer(node: fx.Node) -> bool:
    value = fake_value(node)
    return isinstance(value, torch.Tensor) and value.dtype in (torch.int64, torch.int32)
