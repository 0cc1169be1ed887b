"""Small engines for the tests: random models, caches of any size."""

from __future__ import annotations

import copy

import torch

from fulgurite.models import Decoder
from fulgurite.models.config import Fields
from fulgurite.models.llama import LLAMA
from fulgurite.models.tokenizer import Tokenizer
from fulgurite.models.weights import random_model
from fulgurite.plan.memory import Limits, make_plan
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


def tiny_model(**changed: object) -> Decoder:
    config = LLAMA.read_config(Fields({**FIELDS, **changed}, "a test"))
    return random_model(config, LLAMA, std=0.3)


def packed_model() -> Decoder:
    """With packed linears, so that its decode steps run prepared."""
    model = tiny_model()
    quantize(model, "q8_0", progress=False)
    return model


def make_engine(
    model: Decoder,
    tokenizer: Tokenizer | None = None,
    *,
    context: int = 128,
    max_sequences: int = 8,
    step_tokens: int = 32,
    block_size: int = 4,
    cache_tokens: int | None = None,
    kv_dtype: torch.dtype | None = None,
    reuse: bool = True,
) -> Engine:
    limits = Limits(
        context=context,
        max_sequences=max_sequences,
        step_tokens=step_tokens,
        block_size=block_size,
        kv_dtype=kv_dtype or model.embedding.weight.dtype,
        cache_tokens=cache_tokens,
    )
    shapes = copy.deepcopy(model).to("meta")
    plan = make_plan(shapes, limits, model.norm.weight.device, available=8 << 30)
    return Engine(model, tokenizer, plan, reuse=reuse)


def idle(engine: Engine) -> None:
    """Every block came back, and nothing is left of any request."""
    assert not engine.requests and not engine.listeners and not engine.texts
    assert not engine.scheduler.running and not engine.scheduler.waiting
    for pool, table in zip(engine.tables.pools, engine.tables.tables, strict=True):
        assert sorted(pool.free) == list(range(1, pool.count + 1))
        assert not any(pool.users) and not table.any()
    assert sorted(engine.tables.free_rows) == list(range(engine.plan.limits.max_sequences))
