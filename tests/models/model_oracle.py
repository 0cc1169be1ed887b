"""One small random model a family, in transformers (the oracle) and here, from the same files.

Weights are drawn wide (0.3) so that every part matters, and what transformers initialises to zeros
or ones (norms, biases, router corrections) is drawn too.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from torch import Tensor, nn

from fulgurite.models import ContiguousCache, Decoder

VOCABULARY = 97
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": False,
    "attn_implementation": "eager",
}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.7,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 160,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 5.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 16.0,
        "beta_slow": 1.0,
        "mscale": 0.7,
        "mscale_all_dim": 1.3,
    },
}


def rope(kind: str, theta: float = 10_000.0, **values: object) -> dict[str, object]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **values}}


# name -> transformers' class prefix, fields on top of COMMON
CASES: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama3": (
        "Llama",
        {
            "tie_word_embeddings": True,
            **rope(
                "llama3",
                factor=4.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=64,
            ),
        },
    ),
    "llama_linear": ("Llama", rope("linear", factor=3.0)),
    "llama_dynamic": ("Llama", {"max_position_embeddings": 24, **rope("dynamic", factor=2.0)}),
    "llama_yarn": ("Llama", rope("yarn", theta=5000.0, **YARN)),
    "mistral": ("Mistral", {"sliding_window": 7, "head_dim": 20}),
    "qwen2": ("Qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2}),
    "qwen3": ("Qwen3", {"head_dim": 24, "attention_bias": True}),
    "gemma2": (
        "Gemma2",
        {
            "head_dim": 20,
            "sliding_window": 6,
            "query_pre_attn_scalar": 11,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            "head_dim": 20,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "query_pre_attn_scalar": 11,
            "final_logit_softcapping": 3.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
        },
    ),
    "phi3": (
        "Phi3",
        {
            "original_max_position_embeddings": 48,
            "sliding_window": 50,
            **rope(
                "longrope",
                short_factor=[1.0, 1.1, 1.3, 1.7],
                long_factor=[1.0, 2.0, 4.0, 8.0],
                partial_rotary_factor=0.5,
            ),
        },
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 9}),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            "head_dim": 24,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3_moe_unnormed": (
        "Qwen3Moe",
        {
            "head_dim": 24,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "norm_topk_prob": False,
            "decoder_sparse_step": 2,
        },
    ),
    "deepseek_v2": (
        "DeepseekV2",
        {**LATENT, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    ),
    "deepseek_v2_lite": ("DeepseekV2", {**LATENT, "q_lora_rank": None, "topk_method": "greedy"}),
    "deepseek_v3": ("DeepseekV3", {**LATENT, "n_group": 4, "topk_group": 2, "num_mtp_layers": 0}),
    "llama4": (
        "Llama4",
        {
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size_mlp": 80,
            "interleave_moe_layer_step": 2,
            "no_rope_layer_interval": 2,
            "attention_chunk_size": 8,
            "floor_scale": 5,
            "attn_scale": 0.3,
            **rope("default", theta=20_000.0),
        },
    ),
    "gpt_oss": (
        "GptOss",
        {
            "head_dim": 16,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "sliding_window": 7,
            "swiglu_limit": 3.0,
            **rope("yarn", theta=150_000.0, truncate=False, **YARN),
        },
    ),
}


@dataclass(frozen=True)
class Pair:
    """The same weights twice."""

    name: str
    theirs: nn.Module
    ours: Decoder
    path: Path


def randomise(model: nn.Module, generator: torch.Generator) -> None:
    """Draw what an initialiser leaves at zero or one."""
    state = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, tensor in state.items():
        is_norm = "norm" in name and name.endswith("weight")
        if is_norm or "bias" in name or name.endswith("sinks"):
            noise = 0.3 * torch.randn(tensor.shape, generator=generator)
            tensor.data.copy_(tensor.data + noise if is_norm else noise * 3)


def make_theirs(name: str, **changed: object) -> nn.Module:
    """The transformers model of a case, with some fields changed."""
    prefix, fields = CASES[name]
    suffix = "TextConfig" if prefix in ("Gemma3", "Llama4") else "Config"
    config = getattr(transformers, prefix + suffix)(**{**COMMON, **fields, **changed})
    torch.manual_seed(0)
    model = getattr(transformers, prefix + "ForCausalLM")(config).eval()
    randomise(model, torch.Generator().manual_seed(1))
    assert isinstance(model, nn.Module)
    return model


def prompt(length: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 + seed)
    return torch.randint(0, VOCABULARY, (length,), generator=generator)


def greedy_cached(model: Decoder, prompts: list[Tensor], new: int) -> list[list[int]]:
    """Greedy continuations of ragged prompts in one batch, padded on the right, with a cache.

    A sequence whose cached keys grow stale is run again from its start; here, all of the batch with
    it.
    """
    texts = [ids.tolist() for ids in prompts]
    starts = [len(text) for text in texts]
    last, cache = _prefill(model, texts, max(starts) + new)
    for _ in range(new):
        chosen = last.argmax(dim=-1)
        for text, token in zip(texts, chosen.tolist(), strict=True):
            text.append(token)
        lengths = torch.tensor([len(text) for text in texts])
        if model.stale_after is not None and (lengths == model.stale_after + 1).any():
            last, cache = _prefill(model, texts, max(starts) + new)
        else:
            last = model(chosen[:, None], lengths[:, None] - 1, cache)[:, 0]
    return [text[start:] for text, start in zip(texts, starts, strict=True)]


def _prefill(
    model: Decoder, texts: list[list[int]], capacity: int
) -> tuple[Tensor, ContiguousCache]:
    longest = max(len(ids) for ids in texts)
    cache = ContiguousCache(model.attention_specs, len(texts), capacity)
    ids_BT = torch.zeros(len(texts), longest, dtype=torch.long)
    positions_BT = torch.full((len(texts), longest), -1)
    for row, ids in enumerate(texts):
        ids_BT[row, : len(ids)] = torch.tensor(ids)
        positions_BT[row, : len(ids)] = torch.arange(len(ids))
    logits = model(ids_BT, positions_BT, cache)
    lengths = torch.tensor([len(ids) for ids in texts])
    return logits[torch.arange(len(texts)), lengths - 1], cache


def greedy_uncached(model: Decoder, ids: Tensor, new: int) -> list[int]:
    """The same by running everything again for each token."""
    start = len(ids)
    for _ in range(new):
        last = model.hidden(ids[None], torch.arange(len(ids))[None])[:, -1]
        ids = torch.cat((ids, model.logits(last).argmax(dim=-1)))
    return ids[start:].tolist()


def logits_theirs(model: nn.Module, ids: Tensor) -> Tensor:
    """[T, O]. A short run first: their dynamic RoPE remembers the longest sequence since the last one."""
    model(ids[None, :1])
    logits: Tensor = model(ids[None]).logits[0]
    return logits


def greedy_theirs(model: nn.Module, ids: Tensor, new: int, use_cache: bool = True) -> list[int]:
    out = model.generate(  # type: ignore[operator]
        ids[None],
        attention_mask=torch.ones_like(ids)[None],
        do_sample=False,
        max_new_tokens=new,
        use_cache=use_cache,
    )
    return out[0, len(ids) :].tolist()
