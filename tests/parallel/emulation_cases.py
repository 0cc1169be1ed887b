"""The functions that ranks run in test_emulation.py and test_topology.py."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fulgurite.parallel import Mesh
from fulgurite.parallel.collectives import all_gather, all_reduce, all_to_all_rows
from fulgurite.parallel.dispatch.hierarchical import HierarchicalDispatcher
from fulgurite.parallel.emulation import NETWORK_VARIABLE, EmulatedNetwork, NetworkTraffic
from fulgurite.parallel.experts.expert_parallel import ExpertParallel
from fulgurite.serve.engine.request import SamplingParams
from tests.parallel.engine_cases import Tokens, open_llm
from tests.parallel.model_cases import Shape, mesh_of


def time_collectives(network: EmulatedNetwork) -> dict[str, tuple[float, NetworkTraffic]]:
    """Seconds and traffic of one collective each, on two nodes of two ranks."""
    axis = replace(mesh_of((4, 1, 4)).expert, nodes=(0, 0, 1, 1), network=network)
    x = torch.zeros(4, 250)  # a row has 1000 bytes
    inside = (2, 2, 0, 0) if axis.index < 2 else (0, 0, 2, 2)
    calls = {
        "all-to-all": lambda: all_to_all_rows(x, axis, (1,) * 4, (1,) * 4, "test"),
        "inside": lambda: all_to_all_rows(x, axis, inside, inside, "test"),
        "all-gather": lambda: all_gather(x, axis),
        "all-reduce": lambda: all_reduce(x, axis),
    }
    found = {}
    for name, call in calls.items():
        dist.barrier(axis.group)
        network.collect_traffic()
        start = time.perf_counter()
        call()
        found[name] = (time.perf_counter() - start, network.collect_traffic())
    return found


def generate(
    folder: Path,
    shape: Shape,
    prompts: Tokens,
    params: list[SamplingParams],
    options: dict[str, Any],
    network: str,
) -> tuple[Tokens, str, int]:
    """Rank 0: every reply. All: the dispatcher, and the messages that crossed the network."""
    os.environ[NETWORK_VARIABLE] = network
    try:
        with open_llm(folder, shape, **options) as llm:
            replies: Tokens = []
            if llm.is_driver:
                replies = [one.token_ids for one in llm.generate(prompts, params)]
            experts = next(m for m in llm.model.modules() if isinstance(m, ExpertParallel))
            assert llm.mesh is not None and llm.mesh.network is not None
            dispatcher = experts.dispatcher
            name = type(dispatcher).__name__
            if isinstance(dispatcher, HierarchicalDispatcher):
                name = str(dispatcher).split(", expert axis")[0]
            return replies, name, llm.mesh.network.traffic.messages
    finally:
        del os.environ[NETWORK_VARIABLE]


def nodes_of_mesh(names: list[str], nodes: int | None) -> tuple[tuple[int, ...], bool, bool]:
    """The nodes of the expert axis if ranks have these values of GROUP_RANK."""
    rank = int(os.environ["RANK"])
    os.environ["GROUP_RANK"] = names[rank]
    try:
        with Mesh(data=2, tensor=2, expert=4, timeout=30, nodes=nodes) as mesh:
            return mesh.expert.nodes, mesh.expert.spans_nodes, mesh.tensor.spans_nodes
    finally:
        del os.environ["GROUP_RANK"]
