"""Pack the weights of convolutions and linears on the CPU once, and run them with epilogues.

In: the functional graph of an inference call. Out: the same, where a convolution or linear of a parameter
(`library_calls.py`) is

    weight, bias = packed_weights(conv_weight, bn_weight, …)     # computed once: trace/frozen.py
    y = fulgurite::packed_conv(x, weight, bias, residual, …, "relu")

Convolutions return channels-last tensors (`layouts.py`). Results of the graph have the strides of eager
mode. Training graphs are left alone.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from fulgurite.kernels.conv import cpu, gradients, ops, packing
from fulgurite.kernels.recurrent import cpu as recurrent_cpu
from fulgurite.kernels.recurrent.ops import recurrence
from fulgurite.native import find_compiler
from fulgurite.trace import Trace
from fulgurite.trace.cost import format_count, value_bytes
from fulgurite.trace.frozen import FROZEN, FrozenRegion
from fulgurite.trace.metadata import fill_metadata
from fulgurite.trace.node_meta import (
    clear_fake_value,
    copy_location,
    copy_meta,
    fake_value,
    set_fake_value,
)
from fulgurite.trace.region import Region
from fulgurite.trace.trace import copy_module
from fulgurite.transforms.layouts import CannotRelayout, update_layouts
from fulgurite.transforms.library_calls import (
    RESHAPES,
    LibraryCall,
    fuse_epilogue,
    is_frozen,
    match_library_call,
)
from fulgurite.units import format_bytes

aten = torch.ops.aten
MEMORY_DIVISOR = 8  # packed weights of a graph take at most this part of the memory
MAX_LAYERS = 64  # layers that a graph is expected to run at most: few models have more
REASON = "float32 convolutions and linears, which run without reordering their weights"
PACKING_OPS = (
    ops.pack_weight.overload,
    ops.pack_bias.overload,
    gradients.pack_transposed_weight.overload,
)


def has_library_calls(trace: Trace) -> bool:
    """Whether the step "pack_weights" applies: an inference graph with products of weights on the CPU."""
    if trace.kind != "inference" or find_compiler() is None:
        return False
    nodes = trace.graph.nodes
    return any(_is_frozen_packing(node) or match_library_call(node) is not None for node in nodes)


def _is_frozen_packing(node: fx.Node) -> bool:
    """Whether a node packs a weight or bias that does not change: that of a recurrent layer."""
    return node.target in PACKING_OPS and is_frozen(node)


def pack_weights(trace: Trace, is_layer: bool = False) -> Trace:
    """Replace convolutions and linears of weights by calls with packed weights.

    is_layer   the graph is that of a repeated layer, called with the weights of each in turn
    """
    with _disable_current_modes():  # TorchDynamo calls us in fake mode
        return _pack_weights(trace, MAX_LAYERS if is_layer else 1)


def _pack_weights(trace: Trace, num_copies: int) -> Trace:
    module = copy_module(trace.module)
    before = {node: fake_value(node) for node in module.graph.nodes if node.op != "output"}
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    budget = memory // (MEMORY_DIVISOR * num_copies)
    replaced: dict[fx.Node, str] = {}  # new nodes, with the names of old ones
    inner_names: dict[fx.Node, str] = {}  # of linears before a reshape
    for node in list(module.graph.nodes):
        call = match_library_call(node)
        size = value_bytes(fake_value(call.weight)) if call is not None else 0
        if call is None or not call.node.users or size > budget:
            continue
        budget -= size
        call = fuse_epilogue(call)
        new = _replace_call(call)
        set_fake_value(new, fake_value(call.last))  # shapes; layouts come later
        before[new] = before.get(call.last, fake_value(call.last))
        replaced[new] = call.last.name
        if new.target in RESHAPES:
            inner_names[new.all_input_nodes[0]] = call.node.name
    packed = [node for node in module.graph.nodes if _is_frozen_packing(node)]
    if not packed:
        return trace
    module.graph.eliminate_dead_code()
    for node, name in (replaced | inner_names).items():
        clear_fake_value(node)
        node.name = name
    fill_metadata(module)
    try:
        update_layouts(module, before)
    except CannotRelayout:
        return trace
    _freeze_packed_weights(module)
    cpu.start_build()  # while the rest is compiled
    if any(node.target is recurrence.overload for node in module.graph.nodes):
        recurrent_cpu.start_build()
    return trace.with_module(module)


def _replace_call(call: LibraryCall) -> fx.Node:
    """Compute the call's last node by a packed call; returns the node that replaces it."""
    graph = call.last.graph

    def add(target: Any, *args: Any) -> fx.Node:
        return graph.call_function(target, args)

    with graph.inserting_before(call.last):
        if call.size:
            new = _add_transposed(call, add)
        else:
            new = _add_conv(call, add) if call.geometry else _add_linear(call, add)
    copy_location(call.node, new)
    call.last.replace_all_uses_with(new)
    return new


