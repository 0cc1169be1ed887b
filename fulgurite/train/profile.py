"""`StepProfiler`: `log.profile = "10:13"` records steps 10 to 12 with torch.profiler.

In: the number of each step before it runs. Out: `profile.json` in the run's folder, for chrome://tracing.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from fulgurite.errors import ArgumentError

FILE = "profile.json"


class StepProfiler:
    """Records a range of steps; `text` None: nothing."""

    def __init__(self, text: str | None, folder: Path) -> None:
        self.first, self.end = parse_range(text)
        self.folder = folder
        self._profiler: profile | None = None

    def before(self, step: int) -> None:
        """Start or stop before step `step` runs."""
        if step == self.end:
            self.close()
        if step == self.first and self._profiler is None and self.end > self.first:
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
            self._profiler = profile(activities=activities)
            self._profiler.start()

    def close(self) -> None:
        """Stop and write the file, if steps were recorded."""
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler.export_chrome_trace(str(self.folder / FILE))
            self._profiler = None


def parse_range(text: str | None) -> tuple[int, int]:
    """`A:B` as numbers; (-1, -1) for None."""
    if text is None:
        return -1, -1
    first, _, end = text.partition(":")
    if not first.isdigit() or not end.isdigit() or int(first) >= int(end):
        raise ArgumentError(f"log.profile = {text!r}", next="write steps as A:B, with A below B")
    return int(first), int(end)
