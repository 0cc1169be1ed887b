"""A tiny deterministic training run, with the parts that the real trainer uses; for fault tests.

Replicated data ranks: the gradient is the mean over ranks. What goes wrong is in `config.model.fields`.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fulgurite.train.checkpoint import CheckpointManager, training_state
from fulgurite.train.config import TrainConfig
from fulgurite.train.heartbeat import Heartbeat
from fulgurite.train.receipt import Receipt
from fulgurite.train.stop import StopRequest
from tests.train.fault_worker import World, build


def train(config: TrainConfig) -> None:
    assert config.output is not None and config.steps is not None
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
        dist.init_process_group("gloo")
    world, folder, faults = World(), Path(config.output), config.model.fields
    fail_at_start(faults, world.rank)
    model, optimizer = build(sharded=False)
    values: dict[str, Any] = {"step": 0}
    manager = CheckpointManager(folder / "checkpoints", config.checkpoint, world)
    path = manager.latest()
    step = manager.load(path, {**training_state(model, optimizer), **values}) if path else 0
    receipt = None
    if world.rank == 0:
        receipt = Receipt.open(folder, config=config, step=step, resumed_from=path)
        manager.on_saved = receipt.record_checkpoint
    heartbeat = Heartbeat(folder, world.rank)
    with StopRequest(world.rank, world.world_size) as stop:
        while step < config.steps:
            loss = run_step(model, optimizer, step, world)
            step += 1
            heartbeat.beat(step)
            if receipt is not None:
                receipt.record(step, loss)
            fail_at_step(faults, world.rank, step, folder)
            time.sleep(faults.get("sleep", 0.0))
            manager.check()
            should_stop = stop.poll()
            if step % (config.checkpoint.every or 1) == 0 or step == config.steps or should_stop:
                manager.save(step, {**training_state(model, optimizer), "step": step})
            if should_stop:
                break
    manager.close()
    if receipt is not None:
        receipt.close()
    if dist.is_initialized():
        dist.destroy_process_group()


def run_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int, world: World
) -> float:
    optimizer.zero_grad()
    generator = torch.Generator().manual_seed(step * 100 + world.rank)
    loss = model(torch.randn(4, 6, generator=generator)).square().mean()
    loss.backward()
    loss = loss.detach()
    if world.world_size > 1:
        for x in [loss, *(p.grad for p in model.parameters())]:
            dist.all_reduce(x)
            x /= world.world_size
    optimizer.step()
    return loss.item()


def fail_at_start(faults: dict[str, Any], rank: int) -> None:
    if faults.get("start_error") and rank == faults.get("rank", 0):
        raise ValueError("the data has gone")


def fail_at_step(faults: dict[str, Any], rank: int, step: int, folder: Path) -> None:
    """Fail at a step: always, or once."""
    if rank != faults.get("rank", 0) or step != faults.get("at"):
        return
    mark = folder / "has_failed"
    if faults.get("once") and mark.exists():
        return
    mark.touch()
    if faults["kind"] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif faults["kind"] == "error":
        raise ArithmeticError("the loss is a number nobody likes")
    elif faults["kind"] == "stall":
        time.sleep(3600)
    elif faults["kind"] == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
