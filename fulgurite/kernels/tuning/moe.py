"""Heuristics of the MoE operators."""

from __future__ import annotations

MAX_SMALL_BATCH = 2  # tokens up to which kernels without sorting are faster (H200, Qwen3-30B-A3B; equal at 4)
