"""Side effects of `explain`. Its contents are tested with the parts that produce them."""

from __future__ import annotations

import copy

import torch
from torch import nn

import fulgurite


def test_explain_restores_inputs_and_buffers():
    model = nn.BatchNorm1d(4)
    compiled = fulgurite.compile(model)
    x, before = torch.randn(8, 4), copy.deepcopy(model.state_dict())
    assert compiled.explain(x).times
    once = nn.BatchNorm1d(4)
    once.load_state_dict(before)
    once(x)
    for name, value in once.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value)  # as after the one call

    grows = fulgurite.compile(lambda x, kept: x.add_(1) * kept)
    x, nan = torch.zeros(4), torch.full((1,), torch.nan).expand(4)
    assert grows.explain(x, nan).times
    assert torch.equal(x, torch.ones(4))
