"""Ops whose results have other strides or another dtype than torch's rules for traced ops predict.

In: the FakeTensor rules and decompositions of these ops. Out: the same, with the strides and dtypes of torch's
kernels. A wrong rule is visible: `F.batch_norm(x.transpose(1, 2), ...).view(-1)` runs in eager mode, where the
result is contiguous. The rule keeps the strides of its input, and so TorchDynamo refused the view.

`tests/suites/test_fake_rules.py` compares the rules with the kernels for the operator database.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._decomp import decomposition_table
from torch._meta_registrations import device_hint
from torch._ops import OpOverload
from torch._prims_common import (
    compute_elementwise_output_logical_to_physical_perm,
    elementwise_dtypes,
    invert_perm,
    is_contiguous_or_false,
    suggest_memory_format,
)
from torch._subclasses.fake_impls import register_op_impl

aten = torch.ops.aten
Rule = Callable[..., Any]
Order = list[int]  # the dimensions of a dense tensor, from the largest stride to the smallest
LAST_CHANNEL = {torch.channels_last: [0, 2, 3, 1], torch.channels_last_3d: [0, 2, 3, 4, 1]}


def install() -> None:
    """Correct the rules of all these ops."""
    for op, find_order in ORDERS.items():
        _wrap(op, functools.partial(with_order, find_order))
    for other, wrapper in WRAPPERS.items():
        _wrap(other, wrapper)
    register_op_impl(aten._embedding_bag_backward.default)(_fake_bag_backward)
    key = DispatchKey.CompositeImplicitAutograd
    original = aten.one_hot.default.py_kernels.get(
        key, functools.partial(aten.one_hot.default._op_dk, key)
    )
    aten.one_hot.default.py_kernels[key] = lambda x, *args: original(x.contiguous(), *args)
    aten.one_hot.default._dispatch_cache.clear()


def _wrap(op: OpOverload, wrapper: Callable[[Rule], Rule]) -> None:
    """Replace an op's shape rule and its decomposition, where it has one."""
    if DispatchKey.Meta in op.py_kernels:
        op.py_kernels[DispatchKey.Meta] = wrapper(op.py_kernels[DispatchKey.Meta])
    if op in decomposition_table:
        decomposition_table[op] = wrapper(decomposition_table[op])
    op._dispatch_cache.clear()


# ---- strides ---------------------------------------------------------------------------------------


def with_order(find_order: Callable[..., Order | None], rule: Rule) -> Rule:
    """The rule of an op whose first result has its dimensions in the order that `find_order` gives."""

    def arranged(*args: Any, **kwargs: Any) -> Any:
        result = rule(*args, **kwargs)
        if isinstance(result, Tensor):
            return _arrange(result, find_order(*args))
        first, *others = result
        return _arrange(first, find_order(*args)), *others

    return arranged


def _arrange(x: Tensor, order: Order | None) -> Tensor:
    if order is None or len(order) != x.dim() or is_contiguous_or_false(x.permute(order)):
        return x
    return x.permute(order).contiguous().permute(invert_perm(order))


def _order_of_operands(*args: Any) -> Order:
    """The order of an elementwise op's result."""
    tensors = torch.broadcast_tensors(*(x for x in args if isinstance(x, Tensor)))
    return compute_elementwise_output_logical_to_physical_perm(*tensors)[0]


def _order_of_first(x: Tensor, *_: Any) -> Order:
    return _order_of_operands(x)


def _contiguous(x: Tensor, *_: Any) -> Order:
    return [*range(x.dim())]


def _contiguous_exponent(_: Any, exponent: Tensor) -> Order:
    return _contiguous(exponent)


def _order_of_scaled(x: Tensor, exponent: Tensor) -> Order:
    """`ldexp`: x · 2^exponent, whose power is contiguous if it is real."""
    return _order_of_operands(x, exponent if exponent.is_complex() else exponent.contiguous())


def _contiguous_images(x: Tensor, *_: Any) -> Order:
    """One number for each position of images [batch, channels, height, width]."""
    return [*range(x.dim() - 1)]


def _contiguous_if_complex(x: Tensor) -> Order:
    return _contiguous(x) if x.is_complex() else _order_of_operands(x)


