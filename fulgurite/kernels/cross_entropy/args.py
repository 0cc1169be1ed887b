"""The options of `cross_entropy_rows`."""

from __future__ import annotations

from dataclasses import dataclass

IGNORED = -100  # a label without a loss, as in torch


@dataclass(frozen=True)
class CrossEntropyArgs:
    """scale, cap   of the logits, see ops.py
    z_weight        of the squared log-partition in the gradient
    has_gradient    whether the gradient is computed
    """

    scale: float = 1.0
    cap: float | None = None
    z_weight: float = 0.0
    has_gradient: bool = True
