"""Multi-stream overlap: two independent calls at the same time on a GPU.

In: two functions. Out: both results, as if the calls had run one after the other.

The second call runs on a side stream that forks from the current stream and joins it again, so a
CUDA graph captures both as branches. Tensors need no `record_stream`: each stream has its own side
stream, and work queued on the side stream waits for everything queued on the current stream before
it.

Calls overlap only without gradients (autograd would need to know the streams) and outside of
TorchDynamo captures, which see one stream.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fulgurite.determinism import is_deterministic

Thunk = Callable[[], Tensor]
_side_streams: dict[tuple[int | None, int], torch.cuda.Stream] = {}


def can_overlap(x: Tensor) -> bool:
    """Whether calls on x may run on two streams; in deterministic mode sums have one order, with
    gradients and without."""
    if x.device.type != "cuda" or torch.is_grad_enabled() or is_deterministic():
        return False
    return not torch.compiler.is_compiling()


def run_overlapped(first: Thunk, second: Thunk, device: torch.device) -> tuple[Tensor, Tensor]:
    """(first(), second()), the second on a side stream; only where `can_overlap`."""
    current = torch.cuda.current_stream(device)
    key = device.index, current.cuda_stream
    side = _side_streams.get(key)
    if side is None:
        side = _side_streams[key] = torch.cuda.Stream(device)
    side.wait_stream(current)
    first_result = first()
    with torch.cuda.stream(side):
        second_result = second()
    current.wait_stream(side)
    return first_result, second_result
