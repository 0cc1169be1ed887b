"""Scale many tensors by one factor that is on the device, in float32; the product is rounded once.

`torch._foreach_mul_` would round the factor to the tensors' dtype: to 8 bits for bfloat16. GradScaler's
operator does not, with one kernel for many tensors; on GPUs it has no bfloat16, which a kernel of ours
takes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fulgurite.kernels.optimizer.triton_scale import scale_in_place


@torch.no_grad()
def scale_tensors(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply in place by a scalar in float32. Nothing waits for the device."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    for (device, dtype), group in groups.items():
        local = factor.to(device, torch.float32, non_blocking=True)
        if dtype == torch.float64:
            torch._foreach_mul_(group, local.double())
        elif dtype == torch.bfloat16 and device.type == "cuda":
            _scale_bfloat16(group, local)
        else:
            found_inf = torch.zeros(1, device=device)  # nobody reads it: the norm tells
            torch._amp_foreach_non_finite_check_and_unscale_(group, found_inf, local)


def _scale_bfloat16(tensors: Sequence[Tensor], factor: Tensor) -> None:
    scale_in_place([x for x in tensors if x.is_contiguous()], factor)
    for tensor in tensors:
        if not tensor.is_contiguous():
            tensor.copy_(tensor.float() * factor)
