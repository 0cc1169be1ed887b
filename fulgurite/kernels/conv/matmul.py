"""The operator of float32 matmuls whose operands change with each call: `b` is packed at each of them.

    matmul   a @ b + bias

`transforms/matmuls.py` puts it into training graphs where it is faster than torch's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fulgurite.kernels import registry
from fulgurite.kernels.conv import cpu
from fulgurite.op import op

KERNELS: dict[str, registry.Kernel] = {"cpu": cpu.matmul}


@op("fulgurite::matmul")
def matmul(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    """a [M, K] @ b [K, N] + bias [N]."""
    out: Tensor = registry.dispatch(KERNELS, a.device, reference, a, b, bias)
    return out


@matmul.fake
def _(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[1]))


def reference(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    return torch.mm(a, b) if bias is None else torch.addmm(bias, a, b)
