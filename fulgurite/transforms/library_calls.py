"""Which convolutions and linears on the CPU become calls with packed weights, and with which epilogue.

In: a node of a functional graph. Out: a `LibraryCall`: the product, with the scale and shift of a batch
norm, the residual and the activation that become part of the kernel.

Left to torch: other dtypes than float32, 3-d convolutions, groups of few channels, transposed convolutions with
stride and dilation or of symbolic sizes, small weights, and weights that are computed from inputs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from fulgurite.kernels.conv import packing
from fulgurite.kernels.conv.activations import NONE
from fulgurite.trace.mutations import mutated_inputs
from fulgurite.trace.node_meta import fake_value, is_frozen_input
from fulgurite.trace.purity import is_pure

aten = torch.ops.aten
MIN_WEIGHT_SIZE = (
    1 << 12
)  # elements of a linear's weight: a smaller product costs less than its call
MIN_GROUP_CHANNELS = 16  # output channels of a group: fewer leave most of a vector empty
RESHAPES = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)


@dataclass(frozen=True)
class LibraryCall:
    """A convolution or linear, and what is fused with it.

    weight     [O, I / groups, ...] of a convolution; [I, O / groups, ...] of a transposed one; of a linear [I, O]
    geometry   stride, padding and dilation; empty: a linear
    size       of the images that a transposed convolution returns; empty: it is none
    last       the node whose value the call computes
    """

    node: fx.Node
    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    last: fx.Node
    groups: int = 1
    geometry: tuple[list[int], ...] = ()
    size: tuple[int, ...] = ()
    scale: fx.Node | None = None  # of output channels, before the bias
    residual: fx.Node | None = None
    activation: str = NONE
    parameters: tuple[float, ...] = ()


def match_library_call(node: fx.Node) -> LibraryCall | None:
    """The product of a frozen weight that a node computes; None: it stays with torch."""
    if node.op != "call_function":
        return None
    if node.target is aten.convolution.default:
        return _match_conv(node)
    if node.target in (aten.mm.default, aten.addmm.default):
        return _match_linear(node)
    return None


def _match_conv(node: fx.Node) -> LibraryCall | None:
    x, weight, bias, stride, padding, dilation, transposed, _, groups = node.args
    if not _is_float32(x) or not _is_frozen_weight(weight):
        return None
    if bias is not None and not (_is_float32(bias) and is_frozen(bias)):
        return None
    shape = fake_value(weight).shape  # type: ignore[arg-type]
    if len(shape) not in (3, 4) or fake_value(x).dim() != len(shape):  # type: ignore[arg-type]
        return None
    if not isinstance(groups, int) or shape.numel() == 0:
        return None
    geometry = read_geometry((stride, padding, dilation), len(shape) - 2)
    if not all(isinstance(n, int) for numbers in geometry for n in numbers):
        return None
    if transposed:
        size = tuple(fake_value(node).shape[2:])
        is_unsupported = any(s > 1 and d > 1 for s, d in zip(geometry[0], geometry[2], strict=True))
        if is_unsupported or (groups > 1 and shape[1] < MIN_GROUP_CHANNELS):
            return None
        if not all(isinstance(n, int) for n in size):
            return None
        return LibraryCall(node, x, weight, bias, node, groups, geometry, size)  # type: ignore[arg-type]
    is_depthwise = packing.is_depthwise(shape[0], shape[1] * groups, groups)
    if groups != 1 and not is_depthwise and shape[0] // groups < MIN_GROUP_CHANNELS:
        return None
    return LibraryCall(node, x, weight, bias, node, groups, geometry)  # type: ignore[arg-type]


def read_geometry(given: Any, dimensions: int) -> tuple[list[int], ...]:
    """Stride, padding and dilation, one number a dimension: `padding="valid"` is one for all."""
    return tuple([*numbers] * (dimensions if len(numbers) == 1 else 1) for numbers in given)


def _match_linear(node: fx.Node) -> LibraryCall | None:
    bias, x, weight = (None, *node.args) if node.target is aten.mm.default else node.args
    if node.kwargs or not _is_float32(x) or not _is_frozen_weight(weight):
        return None
    shape = fake_value(weight).shape  # type: ignore[arg-type]
    if shape.numel() < MIN_WEIGHT_SIZE:
        return None
    if bias is not None and not (_is_float32(bias) and is_frozen(bias)):
        return None
    if bias is not None and tuple(fake_value(bias).shape) != (shape[1],):  # type: ignore[arg-type]
        return None
    return LibraryCall(node, x, weight, bias, node)  # type: ignore[arg-type]


def _is_float32(node: Any) -> bool:
    value = fake_value(node) if isinstance(node, fx.Node) else None
    if not isinstance(value, Tensor) or value.dtype != torch.float32:
        return False
    return value.device.type == "cpu" and value.layout == torch.strided


def _is_frozen_weight(node: Any) -> bool:
    if not _is_float32(node) or not is_frozen(node):
        return False
    return all(isinstance(size, int) for size in fake_value(node).shape)


def is_frozen(node: Any) -> bool:
    """Whether a value depends on parameters and buffers alone, and the graph writes to none of them."""
    if not isinstance(node, fx.Node):
        return False
    if node.op == "placeholder":
        written = any(node in mutated_inputs(user) for user in node.users)
        return is_frozen_input(node) and not written
    if node.op != "call_function" or not is_pure(node) or not node.all_input_nodes:
        return False
    return all(map(is_frozen, node.all_input_nodes))


# ---- what becomes part of the call -----------------------------------------------------------------


def fuse_epilogue(call: LibraryCall) -> LibraryCall:
    """The call with batch norm, residual and activation."""
    if call.geometry:
        call = _fuse_residual(_fold_batch_norm(call))
    found = _find_activation(call.last)
    if found is None:
        return call
    node, name, parameters = found
    return replace(call, last=node, activation=name, parameters=parameters)


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _fold_batch_norm(call: LibraryCall) -> LibraryCall:
    """Scale and shift the output channels as a batch norm in evaluation mode that alone reads the call.

    The nodes that compute scale and shift depend on parameters only, so they run once. The filters are
    not multiplied by the scale: their rounding would be the same in every pixel.
    """
    norm = _only_user(call.last)
    if norm is None or norm.target is not aten._native_batch_norm_legit_no_training.default:
        return call
    x, weight, bias, mean, variance, _, eps = norm.args
    given = [node for node in (weight, bias, mean, variance) if node is not None]
    if x is not call.last or not all(_is_float32(node) and is_frozen(node) for node in given):
        return call
    first = [user for user in norm.users if user.args[1:] == (0,)]
    if len(first) != 1 or any(user.users for user in norm.users if user is not first[0]):
        return call
    graph = norm.graph

    def add(target: Any, *args: Any) -> fx.Node:
        return graph.call_function(target, args)

    def widen(node: Any) -> fx.Node:
        return graph.call_function(aten._to_copy.default, (node,), {"dtype": torch.float64})

    with graph.inserting_before(norm):
        mean, variance = (
            widen(mean),
            widen(variance),
        )  # all that follows is rounded once, at the end
        scale = add(aten.rsqrt.default, add(aten.add.Tensor, variance, eps))
        scale = scale if weight is None else add(aten.mul.Tensor, scale, weight)
        shift: Any = mean if call.bias is None else add(aten.sub.Tensor, mean, call.bias)
        shift = add(aten.neg.default, add(aten.mul.Tensor, shift, scale))
        shift = shift if bias is None else add(aten.add.Tensor, shift, bias)
    return replace(call, scale=scale, bias=shift, last=first[0])


def _fuse_residual(call: LibraryCall) -> LibraryCall:
    """Add a tensor of the same shape to a convolution that nothing else reads."""
    user = _only_user(call.last)
    if user is None or user.target is not aten.add.Tensor or user.kwargs or len(user.args) != 2:
        return call
    others = [argument for argument in user.args if argument is not call.last]
    if len(others) != 1 or not _is_float32(others[0]):
        return call
    other: fx.Node = others[0]  # type: ignore[assignment]
    shapes = {str(tuple(fake_value(node).shape)) for node in (other, call.last, user)}
    is_image = fake_value(user).dim() == 4
    return replace(call, residual=other, last=user) if is_image and len(shapes) == 1 else call


def _find_activation(node: fx.Node) -> tuple[fx.Node, str, tuple[float, ...]] | None:
    """The activation that alone reads a value, also through a reshape of a linear's rows."""
    user = _only_user(node)
    if user is not None and user.target in RESHAPES:
        user = _only_user(user)
    if user is None:
        return None
    found = match_activation(user)
    return None if found is None else (user, *found)


