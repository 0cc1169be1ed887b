"""The norm of vectors as a sum of powers, also along negative dimensions.

In: the arguments of `aten.linalg_vector_norm`. Out: the norm. Before torch 2.13, torch's decomposition
keeps dimensions of size 1 that are given as negative numbers. It is the op's FakeTensor rule, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import canonicalize_dims
from torch._refs.linalg import vector_norm as torch_vector_norm

aten = torch.ops.aten


def vector_norm(
    self: Tensor,
    ord: float = 2,
    dim: Sequence[int] | int | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    dims = None if dim is None else [dim] if isinstance(dim, int) else list(dim)
    if dims is not None:
        dims = list(canonicalize_dims(self.dim(), dims))
    return torch_vector_norm(self, ord, dims, keepdim, dtype=dtype)  # type: ignore[no-any-return]


DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {aten.linalg_vector_norm.default: vector_norm}
