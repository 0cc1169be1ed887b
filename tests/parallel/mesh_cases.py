"""What each rank does in test_mesh.py. Ranks import this module, so nothing in it needs pytest."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

from fulgurite.errors import ArgumentError, RankError
from fulgurite.parallel import Mesh
from fulgurite.parallel.collectives import all_reduce
from fulgurite.parallel.processes.channel import BroadcastChannel


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


class _Unreadable:
    def __reduce__(self) -> tuple[object, ...]:
        return int, ("no number",)


def unreadable() -> object:
    return _Unreadable()


def stay(folder: str) -> None:
    """Says where it is, and waits for a rank that does not come."""
    with Mesh(timeout=600) as mesh:
        Path(folder, str(os.getpid())).touch()
        if mesh.rank == 1:
            time.sleep(600)
        all_reduce(torch.ones(1), mesh.world)


def messages(texts: list[bytes], pause: float) -> list[bytes]:
    """What rank 0 says; a pause in the middle, longer than a look around takes."""
    with Mesh(tensor=4, timeout=30) as mesh:
        channel, heard = BroadcastChannel(mesh), []
        for number, text in enumerate(texts):
            if channel.is_sender:
                time.sleep(pause if number == 1 else 0)
                channel.send(text)
            else:
                heard.append(channel.receive())
            all_reduce(torch.ones(1), mesh.world)  # as steps do: nobody runs ahead by more than one
        return heard


def left_alone() -> str:
    """Rank 0 leaves without a word."""
    with Mesh(tensor=4, timeout=30) as mesh:
        channel = BroadcastChannel(mesh)
        try:
            return "" if channel.is_sender else channel.receive().decode()
        except RankError as error:
            return str(error)
