"""What a bug report needs to know of this machine: versions, compiler, devices, settings.

In: this process. Out: `describe()`, labelled lines; `fulgurite env` prints them. Scripts that reproduce a
failure carry the versions and the environment variables.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys

import torch

from fulgurite import native
from fulgurite.config import ENV_VARS, settings
from fulgurite.device import cpu_name, num_cpu_threads
from fulgurite.errors import CompileError
from fulgurite.version import VERSION

FOLDERS = ("FULGURITE_CACHE_DIR", "FULGURITE_REPRO_DIR")  # of one machine: a script sets no folders
# variables of others that change what is compiled or how it runs
OTHER_PREFIXES = ("TORCHINDUCTOR_", "TORCHDYNAMO_", "TORCH_LOGS", "TRITON_", "OMP_", "CUDA_")
PACKAGES = ("triton", "numpy", "transformers", "torchvision")


def versions() -> dict[str, str]:
    """Versions of what compiles and runs a program."""
    found = {
        "fulgurite": VERSION,
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}",
        "python": f"{platform.python_version()}, {platform.platform()}",
    }
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def variables() -> dict[str, str]:
    """The variables of `config.ENV_VARS` that are set, without folders."""
    return {k: os.environ[k] for k in ENV_VARS if os.environ.get(k) and k not in FOLDERS}


def describe() -> dict[str, str]:
    """Everything about this machine and process, by label."""
    compute = {
        "compiler": _describe_compiler(),
        "cpu": f"{cpu_name()}, {os.cpu_count()} cores, {num_cpu_threads()} threads",
        **{f"gpu {k}": text for k, text in enumerate(_describe_gpus())},
    }
    state = {
        "matmul precision": torch.get_float32_matmul_precision(),
        "deterministic": str(torch.are_deterministic_algorithms_enabled()),
        "default dtype": str(torch.get_default_dtype()),
        "cache": str(settings().cache_dir),
        "command": " ".join(sys.argv),
    }
    others = {k: v for k, v in os.environ.items() if k in FOLDERS or k.startswith(OTHER_PREFIXES)}
    return versions() | compute | state | variables() | others


def _describe_compiler() -> str:
    path = native.find_compiler()
    if path is None:
        return "none"
    try:
        return f"{path}: {native.compiler_version(path).splitlines()[0]}"
    except CompileError as problem:
        return f"{path}: {problem.what}"


def _describe_gpus() -> list[str]:
    """Each GPU: name, capability, memory, shared memory of a block."""
    found = []
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        memory = f"{gpu.total_memory / 2**30:.0f} GiB"
        shared = gpu.shared_memory_per_multiprocessor >> 10
        capability = f"sm_{gpu.major}{gpu.minor}, {gpu.multi_processor_count} SMs"
        found.append(f"{gpu.name}, {capability}, {memory}, {shared} KiB shared memory per SM")
    return found
