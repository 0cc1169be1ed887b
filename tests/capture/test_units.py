"""Which modules distributed wrappers run, and how they run compiled. On one rank: see tests/parallel."""

from __future__ import annotations

import copy
import pickle
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fulgurite
from fulgurite.capture.units import find_units, group_units


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    """A mesh of this process alone."""
    with tempfile.NamedTemporaryFile() as file:
        dist.init_process_group("gloo", f"file://{file.name}", rank=0, world_size=1)
        yield init_device_mesh("cpu", (1,))
        dist.destroy_process_group()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return torch.relu(self.linear(x)) + x


class Tail(nn.Module):
    def forward(self, x):
        return x.sigmoid() * 2


def make_model() -> nn.Module:
    return nn.Sequential(Block(), Block(), nn.Linear(4, 3), Tail())


def unit_paths(model: nn.Module) -> list[str]:
    return [unit.path for unit in find_units(model)]


def test_models_without_wrappers_have_no_units():
    assert find_units(make_model()) == []


def test_the_innermost_wrapped_modules_are_units(mesh):
    model = make_model()
    fully_shard(model[0], mesh=mesh), fully_shard(model[1], mesh=mesh)
    assert unit_paths(model) == ["0", "1"]
    fully_shard(model, mesh=mesh)
    assert unit_paths(model) == ["0", "1"]
    assert [str(group) for group in group_units(find_units(model))] == [
        "2 × Block of fully_shard in the model"
    ]
    assert unit_paths(DistributedDataParallel(make_model())) == ["module"]


def test_a_forward_that_the_user_replaced_is_left_alone(mesh):
    model = make_model()
    model[0].forward = fulgurite.compile(model[0].forward, executors="torch")
    fully_shard(model[0], mesh=mesh), fully_shard(model[1], mesh=mesh)
    assert unit_paths(model) == ["1"]


def test_units_and_their_siblings_are_compiled(mesh):
    model = make_model()
    fully_shard(model[0], mesh=mesh), fully_shard(model[1], mesh=mesh)
    compiled = fulgurite.compile(model, executors="torch")
    x = torch.randn(2, 4, requires_grad=True)
    torch.testing.assert_close(compiled(x), model(x))
    assert len(compiled.graphs) == 2 and not compiled.breaks  # blocks, and Tail
    assert "distributed units     2 × Block of fully_shard" in str(compiled.explain())


def test_the_original_model_runs_in_eager_mode(mesh):
    model = make_model()
    fully_shard(model, mesh=mesh)
    compiled = fulgurite.compile(model, executors="torch")
    model(torch.randn(2, 4))
    assert not compiled.graphs
    compiled(torch.randn(2, 4))
    model(torch.randn(5, 4))
    assert len(compiled.graphs) == 1


def test_hooks_of_the_user_run(mesh):
    model = make_model()
    calls = []
    fully_shard(model, mesh=mesh)
    model.register_forward_hook(lambda module, args, output: calls.append(output.shape))
    compiled = fulgurite.compile(model, executors="torch")
    compiled(torch.randn(2, 4)), compiled(torch.randn(2, 4))
    assert calls == [(2, 3), (2, 3)]


def test_state_of_fully_shard_is_found_through_the_compiled_module(mesh):
    model = make_model()
    compiled = fulgurite.compile(fully_shard(model, mesh=mesh))
    compiled.set_requires_gradient_sync(False)
    assert compiled == model and model == compiled and hash(compiled) == hash(model)
    assert compiled != make_model() and {model: 1}[compiled] == 1


def test_copies_and_pickles_of_units_are_not_compiled(mesh):
    wrapped = DistributedDataParallel(make_model())
    compiled = fulgurite.compile(wrapped, executors="torch")
    x = torch.randn(2, 4)
    expected = compiled(x)
    for twin in (copy.deepcopy(wrapped.module), pickle.loads(pickle.dumps(wrapped.module))):
        torch.testing.assert_close(twin(x), expected)
    assert len(compiled.graphs) == 1