def _add_conv(call: LibraryCall, add: Any) -> fx.Node:
    value = fake_value(call.node.args[1])  # type: ignore[arg-type]
    out_channels, in_channels = value.shape[0], value.shape[1] * call.groups
    weight = add(ops.pack_weight.overload, call.weight, call.groups)
    groups = packing.bias_groups(out_channels, in_channels, call.groups)
    bias = None
    if call.bias is not None:
        bias = add(ops.pack_bias.overload, call.bias, call.scale, groups)
    is_1d = value.dim() == 3
    x = add(aten.unsqueeze.default, call.x, 2) if is_1d else call.x
    ones = [1] if is_1d else []
    stride, padding, dilation = call.geometry
    new = add(
        ops.packed_conv.overload, x, weight, bias, call.residual,
        [out_channels, *ones, *value.shape[2:]], [*ones, *stride],
        [0, *padding] if is_1d else padding, [*ones, *dilation], call.groups,
        call.activation, list(call.parameters), call.scale is not None,
    )  # fmt: skip
    return add(aten.squeeze.dim, new, 2) if is_1d else new


def _add_transposed(call: LibraryCall, add: Any) -> fx.Node:
    value = fake_value(call.weight)
    out_channels = value.shape[1] * call.groups
    is_1d = value.dim() == 3
    source = add(aten.unsqueeze.default, call.weight, 2) if is_1d else call.weight
    ones = [1] if is_1d else []
    stride, padding, dilation = call.geometry
    stride = [*ones, *stride]
    weight = add(gradients.pack_transposed_weight.overload, source, call.groups, stride)
    bias = None
    if call.bias is not None:
        bias = add(ops.pack_bias.overload, call.bias, call.scale, call.groups)
    new = add(
        gradients.packed_conv_transpose.overload,
        add(aten.unsqueeze.default, call.x, 2) if is_1d else call.x, weight, bias, call.residual,
        [*ones, *call.size], [out_channels, *ones, *value.shape[2:]], stride,
        [0, *padding] if is_1d else padding, [*ones, *dilation], call.groups,
        call.activation, list(call.parameters), call.scale is not None,
    )  # fmt: skip
    return add(aten.squeeze.dim, new, 2) if is_1d else new


def _add_linear(call: LibraryCall, add: Any) -> fx.Node:
    matrix = call.weight  # [I, O]; mostly the transpose of a parameter
    is_transpose = matrix.target is aten.t.default or (
        matrix.target is aten.permute.default and list(matrix.args[1]) == [1, 0]  # type: ignore[arg-type]
    )
    rows = matrix.args[0] if is_transpose else add(aten.t.default, matrix)
    weight = add(ops.pack_weight.overload, rows, 1)
    bias = None if call.bias is None else add(ops.pack_bias.overload, call.bias, None, 1)
    features = fake_value(matrix).shape[1]
    new = add(
        ops.packed_linear.overload, call.x, weight, bias, None, features,
        call.activation, list(call.parameters),
    )  # fmt: skip
    source = call.last.args[0]
    if call.last is call.node or source is call.node:
        return new
    assert isinstance(source, fx.Node) and source.target in RESHAPES, "only reshapes are between"
    return add(source.target, new, *source.args[1:])


def _freeze_packed_weights(module: fx.GraphModule) -> None:
    """Compute packed weights, and what they are computed from, in one region that runs once."""
    packed = list(filter(_is_frozen_packing, module.graph.nodes))
    count = sum(node.target is not ops.pack_bias.overload for node in packed)
    inner, inputs = _extract_frozen(module, packed)
    size = sum(value_bytes(fake_value(node)) for node in packed)
    summary = f"{format_count(count, 'weight')} packed once   {format_bytes(size)}"
    frozen = FrozenRegion(inner, count, REASON)
    region = Region("packed_weights", FROZEN, inner, frozen, summary)
    first = next(node for node in module.graph.nodes if node.op not in ("placeholder", "get_attr"))
    with module.graph.inserting_before(first):
        call = module.graph.call_function(region, tuple(inputs))
        set_fake_value(call, tuple(fake_value(node) for node in packed))
        for position, node in enumerate(packed):
            item = module.graph.create_node(
                "call_function", operator.getitem, (call, position), name=_packed_name(node)
            )
            copy_meta(node, item)
            node.replace_all_uses_with(item)
    module.graph.eliminate_dead_code()


def _packed_name(node: fx.Node) -> str:
    """`conv1_weight_packed`, after the first parameter that it is computed from."""
    source = node
    while source.op != "placeholder":
        source = source.all_input_nodes[0]
    kind = "bias" if node.target is ops.pack_bias.overload else "weight"
    return f"{source.name.removesuffix(f'_{kind}')}_packed_{kind}"


def _extract_frozen(
    module: fx.GraphModule, packed: Sequence[fx.Node]
) -> tuple[fx.GraphModule, list[fx.Node]]:
    """The graph that computes packed weights from parameters, and the parameters."""
    needed: set[fx.Node] = set()
    stack = list(packed)
    while stack:
        node = stack.pop()
        if node not in needed:
            needed.add(node)
            stack += node.all_input_nodes
    graph = fx.Graph()
    value_of: dict[fx.Node, fx.Node] = {}
    ordered = [node for node in module.graph.nodes if node in needed]
    for node in sorted(ordered, key=lambda node: node.op != "placeholder"):
        value_of[node] = graph.node_copy(node, lambda n: value_of[n])
    graph.output(tuple(value_of[node] for node in packed))
    inner = fx.GraphModule(module, graph, class_name="Region")
    return inner, [node for node in ordered if node.op == "placeholder"]
