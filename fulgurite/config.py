"""Settings: frozen dataclasses, and the one table of environment variables."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

ENVIRONMENT = {
    "FULGURITE_VERIFY": "1: check every trace after every transform (the tests run so)",
    "FULGURITE_CACHE": "folder for built kernels and tuning decisions (default: ~/.cache/fulgurite)",
    "FULGURITE_REPRO": "folder for the scripts saved when a compilation fails (default: ./fulgurite-repro)",
    "FULGURITE_THREADS": "threads that generated CPU kernels use (default: torch.get_num_threads())",
    "FULGURITE_TUNE": 'auto, 1 or 0: as compile(tune="auto", True or False) says where it is not given',
    "FULGURITE_LLAMA_PYTHON": "an interpreter that has llama-cpp-python, for bench generate",
    "FULGURITE_CXX": "the C++ compiler for CPU kernels (default: g++, then clang++)",
}


def environment(name: str) -> str | None:
    """The value of one of the variables above; empty counts as unset."""
    assert name in ENVIRONMENT, f"{name} is not in config.ENVIRONMENT"
    return os.environ.get(name) or None


@dataclass(frozen=True)
class Settings:
    """What the environment says, read once per use: `settings()`."""

    verify: bool
    cache_folder: Path
    repro_folder: Path


def settings() -> Settings:
    cache = environment("FULGURITE_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Settings(
        verify=environment("FULGURITE_VERIFY") == "1",
        cache_folder=Path(cache) if cache else Path(base) / "fulgurite",
        repro_folder=Path(environment("FULGURITE_REPRO") or "fulgurite-repro"),
    )
