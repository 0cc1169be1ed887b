"""`bincount` as an indexed sum whose size is read from data.

In: ATen's `bincount`, where TorchDynamo captures it (`fullgraph=True`, `fuse`). Out: a decomposition for
AOTAutograd's tracing: a maximum, one number that the host reads, and a `scatter_add`. All but the read
are ops that can be fused with their neighbours.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

aten = torch.ops.aten
ERROR = "bincount only supports 1-d non-negative integral inputs."  # as torch's kernel says it


def decompose_bincount(x: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Any:
    if not _is_accepted(x, weights, minlength):
        return NotImplemented  # the op stays whole, and torch raises its error
    positions = x.to(torch.int64)
    aten._assert_async.msg((positions >= 0).all(), ERROR)
    # one more element: an empty tensor has no maximum
    bounded = torch.cat([positions, positions.new_full((1,), minlength - 1)])
    size = aten._local_scalar_dense(bounded.amax() + 1)
    torch._check(size >= minlength)
    if weights is None:
        return positions.new_zeros(size).scatter_add(0, positions, torch.ones_like(positions))
    dtype = torch.float32 if weights.dtype == torch.float32 else torch.float64
    values = weights.to(dtype)
    return values.new_zeros(size).scatter_add(0, positions, values)


def _is_accepted(x: Tensor, weights: Tensor | None, minlength: int) -> bool:
    is_vector = x.dim() == 1 and not (x.is_floating_point() or x.is_complex())
    if not is_vector or x.dtype == torch.bool or minlength < 0:
        return False
    if weights is None:
        return True
    return weights.dim() == 1 and statically_known_true(weights.shape[0] == x.shape[0])


BINCOUNT_DECOMPOSITIONS = {aten.bincount.default: decompose_bincount}
