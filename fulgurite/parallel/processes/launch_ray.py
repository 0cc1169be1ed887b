"""Ranks on a Ray cluster: one actor a rank, on any machine that has room, which run a function together.

    from fulgurite.parallel.processes.launch_ray import launch_ray

    results = launch_ray(generate, 16, "model-folder")     16 GPUs; a list with one result a rank

Needs `pip install ray` and, for more than one machine, a cluster (`ray start`). A placement group
reserves a GPU and a CPU for each rank, packed on as few machines as possible. Ranks are numbered by
machine, and get the environment that torchrun would give them: RANK, WORLD_SIZE, LOCAL_RANK,
LOCAL_WORLD_SIZE, GROUP_RANK, MASTER_ADDR and MASTER_PORT. Rank 0's process hosts the store. So `Mesh()`,
and an `LLM` inside the function, find their ranks.

Ray sees to it that actors get different GPUs, but every actor sees all GPUs of its machine
(LOCAL_RANK is the number of its own): peer access and NCCL need it.

If one rank fails, all actors are killed, and its error is raised.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from fulgurite.errors import ArgumentError, RankError

PLACEMENT_TIMEOUT = 120.0  # seconds until the cluster must have room
ALL_GPUS_VISIBLE = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}


class Place(NamedTuple):
    """Where an actor is: its machine, that machine's address, its GPU if it has one."""

    node: str
    address: str
    gpu: int | None


class RankActor:
    """The process of one rank."""

    def locate(self) -> Place:
        context = ray.get_runtime_context()
        gpus = ray.get_gpu_ids()
        gpu = int(gpus[0]) if gpus else None
        return Place(context.get_node_id(), ray.util.get_node_ip_address(), gpu)

    def find_free_port(self) -> int:
        with socket.socket() as one:
            one.bind(("", 0))
            port: int = one.getsockname()[1]
            return port

    def run(
        self, environment: dict[str, str], function: Callable[..., Any], arguments: tuple[Any, ...]
    ) -> Any:
        os.environ.update(environment)
        return function(*arguments)


def launch_ray(
    function: Callable[..., Any],
    ranks: int,
    *arguments: Any,
    gpus_per_rank: int = 1,
    address: str | None = None,
    timeout: float = PLACEMENT_TIMEOUT,
) -> list[Any]:
    """Call a function on `ranks` actors; returns their results, by rank.

    gpus_per_rank   1, or 0 for ranks on CPUs
    address         of the cluster. None: the one of this machine, or a new one
    timeout         seconds until the cluster must have room for all ranks
    """
    if ranks < 1 or gpus_per_rank not in (0, 1):
        raise ArgumentError(
            f"{ranks} ranks of {gpus_per_rank} GPUs", next="1 rank or more, of 0 or 1 GPU"
        )
    if not ray.is_initialized():
        ray.init(address=address, log_to_driver=True)
    bundle = {"CPU": 1, "GPU": gpus_per_rank} if gpus_per_rank else {"CPU": 1}
    group = placement_group([bundle] * ranks, strategy="PACK")
    actors: list[Any] = []
    try:
        if not group.wait(timeout):
            raise ArgumentError(
                f"the cluster has no room for {ranks} ranks with {bundle} each",
                where=f"{ray.cluster_resources()}",
                next="add machines (ray start --address HEAD:6379), or start fewer ranks",
            )
        remote = ray.remote(RankActor)
        for index in range(ranks):
            strategy = PlacementGroupSchedulingStrategy(group, index)
            options = remote.options(
                num_cpus=1,
                num_gpus=gpus_per_rank,
                scheduling_strategy=strategy,
                runtime_env={"env_vars": ALL_GPUS_VISIBLE},
            )
            actors.append(options.remote())
        return _run_on_actors(actors, function, arguments)
    finally:
        for actor in actors:
            ray.kill(actor)
        remove_placement_group(group)


def _run_on_actors(
    actors: list[Any], function: Callable[..., Any], arguments: tuple[Any, ...]
) -> list[Any]:
    places: list[Place] = ray.get([actor.locate.remote() for actor in actors])
    order = order_by_node(places)
    ordered = [actors[index] for index in order]
    port = ray.get(ordered[0].find_free_port.remote())
    environments = rank_environments([places[index] for index in order], port)
    calls = [
        actor.run.remote(environment, function, arguments)
        for actor, environment in zip(ordered, environments, strict=True)
    ]
    waiting = list(calls)
    while waiting:
        done, waiting = ray.wait(waiting)
        try:
            ray.get(done)
        except ray.exceptions.RayError as error:
            rank = calls.index(done[0])
            raise RankError(
                f"rank {rank} of {len(calls)} failed: {str(error).strip().splitlines()[-1]}",
                ranks=(rank,),
                trace=str(error),
            ) from error
    results: list[Any] = ray.get(calls)
    return results


def order_by_node(places: Sequence[Place]) -> list[int]:
    """Actors by rank: those of one machine are consecutive, by GPU."""
    nodes = list(dict.fromkeys(place.node for place in places))
    return sorted(
        range(len(places)), key=lambda i: (nodes.index(places[i].node), places[i].gpu or 0, i)
    )


def rank_environments(places: Sequence[Place], port: int) -> list[dict[str, str]]:
    """What torchrun would set for ranks at these places; `port`: free on the machine of rank 0."""
    nodes = list(dict.fromkeys(place.node for place in places))
    counts = {node: sum(place.node == node for place in places) for node in nodes}
    seen = dict.fromkeys(nodes, 0)
    found = []
    for rank, place in enumerate(places):
        local, seen[place.node] = seen[place.node], seen[place.node] + 1
        names = {
            "RANK": rank,
            "WORLD_SIZE": len(places),
            "LOCAL_RANK": local if place.gpu is None else place.gpu,
            "LOCAL_WORLD_SIZE": counts[place.node],
            "GROUP_RANK": nodes.index(place.node),
            "MASTER_ADDR": places[0].address,
            "MASTER_PORT": port,
        }
        found.append({name: str(value) for name, value in names.items()})
    return found
