"""Regions through TorchInductor, and autotuning between executors."""

from __future__ import annotations

import pytest
import torch

import fulgurite
from fulgurite import cache


def f(x, w):
    h = torch.nn.functional.gelu(x @ w, approximate="tanh")
    return h.softmax(-1), torch.rand_like(h).argmax()


@pytest.fixture(scope="module")
def inputs():
    torch.manual_seed(0)
    return torch.randn(6, 8), torch.randn(8, 5)


def test_regions_and_single_ops_share_a_graph(inputs):
    compiled = fulgurite.compile(f, executors=["inductor", "torch"])
    torch.manual_seed(1)
    expected = f(*inputs)
    torch.manual_seed(1)
    torch.testing.assert_close(compiled(*inputs), expected)
    text = str(compiled.last_trace())
    assert "@fulgurite.region('inductor')" in text and "rand_like" in text.split("def forward")[1]
    assert compiled.explain().graphs[0].compiled_graphs[0].calls["inductor"] >= 1


def test_dynamic_sizes_reach_inductor():
    compiled = fulgurite.compile(
        lambda x: (x * 2).relu().sum(-1), executors=["inductor", "torch"], dynamic=True
    )
    for size in (3, 8, 17):
        x = torch.randn(size, size + 1)
        torch.testing.assert_close(compiled(x), (x * 2).relu().sum(-1))
    assert len(compiled.graphs) == 1
    final, x, sizes = compiled.last_trace(), torch.randn(5, 6), iter((5, 6))
    values = [node.meta["val"] for node in final.inputs]
    inputs = [x if isinstance(value, torch.Tensor) else next(sizes) for value in values]
    torch.testing.assert_close(final.load()(*inputs)[0], (x * 2).relu().sum(-1))


def test_autotune_keeps_the_fastest_and_caches_it(inputs, monkeypatch):
    def timed(calls, *args, **kwargs):
        timed.count += 1
        return {name: {"torch": 1e-6, "inductor": 5e-6}[name] for name in calls}

    timed.count = 0
    monkeypatch.setattr("fulgurite.timing.median_times_on", timed)
    g = lambda x, w: (x @ w).relu() + 1  # noqa: E731
    for cached in (False, True):
        compiled = fulgurite.compile(g, executors=["inductor", "torch"], autotune=True)
        torch.testing.assert_close(compiled(*inputs), g(*inputs))
        (decision,) = compiled.graphs[0].decisions
        assert decision.winner == "torch" and decision.cached == cached
        assert "torch" in str(compiled.explain()) and "1.0 µs" in str(compiled.explain())
    assert timed.count == 1
    cache.clear("decisions")


def test_autotune_measures(inputs):
    compiled = fulgurite.compile(
        lambda x, w: (x @ w).tanh(), executors=["inductor", "torch"], autotune=True
    )
    torch.testing.assert_close(compiled(*inputs), (inputs[0] @ inputs[1]).tanh())
    (decision,) = compiled.graphs[0].decisions
    assert set(decision.seconds) == {"inductor", "torch"}
    assert decision.winner == min(decision.seconds, key=decision.seconds.get)
