"""Tiny transformers checkpoints with a byte tokenizer, and what the command makes of them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers
from torch import nn

from fulgurite import cli
from tests.models.reference_models import randomize
from tests.serve.tiny_checkpoint import VOCABULARY, byte_tokenizer

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "initializer_range": 0.1,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": None,
    "attn_implementation": "eager",
}
MOE_SIZES = SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2}
CLASSES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, SIZES),
    "phi3": (transformers.Phi3Config, transformers.Phi3ForCausalLM, SIZES),
    "mixtral": (transformers.MixtralConfig, transformers.MixtralForCausalLM, MOE_SIZES),
    "qwen3_moe": (
        transformers.Qwen3MoeConfig,
        transformers.Qwen3MoeForCausalLM,
        SIZES
        | {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 128,
            "norm_topk_prob": True,
        },
    ),
}
TEXT = "The quick brown fox jumps over the lazy dog. Numbers: 0123456789! " * 20


def build_model(name: str, dtype: torch.dtype = torch.float32, **changes: object) -> nn.Module:
    config_class, model_class, sizes = CLASSES[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = model_class(config_class(**(sizes | changes))).eval()
    randomize(model, torch.Generator().manual_seed(0))
    return model.to(dtype)


def save_checkpoint(folder: Path, name: str, dtype: torch.dtype = torch.float32, **changes) -> Path:
    build_model(name, dtype, **changes).save_pretrained(folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "</s>", "bos_token": "<s>", "chat_template": "{{ messages }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def run_quantize(source: Path, output: Path, *options: str) -> int:
    return cli.main(["quantize", str(source), "--output", str(output), "--device", "cpu", *options])
