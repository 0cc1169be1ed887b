"""Multi-stream overlap: two calls at once give the results of one after the other."""

from __future__ import annotations

import pytest
import torch

from fulgurite.kernels.common.multi_stream import can_overlap, run_overlapped


def test_overlap_only_on_a_gpu_without_gradients() -> None:
    assert not can_overlap(torch.ones(1))
    with torch.no_grad():
        assert not can_overlap(torch.ones(1))
        assert not torch.cuda.is_available() or can_overlap(torch.ones(1, device="cuda"))
    assert not torch.cuda.is_available() or not can_overlap(torch.ones(1, device="cuda"))


@pytest.mark.gpu
def test_streams_wait_for_each_other() -> None:
    """Each round reads what the previous one wrote on the other stream."""
    x = torch.ones(1 << 20, device="cuda")
    with torch.no_grad():
        for _ in range(200):
            a, b = run_overlapped(lambda: x * 2, lambda: (x + 1) * 3, x.device)
            x = (a + b) / 8
    expected = 1.0
    for _ in range(200):
        expected = (2 * expected + 3 * (expected + 1)) / 8
    torch.testing.assert_close(x, torch.full_like(x, expected))


@pytest.mark.gpu
def test_cuda_graph_captures_both_streams() -> None:
    x = torch.zeros(1000, device="cuda")

    def call() -> torch.Tensor:
        a, b = run_overlapped(lambda: x * 2, lambda: x + 1, x.device)
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
