"""Explanations to draw: small models with their backward."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

import fulgurite
from fulgurite.explain import Explanation


class Perceptron(nn.Module):
    def __init__(self, size: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.up = nn.Linear(size, 3 * size)
        self.down = nn.Linear(3 * size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.up(self.norm(x)))
        return x + self.down(hidden)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Perceptron(), Perceptron(), Perceptron())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Pointwise(fulgurite.Executor):
    """Takes additions and activations into regions that run as they are."""

    name = "pointwise"

    def claims(self, node: fx.Node) -> bool:
        return any(part in str(node.target) for part in ("aten.add.", "aten.relu", "layer_norm"))

    def lower(self, region: fx.GraphModule):
        return region.forward


@pytest.fixture(scope="session")
def explained() -> Explanation:
    """Three layers, trained, with a user's executor and the torch executor."""
    torch.manual_seed(0)
    model = fulgurite.compile(Stack(), granularity="model", executors=[Pointwise(), "torch"])
    x = torch.randn(4, 16)
    model(x).sum().backward()
    return model.explain(x)


@pytest.fixture(scope="session")
def plain() -> Explanation:
    """One layer, trained, with the torch executor."""
    torch.manual_seed(0)
    model = fulgurite.compile(Perceptron(), executors=["torch"])
    model(torch.randn(4, 16)).sum().backward()
    return model.explain()
