"""Float32 convolutions of training graphs on the CPU: ours or torch's, the faster by measurement.

In: a functional training graph, whose images are channels-last (`conv_training.py`). Out: the same, with

    convolution(x, w, …)            →   fulgurite::conv2d, or conv_transpose2d if it is transposed
    convolution_backward(…)[0]      →   the other one, where only the gradient of the input is wanted

where our kernel is faster on this machine (`measured.py`). Nothing is replaced without autotuning.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from fulgurite.kernels.conv import cpu, dense
from fulgurite.native import find_compiler
from fulgurite.trace import Trace
from fulgurite.trace.node_meta import fake_value
from fulgurite.transforms.library_calls import read_geometry
from fulgurite.transforms.measured import Comparison, is_ours_faster, is_plain, layout_of

aten = torch.ops.aten


def has_convolutions(trace: Trace) -> bool:
    """Whether the step applies: a training graph with float32 convolutions of images on the CPU."""
    if trace.kind == "inference" or find_compiler() is None:
        return False
    return any(_match(node) is not None for node in trace.graph.nodes)


def use_own_convolutions(trace: Trace) -> Trace:
    """Replace the convolutions and gradients of inputs for which our kernel is faster."""

    def change(graph: fx.Graph) -> None:
        for node in list(graph.nodes):
            found = _match(node)
            if found is None or not is_ours_faster(_compare(node, found)):
                continue
            target, args = found
            result = node
            if node.target is aten.convolution_backward.default:
                (result,) = node.users
            result.target, result.args = target, args
            if result is not node:
                graph.erase_node(node)

    return trace.edit(change)


_Call = tuple[Any, tuple[Any, ...]]  # an operator of ours with its arguments


def _match(node: fx.Node) -> _Call | None:
    """The call of our operator that computes a node, or the one result of a gradient."""
    if node.op != "call_function":
        return None
    if node.target is aten.convolution.default:
        call, result = _match_forward(node), node
    elif node.target is aten.convolution_backward.default:
        call, result = _match_backward(node), next(iter(node.users), node)
    else:
        return None
    if call is None or not all(is_plain(x) for x in call[1][:3] if isinstance(x, fx.Node)):
        return None
    value, predicted = fake_value(result), _predict_shape(call)
    is_same = tuple(value.shape) == predicted
    return call if is_same and value.stride() == cpu.channels_last_strides(predicted) else None


def _match_forward(node: fx.Node) -> _Call | None:
    x, weight, bias, stride, padding, dilation, transposed, _, groups = node.args
    if fake_value(x).dim() != 4:  # type: ignore[arg-type]
        return None
    size = list(fake_value(node).shape[2:])
    return _make_call(transposed, (x, weight, bias), (stride, padding, dilation), groups, size)


def _match_backward(node: fx.Node) -> _Call | None:
    gradient, x, weight, _, stride, padding, dilation, transposed, _, groups, mask = node.args
    users = list(node.users)
    is_item = len(users) == 1 and users[0].target is operator.getitem and users[0].args[1] == 0
    if list(mask) != [True, False, False] or not is_item:  # type: ignore[arg-type]
        return None
    if fake_value(x).dim() != 4:  # type: ignore[arg-type]
        return None
    operands = (gradient, weight, None)
    size = list(fake_value(x).shape[2:])  # type: ignore[arg-type]
    return _make_call(not transposed, operands, (stride, padding, dilation), groups, size)


def _make_call(
    transposed: Any, operands: tuple[Any, ...], geometry: Any, groups: Any, size: list[Any]
) -> _Call | None:
    stride, padding, dilation = read_geometry(geometry, 2)
    if not transposed:
        return dense.conv2d.overload, (*operands, stride, padding, dilation, groups)
    if any(s > 1 and d > 1 for s, d in zip(stride, dilation, strict=True)):
        return None
    return dense.conv_transpose2d.overload, (*operands, size, stride, padding, dilation, groups)


def _predict_shape(call: _Call) -> tuple[int, ...]:
    """The sizes that our operator returns."""
    op, (x, weight, _, *rest) = call
    filters = fake_value(weight).shape
    if op is dense.conv2d.overload:
        p = cpu.ConvParameters((filters[0], *filters[2:]), *rest)
        return tuple(p.output_shape(fake_value(x)))
    return (fake_value(x).shape[0], filters[1] * rest[-1], *rest[0])


def _compare(node: fx.Node, call: _Call) -> Comparison:
    op, (x, weight, bias, *rest) = call
    ours = cpu.conv2d if op is dense.conv2d.overload else cpu.conv_transpose2d
    if node.target is aten.convolution.default:
        constants = node.args[3:]

        def run_torch(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return torch.convolution(x, weight, bias, *constants)  # type: ignore[arg-type]

        image = None
    else:
        constants, image = node.args[3:], node.args[1]

        def run_torch(gradient: Tensor, weight: Tensor, _: None, x: Tensor) -> Tensor:  # type: ignore[misc]
            return aten.convolution_backward(gradient, x, weight, *constants)[0]

    def run_ours(x: Tensor, weight: Tensor, bias: Tensor | None, *_: Tensor) -> Any:
        return ours(x, weight, bias, *rest)

    operands = [layout_of(n) for n in (x, weight, bias)]
    operands += [layout_of(image)] if image is not None else []
    kind = f"{op._schema.name} of {node.target._schema.name}"  # type: ignore[union-attr]
    return Comparison(kind, tuple(operands), tuple(constants), run_torch, run_ours)
