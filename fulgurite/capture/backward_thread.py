"""The thread that runs the backward pass of compiled graphs on a GPU.

In: the inputs of a training graph. Out: whether its backward pass should run in the calling thread.

torch runs the nodes of each GPU in a thread of that GPU, so that several GPUs are fed at the same time. The
calling thread waits for it. With one GPU there is nothing to gain, and a step pays for two thread switches.
If a process uses one GPU, a compiled training graph turns torch's device threads off in the thread that
calls it: `torch.autograd.set_multithreading_enabled(False)`. They stay off for that thread's backward passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fulgurite.config import read_env
from fulgurite.errors import ArgumentError

DEVICE, CALLER = "device", "caller"


def find_thread_setter(inputs: Sequence[Any]) -> Callable[[], None] | None:
    """What a training graph with these inputs calls before it runs; None: leave torch's setting."""
    choice = read_env("FULGURITE_BACKWARD_THREAD") or CALLER
    if choice not in (DEVICE, CALLER):
        raise ArgumentError(
            f"FULGURITE_BACKWARD_THREAD={choice}",
            next=f"set it to {DEVICE} (torch's default) or {CALLER}",
        )
    devices = {value.device for value in inputs if isinstance(value, Tensor)}
    gpus = [device for device in devices if device.type == "cuda"]
    if choice == DEVICE or len(gpus) != 1 or not is_only_gpu(gpus[0]):
        return None
    return run_backward_in_calling_thread


def run_backward_in_calling_thread() -> None:
    """Turn torch's device threads off for the backward passes that this thread starts."""
    torch._C._set_multithreading_enabled(False)


def is_only_gpu(device: torch.device) -> bool:
    """Whether this process has used no other GPU."""
    others = (k for k in range(torch.cuda.device_count()) if k != device.index)
    return not any(torch._C._cuda_hasPrimaryContext(k) for k in others)
