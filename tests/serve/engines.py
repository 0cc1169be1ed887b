"""Small engines for the tests: random models and KV caches of any size."""

from __future__ import annotations

import copy

import torch

from fulgurite.models import CausalLM
from fulgurite.models.config import ConfigFields
from fulgurite.models.families.llama import LLAMA
from fulgurite.models.loading.loader import build_random_model
from fulgurite.models.tokenizer import Tokenizer
from fulgurite.plan.limits import EngineLimits
from fulgurite.plan.memory import plan_memory
from fulgurite.quantize import quantize
from fulgurite.serve.engine.engine import Engine

FIELDS = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


def tiny_model(**changed: object) -> CausalLM:
    config = LLAMA.read_config(ConfigFields({**FIELDS, **changed}, "a test"))
    return build_random_model(config, LLAMA, std=0.3)


def quantized_model(**changed: object) -> CausalLM:
    """With quantized linears, so that its decode steps are captured."""
    model = tiny_model(**changed)
    quantize(model, "q8_0", progress=False)
    return model


def make_engine(
    model: CausalLM,
    tokenizer: Tokenizer | None = None,
    *,
    context: int = 128,
    max_sequences: int = 8,
    max_batched_tokens: int = 32,
    block_size: int = 4,
    cache_tokens: int | None = None,
    kv_dtype: torch.dtype | None = None,
    prefix_caching: bool = True,
    async_scheduling: bool | None = None,
    deterministic: bool | None = None,
) -> Engine:
    limits = EngineLimits(
        context=context,
        max_sequences=max_sequences,
        max_batched_tokens=max_batched_tokens,
        block_size=block_size,
        kv_dtype=kv_dtype or model.embed_tokens.weight.dtype,
        cache_tokens=cache_tokens,
    )
    shapes = copy.deepcopy(model).to("meta")
    plan = plan_memory(shapes, limits, model.norm.weight.device, available=8 << 30)
    return Engine(
        model,
        tokenizer,
        plan,
        prefix_caching=prefix_caching,
        async_scheduling=async_scheduling,
        deterministic=deterministic,
    )


def check_idle(engine: Engine) -> None:
    """Check that all blocks are free and no state of a request is left."""
    assert not engine.requests and not engine.listeners and not engine.detokenizers
    assert not engine.scheduler.running and not engine.scheduler.waiting
    for pool, table in zip(
        engine.block_manager.pools, engine.block_manager.block_tables, strict=True
    ):
        assert sorted(pool.free_blocks) == list(range(1, pool.num_blocks + 1))
        assert not any(pool.ref_counts) and not table.any()
    assert sorted(engine.block_manager.free_rows) == list(range(engine.plan.limits.max_sequences))
