"""`torch.isin` as comparisons, or for many integers as a sort and a search.

In: the arguments of `aten.isin`. Out: its result; NotImplementedError for floats that torch's decomposition
would sort: its binary search steps over NaN and misses the largest numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._decomp import decompositions

aten = torch.ops.aten
MAX_COMPARED = 10  # test elements: torch's decomposition never sorts fewer


def isin(elements: Any, test_elements: Any, **options: bool) -> Tensor:
    tensors = [x for x in (elements, test_elements) if isinstance(x, Tensor)]
    is_float = any(x.is_floating_point() for x in tensors)
    if is_float and isinstance(test_elements, Tensor) and not _has_few(test_elements):
        raise NotImplementedError("floats with NaN can't be searched for in sorted order")
    return decompositions.isin(elements, test_elements, **options)  # type: ignore[no-any-return]


def _has_few(tensor: Tensor) -> bool:
    count = tensor.numel()
    return isinstance(count, int) and count < MAX_COMPARED


DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    aten.isin.Tensor_Tensor: isin,
    aten.isin.Tensor_Scalar: isin,
    aten.isin.Scalar_Tensor: isin,
}
