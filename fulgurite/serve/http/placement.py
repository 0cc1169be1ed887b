"""Which GPUs a replica gets: a config and the visible GPUs in, environment variables out."""

from __future__ import annotations

import os

import torch

from fulgurite.errors import ArgumentError
from fulgurite.serve.http.config import ServerConfig

VARIABLE = "CUDA_VISIBLE_DEVICES"


def count_gpus() -> int:
    """GPUs that this process sees; starts no CUDA context."""
    return torch.cuda.device_count()


def count_ranks(config: ServerConfig) -> int:
    """GPUs of one replica."""
    engine = config.engine
    sizes = {
        name: int(engine.get(name) or 1)
        for name in ("pipeline", "data", "context_parallel", "tensor", "expert")
    }
    stage = sizes["data"] * sizes["context_parallel"] * sizes["tensor"]
    return sizes["pipeline"] * max(stage, sizes["expert"])


def choose_devices(config: ServerConfig, index: int, num_gpus: int) -> dict[str, str]:
    """The environment of replica `index`: each one has GPUs of its own.

    Empty, so that the replica sees all GPUs: on a CPU, with one replica, or for engines in threads. With
    `cache_tokens` replicas may share GPUs, since then each one says how much it needs.
    """
    uses_gpus = not config.mock and str(config.engine.get("device") or "cuda").startswith("cuda")
    if config.replicas == 1 or num_gpus == 0 or not uses_gpus or config.engine_in == "thread":
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
