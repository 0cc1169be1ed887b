"""Convolutions and linears with packed weights, and gradients of convolutions, as instructions.

In: a call of one of `PACKED_OPS` in a final trace. Out: a check of the input's layout, an
allocation, and a call of the C++ kernel (`kernels/conv/cpu.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import fx

from fulgurite.config import read_env
from fulgurite.device import num_cpu_threads
from fulgurite.host.expression import Unsupported
from fulgurite.host.words import Argument, Op, StepWriter
from fulgurite.kernels.conv import cpu, dense, gradients, ops
from fulgurite.kernels.conv.cpu import ConvParameters
from fulgurite.kernels.conv.matmul import matmul
from fulgurite.trace.node_meta import fake_value

PACKED_OPS = (
    ops.packed_conv.overload,
    ops.packed_linear.overload,
    gradients.packed_conv_transpose.overload,
    gradients.conv_weight_gradient.overload,
    dense.conv2d.overload,
    dense.conv_transpose2d.overload,
    matmul.overload,
)


class _Lowering(Protocol):
    """What a packed call needs of the lowering of its trace."""

    def _slot(self, node: Any) -> int: ...
    def _operands(self, values: Sequence[Any], writer: StepWriter) -> list[int]: ...
    def _write_allocation(self, result: torch.Tensor, slot: int, writer: StepWriter) -> None: ...


def write_packed_call(
    lowering: _Lowering,
    op: Any,
    arguments: Sequence[Any],
    out: tuple[fx.Node, int],
    writer: StepWriter,
) -> Callable[..., None]:
    """Write the instructions; returns what raises the kernel's error.

    arguments   of the op, in the order of its schema
    out         the node, and the slot of its value
    """
    if op is matmul.overload:
        return _write_matmul(lowering, arguments, out, writer)
    result, slot = fake_value(out[0]), out[1]
    call = _plan_call(op, arguments)
    for node in filter(None, call.checked):
        _check_layout(lowering, node, fake_value(node), writer)
    residual = call.operands[3]
    if residual is not None and fake_value(residual).stride() != result.stride():
        raise Unsupported("a residual with another layout")
    lowering._write_allocation(result, slot, writer)
    words = [*_addresses(lowering, call.operands), Argument.ADDRESS, slot, 0]
    return _write_run(lowering, call, words, writer)


@dataclass(frozen=True)
class _Call:
    """A kernel's call.

    operands   x, weight, bias, residual
    checked    operands whose layout the numbers contain
    packing    the numbers of a weight's packing
    """

    name: str
    operands: tuple[fx.Node | None, ...]
    checked: tuple[fx.Node | None, ...]
    numbers: Sequence[Any]
    packing: Sequence[Any] = ()


def _plan_call(op: Any, arguments: Sequence[Any]) -> _Call:
    if op is gradients.conv_weight_gradient.overload:
        return _plan_weight_gradient(*arguments)
    if op in (dense.conv2d.overload, dense.conv_transpose2d.overload):
        return _plan_dense(op, *arguments)
    x, weight, bias, residual, *rest = arguments
    value = fake_value(x)
    if op is ops.packed_linear.overload:
        name, numbers = cpu.CONV, cpu.linear_numbers(value, *rest)
    elif op is ops.packed_conv.overload:
        p = ConvParameters(*rest)
        name, numbers = cpu.kernel_name(value.shape[1], p), cpu.conv_numbers(value, p)
    else:
        name, numbers = cpu.TRANSPOSE, cpu.conv_numbers(value, ConvParameters(*rest[1:]), rest[0])
    return _Call(name, (x, weight, bias, residual), (x, residual), numbers)


def _plan_weight_gradient(gradient: fx.Node, x: fx.Node, kernel: Any, *geometry: Any) -> _Call:
    value = fake_value(gradient)
    if value.stride() != cpu.channels_last_strides(value.shape):
        raise Unsupported("a gradient in another layout")
    p = ConvParameters((value.shape[1], *kernel), *geometry)
    numbers = cpu.weight_gradient_numbers(value, fake_value(x), p)
    name = cpu.weight_gradient_kernel(p.groups)
    return _Call(name, (x, gradient, None, None), (x, gradient), numbers)


def _plan_dense(op: Any, x: fx.Node, weight: fx.Node, bias: Any, *rest: Any) -> _Call:
    if bias is not None and fake_value(bias).stride() != (1,):
        raise Unsupported("a bias that is not contiguous")
    image, filters = fake_value(x), fake_value(weight)
    if op is dense.conv2d.overload:
        p = ConvParameters((filters.shape[0], *filters.shape[2:]), *rest)
        call = cpu.dense_conv_call(image, filters, p)
    else:
        size, *geometry = rest
        p = ConvParameters((filters.shape[1] * geometry[-1], *filters.shape[2:]), *geometry)
        call = cpu.dense_transpose_call(image, filters, size, p)
    operands = (x, weight, bias, None)
    return _Call(call.name, operands, operands, call.numbers, call.packing)


def _addresses(lowering: _Lowering, nodes: Sequence[fx.Node | None]) -> list[int]:
    words: list[int] = []
    for node in nodes:
        words += (
            [Argument.VALUE, 0, 0] if node is None else [Argument.ADDRESS, lowering._slot(node), 0]
        )
    return words


def _write_matmul(
    lowering: _Lowering, arguments: Sequence[Any], out: tuple[fx.Node, int], writer: StepWriter
) -> Callable[..., None]:
    a, b, bias = arguments
    for node in arguments:
        if node is not None:
            _check_layout(lowering, node, fake_value(node), writer)
    if bias is not None and not fake_value(bias).is_contiguous():
        raise Unsupported("a bias that is not contiguous")
    lowering._write_allocation(fake_value(out[0]), out[1], writer)
    words = [*_addresses(lowering, (a, b, bias)), Argument.ADDRESS, out[1], 0]
    numbers = cpu.matmul_numbers(fake_value(a), fake_value(b))
    call = _Call(cpu.MATMUL, (a, b, bias), (a, b, bias), numbers)
    return _write_run(lowering, call, words, writer)


def _write_run(
    lowering: _Lowering, call: _Call, words: list[int], writer: StepWriter
) -> Callable[..., None]:
    """Write the call of a kernel with addresses, numbers and threads; returns what raises its error."""
    for operand in lowering._operands(call.numbers, writer):
        words += [Argument.VALUE, operand, 0]
    words += _threads()
    for operand in lowering._operands(call.packing, writer):
        words += [Argument.VALUE, operand, 0]
    kernel = cpu.load_kernel(call.name)
    writer.program.add_object(kernel)  # keeps its library loaded
    writer.add(Op.RUN, [kernel.address, 0, len(words) // 3, *words])

    def raise_error(status: int, *_: Any) -> None:
        raise kernel.make_error(status)

    return raise_error


def _check_layout(
    lowering: _Lowering, node: fx.Node, value: torch.Tensor, writer: StepWriter
) -> None:
    layout = lowering._operands([*value.stride(), *value.shape], writer)
    writer.add(Op.CHECK, [lowering._slot(node), value.dim(), 1, *layout])


def _threads() -> list[int]:
    if read_env("FULGURITE_NUM_THREADS") is None:
        return [Argument.THREADS, 0, 0]
    return [Argument.VALUE, num_cpu_threads() << 1, 0]
