"""What rank processes of the fault tests run: a tiny training loop with checkpoints.

A function here is called in a process that has imported torch, so it starts in milliseconds.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from fulgurite.train.checkpoint import CheckpointManager, hash_state, training_state
from fulgurite.train.config import CheckpointSection


class KillAt:
    """Kills this process at the n-th time that a phase is reached."""

    def __init__(self, phase: str, occurrence: int = 1) -> None:
        self.phase, self.left = phase, occurrence

    def __call__(self, phase: str) -> None:
        if phase == self.phase:
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)


class World:
    """The rank numbers of the process group."""

    def __init__(self) -> None:
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1


def advance(weight: Tensor, step: int) -> Tensor:
    """One step of a recurrence that no other order of steps gives."""
    return torch.sin(weight * 1.7 + step) + 0.25 * weight


def weight_at(step: int) -> Tensor:
    weight = torch.linspace(-1, 1, 40).reshape(8, 5)
    for number in range(step):
        weight = advance(weight, number)
    return weight


def run_loop(folder: str, steps: int, phase: str = "", occurrence: int = 1) -> int:
    """Resume, run to `steps` with a checkpoint a step, and return the step that was resumed from."""
    state: dict[str, Any] = {"weight": weight_at(0), "moments": [torch.zeros(3)], "step": 0}
    section = CheckpointSection(keep=2)
    with CheckpointManager(folder, section, on_phase=KillAt(phase, occurrence)) as manager:
        start = manager.load_latest(state) or 0
        assert state["step"] == start
        assert torch.equal(state["weight"], weight_at(start))
        assert torch.equal(state["moments"][0], torch.full((3,), float(start)))
        for step in range(start, steps):
            state["weight"] = advance(state["weight"], step)
            state["moments"][0].fill_(step + 1)
            state["step"] = step + 1
            manager.save(step + 1, state)
            if phase == "save:replace" and step == 0:
                manager.wait()
                manager.save(step + 1, state)
    return start


def start_group() -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo")


def run_killed_rank(folder: str, killed_rank: int, phase: str, occurrence: int) -> str:
    """Two replicas save until one is killed; the other must see an error, not hang."""
    start_group()
    hook = KillAt(phase if dist.get_rank() == killed_rank else "", occurrence)
    manager = CheckpointManager(folder, CheckpointSection(), World(), on_phase=hook)
    for step in range(1, 4):
        manager.save(step, {"weight": weight_at(step), "step": step}, wait=True)
    return "not killed"


class Net(nn.Module):
    """Shapes that 2, 3 and 4 do not divide, and one dimension smaller than the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 7)
        self.second = nn.Linear(7, 2, bias=False)
        self.register_buffer("count", torch.zeros(1))
        self.scale = nn.Parameter(torch.tensor([1.5]))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x))) * self.scale


def build(sharded: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(5)
    model: nn.Module = Net()
    if sharded:
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for parameter in model.parameters():  # states exist from the start, as those of train.optim
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return model, optimizer


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
    model(x).square().sum().backward()
    optimizer.step()


def run_sharded(folder: str, steps: int, expected: str | None) -> tuple[str, int]:
    """Resume an FSDP2 run on these ranks, check its hash, train and save; returns the new hash."""
    start_group()
    model, optimizer = build(sharded=True)
    assert any(isinstance(p, DTensor) for p in model.parameters())
    state = {**training_state(model, optimizer), "step": 0}
    with CheckpointManager(folder, CheckpointSection(), World()) as manager:
        start = manager.load_latest(state) or 0
        if expected is not None:
            assert hash_state(training_state(model, optimizer)) == expected
        for step in range(start, start + steps):
            train_step(model, optimizer, step)
        state = {**training_state(model, optimizer), "step": start + steps}
        manager.save(start + steps, state)
        digest = hash_state(training_state(model, optimizer))
    return digest, start


def save_unequal_replicas(folder: str) -> str:
    """Every rank holds another tensor under one name."""
    start_group()
    manager = CheckpointManager(folder, CheckpointSection(), World())
    manager.save(1, {"good": torch.ones(3), "experts": torch.full((4,), float(dist.get_rank()))})
    try:
        manager.wait()
    except RuntimeError as error:
        return str(error)
    finally:
        manager.close()
    return ""


def load_damaged_on_ranks(folder: str) -> tuple[int | None, list[float]]:
    start_group()
    state = {"weight": torch.zeros(4), "step": 0}
    with CheckpointManager(folder, CheckpointSection(), World()) as manager:
        return manager.load_latest(state), state["weight"].tolist()


def fill_small_disk(folder: str, steps: int, free_after: int) -> list[str]:
    """Save to a disk that gets full, and later has room again; returns what `save` reported."""
    reports: list[str] = []
    filler = Path(folder) / "filler"
    with CheckpointManager(Path(folder) / "checkpoints", CheckpointSection(keep=1)) as manager:
        for step in range(1, steps + 1):
            if step == free_after:
                filler.unlink()
            try:
                manager.save(step, {"weight": torch.full((40_000,), float(step))}, wait=True)
                reports.append("saved")
            except RuntimeError as error:
                reports.append(str(error))
    return reports
