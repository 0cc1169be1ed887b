"""Repeated blocks: which layers are found, and that compiled blocks match the layers."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import fulgurite
from fulgurite.capture.blocks import find_blocks, find_sibling_modules


class Layer(nn.Module):
    def __init__(self, index=0):
        super().__init__()
        self.layer_idx = index
        self.linear = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)

    def forward(self, x):
        return torch.relu(self.norm(self.linear(x))) * (self.layer_idx + 1)


class Stack(nn.Module):
    def __init__(self, *groups):
        super().__init__()
        self.groups = nn.ModuleList(nn.ModuleList(group) for group in groups)

    def forward(self, x):
        for group in self.groups:
            for layer in group:
                x = x + layer(x)
        return x


def test_layers_in_nested_containers_are_found():
    model = Stack(*([Layer() for _ in range(2)] for _ in range(3)))
    assert [str(group) for group in find_blocks(model)] == ["6 × Layer in groups"]
    compiled = fulgurite.compile(model)
    x = torch.randn(3, 4, requires_grad=True)
    torch.testing.assert_close(compiled(x), model(x))
    assert len(compiled.graphs) == 1


class Scaled(nn.Module):
    """A sibling module of the layers, with a class of the user's."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


class WithSiblings(nn.Module):
    """Layers with siblings: two norms of the user's class, and torch's own modules."""

    def __init__(self):
        super().__init__()
        self.first, self.last = Scaled(), Scaled()
        self.embedding, self.tower = nn.Embedding(9, 4), Stack([Layer() for _ in range(4)])
        self.layers = nn.ModuleList(Layer() for _ in range(5))

    def forward(self, tokens):
        x = self.tower(self.first(self.embedding(tokens)))
        for layer in self.layers:
            x = x + layer(x)
        return self.last(x)


def test_sibling_modules_are_compiled():
    model = WithSiblings()
    blocks = find_blocks(model)
    assert find_sibling_modules(blocks) == [
        model.first,
        model.last,
    ]  # not torch's own modules, nor other block parents
    compiled = fulgurite.compile(model, granularity="blocks")
    tokens = torch.randint(0, 9, (3, 7))
    for training in (True, False):
        with torch.set_grad_enabled(training):
            torch.testing.assert_close(compiled(tokens), model(tokens))
    wanted = torch.autograd.grad(model(tokens).sum(), list(model.parameters()))
    got = torch.autograd.grad(compiled(tokens).sum(), list(model.parameters()))
    torch.testing.assert_close(got, wanted)
    assert len(compiled.graphs) == 4  # a layer and a norm, with and without gradients
    assert "siblings Scaled, Scaled" in compiled.explain().granularity


def test_shared_layer_counts_once():
    layer = Layer()
    model = Stack([layer, layer, Layer()], [layer, Layer(), Layer()])
    (group,) = find_blocks(model)
    assert len(group.modules) == 4
    compiled = fulgurite.compile(copy.deepcopy(model), granularity="blocks")
    x = torch.randn(3, 4)
    torch.testing.assert_close(compiled(x), model(x))


def test_layers_with_different_attributes():
    model = Stack([Layer(index) for index in range(4)])
    compiled = fulgurite.compile(model, granularity="blocks")
    x = torch.randn(3, 4)
    torch.testing.assert_close(compiled(x), model(x))
    model.groups[0][1].layer_idx = 9
    torch.testing.assert_close(compiled(x), model(x))
    model.groups[0][2].norm = nn.Identity()
    torch.testing.assert_close(compiled(x), model(x))


@pytest.mark.parametrize("granularity", ["blocks", "model"])
def test_concurrent_threads(granularity):
    models = [Stack([Layer() for _ in range(4)]) for _ in range(2)]
    compiled = [fulgurite.compile(model, granularity=granularity) for model in models]
    failures = []

    def work(position):
        try:
            x = torch.randn(3, 4, requires_grad=True)
            result, expected = compiled[position](x), models[position](x)
            torch.testing.assert_close(result, expected)
            result.sum().backward()
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(position,)) for position in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert all(model.graphs for model in compiled)


@pytest.mark.parametrize("granularity", ["blocks", "model"])
def test_call_while_another_thread_traces(granularity):
    """torch has one tracing flag for all threads, and torch.compile's functions raise while it is set."""
    model = Stack([Layer() for _ in range(4)])
    compiled = fulgurite.compile(model, granularity=granularity)
    entered, done = threading.Event(), threading.Event()

    def traced(x):
        entered.set()
        assert done.wait(60)
        return x + 1

    thread = threading.Thread(target=lambda: make_fx(traced)(torch.ones(2)))
    thread.start()
    assert entered.wait(60)
    try:
        x = torch.randn(3, 4)
        for _ in range(2):
            torch.testing.assert_close(compiled(x), model(x))
    finally:
        done.set()
        thread.join()
    assert compiled.graphs


def test_tracing_sees_the_original_model():
    model = Stack([Layer() for _ in range(4)])
    compiled = fulgurite.compile(model)
    x = torch.randn(3, 4)
    graph = make_fx(lambda x: compiled(x))(x)
    torch.testing.assert_close(graph(x), model(x))
    assert not compiled.graphs


class Unpacked(Stack):
    """Has repeated layers, and calls their children instead of the layers."""

    def forward(self, x):
        for layer in self.groups[0]:
            x = layer.norm(layer.linear(x))
        return x


def test_model_that_never_calls_its_layers_is_compiled_as_one_graph():
    model = Unpacked([Layer() for _ in range(4)])
    compiled = fulgurite.compile(model)
    x = torch.randn(3, 4)
    for _ in range(2):
        torch.testing.assert_close(compiled(x), model(x))
    assert len(compiled.graphs) == 1 and compiled.explain().granularity.startswith("model")


def test_lazy_modules_are_compiled_as_one_graph():
    model = nn.Sequential(*(nn.Sequential(nn.LazyLinear(4), nn.ReLU()) for _ in range(4)))
    compiled = fulgurite.compile(model)
    x = torch.randn(3, 5)
    torch.testing.assert_close(compiled(x), model(x))
