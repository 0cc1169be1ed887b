"""Convolutions and linears with packed weights, and gradients of convolutions, as instructions.

In: a call of one of `PACKED_OPS` in a final trace. Out: a check of the input's layout, an
allocation, and a call of the C++ kernel (`kernels/conv/cpu.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import fx

from fulgurite.config import read_env
from fulgurite.device import num_cpu_threads
from fulgurite.host.expression import Unsupported
from fulgurite.host.words import Argument, Op, StepWriter
from fulgurite.kernels.conv import cpu, gradients, ops
from fulgurite.kernels.conv.matmul import matmul
from fulgurite.trace.node_meta import fake_value

PACKED_OPS = (
    ops.packed_conv.overload,
    ops.packed_linear.overload,
    gradients.packed_conv_transpose.overload,
    gradients.conv_weight_gradient.overload,
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
    result, slot = fake_value(out[0]), out[1]
    if op is matmul.overload:
        return _write_matmul(lowering, arguments, out, writer)
    if op is gradients.conv_weight_gradient.overload:
        gradient, x, *rest = arguments
        weight, bias, residual = gradient, None, None
        value = fake_value(gradient)
        if value.stride() != cpu.channels_last_strides(value.shape):
            raise Unsupported("a gradient in another layout")
        assert result.is_contiguous(), "so says its fake rule"
        _check_layout(lowering, gradient, value, writer)
        name = cpu.WEIGHT_GRADIENT if rest[-1] == 1 else cpu.DEPTHWISE_WEIGHT_GRADIENT
        numbers = cpu.weight_gradient_numbers(value, fake_value(x), *rest[:-1])
    else:
        x, weight, bias, residual, *rest = arguments
        name, numbers = _find_kernel(op, fake_value(x), rest)
    _check_layout(lowering, x, fake_value(x), writer)
    if residual is not None:
        if fake_value(residual).stride() != result.stride():
            raise Unsupported("a residual with another layout")
        _check_layout(lowering, residual, result, writer)
    lowering._write_allocation(result, slot, writer)
    words: list[int] = []
    for node in (x, weight, bias, residual):
        words += (
            [Argument.VALUE, 0, 0] if node is None else [Argument.ADDRESS, lowering._slot(node), 0]
        )
    words += [Argument.ADDRESS, slot, 0]
    return _write_run(lowering, name, words, numbers, writer)


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
    words: list[int] = []
    for node in (a, b, bias):
        words += (
            [Argument.VALUE, 0, 0] if node is None else [Argument.ADDRESS, lowering._slot(node), 0]
        )
    words += [Argument.ADDRESS, out[1], 0]
    numbers = cpu.matmul_numbers(fake_value(a), fake_value(b))
    return _write_run(lowering, cpu.MATMUL, words, numbers, writer)


def _write_run(
    lowering: _Lowering,
    name: str,
    words: list[int],
    numbers: Sequence[Any],
    writer: StepWriter,
) -> Callable[..., None]:
    """Write the call of a kernel with addresses, numbers and threads; returns what raises its error."""
    for operand in lowering._operands(numbers, writer):
        words += [Argument.VALUE, operand, 0]
    words += _threads()
    kernel = cpu.load_kernel(name)
    writer.program.add_object(kernel)  # keeps its library loaded
    writer.add(Op.RUN, [kernel.address, 0, len(words) // 3, *words])

    def raise_error(status: int, *_: Any) -> None:
        raise kernel.make_error(status)

    return raise_error


def _find_kernel(op: Any, x: torch.Tensor, rest: Sequence[Any]) -> tuple[str, tuple[Any, ...]]:
    """The kernel of a packed call, and its numbers."""
    if op is ops.packed_conv.overload:
        return cpu.kernel_name(x.shape[1], rest[0], rest[4]), cpu.conv_numbers(x, *rest)
    if op is gradients.packed_conv_transpose.overload:
        return cpu.TRANSPOSE, cpu.transpose_numbers(x, *rest)
    return cpu.CONV, cpu.linear_numbers(x, *rest)


def _check_layout(
    lowering: _Lowering, node: fx.Node, value: torch.Tensor, writer: StepWriter
) -> None:
    layout = lowering._operands([*value.stride(), *value.shape], writer)
    writer.add(Op.CHECK, [lowering._slot(node), value.dim(), 1, *layout])


def _threads() -> list[int]:
    if read_env("FULGURITE_NUM_THREADS") is None:
        return [Argument.THREADS, 0, 0]
    return [Argument.VALUE, num_cpu_threads() << 1, 0]
