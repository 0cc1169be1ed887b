"""Which GPUs a replica gets: a config and the visible GPUs in, environment variables out."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from fulgurite.errors import ArgumentError
from fulgurite.serve.http.config import ServerConfig

VARIABLE = "CUDA_VISIBLE_DEVICES"


# Asks the driver, which knows CUDA_VISIBLE_DEVICES. Prints the number of GPUs.
COUNT_GPUS = """
import ctypes
count = ctypes.c_int()
try:
    driver = ctypes.CDLL("libcuda.so.1")
except OSError:
    print(0)
else:
    is_ok = driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0
    print(count.value if is_ok else 0)
"""


def count_gpus() -> int:
    """GPUs that torch can use here. A short-lived process asks: no torch and no CUDA in this one."""
    if not has_cuda_build():
        return 0
    command = [sys.executable, "-I", "-S", "-c", COUNT_GPUS]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def has_cuda_build() -> bool:
    """Whether the installed torch was built for CUDA; it is not imported."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    return (Path(spec.origin).parent / "lib" / "libtorch_cuda.so").exists()


def count_ranks(config: ServerConfig) -> int:
    """GPUs of one replica."""
    engine = config.engine
    sizes = {
        name: int(engine.get(name) or 1)
        for name in ("pipeline", "data", "context_parallel", "tensor", "expert")
    }
    stage = sizes["data"] * sizes["context_parallel"] * sizes["tensor"]
    return sizes["pipeline"] * max(stage, sizes["expert"])


def needs_own_gpus(config: ServerConfig) -> bool:
    """Whether each replica gets GPUs of its own, if there are any."""
    uses_gpus = not config.mock and str(config.engine.get("device") or "cuda").startswith("cuda")
    return config.replicas > 1 and uses_gpus and config.engine_in == "process"


def choose_devices(config: ServerConfig, index: int, num_gpus: int) -> dict[str, str]:
    """The environment of replica `index`: each one has GPUs of its own.

    Empty, so that the replica sees all GPUs: on a CPU, with one replica, or for engines in threads. With
    `cache_tokens` replicas may share GPUs, since then each one says how much it needs.
    """
    if num_gpus == 0 or not needs_own_gpus(config):
        return {}
    ranks = count_ranks(config)
    if num_gpus < ranks * config.replicas and (ranks > 1 or "cache_tokens" not in config.engine):
        raise ArgumentError(
            f"{config.replicas} replicas of {ranks} GPUs need {config.replicas * ranks}, "
            f"but there are {num_gpus}",
            next="use fewer replicas, or --cache-tokens to let them share GPUs",
        )
    given = os.environ.get(VARIABLE)
    names = given.split(",") if given else [str(number) for number in range(num_gpus)]
    first = index * ranks
    return {VARIABLE: ",".join(names[number % num_gpus] for number in range(first, first + ranks))}
