"""Settings from the environment: the one table of environment variables, and `settings()`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

ENV_VARS = {
    "FULGURITE_VERIFY": "1: verify every trace, and schemas of custom operators when they run (as the tests do)",
    "FULGURITE_STRICT": "1: raise where a region or a step would fall back to torch (as the tests do)",
    "FULGURITE_LOG": "debug, info or warning: print log messages to stderr, with the rank",
    "FULGURITE_LOG_FORMAT": "text or json: one line of text, or one JSON object, a log message",
    "FULGURITE_CACHE_DIR": "folder for compiled kernels and autotuning results (default: ~/.cache/fulgurite)",
    "FULGURITE_REPRO_DIR": "folder for scripts that reproduce failures (default: ./fulgurite-repro)",
    "FULGURITE_NUM_THREADS": "threads of generated CPU kernels (default: torch.get_num_threads())",
    "FULGURITE_HOST_PROGRAM": "0: run final traces as Python instead of as host programs",
    "FULGURITE_AUTOTUNE": 'auto, 1 or 0: the default of compile(autotune=...): "auto", True or False',
    "FULGURITE_LLAMA_PYTHON": "Python interpreter with llama-cpp-python, for bench generate",
    "FULGURITE_API_KEY": "key of `fulgurite serve` and `top`; several separated by commas",
    "FULGURITE_CXX": "C++ compiler for CPU kernels (default: g++, then clang++)",
}


def read_env(name: str) -> str | None:
    """The value of a variable of `ENV_VARS`; None if unset or empty."""
    assert name in ENV_VARS, f"{name} is not in config.ENV_VARS"
    return os.environ.get(name) or None


@dataclass(frozen=True)
class Settings:
    """Settings from the environment. `settings()` reads it at every call."""

    verify: bool
    strict: bool
    cache_dir: Path
    repro_dir: Path


def settings() -> Settings:
    cache = read_env("FULGURITE_CACHE_DIR")
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Settings(
        verify=read_env("FULGURITE_VERIFY") == "1",
        strict=read_env("FULGURITE_STRICT") == "1",
        cache_dir=Path(cache) if cache else Path(base) / "fulgurite",
        repro_dir=Path(read_env("FULGURITE_REPRO_DIR") or "fulgurite-repro"),
    )
