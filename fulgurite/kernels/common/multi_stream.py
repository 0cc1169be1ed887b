"""Two calls that don't need each other, at the same time on a GPU.

In: two functions. Out: the results of both, as if one had run after the other.

The second runs on a side stream that forks off the current one and joins it again, so a CUDA graph
records both as branches. Its memory is safe without marking: each stream has a side stream of its own,
and whatever the side stream does next waits for all that the current one was told before.

Only where it can help and does no harm: without gradients (autograd would have to know of the streams),
and outside of captures by TorchDynamo, which see one stream.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Call = Callable[[], Tensor]
_sides: dict[tuple[int | None, int], torch.cuda.Stream] = {}


def forks(x: Tensor) -> bool:
    """Whether calls on x run beside each other."""
    if x.device.type != "cuda" or torch.is_grad_enabled():
        return False
    return not torch.compiler.is_compiling()


def beside(first: Call, second: Call, device: torch.device) -> tuple[Tensor, Tensor]:
    """(first(), second()) on a GPU where `forks` says so, the second on a side stream."""
    current = torch.cuda.current_stream(device)
    key = device.index, current.cuda_stream
    side = _sides.get(key)
    if side is None:
        side = _sides[key] = torch.cuda.Stream(device)
    side.wait_stream(current)
    here = first()
    with torch.cuda.stream(side):
        there = second()
    current.wait_stream(side)
    return here, there
