"""Heuristics of linear attention: how channels and values are divided among programs."""

from __future__ import annotations

from fulgurite.kernels.tuning.config import LaunchConfig


class LinearAttentionHeuristics:
    """Decisions of `kernels/linear_attention`; the numbers are in the device family's table."""

    causal_conv: LaunchConfig  # `block_m` tokens in a step of the loop, `block_n` channels
    delta_rule_inverse: LaunchConfig
    delta_rule_chunked: LaunchConfig  # `block_n` columns of a value
    delta_rule_recurrent: LaunchConfig  # `block_n` columns of a value; one for prefill and decode
    delta_rule_chunks_prompts = True  # whether whole blocks of a prompt run in chunked form
