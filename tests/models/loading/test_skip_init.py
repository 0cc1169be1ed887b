"""Modules without initial values."""

from __future__ import annotations

import torch
from torch import nn

from fulgurite.models.loading.skip_init import SkipInitialization


def test_values_are_left_as_they_are():
    linear = nn.Linear(3, 2)
    before = [parameter.detach().clone() for parameter in linear.parameters()]
    with SkipInitialization():
        linear.reset_parameters()
        assert nn.init.normal_(linear.weight) is linear.weight
        assert torch.zeros(2).sum() == 0  # everything else works
    for parameter, value in zip(linear.parameters(), before, strict=True):
        assert torch.equal(parameter, value)
    linear.reset_parameters()
    assert not torch.equal(linear.weight, before[0])


def test_on_the_meta_device():
    with torch.device("meta"), SkipInitialization():
        embedding = nn.Embedding(5, 4)
    assert embedding.weight.is_meta and embedding.weight.shape == (5, 4)
    assert isinstance(embedding.weight, nn.Parameter)
