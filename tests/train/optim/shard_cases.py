"""What the rank processes of `test_shards.py` run."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fulgurite.models import ARCHITECTURES, build_random_model, load_model
from fulgurite.models.config import ConfigFields
from fulgurite.train.config import OptimizerSection
from fulgurite.train.export import save_pretrained
from fulgurite.train.optim import adamw, build_optimizer, clip_gradients
from tests.train.test_balance import FIELDS

OPTIONS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "adamw_int8": {"states": "int8"},
    "adamw_stochastic": {"states": "bfloat16", "rounding": "stochastic"},
    "muon": {"name": "muon"},
    "muon_int8": {"name": "muon", "states": "int8", "rounding": "stochastic"},
}
STEPS = 3


class Small(nn.Module):
    """Matrices of odd sizes, stacked experts, vectors shorter than the number of ranks."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(67, 65)
        self.second = nn.Linear(65, 67, bias=False)
        self.third = nn.Linear(67, 65, bias=False)
        self.gate = nn.Linear(8, 1)
        self.experts = nn.Parameter(torch.randn(3, 40, 70))
        self.to(dtype)


def make_section(name: str) -> OptimizerSection:
    return OptimizerSection(learning_rate=0.02, warmup=0, **OPTIONS[name])


def make_gradient(parameter: Tensor, step: int, index: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + index)
    return torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def set_gradients(model: nn.Module, step: int) -> None:
    for index, parameter in enumerate(model.parameters()):
        gradient = make_gradient(parameter, step, index)
        if isinstance(parameter, DTensor):
            gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
        parameter.grad = gradient


def take_steps(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        set_gradients(model, step)
        clip_gradients(model.parameters(), torch.tensor(10.0), 5.0)
        optimizer.step()


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def run_whole(name: str, dtype: torch.dtype, steps: int = STEPS) -> list[Tensor]:
    model = Small(dtype)
    take_steps(model, build_optimizer(model, make_section(name), 10, True), range(steps))
    return [parameter.detach() for parameter in model.parameters()]


def compare_sharded(name: str, dtype: torch.dtype) -> float:
    """The largest difference of FSDP2 ranks to one rank."""
    model = fully_shard(Small(dtype), mesh=_mesh())
    take_steps(model, build_optimizer(model, make_section(name), 10, True), range(STEPS))
    expected = run_whole(name, dtype)
    pairs = zip(model.parameters(), expected, strict=True)
    return max((whole(p.detach()) - e).abs().max().item() for p, e in pairs)


def compare_batched_chunks() -> float:
    """Muon in chunks that would differ between ranks if each counted the elements of its own shards."""
    before, adamw.CHUNK_ELEMENTS = adamw.CHUNK_ELEMENTS, 7000
    try:
        model = fully_shard(Small(torch.float32), mesh=_mesh())
        take_steps(model, build_optimizer(model, make_section("muon"), 10), range(STEPS))
    finally:
        adamw.CHUNK_ELEMENTS = before
    pairs = zip(model.parameters(), run_whole("muon", torch.float32), strict=True)
    return max((whole(p.detach()) - e).abs().max().item() for p, e in pairs)


def compare_split_columns(name: str) -> float:
    """The same with columns split over ranks, as tensor parallel layers have them."""
    model = Small(torch.float32)
    mesh = _mesh()
    for module in (model.first, model.second, model.third):
        columns = distribute_tensor(module.weight.detach(), mesh, [Shard(1)])
        module.weight = nn.Parameter(columns)
    take_steps(model, build_optimizer(model, make_section(name), 10, True), range(STEPS))
    pairs = zip(model.parameters(), run_whole(name, torch.float32), strict=True)
    return max((whole(p.detach()) - e).abs().max().item() for p, e in pairs)


def save_and_load(name: str, folder: str) -> None:
    """A checkpoint of sharded weights and states, after some steps."""
    model = fully_shard(Small(torch.bfloat16), mesh=_mesh())
    optimizer = build_optimizer(model, make_section(name), 10, True)
    take_steps(model, optimizer, range(2))
    states = get_optimizer_state_dict(model, optimizer)
    dcp.save({"model": model.state_dict(), "optimizer": states}, checkpoint_id=folder)


def load_on_one_rank(name: str, folder: str) -> list[Tensor]:
    """Weights after one more step from the checkpoint, in this process alone."""
    model = Small(torch.bfloat16)
    optimizer = build_optimizer(model, make_section(name), 10, True)
    state = {
        "model": model.state_dict(),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    take_steps(model, optimizer, range(2, 3))
    return [parameter.detach() for parameter in model.parameters()]


def export_sharded(folder: str) -> tuple[bool, str]:
    """Whether the export of sharded weights equals the model; what a second export says."""
    family = ARCHITECTURES["Dots1ForCausalLM"]
    fields = {**FIELDS["Dots1ForCausalLM"], "architectures": ["Dots1ForCausalLM"]}
    config = family.read_config(ConfigFields(fields, "config.json"))
    model = build_random_model(config, family, dtype=torch.float32, seed=1)
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    sharded = fully_shard(model, mesh=_mesh())
    output = save_pretrained(sharded, family, fields, Path(folder) / "export")
    dist.barrier()
    loaded = dict(load_model(output).named_parameters())
    is_equal = all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())
    try:
        save_pretrained(sharded, family, fields, Path(folder) / "export")
    except ValueError as error:
        return is_equal, str(error)
    return is_equal, ""


def _mesh() -> Any:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return init_device_mesh("cpu", (dist.get_world_size(),))


def run_all(folder: str) -> dict[str, Any]:
    """Everything in one start of the ranks."""
    result: dict[str, Any] = {}
    for name in OPTIONS:
        for dtype in (torch.float32, torch.bfloat16):
            result[f"{name} {dtype}"] = compare_sharded(name, dtype)
        save_and_load(name, str(Path(folder) / name))
    result["columns adamw"] = compare_split_columns("adamw_stochastic")
    result["columns muon"] = compare_split_columns("muon")
    result["chunks"] = compare_batched_chunks()
    result["export"] = export_sharded(folder)
    return result


if __name__ == "__main__":
    print(run_all(tempfile.mkdtemp()))
