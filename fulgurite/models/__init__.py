"""Language models as plain modules: a checkpoint in, a `Decoder` out; token ids in, logits out.

    name ─ hub.resolve ─▶ path ─ open_checkpoint ─▶ family, ModelConfig, mapped tensors
                                    │ load_checkpoint: modules on meta, then one tensor at a time
                                    ▼
    token ids, positions ─▶ Decoder ─▶ logits         text ─ Tokenizer ─▶ token ids
                              │ each attention layer
                              ▼
                            Cache.attend

**The interface between a model and whoever runs it** is `model(token_ids, positions, cache)`:

- Tokens come flat, [T], or in a batch, [B, T]. Nothing but attention looks beyond one token, so
  a model can't tell which; flat is for an engine that mixes prompts and steps of many sequences.
- `positions` has the shape of `token_ids`: where each token stands in its own sequence. A negative
  position marks padding. Who may see whom follows from positions alone, no mask is passed.
- `cache` is whatever has the four names of `cache.Cache`:
    `attend(spec, q, k, v, positions, sinks)`  stores a layer's new keys and values, attends
    `extent(positions)`   how long each token's sequence is; only dynamic and LongRoPE ask
    `attend_latent(spec, step, positions)`     the same for latent attention, from raw projections
    `pages(spec)`         where a kernel may store new keys and values itself, or None
  It knows which token belongs to which sequence (by its row, by a table of blocks, by segments);
  the model does not. None means `WholeSequence`: no cache, the tokens given are all there is.
- `model.attention_specs`, one a layer, says what a cache has to keep: heads, sizes, window, chunk.
  For latent attention it is one key of rank + rope numbers a token, and no values.
- `model.hidden(...)` and `model.logits(hidden)` are the two halves of the call, for logits of
  some rows.
- `model.stale_after`: a LongRoPE sequence that outgrows this length has to be run again from
  its start.

Families are one file each; `registry.py` maps architecture names to them. Tokenizers are in
`tokenizer.py`, which needs the tokenizers and jinja2 packages and so is not imported from here.
"""

from __future__ import annotations

from fulgurite.models.cache import AttentionSpec, Cache, ContiguousCache, WholeSequence
from fulgurite.models.checkpoint import open_checkpoint
from fulgurite.models.config import ModelConfig
from fulgurite.models.layers import Decoder
from fulgurite.models.registry import ARCHITECTURES
from fulgurite.models.weights import load_checkpoint, load_model, load_share, random_model

__all__ = [
    "ARCHITECTURES",
    "AttentionSpec",
    "Cache",
    "ContiguousCache",
    "Decoder",
    "ModelConfig",
    "WholeSequence",
    "load_checkpoint",
    "load_model",
    "load_share",
    "open_checkpoint",
    "random_model",
]
