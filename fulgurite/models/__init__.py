"""Language models as plain `nn.Module`s: a checkpoint in, a `CausalLM` out; token ids in, logits out.

    name ─ resolve_model_path ─▶ path ─ open_checkpoint ─▶ family, ModelConfig, mapped tensors
                                    │ load_checkpoint: modules on meta, then one tensor at a time
                                    ▼
    token ids, positions ─▶ CausalLM ─▶ logits        text ─ Tokenizer ─▶ token ids
                              │ each attention layer
                              ▼
                            KVCache.attend

    config.py      ModelConfig, ConfigFields           layers.py        CausalLM
    config_readers.py   RoPE, dtype, layer types       residual_layers.py   PreNormLayer and others
    norms.py       RMSNorm, LayerNorm                  attention.py, blocks.py   Attention, GatedMLP
    rope.py        rotary embeddings                   moe.py           Router, Experts, MoE
    kv_cache.py    KVCache protocol, simple caches     mla.py           multi-head latent attention
    families/      one file per family; registry       loading/         checkpoints and weights
    tokenizer.py   Tokenizer, chat templates           expert_load.py   tokens per expert
    transformers_backend/   architectures without a family: transformers' modules

**The interface of a model** is `model(token_ids, positions, cache)`:

- Tokens are flat, [T], or a batch, [B, T]. Only attention looks beyond one token, so a model does
  not need to know which. The flat layout is for an engine that mixes prefill and decode of many
  sequences.
- `positions` has the shape of `token_ids`: the position of each token in its own sequence. A
  negative position marks padding. Positions define the attention mask; no mask is passed.
- `cache` implements `kv_cache.KVCache`:
    `attend(spec, q, k, v, positions, sinks)`   stores a layer's new keys and values, and attends
    `attend_mla(spec, inputs, positions)`       the same for MLA, from the raw projections
    `attend_fused(spec, qkv, sinks)`            QK norm, RoPE, cache write and attention, fused
    `cache_slots(spec)`                         where a kernel may write keys and values, or None
    `sequence_lengths(positions)`               for dynamic NTK and LongRoPE
  The cache knows which token belongs to which sequence (by row, by block table or by segments); the
  model does not. None means `NoKVCache`: tokens attend only to tokens of the same call.
- `model.attention_specs`, one per layer, tells what a cache must store: heads, sizes, sliding
  window, chunk. For MLA this is one key of kv_lora_rank + qk_rope_head_dim elements per token, and
  no values.
- `model.compute_hidden_states(...)` and `model.compute_logits(hidden)` are the two halves of the
  call, for logits of some rows.
- `model.recompute_after`: a LongRoPE sequence that grows beyond this length must be run again from
  its start.

`tokenizer.py` needs the tokenizers and jinja2 packages, so it is not imported here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fulgurite.lazy import make_lazy

if TYPE_CHECKING:
    from fulgurite.models.attention_spec import AttentionSpec
    from fulgurite.models.config import ModelConfig
    from fulgurite.models.families.registry import ARCHITECTURES
    from fulgurite.models.kv_cache import ContiguousKVCache, KVCache, NoKVCache
    from fulgurite.models.layers import CausalLM
    from fulgurite.models.loading.checkpoint import open_checkpoint
    from fulgurite.models.loading.loader import (
        build_random_model,
        load_checkpoint,
        load_model,
        load_shard,
    )

__all__ = [
    "ARCHITECTURES",
    "AttentionSpec",
    "CausalLM",
    "ContiguousKVCache",
    "KVCache",
    "ModelConfig",
    "NoKVCache",
    "build_random_model",
    "load_checkpoint",
    "load_model",
    "load_shard",
    "open_checkpoint",
]

__getattr__, __dir__ = make_lazy(__name__)
