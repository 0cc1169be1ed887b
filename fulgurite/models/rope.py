"""Rotary position embedding (RoPE): positions in, cos and sin out; queries and keys in, rotated
ones out.

    (a, b) -> (a cos t - b sin t, b cos t + a sin t),   t = position * inv_freq[pair]

A pair is (x[i], x[i + R/2]) in the half layout and (x[2i], x[2i + 1]) in the interleaved layout.
RoPE scalings change only the frequencies; YaRN and LongRoPE also scale cos and sin.

Dynamic NTK and LongRoPE depend on the length of the whole sequence. Callers pass that length for
each token, so other sequences in a batch never change a result.

In multimodal models a position has three numbers: time, height and width (M-RoPE). Each pair rotates
by one of them. The three are equal for text, which makes it plain RoPE.

Shapes: X token layout, [T] or [B, T]; N heads; H head size; R rotary_dim.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fulgurite.determinism import is_deterministic
from fulgurite.kernels.elementwise import ops as elementwise
from fulgurite.models.config import RopeConfig
from fulgurite.op import op


class RotaryCosSin(NamedTuple):
    """cos and sin of each token's angles, times the attention factor; [X, 1, R / 2], float32."""

    cos: Tensor
    sin: Tensor


class RotaryEmbedding(nn.Module):
    """cos and sin of one rotary embedding.

    Frequencies are computed, not loaded. So they are created on the CPU even when the modules are
    built on the meta device.
    """

    short_inv_freq: Tensor
    long_inv_freq: Tensor
    mrope_axes: Tensor

    def __init__(self, config: RopeConfig) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("short_inv_freq", compute_inv_freq(config), persistent=False)
        long_inv_freq = compute_inv_freq(config, long=True)
        self.register_buffer("long_inv_freq", long_inv_freq, persistent=False)
        self.register_buffer("mrope_axes", find_mrope_axes(config), persistent=False)

    def forward(self, positions_X: Tensor, lengths_X: Tensor | None) -> RotaryCosSin:
        return self._rotate(positions_X[..., None], lengths_X)

    def rotate_multimodal(self, positions_3X: Tensor, lengths_X: Tensor | None) -> RotaryCosSin:
        """The same for positions of time, height and width, [3, X]."""
        return self._rotate(positions_3X.movedim(0, -1)[..., self.mrope_axes], lengths_X)

    def _rotate(self, positions_XR: Tensor, lengths_X: Tensor | None) -> RotaryCosSin:
        angles = positions_XR * self._inv_freq(lengths_X)  # int * float32 -> float32
        is_opaque = torch.compiler.is_compiling() and is_deterministic()
        cos, sin = cos_sin_op(angles) if is_opaque else (angles.cos(), angles.sin())
        factor = self._attention_factor(lengths_X)
        if factor is not None:
            cos, sin = cos * factor, sin * factor
        return RotaryCosSin(cos[..., None, :], sin[..., None, :])

    def _attention_factor(self, lengths_X: Tensor | None) -> float | Tensor | None:
        """The factor of cos and sin; None: 1. Phi-MoE has another one for long sequences."""
        short, long = self.config.attention_factor, self.config.long_attention_factor
        if long is None:
            return None if short == 1.0 else short
        assert lengths_X is not None, "two attention factors need sequence lengths"
        is_long = lengths_X[..., None] > self.config.original_max_positions
        return torch.where(is_long, long, short)

    def _inv_freq(self, lengths_X: Tensor | None) -> Tensor:
        if not self.config.needs_sequence_length:
            return self.short_inv_freq
        assert lengths_X is not None, (
            f"a {self.config.rope_type} rotary embedding needs sequence lengths"
        )
        if self.config.rope_type == "longrope":
            is_long = lengths_X[..., None] > self.config.original_max_positions
            return torch.where(is_long, self.long_inv_freq, self.short_inv_freq)
        return self._dynamic_ntk_inv_freq(lengths_X)

    def _dynamic_ntk_inv_freq(self, lengths_X: Tensor) -> Tensor:
        """Dynamic NTK: beyond `max_positions` the base grows with the sequence length."""
        rope = self.config
        length = lengths_X.clamp(min=rope.max_positions).float()
        growth = rope.factor * length / rope.max_positions - (rope.factor - 1)
        base = rope.theta * growth ** (rope.rotary_dim / (rope.rotary_dim - 2))
        dims = torch.arange(0, rope.rotary_dim, 2, device=lengths_X.device).float()
        exponents = dims / rope.rotary_dim
        return 1.0 / base[..., None] ** exponents


