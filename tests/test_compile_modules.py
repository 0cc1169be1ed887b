"""Compiled modules share state with the original; copying, pickling and nesting of compiled code."""

from __future__ import annotations

import copy
import os
import pickle

import pytest
import torch
from torch import fx, nn

import fulgurite
from fulgurite.compile import backend
from fulgurite.errors import ArgumentError
from tests.forked import run_program


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.calls += 1
        return self.drop(self.norm(self.linear(x)))

    def helper(self):
        return self.linear.weight.sum()


def test_compiled_module_shares_state_with_the_original():
    model = Small()
    compiled = fulgurite.compile(model)
    assert isinstance(compiled, Small)
    assert list(compiled.state_dict()) == list(model.state_dict())
    assert all(a is b for a, b in zip(compiled.parameters(), model.parameters(), strict=True))
    assert compiled.helper() == model.helper()
    compiled.eval()
    assert not model.training and not model.drop.training
    model.train()
    assert compiled.training
    compiled.load_state_dict({k: torch.zeros_like(v) for k, v in model.state_dict().items()})
    assert model.linear.weight.abs().sum() == 0
    compiled.to(torch.float64)
    assert model.linear.weight.dtype == torch.float64
    compiled.extra = 5
    assert model.extra == 5
    assert "Linear" in repr(compiled)


@pytest.mark.usefixtures("torch_only")
def test_train_eval_and_mutated_buffers():
    eager = Small()
    ours = fulgurite.compile(copy.deepcopy(eager))
    x = torch.randn(6, 4)
    for training in (True, False, True):
        eager.train(training), ours.train(training)
        torch.manual_seed(3)
        expected = eager(x)
        torch.manual_seed(3)
        assert torch.equal(ours(x), expected)
        for (name, mine), theirs in zip(ours.named_buffers(), eager.buffers(), strict=True):
            assert torch.equal(mine, theirs), name


def test_deepcopy_and_pickle():
    compiled = fulgurite.compile(Small().eval())
    x = torch.randn(2, 4)
    twin = copy.deepcopy(compiled)
    assert torch.equal(twin(x), compiled(x)) and twin.linear.weight is not compiled.linear.weight
    assert twin.graphs and twin.graphs is not compiled.graphs
    plain = pickle.loads(pickle.dumps(compiled))
    assert type(plain) is Small and torch.equal(plain(x), compiled(x))


@fulgurite.compile
def doubled(x):
    return x * 2


def plain_doubled(x):
    return x * 2


class Holder:
    def __init__(self):
        self.factor = 2
        self.call = fulgurite.compile(self.times)

    def times(self, x):
        return x * self.factor


def test_copy_and_pickle_of_compiled_functions():
    x = torch.ones(2)
    assert copy.copy(doubled) is doubled and copy.deepcopy(doubled) is doubled
    assert pickle.loads(pickle.dumps(doubled)) is doubled
    unnamed = fulgurite.compile(plain_doubled)
    unnamed(x)
    assert pickle.loads(pickle.dumps(unnamed)) is plain_doubled
    holder = Holder()
    holder.call(x)
    other = copy.deepcopy(holder)
    other.factor = 5
    assert torch.equal(other.call(x), 5 * x) and torch.equal(holder.call(x), 2 * x)
    assert other.call is not holder.call and other.call.graphs


def test_recompiling_starts_from_the_original():
    compiled = fulgurite.compile(fulgurite.compile(Small().eval()), remat="none")
    assert compiled(torch.randn(2, 4)).shape == (2, 4)
    assert len(compiled.graphs) == 1


def test_user_attributes_take_precedence_over_ours():
    class Mine(nn.Module):
        def __init__(self):
            super().__init__()
            self.history = [1]

        def forward(self, x):
            return x + len(self.history)

    compiled = fulgurite.compile(Mine())
    assert compiled.history == [1]
    assert compiled(torch.zeros(1)) == 1
    assert compiled.compiled.history


def test_compiled_function_inside_another_compilation():
    inner = fulgurite.compile(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    outer = fulgurite.compile(lambda x: inner(x) + 1, fullgraph=True)
    x = torch.randn(2, 4)
    torch.testing.assert_close(outer(x), inner(x) + 1)
    theirs = torch.compile(lambda x: inner(x) * 2, backend="eager", fullgraph=True)
    torch.testing.assert_close(theirs(x), inner(x) * 2)


def test_torch_compile_backend():
    model = nn.Linear(4, 4)
    x = torch.randn(2, 4)
    assert torch.allclose(torch.compile(model, backend="fulgurite")(x), model(x))
    options = {"remat": "none", "executors": ["torch"]}
    assert torch.allclose(torch.compile(model, backend="fulgurite", options=options)(x), model(x))


def test_torch_compile_captures_as_fulgurite_does():
    program = """
import torch
x = torch.ones(())
compiled = torch.compile(lambda x: x in [x + 1, x], backend="fulgurite")
assert compiled(x) is True, compiled(x)
"""
    outcome = run_program(program, os.environ)
    assert outcome.returncode == 0, outcome.output


@pytest.mark.parametrize(
    "mode", ["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
)
def test_modes_of_torch_compile(mode):
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    compiled = torch.compile(model, backend="fulgurite", mode=mode)
    torch.testing.assert_close(compiled(x), model(x))


def test_unknown_modes_list_what_is_allowed():
    with pytest.raises(ArgumentError, match="'max-autotune'"):
        backend(fx.symbolic_trace(nn.Identity()), [torch.ones(2)], mode="fastest")
