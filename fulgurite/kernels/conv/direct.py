"""The operators of this folder without torch's dispatcher: what final traces call.

In and out: as the operators of `ops.py`, `gradients.py`, `dense.py` and `matmul.py`. Plain tensors go straight to the C++ kernel;
FakeTensors, other subclasses, and what no kernel supports, to the operator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from fulgurite.kernels.conv import cpu, dense, gradients, ops
from fulgurite.kernels.conv.matmul import matmul as matmul_op

PLAIN = (Tensor, nn.Parameter)


def _skip_dispatcher(
    kernel: Callable[..., Any], operator: Callable[..., Any]
) -> Callable[..., Tensor]:
    def call(x: Tensor, *arguments: Any) -> Tensor:
        result: Any = kernel(x, *arguments) if type(x) in PLAIN else NotImplemented
        out: Tensor = operator(x, *arguments) if result is NotImplemented else result
        return out

    call.__name__ = kernel.__name__
    return call


packed_conv = _skip_dispatcher(cpu.packed_conv, ops.packed_conv)
packed_linear = _skip_dispatcher(cpu.packed_linear, ops.packed_linear)
packed_conv_transpose = _skip_dispatcher(cpu.packed_conv_transpose, gradients.packed_conv_transpose)
conv_weight_gradient = _skip_dispatcher(cpu.conv_weight_gradient, gradients.conv_weight_gradient)
conv2d = _skip_dispatcher(cpu.conv2d, dense.conv2d)
conv_transpose2d = _skip_dispatcher(cpu.conv_transpose2d, dense.conv_transpose2d)
matmul = _skip_dispatcher(cpu.matmul, matmul_op)