def find_memory_format(x: Tensor, *_: Any) -> Order | None:
    """Channels last if the input is, else contiguous, as CPU kernels do. None for other devices."""
    if device_hint(x) != "cpu":
        return None
    return LAST_CHANNEL.get(suggest_memory_format(x), _contiguous(x))


def keep_memory_format(rule: Rule) -> Rule:
    """A rule of batch norm whose result is contiguous or channels-last, as on CPUs."""
    return with_order(find_memory_format, rule)


ORDERS: dict[OpOverload, Callable[..., Order | None]] = {
    aten.copysign.Tensor: _order_of_operands,
    aten.div.Tensor_mode: _order_of_operands,
    aten.floor_divide.default: _order_of_operands,
    aten.xlogy.Tensor: _order_of_operands,
    aten.heaviside.default: _order_of_operands,
    aten.pow.Scalar: _contiguous_exponent,
    aten.ldexp.Tensor: _order_of_scaled,
    aten.logaddexp.default: _order_of_operands,
    aten.logaddexp2.default: _order_of_operands,
    aten.logical_and.default: _order_of_operands,
    aten.logical_or.default: _order_of_operands,
    aten.logical_xor.default: _order_of_operands,
    aten.special_xlog1py.default: _order_of_operands,
    aten.binary_cross_entropy.default: _order_of_first,
    aten.nll_loss2d_forward.default: _contiguous_images,
    aten.angle.default: _contiguous_if_complex,
    aten.max_unpool2d.default: find_memory_format,
    aten.reflection_pad3d.default: find_memory_format,
    aten.replication_pad3d.default: find_memory_format,
    aten.channel_shuffle.default: find_memory_format,
}


# ---- dtypes and sizes ------------------------------------------------------------------------------


def _keep_dtype_of_input(rule: Rule) -> Rule:
    """A rule of a loss: `rule(..., reduction="none")` in the dtype of the input, then the reduction."""

    def loss(input: Tensor, target: Tensor, reduction: int = 1, *settings: Any) -> Tensor:
        if input.dtype == target.dtype:
            result: Tensor = rule(input, target, reduction, *settings)
            return result
        each = rule(input, target, 0, *settings).to(input.dtype)
        return (each, each.mean(), each.sum())[reduction]  # type: ignore[no-any-return]

    return loss


def _expand_first(rule: Rule) -> Rule:
    """`addr` promotes its first operand as the matrix that it is expanded to, not as a number."""

    def addr(self: Tensor, one: Tensor, two: Tensor, **factors: Any) -> Any:
        return rule(self.expand(one.shape[0], two.shape[0]), one, two, **factors)

    return addr


def _promote_blocks(rule: Rule) -> Rule:
    """`block_diag` promotes its operands as other ops do: a number doesn't change the dtype."""

    def block_diag(tensors: Sequence[Tensor]) -> Any:
        kind = torch._prims_common.ELEMENTWISE_TYPE_PROMOTION_KIND.DEFAULT
        dtype = elementwise_dtypes(*tensors, type_promotion_kind=kind)[1]
        return rule([x.to(dtype) for x in tensors])

    return block_diag


def _sum_like_float32(rule: Rule) -> Rule:
    """`_embedding_bag` in bfloat16 saves what it saves in float32, on CPUs."""

    def embedding_bag(weight: Tensor, *args: Any, **kwargs: Any) -> Any:
        if weight.dtype != torch.bfloat16 or device_hint(weight) != "cpu":
            return rule(weight, *args, **kwargs)
        output, *saved = rule(weight.float(), *args, **kwargs)
        return output.to(weight.dtype), *saved

    return embedding_bag


def _fake_bag_backward(
    mode: Any,
    op: OpOverload,
    grad: Tensor,
    indices: Tensor,
    offsets: Tensor,
    bags: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """The backward of `_embedding_bag` finds the bag of each index, if forward did not save it."""
    if bags.shape[0] == indices.shape[0]:
        return NotImplemented  # the usual rule
    with mode:
        return op(grad, indices, offsets, torch.empty_like(indices), *args, **kwargs)


WRAPPERS: dict[OpOverload, Callable[[Rule], Rule]] = {
    aten.huber_loss.default: _keep_dtype_of_input,
    aten.soft_margin_loss.default: _keep_dtype_of_input,
    aten.addr.default: _expand_first,
    aten.block_diag.default: _promote_blocks,
    aten._embedding_bag.default: _sum_like_float32,
}
