"""A table while it is measured, and a file afterwards.

In: rows of figures. Out: aligned text, and JSON with the machine, the versions and the command.
"""

from __future__ import annotations

import datetime
import json
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from fulgurite.trace.text import write_text
from fulgurite.version import VERSION


def machine(device: str) -> dict[str, Any]:
    """What the figures were measured on."""
    facts = {
        "date": datetime.date.today().isoformat(),
        "fulgurite": VERSION,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "processor": _processor(),
        "command": " ".join(["fulgurite", *sys.argv[1:]]),
    }
    if device.startswith("cuda"):
        facts["gpu"] = torch.cuda.get_device_name()
    return facts


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def fresh_caches() -> dict[str, str]:
    """Variables that point every compiler's cache to an empty folder: a cold compile is cold."""
    folder = tempfile.mkdtemp(prefix="fulgurite-bench-")
    return {
        "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
        "TRITON_CACHE_DIR": f"{folder}/triton",
        "FULGURITE_CACHE": f"{folder}/fulgurite",
    }


def save(suite: str, device: str, rows: list[dict[str, Any]], output: str | None) -> Path:
    """Write a suite's rows beside the facts of the machine."""
    facts = machine(device)
    path = Path(output) if output else Path("benchmarks") / f"{facts['date']}-{suite}-{device}.json"
    return write_text(path, json.dumps({"machine": facts, "rows": rows}, indent=1) + "\n")


def table(rows: list[list[str]]) -> str:
    """Aligned columns: the first to the left, figures to the right; the first row is the head."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
