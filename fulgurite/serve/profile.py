"""`generate --profile FILE`: steps of an engine in, a Chrome trace out.

The trace is torch.profiler's. Every step is a range such as `step 12: prefill 3 x 512, decode 5`; below it
are torch's operators and our kernels by name. Open it in https://ui.perfetto.dev or chrome://tracing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity

from fulgurite.errors import ArgumentError


def check_profile_path(path: Path) -> None:
    """ArgumentError, before a model is loaded, if the file can't be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a"):
            pass
    except OSError as error:
        raise ArgumentError(
            f"can't write the profile to {path}: {error.strerror}", next="give another file"
        ) from error


@contextmanager
def write_profile(path: Path, device: torch.device) -> Iterator[None]:
    """Profile the block on the host and on the device, and write a Chrome trace."""
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        yield
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    profile.export_chrome_trace(str(path))