def match_activation(node: fx.Node) -> tuple[str, tuple[float, ...]] | None:
    """Name and parameters of an activation of `kernels/conv/activations.py`; None: it is none."""
    args, target = node.args[1:], node.target
    if target in PLAIN_ACTIVATIONS and not args and not node.kwargs:
        return PLAIN_ACTIVATIONS[target], ()
    if target is aten.gelu.default and not args:
        approximate = node.kwargs.get("approximate", "none")
        return ("gelu" if approximate == "none" else "gelu_tanh"), ()
    if node.kwargs or not all(isinstance(n, int | float) for n in args):
        return None
    numbers = tuple(float(n) for n in args)  # type: ignore[arg-type]
    if target is aten.hardtanh.default:
        return "clamp", (*numbers, *(-1.0, 1.0)[len(numbers) :])
    if target is aten.clamp.default and len(numbers) == 2:
        return "clamp", numbers
    if target is aten.leaky_relu.default:
        return "leaky_relu", numbers or (0.01,)
    if target is aten.elu.default and len(numbers) <= 1:
        return "elu", numbers or (1.0,)
    return None


PLAIN_ACTIVATIONS: dict[Any, str] = {
    aten.relu.default: "relu",
    aten.silu.default: "silu",
    aten.sigmoid.default: "sigmoid",
    aten.tanh.default: "tanh",
    aten.hardswish.default: "hardswish",
    aten.hardsigmoid.default: "hardsigmoid",
}
