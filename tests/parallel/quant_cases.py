"""What each rank does in test_quant.py: sharded training in FP8, and packed weights as DTensors."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

import fulgurite
from fulgurite.kernels.gemm.quant_linear import quant_linear
from fulgurite.quant import QuantTensor, quantize
from fulgurite.transforms.fp8 import fp8_training
from tests.parallel.model_cases import mesh_of
from tests.ranks import open_once


def mesh() -> DeviceMesh:
    """All ranks, in one dimension."""
    world_size = int(os.environ["WORLD_SIZE"])
    mesh_of((world_size, 1, 1))  # starts torch.distributed
    return open_once("all", lambda: init_device_mesh("cpu", (world_size,)))


class Block(nn.Module):
    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.up = nn.Linear(64, 96)
        self.down = nn.Linear(96, 64, bias=False)
        self.checkpointed = checkpointed

    def body(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.silu(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x, use_reentrant=False) if self.checkpointed else self.body(x)


def network(recipe: str, checkpointed: bool) -> nn.Sequential:
    torch.manual_seed(3)
    blocks = [Block(checkpointed) for _ in range(2)]
    options = {"transforms": [fp8_training(recipe)], "executors": "torch"}
    return nn.Sequential(*(fulgurite.compile(block, **options) for block in blocks))


def batch(rank: int) -> Tensor:
    return torch.randn(5, 64, generator=torch.Generator().manual_seed(90 + rank))


def train_sharded(recipe: str, checkpointed: bool) -> dict[str, float]:
    """The largest difference of each gradient to that of one process with all batches, relative."""
    group = mesh()
    rank, world = dist.get_rank(), dist.get_world_size()
    alone, sharded = network(recipe, checkpointed), network(recipe, checkpointed)
    for part in (*sharded, sharded):
        fully_shard(part, mesh=group)
    sharded(batch(rank)).square().sum().backward()
    for other in range(world):
        (alone(batch(other)).square().sum() / world).backward()
    found = {}
    for (name, ours), wanted in zip(sharded.named_parameters(), alone.parameters(), strict=True):
        assert isinstance(ours, DTensor) and isinstance(ours.grad, DTensor), (
            f"{name} is not sharded"
        )
        gradient = ours.grad.full_tensor()
        found[name] = ((gradient - wanted.grad).abs().max() / wanted.grad.abs().max()).item()
    return found


def packed_as_dtensor(format: str, dim: int) -> float:
    """Column (dim 0) or row (dim 1) parallel linears of a packed weight against the whole one."""
    group = mesh()
    rank, world = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(7)
    weight = quantize(torch.randn(64, 512, generator=generator), format)
    x = torch.randn(6, 512, generator=generator)
    local = weight.shard(dim, rank, world)
    sharded = DTensor.from_local(
        local, group, [Shard(dim)], run_check=False, shape=weight.shape, stride=weight.stride()
    )
    assert sharded.shape == weight.shape and isinstance(sharded.to_local(), QuantTensor)
    holder = nn.Module()
    holder.weight = nn.Parameter(sharded, requires_grad=False)
    mine = holder.state_dict()["weight"].to_local()
    assert torch.equal(mine, local)
    width = x.shape[1] // world
    part = x if dim == 0 else x[:, rank * width : (rank + 1) * width]
    out = quant_linear(part, mine)
    parts = [torch.empty_like(out) for _ in range(world)]
    dist.all_gather(parts, out)
    got = torch.cat(parts, dim=1) if dim == 0 else torch.stack(parts).sum(0)
    want = x.double() @ weight.dequantize(torch.float64).T
    return ((got - want).abs().max() / want.abs().max()).item()
