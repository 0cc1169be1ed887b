"""The functions that ranks run in test_launch_ray.py. Ray imports this module on the ranks."""

from __future__ import annotations

import os

import torch

from fulgurite.parallel import Mesh
from fulgurite.parallel.collectives import all_reduce


def sum_over_ranks(factor: int) -> tuple[int, float, tuple[int, ...]]:
    with Mesh(tensor=2, timeout=60) as mesh:
        total = all_reduce(torch.ones(1) * factor * (mesh.rank + 1), mesh.tensor)
        return mesh.rank, float(total), mesh.tensor.nodes


def fail_on_one() -> int:
    if os.environ["RANK"] == "1":
        raise ValueError("no more of rank 1")
    return 0
