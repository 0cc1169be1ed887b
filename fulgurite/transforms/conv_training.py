"""Convolutions of training graphs on the CPU: channels-last tensors, and weight gradients of our own.

In: the joint graph of forward and backward, before it is split. Out: the same graph, where 2-d convolutions and
their gradients read and return channels-last tensors. torch's kernels take them without reordering, and so do the
ops between (`layouts.py`). Results of the graph, gradients of parameters included, have the strides of eager mode.

    grad_x, grad_w, grad_b = convolution_backward(grad, x, w, …)
    →   grad_x, _, _ = convolution_backward(grad, x, w, …, [True, False, False])
        grad_w = fulgurite::conv_weight_gradient(grad, x, …)
        grad_b = grad.sum([0, 2, 3])

Left as they are: other dtypes than float32, transposed and 3-d convolutions, symbolic sizes.
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
MIN_DEPTHWISE_TAPS = 16  # of a depthwise filter: torch's kernels are as fast for fewer (3 x 3)


def use_channels_last(joint: fx.GraphModule) -> None:
    """Let 2-d convolutions of a joint graph run on channels-last tensors."""
    if not any(map(_is_image_convolution, joint.graph.nodes)):
        return
    module = copy_module(joint)
    before = {node: fake_value(node) for node in module.graph.nodes if has_fake_value(node)}
    converted: dict[fx.Node, fx.Node] = {}
    for node in list(module.graph.nodes):
        if not _is_image_convolution(node):
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


def _is_image_convolution(node: fx.Node) -> bool:
    """Whether the node is a 2-d convolution of float32 images on the CPU, or the gradient of one."""
    if node.op != "call_function":
        return False
    if node.target is aten.convolution.default:
        x, weight, transposed = node.args[0], node.args[1], node.args[6]
    elif node.target is aten.convolution_backward.default:
        x, weight, transposed = node.args[1], node.args[2], node.args[7]
    else:
        return False
    return not transposed and all(map(_is_image, (x, weight)))


def _is_image(node: Any) -> bool:
    value = fake_value(node) if isinstance(node, fx.Node) else None
    if not isinstance(value, Tensor) or value.dtype != torch.float32 or value.dim() != 4:
        return False
    sizes = all(isinstance(size, int) and size > 0 for size in value.shape)
    return sizes and value.device.type == "cpu" and value.layout == torch.strided


def _convert(source: fx.Node, reader: fx.Node) -> fx.Node:
    """A channels-last copy of a tensor, before the first convolution that reads it.

    Not after the tensor: partitioners take what is between nodes of forward for a part of it, and the
    placeholders of tangents are before all of them.
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
    gradient, x, weight, _, stride, padding, dilation, _, _, groups, mask = node.args
    filters, channels = fake_value(weight).shape, fake_value(x).shape[1]  # type: ignore[arg-type]
    taps = filters[2] * filters[3]
    is_depthwise = packing.is_depthwise(filters[0], channels, groups)  # type: ignore[arg-type]
    is_ours = groups == 1 or (is_depthwise and taps >= MIN_DEPTHWISE_TAPS)
    if not is_ours or not mask[1]:  # type: ignore[index]
        return
    geometry = read_geometry((stride, padding, dilation), 2)
    arguments = (gradient, x, list(filters[2:]), *geometry, groups)
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
