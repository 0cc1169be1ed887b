"""Rotary position embedding: positions in, cos and sin out; queries and keys in, rotated ones out.

    (a, b) -> (a cos t - b sin t, b cos t + a sin t),   t = position * frequency[pair]

A pair is (x[i], x[i + R/2]) in the half layout and (x[2i], x[2i + 1]) in the interleaved one. The
scalings change only the frequencies, and for YaRN and LongRoPE the length of the rotated vector.

Two scalings, dynamic and LongRoPE, depend on how long the whole sequence is. That length comes in
as the `extent` of each token, so that neighbours in a batch never change a result.

Shapes: X the layout of the tokens, [T] or [B, T]; N heads; H head size; R rotated ones.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fulgurite.kernels.elementwise import ops
from fulgurite.models.config import RopeConfig


class Rotation(NamedTuple):
    """cos and sin of each token's angles, times the attention factor; [X, 1, R / 2], float32."""

    cos: Tensor
    sin: Tensor


class Rotary(nn.Module):
    """The angles of one rotary embedding.

    The frequencies are made on the CPU even while modules are built on the meta device: they are
    computed, not loaded, and so must exist before any checkpoint is read.
    """

    short: Tensor
    long: Tensor

    def __init__(self, config: RopeConfig) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("short", frequencies(config), persistent=False)
        self.register_buffer("long", frequencies(config, long=True), persistent=False)

    def forward(self, positions_X: Tensor, extent_X: Tensor | None) -> Rotation:
        angles = positions_X[..., None] * self._frequencies(
            extent_X
        )  # whole numbers become float32
        cos, sin, factor = angles.cos(), angles.sin(), self.config.attention_factor
        if factor != 1.0:
            cos, sin = cos * factor, sin * factor
        return Rotation(cos[..., None, :], sin[..., None, :])

    def _frequencies(self, extent_X: Tensor | None) -> Tensor:
        if not self.config.needs_extent:
            return self.short
        assert extent_X is not None, f"a {self.config.kind} rotary embedding needs the extents"
        if self.config.kind == "longrope":
            is_long = extent_X[..., None] > self.config.original_positions
            return torch.where(is_long, self.long, self.short)
        return self._stretched(extent_X)

    def _stretched(self, extent_X: Tensor) -> Tensor:
        """Dynamic NTK: past the trained length the base grows with the length of the sequence."""
        rope = self.config
        length = extent_X.clamp(min=rope.max_positions).float()
        growth = rope.factor * length / rope.max_positions - (rope.factor - 1)
        base = rope.theta * growth ** (rope.dim / (rope.dim - 2))
        exponents = torch.arange(0, rope.dim, 2, device=extent_X.device).float() / rope.dim
        return 1.0 / base[..., None] ** exponents


def rotate(x_XNH: Tensor, rotation: Rotation, interleaved: bool) -> Tensor:
    """Turn the first R dimensions of each head, in float32; the others pass through."""
    return ops.rotate(x_XNH, rotation.cos, rotation.sin, interleaved)


def frequencies(rope: RopeConfig, long: bool = False) -> Tensor:
    """Radians per position of each pair, [R / 2] float32, scaled as `rope.kind` says."""
    exponents = torch.arange(0, rope.dim, 2, device="cpu").float() / rope.dim
    plain = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "yarn":
        return _yarn(rope, plain)
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    if rope.kind == "longrope":
        factors = rope.long_factors if long else rope.short_factors
        return 1.0 / (torch.tensor(factors, device="cpu") * rope.theta**exponents)
    return plain


def _llama3(rope: RopeConfig, plain: Tensor) -> Tensor:
    """Slow pairs are slowed by `factor`, fast ones kept, those between blended."""
    turns = rope.original_positions * plain / (2 * math.pi)
    span = rope.high_frequency_factor - rope.low_frequency_factor
    past = turns - rope.low_frequency_factor
    keep = (past / span).clamp(0, 1) if span else (past >= 0).float()
    return keep * plain + (1 - keep) * plain / rope.factor


def _yarn(rope: RopeConfig, plain: Tensor) -> Tensor:
    """Pairs with over beta_fast turns in the trained context are kept, under beta_slow slowed."""

    def pair_with(turns: float) -> float:
        logarithm = math.log(rope.original_positions / (turns * 2 * math.pi))
        return rope.dim * logarithm / (2 * math.log(rope.theta))

    low, high = pair_with(rope.beta_fast), pair_with(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    width = (high - low) or 0.001
    slow = ((torch.arange(rope.dim // 2, device="cpu").float() - low) / width).clamp(0, 1)
    return slow * plain / rope.factor + (1 - slow) * plain
