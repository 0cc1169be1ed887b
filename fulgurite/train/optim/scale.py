"""Scale many tensors by one factor that is on the device: one kernel for each device and dtype.

`torch._foreach_mul_` takes one kernel a tensor if the factor is a float32 tensor and the others are
bfloat16, and a factor in bfloat16 has 8 bits. GradScaler's operator multiplies in float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


@torch.no_grad()
def scale_tensors(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply in place by a scalar in float32. The product is rounded once; nothing waits."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    for (device, dtype), group in groups.items():
        local = factor.to(device, torch.float32, non_blocking=True)
        if dtype == torch.float64:
            torch._foreach_mul_(group, local.double())
        else:
            found_inf = torch.zeros(1, device=device)  # nobody reads it: the norm tells
            torch._amp_foreach_non_finite_check_and_unscale_(group, found_inf, local)
