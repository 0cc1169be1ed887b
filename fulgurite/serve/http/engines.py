"""The engines of a server on this machine: a `ServerConfig` in, processes that load the model out.

`fulgurite serve` launches them before it imports the rest of the server, so that both start at the
same time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from fulgurite.models.loading import hub
from fulgurite.serve.http.config import ServerConfig
from fulgurite.serve.http.placement import choose_devices, count_gpus, needs_own_gpus
from fulgurite.serve.remote.launch import LaunchedEngine, launch_engine
from fulgurite.serve.remote.messages import LoadModel

MOCK_TOKENIZER = "smollm2"  # text of the mock engine's tokens


def make_load(config: ServerConfig) -> LoadModel:
    """What each replica loads."""
    threads = config.threads
    if threads is None and config.replicas > 1:
        threads = max(1, (os.cpu_count() or 1) // config.replicas)
    return LoadModel(
        str(hub.resolve_model_path(MOCK_TOKENIZER if config.mock else config.model)),
        dict(config.engine),
        threads,
        dict(config.mock_options) if config.mock else None,
        config.faults,
    )


def choose_environments(config: ServerConfig) -> list[dict[str, str]]:
    """The environment of each replica's process, in addition: its GPUs."""
    num_gpus = count_gpus() if needs_own_gpus(config) else 0
    return [choose_devices(config, index, num_gpus) for index in range(config.replicas)]


@contextmanager
def launch_engines(config: ServerConfig) -> Iterator[list[LaunchedEngine]]:
    """Start the processes of all replicas; none for engines in threads. They are ended at the end."""
    engines: list[LaunchedEngine] = []
    try:
        if config.engine_in == "process":
            load = make_load(config)
            for env in choose_environments(config):
                engines.append(launch_engine(load, env))
        yield engines
    finally:
        for engine in engines:
            engine.kill()
