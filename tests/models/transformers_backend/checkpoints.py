"""Tiny checkpoints of architectures that run through transformers, written by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB_SIZE = 97
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
GPT2_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "n_positions": 96,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "bos_token_id": None,
    "eos_token_id": None,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
# What each adds to the one before: see the comment.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "cohere2": ("Cohere2", {**SIZES, "sliding_window": 8}),  # NoPE layers, logit scale, windows
    "gpt2": ("GPT2", GPT2_SIZES),  # learned positions, Conv1D
    "opt": ("OPT", {**SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32}),  # offset positions
    "gpt_neox": ("GPTNeoX", SIZES),  # fused QKV, partial RoPE, parallel residual
    "gemma2": ("Gemma2", {**SIZES, "head_dim": 12, "sliding_window": 6}),  # softcaps, another scale
    "gpt_oss": ("GptOss", {**SIZES, "head_dim": 8, "num_local_experts": 4}),  # sinks, experts
    "qwen2_moe": ("Qwen2Moe", {**SIZES, **EXPERTS, "shared_expert_intermediate_size": 24}),
    "persimmon": ("Persimmon", SIZES),  # QK norm, relu squared
}


def build_module(case: str, **changes: Any) -> Any:
    """A module of random weights, norms and biases included."""
    name, sizes = CASES[case]
    torch.manual_seed(3)
    config = getattr(transformers, f"{name}Config")(**{**sizes, **changes})
    module = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return module.eval()


def write_checkpoint(module: Any, folder: Path) -> Path:
    transformers.utils.logging.disable_progress_bar()
    module.save_pretrained(folder)
    return folder
