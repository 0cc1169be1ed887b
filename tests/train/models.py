"""Small models of several families for the tests of train."""

from __future__ import annotations

from typing import Any

import torch

from fulgurite.models.layers import CausalLM
from fulgurite.train.build import build_from_scratch

DENSE: dict[str, Any] = dict(
    vocab_size=320,
    hidden_size=32,
    intermediate_size=80,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=128,
    rms_norm_eps=1e-6,
    tie_word_embeddings=False,
)
MOE: dict[str, Any] = dict(
    DENSE,
    moe_intermediate_size=24,
    n_routed_experts=8,
    num_experts_per_tok=2,
    n_shared_experts=1,
    first_k_dense_replace=1,
    n_group=1,
    topk_group=1,
    norm_topk_prob=True,
    routed_scaling_factor=1.0,
)


def build_small(architecture: str = "LlamaForCausalLM", **fields: Any) -> CausalLM:
    """A model with random weights, the same at every call."""
    base = MOE if architecture == "Dots1ForCausalLM" else DENSE
    built = build_from_scratch(
        {**base, **fields}, architecture, dtype=torch.float32, device="cpu", seed=0
    )
    return built.model
