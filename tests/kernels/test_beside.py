"""Two calls at once give what they give one after the other."""

from __future__ import annotations

import pytest
import torch

from fulgurite.kernels.common.multi_stream import beside, forks


def test_only_without_gradients_on_a_gpu() -> None:
    assert not forks(torch.ones(1))
    with torch.no_grad():
        assert not forks(torch.ones(1))
        assert not torch.cuda.is_available() or forks(torch.ones(1, device="cuda"))
    assert not torch.cuda.is_available() or not forks(torch.ones(1, device="cuda"))


@pytest.mark.gpu
def test_streams_wait_for_each_other() -> None:
    """Many rounds, each of which reads what the one before has written on the other stream."""
    x = torch.ones(1 << 20, device="cuda")
    with torch.no_grad():
        for _ in range(200):
            a, b = beside(lambda: x * 2, lambda: (x + 1) * 3, x.device)
            x = (a + b) / 8
    expected = 1.0
    for _ in range(200):
        expected = (2 * expected + 3 * (expected + 1)) / 8
    torch.testing.assert_close(x, torch.full_like(x, expected))


@pytest.mark.gpu
def test_a_graph_records_both() -> None:
    x = torch.zeros(1000, device="cuda")

    def call() -> torch.Tensor:
        a, b = beside(lambda: x * 2, lambda: x + 1, x.device)
        return a * b

    with torch.no_grad():
        call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = call()
    for value in (1.0, 5.0):
        x.fill_(value)
        graph.replay()
        torch.testing.assert_close(out, torch.full_like(x, 2 * value * (value + 1)))
