"""Convolutions of training graphs on the CPU: channels-last tensors, and weight gradients of our own.

In: the joint graph of forward and backward, before it is split. Out: the same graph, where 2-d convolutions and
their gradients read and return channels-last tensors. torch's kernels take them without reordering, and so do the
ops between (`layouts.py`). Results of the graph, gradients of parameters included, have the strides of eager mode.
A 1-d convolution is one of images of one row, and so is a batch norm beside it: torch's kernel would return a
contiguous tensor for three dimensions.

    grad_x, grad_w, grad_b = convolution_backward(grad, x, w, …)
    →   grad_x, _, _ = convolution_backward(grad, x, w, …, [True, False, False])
        grad_w = fulgurite::conv_weight_gradient(grad, x, …)
        grad_b = grad.sum([0, 2, 3])

Left as they are: other dtypes than float32, 3-d convolutions, symbolic sizes.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from fulgurite.kernels.conv import gradients, packing
from fulgurite.native import find_compiler
from fulgurite.trace.metadata import find_fake_mode, run_node, use_fake_mode
from fulgurite.trace.node_meta import (
    copy_location,
    fake_value,
    has_fake_value,
    is_in_backward,
    mark_in_backward,
    set_fake_value,
)
from fulgurite.trace.trace import copy_module
from fulgurite.transforms.layouts import CannotRelayout, update_layouts
from fulgurite.transforms.library_calls import read_geometry

aten = torch.ops.aten
# positions of the tensors, and of stride, padding, dilation and output padding with what one row has
TENSORS = {aten.convolution.default: (0, 1), aten.convolution_backward.default: (0, 1, 2)}
GEOMETRY = {
    aten.convolution.default: {3: 1, 4: 0, 5: 1, 7: 0},
    aten.convolution_backward.default: {4: 1, 5: 0, 6: 1, 8: 0},
}
NORM_TENSORS = {
    aten._native_batch_norm_legit_functional.default: (0,),
    aten.native_batch_norm_backward.default: (0, 1),
}


def use_channels_last(joint: fx.GraphModule) -> None:
    """Let 2-d convolutions of a joint graph run on channels-last tensors."""
    if not any(_is_convolution(node, 3) or _is_convolution(node, 4) for node in joint.graph.nodes):
        return
    module = copy_module(joint)
    before = {node: fake_value(node) for node in module.graph.nodes if has_fake_value(node)}
    images: dict[fx.Node, fx.Node] = {}
    for node in list(module.graph.nodes):
        if _is_convolution(node, 3):
            _make_2d(module, node, images, before)
    images = {}  # in the order of the graph: a norm may come before the convolutions that read its input
    for node in list(module.graph.nodes):
        if _is_norm_of_rows(node):
            _make_2d(module, node, images, before)
    converted: dict[fx.Node, fx.Node] = {}
    for node in list(module.graph.nodes):
        if not _is_convolution(node, 4):
            continue
        operands = (
            node.args[:2] if node.target is aten.convolution_backward.default else node.args[:1]
        )
        for source in operands:
            assert isinstance(source, fx.Node), "a convolution of tensors"
            if source not in converted:
                converted[source] = _convert(source, node)
                before[converted[source]] = fake_value(source)
            node.replace_input_with(source, converted[source])
        if node.target is aten.convolution_backward.default and find_compiler() is not None:
            _split_backward(module, node, before)
    try:
        update_layouts(module, before)
    except CannotRelayout:
        return
    for source, copy in converted.items():
        if fake_value(source).stride() == fake_value(copy).stride():
            copy.replace_all_uses_with(source)
            module.graph.erase_node(copy)
    joint.graph = module.graph
    joint.recompile()


def _is_convolution(node: fx.Node, dim: int) -> bool:
    """Whether the node is a convolution of float32 tensors of some dimensions on the CPU, or its gradient."""
    if node.op != "call_function" or node.target not in TENSORS:
        return False
    transposed = node.args[6 if node.target is aten.convolution.default else 7]
    if transposed and find_compiler() is None:  # torch's kernels gain nothing
        return False
    return all(_is_image(node.args[position], dim) for position in TENSORS[node.target])


def _is_norm_of_rows(node: fx.Node) -> bool:
    """Whether the node is a batch norm of what a 1-d convolution reads or returns as images, or its gradient."""
    if node.op != "call_function" or node.target not in NORM_TENSORS:
        return False
    tensors = [node.args[position] for position in NORM_TENSORS[node.target]]
    is_beside = any(getattr(tensor, "target", None) is aten.squeeze.dim for tensor in tensors)
    return is_beside and all(_is_image(tensor, 3) for tensor in tensors)


def _is_image(node: Any, dim: int) -> bool:
    value = fake_value(node) if isinstance(node, fx.Node) else None
    if not isinstance(value, Tensor) or value.dtype != torch.float32 or value.dim() != dim:
        return False
    sizes = all(isinstance(size, int) and size > 0 for size in value.shape)
    return sizes and value.device.type == "cpu" and value.layout == torch.strided


def _make_2d(
    module: fx.GraphModule,
    node: fx.Node,
    images: dict[fx.Node, fx.Node],
    before: dict[fx.Node, Any],
) -> None:
    """Replace a 1-d convolution, batch norm, or gradient of one by that of images of one row.

    images   the tensors that are images already
    """

    mode = find_fake_mode(module)

    def add(target: Any, *args: Any) -> fx.Node:
        new = node.graph.call_function(target, args)
        copy_location(node, new)
        if is_in_backward(node):
            mark_in_backward(new)
        inputs = {source: fake_value(source) for source in new.all_input_nodes}
        with use_fake_mode(mode):
            set_fake_value(new, run_node(module, new, inputs))
        before[new] = fake_value(new)
        return new

    def add_squeeze(image: fx.Node, old: fx.Node) -> None:
        before[image] = _as_image(fake_value(old), mode)
        row = add(aten.squeeze.dim, image, 2)
        before[row] = fake_value(old)
        set_fake_value(row, fake_value(old))  # until `update_layouts` computes it
        old.replace_all_uses_with(row)

    args = list(node.args)
    with node.graph.inserting_before(node):
        for position in (TENSORS | NORM_TENSORS)[node.target]:
            source: fx.Node = args[position]  # type: ignore[assignment]
            if source not in images:
                images[source] = add(aten.unsqueeze.default, source, 2)
            args[position] = images[source]
        for position, single in GEOMETRY.get(node.target, {}).items():
            args[position] = [single, *args[position]]  # type: ignore[misc]
        new = add(node.target, *args)
        if node.target is aten.convolution.default:
            add_squeeze(new, node)
        else:
            before[new] = tuple(_as_image(value, mode) for value in fake_value(node))
        for item in list(node.users):
            result = add(operator.getitem, new, item.args[1])
            if fake_value(item).dim() == 3:
                add_squeeze(result, item)
            else:
                item.replace_all_uses_with(result)
            node.graph.erase_node(item)
    node.graph.erase_node(node)


def _as_image(value: Any, mode: Any) -> Any:
    """The value of a 1-d convolution, or a gradient of it, as images of one row; a bias stays as it is."""
    if not isinstance(value, Tensor) or value.dim() != 3:
        return value
    with use_fake_mode(mode):
        return value.unsqueeze(2)


def _convert(source: fx.Node, reader: fx.Node) -> fx.Node:
    """A channels-last copy of a tensor, before the first node that reads it and in the same direction.

    torch's partitioner takes every node before the last one of forward for a node of forward.
    """
    arguments = {"memory_format": torch.channels_last}
    with source.graph.inserting_before(reader):
        copy = source.graph.call_function(aten.clone.default, (source,), arguments)
    set_fake_value(copy, aten.clone.default(fake_value(source), **arguments))
    copy.meta |= {k: v for k, v in source.meta.items() if k not in copy.meta and k != "desc"}
    if is_in_backward(reader):
        mark_in_backward(copy)
    return copy


def _split_backward(module: fx.GraphModule, node: fx.Node, before: dict[fx.Node, Any]) -> None:
    """Compute the gradients of weight and bias by ops of their own."""
    gradient, x, weight, _, stride, padding, dilation, transposed, _, groups, mask = node.args
    filters, channels = fake_value(weight).shape, fake_value(x).shape[1]  # type: ignore[arg-type]
    is_depthwise = packing.is_depthwise(filters[0], channels, groups) and filters[1] == 1  # type: ignore[arg-type]
    if not (groups == 1 or is_depthwise) or not mask[1]:  # type: ignore[index]
        return
    geometry = read_geometry((stride, padding, dilation), 2)
    # the gradient of a transposed convolution's weight is that of a convolution from its result to its input
    images = (x, gradient) if transposed else (gradient, x)
    arguments = (*images, list(filters[2:]), *geometry, groups)
    results: dict[int, tuple[Any, tuple[Any, ...]]] = {
        1: (gradients.conv_weight_gradient.overload, arguments)
    }
    if mask[2]:  # type: ignore[index]
        results[2] = (aten.sum.dim_IntList, (gradient, [0, 2, 3]))
    for item in list(node.users):
        assert item.target is operator.getitem, "convolution_backward returns a tuple"
        if item.args[1] not in results:
            continue
        target, args = results[item.args[1]]  # type: ignore[index]
        item.target, item.args = target, args
        inputs = {source: fake_value(source) for source in item.all_input_nodes}
        with use_fake_mode(find_fake_mode(module)):
            set_fake_value(item, run_node(module, item, inputs))
    node.args = (*node.args[:-1], [mask[0], False, False])  # type: ignore[index]
    value = fake_value(node)
    set_fake_value(node, (value[0], None, None))
    before[node] = fake_value(node)
    if not node.users:
        node.graph.erase_node(node)
