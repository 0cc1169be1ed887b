"""FP8 training with FSDP2 on two processes: bitwise equal to unsharded."""

from __future__ import annotations

import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import nn

import fulgurite
from fulgurite.transforms import fp8_training

pytestmark = pytest.mark.slow


def layers() -> nn.ModuleList:
    torch.manual_seed(0)
    make = lambda: nn.Sequential(nn.Linear(64, 128), nn.SiLU(), nn.Linear(128, 64))  # noqa: E731
    return nn.ModuleList([make(), make()])


def compile_forward(layer: nn.Module) -> None:
    transforms = [fp8_training("rowwise")]
    layer.forward = fulgurite.compile(layer.forward, transforms=transforms, executors="torch")


def run(model: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    for layer in model:
        x = layer(x)
    return x


def compare(rank: int, world: int, port: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    plain, sharded = layers(), layers()
    for layer in (*plain, *sharded):
        compile_forward(layer)
    for layer in sharded:
        fully_shard(layer, mesh=init_device_mesh("cpu", (world,)), reshard_after_forward=True)
    x = torch.randn(world, 8, 64)
    results = [run(plain, part) for part in x]
    (sum(y.square().sum() for y in results) / world).backward()
    ours = run(sharded, x[rank])
    ours.square().sum().backward()
    assert torch.equal(ours, results[rank])
    for one, two in zip(plain.parameters(), sharded.parameters(), strict=True):
        torch.testing.assert_close(two.grad.full_tensor(), one.grad)
    assert len(sharded[0].forward.graphs) == 1
    dist.destroy_process_group()


def test_fsdp_on_two_ranks():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    multiprocessing.spawn(compare, args=(2, port), nprocs=2)
