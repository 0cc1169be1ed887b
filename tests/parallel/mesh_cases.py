"""What each rank does in test_mesh.py. Ranks import this module, so nothing in it needs pytest."""

from __future__ import annotations

import os
import time

import torch

from fulgurite.errors import ArgumentError
from fulgurite.parallel import Mesh


def places() -> tuple[int, tuple[int, ...], int, str]:
    with Mesh(data=2, tensor=2, expert=4, timeout=30) as mesh:
        return mesh.rank, mesh.data.ranks, mesh.tensor.index, str(mesh.device)


def too_many() -> str:
    try:
        Mesh(data=3, tensor=1)
    except ArgumentError as error:
        return str(error)
    return ""


def one_fails(rank: int) -> int:
    if int(os.environ["RANK"]) == rank:
        raise ValueError(f"no more of rank {rank}")
    time.sleep(60)
    return 0


def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * (2 + int(os.environ["RANK"]))
