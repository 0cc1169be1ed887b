"""Copies, hooks and overridden calls of compiled modules."""

from __future__ import annotations

import abc
import copy
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import fulgurite


def test_shallow_copy_shares_parameters_but_not_graphs():
    compiled = fulgurite.compile(nn.Linear(3, 3))
    twin = copy.copy(compiled)
    twin.extra = 1
    assert twin.weight is compiled.weight and not hasattr(compiled, "extra")
    assert torch.equal(twin(torch.ones(2, 3)), compiled(torch.ones(2, 3)))
    assert twin.graphs and twin.graphs is not compiled.graphs


def test_hooks_and_an_overridden_call():
    class Scaled(nn.Linear):
        def __call__(self, x, factor=2):
            return super().__call__(x) * factor

    compiled = fulgurite.compile(Scaled(3, 3))
    x = torch.randn(2, 3)
    plain = nn.functional.linear(x, compiled.weight, compiled.bias)
    torch.testing.assert_close(compiled(x, factor=5), plain * 5)
    compiled.register_forward_hook(lambda module, inputs, output: output * 0)
    assert fulgurite.compile(compiled)(x).abs().sum() == 0


class Scale(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor))

    def forward(self, x):
        return x * self.factor

    def double(self):
        return type(self)(self.factor.item() * 2)

    @classmethod
    def of(cls, factor):
        return cls(factor)


class AbstractScale(Scale, abc.ABC):
    pass


@pytest.mark.parametrize("kind", [Scale, AbstractScale])
def test_new_objects_of_the_class_are_not_the_compiled_object(kind):
    compiled, x = fulgurite.compile(kind(3.0)), torch.ones(2)
    assert torch.equal(compiled(x), x * 3)
    replica = compiled._replicate_for_data_parallel()
    replica.factor = torch.tensor(7.0)
    made = {compiled.double(): 6, compiled.__class__(4.0): 4, compiled.of(5.0): 5, replica: 7}
    assert len(made) == 4 and compiled not in made
    for module, factor in made.items():
        assert type(module) is kind
        assert torch.equal(module(x), x * factor)
        assert torch.equal(fulgurite.compile(module)(x), x * factor)
    assert isinstance(compiled, kind) and torch.equal(compiled(x), x * 3)


@pytest.mark.parametrize("granularity", ["auto", "model"])
def test_parts_of_a_compiled_container(granularity):
    model = nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(4)))
    compiled, x = fulgurite.compile(model, granularity=granularity), torch.randn(2, 3)
    torch.testing.assert_close(compiled(x), model(x))
    torch.testing.assert_close(compiled[:2](x), model[1](model[0](x)))
    torch.testing.assert_close((compiled + nn.Sequential(nn.ReLU()))(x), model(x).relu())
    torch.testing.assert_close((compiled * 2)(x), model(model(x)))
    torch.testing.assert_close(compiled(x), model(x))


def test_a_class_is_not_told_of_the_compiled_class():
    class Layer(nn.Module):
        kinds: ClassVar[list[type]] = []

        def __init_subclass__(cls, name: str) -> None:
            cls.kinds.append(cls)

        def forward(self, x):
            return x + len(self.kinds)

    class Named(Layer, name="named"):
        pass

    compiled = fulgurite.compile(Named())
    torch.testing.assert_close(compiled(torch.ones(2)), torch.full((2,), 2.0))
    assert Layer.kinds == [Named]


def test_a_class_that_forbids_new_attributes():
    class Frozen(nn.Module):
        def __setattr__(self, name, value):
            if not name.startswith("_"):
                super().__setattr__(name, value)

        def forward(self, x):
            return x + 1

    module = Frozen()
    compiled = fulgurite.compile(module)
    torch.testing.assert_close(compiled(torch.ones(2)), torch.full((2,), 2.0))
    assert compiled.__dict__ is module.__dict__


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        return self.linear(x).relu()


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.jit.script(nn.Linear(3, 3)),
        lambda: torch.jit.trace(nn.Linear(3, 3), torch.ones(2, 3)),
        lambda: nn.Sequential(torch.jit.script(nn.Sequential(*[Block() for _ in range(4)]))),
    ],
    ids=["scripted", "traced", "repeated layers"],
)
def test_torchscript_runs_as_it_is(make):
    module, x = make(), torch.randn(2, 3)
    compiled = fulgurite.compile(module)
    torch.testing.assert_close(compiled(x), module(x))
    assert isinstance(compiled, type(module)) and compiled.breaks
    torch.testing.assert_close(copy.deepcopy(compiled)(x), module(x))


class Doubled(nn.Module):
    def forward(self, weight):
        return weight * 2


@pytest.mark.parametrize("on_original", [False, True])
def test_parametrizations_come_and_go(on_original):
    original = nn.Linear(3, 3)
    compiled, x = fulgurite.compile(original), torch.randn(2, 3)
    module = original if on_original else compiled
    weight = original.weight.detach().clone()
    plain = compiled(x)
    parametrize.register_parametrization(module, "weight", Doubled())
    for one in (original, compiled):
        assert isinstance(one, nn.Linear) and parametrize.is_parametrized(one)
        torch.testing.assert_close(one.weight, weight * 2)
        torch.testing.assert_close(one(x), plain + x @ weight.T)
    torch.testing.assert_close(copy.deepcopy(compiled)(x), plain + x @ weight.T)
    parametrize.remove_parametrizations(module, "weight", leave_parametrized=False)
    assert [*compiled.state_dict()] == [*original.state_dict()] == ["bias", "weight"]
    torch.testing.assert_close(compiled(x), plain)


def test_attributes_of_a_parametrized_module_are_written_through_its_properties():
    class Doubling(nn.Module):
        def forward(self, weight):
            return weight * 2

        def right_inverse(self, weight):
            return weight / 2

    compiled = fulgurite.compile(
        parametrize.register_parametrization(nn.Linear(3, 3), "weight", Doubling())
    )
    compiled.weight = torch.eye(3)
    compiled.bias = nn.Parameter(torch.zeros(3))
    x = torch.randn(2, 3)
    torch.testing.assert_close(compiled(x), x)
    parametrize.register_parametrization(compiled, "bias", Doubled())
    parametrize.remove_parametrizations(compiled, "weight")
    torch.testing.assert_close(compiled(x), x)
    del compiled.weight
    assert not hasattr(compiled, "weight")
