"""Decompositions: results are what the op returns, in memory of their own."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import fulgurite


def test_results_share_no_memory_with_arguments():
    """torch decomposes a shuffle of one group to views; the op returns a copy."""

    def function(x):
        return F.channel_shuffle(x, 1)

    x = torch.randn(1, 1, 1, 1, 2)
    compiled = fulgurite.compile(function, dynamic=True)
    result = compiled(x)
    expected = function(x).clone()
    x.zero_()
    assert torch.equal(result, expected)