def apply_rope(x_XNH: Tensor, cos_sin: RotaryCosSin, interleaved: bool) -> Tensor:
    """Rotate the first R dimensions of each head, in float32. The others are unchanged."""
    return elementwise.apply_rope(x_XNH, cos_sin.cos, cos_sin.sin, interleaved)


def find_mrope_axes(rope: RopeConfig) -> Tensor:
    """Which of time (0), height (1) and width (2) each pair rotates by; [R / 2], empty without M-RoPE."""
    sections = torch.tensor(rope.mrope_sections, dtype=torch.int64, device="cpu")
    if not rope.mrope_interleaved:
        return torch.arange(len(sections), device="cpu").repeat_interleave(sections)
    pairs = torch.arange(int(sections.sum()), device="cpu")
    axes = pairs % 3  # as long as the section of height or width has pairs left
    return torch.where(pairs < 3 * sections[axes], axes, 0)


def compute_inv_freq(rope: RopeConfig, long: bool = False) -> Tensor:
    """Radians per position of each pair, [R / 2] float32, scaled by `rope.rope_type`."""
    exponents = torch.arange(0, rope.rotary_dim, 2, device="cpu").float() / rope.rotary_dim
    inv_freq = 1.0 / rope.theta**exponents
    if rope.rope_type == "linear":
        return inv_freq / rope.factor
    if rope.rope_type == "yarn":
        return _scale_yarn(rope, inv_freq)
    if rope.rope_type == "llama3":
        return _scale_llama3(rope, inv_freq)
    if rope.rope_type == "longrope":
        factors = rope.long_factors if long else rope.short_factors
        return 1.0 / (torch.tensor(factors, device="cpu") * rope.theta**exponents)
    return inv_freq


def _scale_llama3(rope: RopeConfig, inv_freq: Tensor) -> Tensor:
    """Divide low frequencies by `factor`, keep high frequencies, blend between them."""
    rotations = rope.original_max_positions * inv_freq / (2 * math.pi)
    span = rope.high_freq_factor - rope.low_freq_factor
    excess = rotations - rope.low_freq_factor
    keep = (excess / span).clamp(0, 1) if span else (excess >= 0).float()
    return keep * inv_freq + (1 - keep) * inv_freq / rope.factor


def _scale_yarn(rope: RopeConfig, inv_freq: Tensor) -> Tensor:
    """Keep pairs with more than beta_fast rotations in the trained context; divide those below
    beta_slow.
    """

    def find_pair(rotations: float) -> float:
        logarithm = math.log(rope.original_max_positions / (rotations * 2 * math.pi))
        return rope.rotary_dim * logarithm / (2 * math.log(rope.theta))

    low, high = find_pair(rope.beta_fast), find_pair(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    width = (high - low) or 0.001
    ramp = ((torch.arange(rope.rotary_dim // 2, device="cpu").float() - low) / width).clamp(0, 1)
    return ramp * inv_freq / rope.factor + (1 - ramp) * inv_freq


@op("fulgurite::cos_sin")
def cos_sin_op(angles: Tensor) -> tuple[Tensor, Tensor]:
    """torch's cosine and sine, also in a captured graph: the fuser has approximations of its own."""
    return angles.cos(), angles.sin()


@cos_sin_op.fake
def _(angles: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(angles), torch.empty_like(angles)
