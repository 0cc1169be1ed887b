"""Results of a suite: an aligned text table, and a JSON file.

In: rows of figures. Out: text; and JSON with the hardware, the versions and the command.
"""

from __future__ import annotations

import datetime
import json
import platform
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from fulgurite.config import read_env
from fulgurite.files import write_atomically
from fulgurite.version import VERSION

RECORDED_SETTINGS = ("FULGURITE_STRICT", "FULGURITE_AUTOTUNE", "FULGURITE_NUM_THREADS")


def describe_machine(device: str) -> dict[str, Any]:
    """The hardware and versions that the figures were measured with."""
    facts = {
        "date": datetime.date.today().isoformat(),
        "fulgurite": VERSION,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "processor": _processor(),
        "command": _command(),
    }
    if device.startswith("cuda"):
        facts["gpu"] = torch.cuda.get_device_name()
    return facts


def _command() -> str:
    """The command line without files and keys, after the settings that change what is measured."""
    settings = [f"{name}={value}" for name in RECORDED_SETTINGS if (value := read_env(name))]
    command = " ".join([*settings, "fulgurite", *sys.argv[1:]])
    return re.sub(r" --(output|api-key)[ =]\S+|(?<= --llama-cpp)[ =](?!-)\S+", "", command)


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def fresh_cache_environment() -> dict[str, str]:
    """Environment variables that point every compiler's cache to an empty folder, for cold compiles."""
    folder = tempfile.mkdtemp(prefix="fulgurite-bench-")
    return {
        "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
        "TRITON_CACHE_DIR": f"{folder}/triton",
        "FULGURITE_CACHE_DIR": f"{folder}/fulgurite",
    }


def default_path(suite: str, device: str, output: str | None) -> Path:
    """The file that `save_results` writes today."""
    today = datetime.date.today().isoformat()
    return Path(output) if output else Path("benchmarks") / f"{today}-{suite}-{device}.json"


def save_results(suite: str, device: str, rows: list[dict[str, Any]], output: str | None) -> Path:
    """Write the rows of a suite and the description of the machine."""
    facts = describe_machine(device)
    return write_content(default_path(suite, device, output), {"machine": facts, "rows": rows})


def write_content(path: Path, content: dict[str, Any]) -> Path:
    """Write a result file: the machine and the rows."""
    return write_atomically(path, json.dumps(content, indent=1) + "\n")


def format_table(rows: list[list[str]]) -> str:
    """Aligned columns: the first one left, figures right. The first row is the header."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
