"""A small model, and its CUDA graphs, for tests with fake and with real captures."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0, width: int = 8) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.dropout(self.down(F.gelu(self.up(x)))))


def graphed(compiled: Any, kind: Any = None) -> Any:
    """The graphed function of a compiled module's last graph."""
    found = compiled.compiled.session.compiled_graph(-1, kind).graphed
    assert found is not None
    return found
